"""A dependency treebank in CoNLL-U: words, their parts of speech, heads and relations."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bertsmith.core.errors import UserError
from bertsmith.tasks.conll import ConlluSentence, conllu_sentences

ROOT = -1
_UNSEEN, _ON_PATH = -1, -2
FORM, UPOS, HEAD, RELATION = 1, 3, 6, 7
MEND = "correct the line: columns 7 and 8 of CoNLL-U are the head's number and the relation"


@dataclass(frozen=True, slots=True)
class ParsedSentence:
    """A sentence with its tree: four parallel tuples, one entry per word."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    heads: tuple[int, ...]
    """Index of the word that each word depends on; -1 for the root."""
    relations: tuple[str, ...]

    def depths(self) -> list[int]:
        """Return the number of steps from each word to the root, which has 0."""
        return _depths(self.heads)


def read_treebank(path: Path) -> list[ParsedSentence]:
    """Read all sentences of a CoNLL-U file."""
    found = [parsed(sentence) for sentence in conllu_sentences(path)]
    if not found:
        raise UserError("does not contain sentences", where=str(path), remedy="give a treebank in CoNLL-U")
    return found


def parsed(sentence: ConlluSentence) -> ParsedSentence:
    """Parse the tree of a CoNLL-U sentence."""
    words = sentence.words
    heads = tuple(
        _head(cells, len(words), where) for cells, where in zip(words, sentence.wheres, strict=True)
    )
    if not _depths(heads):
        raise UserError("its heads form a cycle", where=sentence.wheres[0], remedy=MEND)
    forms, tags, relations = (tuple(cells[column] for cells in words) for column in (FORM, UPOS, RELATION))
    return ParsedSentence(forms, tags, heads, relations)


def _head(cells: Sequence[str], words: int, where: str) -> int:
    number = int(cells[HEAD]) if cells[HEAD].isdecimal() and len(cells[HEAD]) < 10 else -1
    if not 0 <= number <= words or number == int(cells[0]):
        raise UserError(f"{cells[HEAD]!r} is not a head of this word", where=where, remedy=MEND)
    return number - 1


def _depths(heads: Sequence[int]) -> list[int]:
    """Return the number of steps from each word to the root, or [] if the heads form a cycle."""
    found = [0 if head == ROOT else _UNSEEN for head in heads]
    for word in range(len(heads)):
        path = []
        while found[word] == _UNSEEN:
            found[word] = _ON_PATH
            path.append(word)
            word = heads[word]
        if found[word] == _ON_PATH:
            return []
        for depth, each in enumerate(reversed(path), found[word] + 1):
            found[each] = depth
    return found
