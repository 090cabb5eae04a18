"""Documents with coreferent mentions: CoNLL-2012-style columns, and entities in CoNLL-U as in GUM."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bertsmith.core.errors import UserError
from bertsmith.core.files import read_text
from bertsmith.insight.treebank import ROOT, ParsedSentence, parsed
from bertsmith.tasks.conll import conllu_sentences

MentionKind = Literal["pronoun", "proper", "nominal"]
MISC, FEATURES = 9, 5
WORD_2012, TAG_2012 = 3, 4
PRONOUN_TAGS, PROPER_TAGS = frozenset({"PRON", "PRP", "PRP$"}), frozenset({"PROPN", "NNP", "NNPS"})
PLURAL_TAGS = frozenset({"NNS", "NNPS"})
ENDS_OF_CORE = frozenset(
    {"IN", "TO", "WDT", "WP", "WP$", ",", ":", "-LRB-", "CC", "VBN", "VBG", "VBD", "VBZ"}
)
"""Tags that start the modifiers at the end of a mention; without a tree, the head is before the first."""
BRACKET = re.compile(r"\(([^()|]*)(\))?|(?<![^()|])([^()|]++)\)")
MAX_OPEN = 100
"""Maximum number of mentions around a word; published corpora have about ten."""
MEND = "correct the line: every opened entity must be closed in its document"


@dataclass(frozen=True, slots=True)
class Mention:
    """A span of words that refers to an entity."""

    start: int
    """Index of the first word in the document."""
    end: int
    """Index after the last word."""
    head: int
    entity: str
    kind: MentionKind
    plural: bool


@dataclass(frozen=True, slots=True)
class MentionDocument:
    """The words of a document in sentences, and its mentions in the order of their heads."""

    sentences: tuple[tuple[str, ...], ...]
    mentions: tuple[Mention, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """All words of the document."""
        return tuple(word for sentence in self.sentences for word in sentence)


@dataclass(frozen=True, slots=True)
class _Row:
    """A word of either format; `tree_head` is -1 for a root and None without a tree."""

    word: str
    tag: str
    plural: bool
    brackets: str
    where: str
    tree_head: int | None = None


def read_mentions(path: Path) -> list[MentionDocument]:
    """Read the documents of a file: CoNLL-U if its name ends in .conllu, else columns as in CoNLL-2012."""
    rows = _conllu_rows(path) if path.name.endswith(".conllu") else _column_rows(path)
    found = [_document(document) for document in rows]
    if not any(document.mentions for document in found):
        remedy = "give CoNLL-U with Entity=... in its last column, or CoNLL-2012 columns (coreference last)"
        raise UserError("does not contain mentions", where=str(path), remedy=remedy)
    return found


def _conllu_rows(path: Path) -> Iterator[list[list[_Row]]]:
    document: list[list[_Row]] = []
    group, words = 0, 0
    for sentence in conllu_sentences(path):
        for comment in sentence.comments:
            if re.match(r"#\s*newdoc\b", comment) and document:
                yield document
                document, words = [], 0
            if found := re.match(r"#\s*global\.Entity\s*=\s*(\S+)", comment):
                names = found[1].split("-")
                group = next((at for at, name in enumerate(names) if name in ("GRP", "eid")), 0)
        tree: ParsedSentence = parsed(sentence)
        rows = [
            _Row(
                cells[1],
                cells[3],
                "Number=Plur" in cells[FEATURES],
                _entities(cells[MISC], group),
                where,
                head if head == ROOT else head + words,
            )
            for cells, where, head in zip(sentence.words, sentence.wheres, tree.heads, strict=True)
        ]
        document.append(rows)
        words += len(rows)
    if document:
        yield document


def _entities(misc: str, group: int) -> str:
    """Return the brackets of a word with only the entity names in them: (1-person-new becomes (1."""
    found = re.search(r"(?:^|\|)Entity=([^|]*)", misc)
    if not found:
        return ""
    # The parts of a discontinuous mention, e1[1/2] and e1[2/2], count as separate mentions.
    plain = re.sub(r"\[\d+/\d+\]", "", found[1])
    return re.sub(r"\(([^()]*)", lambda opened: "(" + _part(opened[1], group), plain)


def _part(attributes: str, group: int) -> str:
    parts = attributes.split("-")
    return parts[group] if group < len(parts) else parts[0]


def _column_rows(path: Path) -> Iterator[list[list[_Row]]]:
    text = read_text(path, remedy="give CoNLL-2012-style columns or CoNLL-U (.conllu)")
    document: list[list[_Row]] = [[]]
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{path}:{number}"
        if line.startswith("#begin"):
            if any(document):
                yield [sentence for sentence in document if sentence]
            document = [[]]
        elif not line.strip():
            document.append([])
        elif not line.startswith("#"):
            cells = line.split()
            if len(cells) < TAG_2012 + 2:
                what = f"has {len(cells)} columns, CoNLL-2012 has a word in the fourth and coreference last"
                raise UserError(what, where=where, remedy="correct the line")
            brackets = "" if cells[-1] in ("-", "_") else cells[-1]
            plural = cells[TAG_2012] in PLURAL_TAGS
            document[-1].append(_Row(cells[WORD_2012], cells[TAG_2012], plural, brackets, where))
    if any(document):
        yield [sentence for sentence in document if sentence]


def _document(sentences: Sequence[Sequence[_Row]]) -> MentionDocument:
    rows = [row for sentence in sentences for row in sentence]
    open_at: dict[str, list[int]] = {}
    spans, depth = [], 0
    for number, row in enumerate(rows):
        for opened, closed_at_once, closed in BRACKET.findall(row.brackets):
            depth += bool(opened) - bool(closed_at_once or closed)
            if depth > MAX_OPEN:  # the work grows with the words of all nested mentions
                what = f"more than {MAX_OPEN} entities are open at this word"
                raise UserError(what, where=row.where, remedy=MEND)
            if opened:
                open_at.setdefault(opened, []).append(number)
            name = opened if closed_at_once else closed
            if name and not open_at.get(name):
                raise UserError(f"entity {name!r} is closed but was not opened", where=row.where, remedy=MEND)
            if name:
                spans.append((open_at[name].pop(), number + 1, name))
    if unclosed := [(starts[0], name) for name, starts in open_at.items() if starts]:
        start, name = min(unclosed)
        raise UserError(f"entity {name!r} is never closed", where=rows[start].where, remedy=MEND)
    mentions = [_mention(rows, *span) for span in spans]
    in_order = sorted(mentions, key=lambda mention: (mention.head, mention.start - mention.end))
    words = tuple(tuple(row.word for row in sentence) for sentence in sentences)
    return MentionDocument(words, tuple(in_order))


def _mention(rows: Sequence[_Row], start: int, end: int, entity: str) -> Mention:
    head = _head(rows, start, end)
    tag = rows[head].tag
    kind: MentionKind = "nominal"
    if tag in PRONOUN_TAGS:
        kind = "pronoun"
    elif tag in PROPER_TAGS:
        kind = "proper"
    return Mention(start, end, head, entity, kind, rows[head].plural)


def _head(rows: Sequence[_Row], start: int, end: int) -> int:
    """Return the word that the mention's other words depend on; without a tree, the last word of its core."""
    heads = [row.tree_head for row in rows[start:end]]
    if None not in heads:
        return next(start + at for at, head in enumerate(heads) if head is None or not start <= head < end)
    core = start + 1
    while core < end and rows[core].tag not in ENDS_OF_CORE:
        core += 1
    # A possessive mark at the end belongs to the mention but is not its head.
    return core - 2 if core - start > 1 and rows[core - 1].tag == "POS" else core - 1
