"""Add words to a WordPiece vocabulary: first in its [unused] slots, then at its end."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from bertsmith.core.errors import UserError
from bertsmith.core.files import read_text
from bertsmith.text.tokenizer import Tokenizer

UNUSED = re.compile(r"\[unused(\d+)\]")


def read_words(file: Path) -> list[str]:
    """Read the words of a file, one per line; empty lines are skipped."""
    return [word for _, word in _numbered_words(file)]


def words_for(tokenizer: Tokenizer, files: Sequence[Path]) -> list[str]:
    """Return the words of files that are not single tokens of this tokenizer yet; each line is one word."""
    found = [(f"{file}:{line}", word) for file in files for line, word in _numbered_words(file)]
    for where, word in found:
        _normalised(tokenizer, word, where=where)
    return new_words(tokenizer, [word for _, word in found])


def _numbered_words(file: Path) -> list[tuple[int, str]]:
    lines = read_text(file, remedy="give a text file with one word per line").splitlines()
    words = [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]
    if not words:
        raise UserError("contains no words", where=str(file), remedy="write one word per line")
    return words


def with_words(tokenizer: Tokenizer, words: Sequence[str]) -> Tokenizer:
    """Return a tokenizer with these words as single tokens; existing tokens keep their ids."""
    spec = tokenizer.spec
    pipeline = json.loads(spec.pipeline)
    if pipeline["model"]["type"] != "WordPiece":
        what = f"words cannot be added to a {pipeline['model']['type']} vocabulary"
        raise UserError(what, where=spec.where, remedy="train a new vocabulary with bertsmith vocab")
    vocabulary: dict[str, int] = pipeline["model"]["vocab"]
    slots = [name for name in vocabulary if UNUSED.fullmatch(name)]
    slots.sort(key=vocabulary.__getitem__, reverse=True)  # slots are popped from the end
    end = tokenizer.vocabulary_size
    taken = set()
    for word in new_words(tokenizer, words):
        if slots:
            taken.add(slot := slots.pop())
            vocabulary[word] = vocabulary.pop(slot)
        else:
            vocabulary[word], end = end, end + 1
    # A slot that is also declared as an added token would bring back its old name as well.
    pipeline["added_tokens"] = [token for token in pipeline["added_tokens"] if token["content"] not in taken]
    return Tokenizer(type(spec)(json.dumps(pipeline), spec.settings, spec.where))


def new_words(tokenizer: Tokenizer, words: Sequence[str]) -> list[str]:
    """Return each word that is not a single token yet, once, as the tokenizer normalises it."""
    found: dict[str, None] = {}
    for word in words:
        plain, encoded = _normalised(tokenizer, word, where="added words"), tokenizer.encode(word)
        pieces = [number for number, text in zip(encoded.ids, encoded.sequence, strict=True) if text >= 0]
        if len(pieces) != 1 or pieces == [tokenizer.unknown_id]:
            found.setdefault(plain)
    return list(found)


def _normalised(tokenizer: Tokenizer, word: str, *, where: str) -> str:
    pieces = tokenizer.words_of(word)
    if len(pieces) != 1:
        what = f"{word!r} is {len(pieces)} words to this tokenizer"
        raise UserError(what, where=where, remedy="give one word per line, without spaces or punctuation")
    return pieces[0]
