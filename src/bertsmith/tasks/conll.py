"""Tagged words: CoNLL-2003 and similar formats, WNUT-17, CoNLL-U, and JSON lines with one sentence each."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith.core.errors import UserError
from bertsmith.recipe.finetuning_schema import PUBLISHED_FEATURES
from bertsmith.tasks.example_types import BadLine, Reader, TaggedExample
from bertsmith.tasks.kinds.tag import TAG
from bertsmith.tasks.tables import CONVERT, NOT_UTF8, Row, is_torn, numbered_lines, rows_of
from bertsmith.tasks.task import Split, Task

CONLLU_COLUMNS: Mapping[str, int] = {"upos": 3, "xpos": 4, "feats": 5, "deprel": 7}
"""Columns of CoNLL-U that have one tag per word (universaldependencies.org/format.html)."""
_CONLLU_WIDTH = 10
_UNKNOWN = "_"
_DOCUMENT_START = "-DOCSTART-"
_WORD_ID = re.compile(r"[1-9][0-9]{0,8}")
_SKIPPED_ID = re.compile(r"[0-9]+[-.][0-9]+")  # multi-word tokens 3-4 and empty nodes 8.1
_NEW_DOCUMENT = re.compile(r"#\s*newdoc\b")
_SENTENCE_ID = re.compile(r"#\s*sent_id\s*=\s*+(.+)")
_MEND_LINE = "correct the line"


@dataclass(frozen=True, slots=True)
class _Line:
    text: str
    where: str


class _Documents:
    """Numbers the documents: before the first document mark, each sentence is a separate document."""

    def __init__(self) -> None:
        self._number, self._marked = -1, False

    def begin(self) -> None:
        self._number, self._marked = self._number + 1, True

    def of_next_sentence(self) -> int:
        self._number += 0 if self._marked else 1
        return self._number


def read_columns(path: Path) -> Iterator[TaggedExample | BadLine]:
    """Read sentences from a file with words in the first column and tags in the last, or words alone."""
    documents, width, index = _Documents(), 0, 0
    for lines in _blocks(path):
        rows = [(line, _cells(line.text)) for line in lines if not line.text.startswith(_DOCUMENT_START)]
        if len(rows) < len(lines):
            documents.begin()
        if not rows:
            continue
        width = width or len(rows[0][1])
        faults = (_column_fault(line, cells, width=width) for line, cells in rows)
        fault = _torn(lines) or next(filter(None, faults), None)
        words = tuple(cells[0] for _, cells in rows)
        tags = tuple(cells[-1] for _, cells in rows) if width > 1 else None
        document = documents.of_next_sentence()
        yield fault or TaggedExample(str(index), words, tags, document, rows[0][0].where)
        index += 1


def conllu_reader(column: str) -> Reader:
    """Return a reader of CoNLL-U that uses one of its columns as tags."""
    if column not in CONLLU_COLUMNS:
        remedy = f"choose one of {', '.join(CONLLU_COLUMNS)}"
        raise UserError(f"CoNLL-U lacks a column {column!r} with a tag for each word", remedy=remedy)

    def read(path: Path) -> Iterator[TaggedExample | BadLine]:
        documents, index = _Documents(), 0
        for lines in _blocks(path):
            comments = [line.text for line in lines if line.text.startswith("#")]
            if any(_NEW_DOCUMENT.match(comment) for comment in comments):
                documents.begin()
            if len(comments) == len(lines):
                continue
            key = next(
                (id[1].rstrip() for comment in comments if (id := _SENTENCE_ID.match(comment))), str(index)
            )
            words = [line for line in lines if not line.text.startswith("#")]
            document = documents.of_next_sentence()
            yield _torn(lines) or _conllu_sentence(words, column, key=key, document=document)
            index += 1

    return read


@dataclass(frozen=True, slots=True)
class ConlluSentence:
    """A sentence's words, ten cells each, without multi-word tokens and empty nodes."""

    words: tuple[tuple[str, ...], ...]
    comments: tuple[str, ...]
    wheres: tuple[str, ...]
    """Location of each word, for error messages."""


def conllu_sentences(path: Path) -> Iterator[ConlluSentence]:
    """Yield the sentences of a CoNLL-U file with all of their columns; a bad line is an error."""
    for lines in _blocks(path):
        comments = tuple(line.text for line in lines if line.text.startswith("#"))
        rows = [(line, line.text.split("\t")) for line in lines if not line.text.startswith("#")]
        faults = (_conllu_fault(line, cells) for line, cells in rows)
        if fault := _torn(lines) or next(filter(None, faults), None):
            raise UserError(fault.what, where=fault.where, remedy=fault.remedy)
        kept = [(line, tuple(cells)) for line, cells in rows if _WORD_ID.fullmatch(cells[0])]
        if kept:
            yield ConlluSentence(
                tuple(cells for _, cells in kept), comments, tuple(line.where for line, _ in kept)
            )


def read_tagged_rows(path: Path) -> Iterator[TaggedExample | BadLine]:
    """Read sentences of a JSONL file: the lists `words` (or `tokens`) and `tags` (absent if unknown)."""
    for index, row in enumerate(rows_of(path)):
        yield row if isinstance(row, BadLine) else _sentence_of_row(row, index)


def _conllu_sentence(
    lines: Sequence[_Line], column: str, *, key: str, document: int
) -> TaggedExample | BadLine:
    rows = [(line, line.text.split("\t")) for line in lines]
    fault = next((fault for line, cells in rows if (fault := _conllu_fault(line, cells))), None)
    kept = [cells for _, cells in rows if _WORD_ID.fullmatch(cells[0])]
    if fault or not kept:
        return fault or BadLine("the sentence is empty", lines[0].where, _MEND_LINE)
    tags = tuple(cells[CONLLU_COLUMNS[column]] for cells in kept)
    # An empty cell means "no features" in feats, but "not annotated" in the other columns.
    is_labelled = column == "feats" or any(tag != _UNKNOWN for tag in tags)
    words = tuple(cells[1] for cells in kept)
    return TaggedExample(key, words, tags if is_labelled else None, document, lines[0].where)


def _conllu_fault(line: _Line, cells: Sequence[str]) -> BadLine | None:
    if len(cells) != _CONLLU_WIDTH:
        what = f"the line has {len(cells)} tab-separated columns, CoNLL-U has {_CONLLU_WIDTH}"
        return BadLine(what, line.where, _MEND_LINE)
    if not (_WORD_ID.fullmatch(cells[0]) or _SKIPPED_ID.fullmatch(cells[0])):
        return BadLine(f"{cells[0]!r} is not a word number", line.where, _MEND_LINE)
    return None if all(cells) else BadLine("a column is empty", line.where, f"write {_UNKNOWN} in it")


def _column_fault(line: _Line, cells: Sequence[str], *, width: int) -> BadLine | None:
    if len(cells) != width:
        what = f"the line has {len(cells)} columns, the file's first has {width}"
        return BadLine(what, line.where, f"{_MEND_LINE} (`bertsmith tag --input` takes plain sentences)")
    if not cells[0] or not cells[-1]:
        return BadLine("the word or its tag is empty", line.where, _MEND_LINE)
    return None


def _cells(text: str) -> list[str]:
    # Words of tweets may contain any space except the column separator, so do not use a bare split().
    return text.split("\t") if "\t" in text else re.split(" +", text.strip(" "))


def _blocks(path: Path) -> Iterator[list[_Line]]:
    """Yield the file's lines between empty ones; in WNUT-17 a line with a lone tab counts as empty."""
    block: list[_Line] = []
    for number, raw in numbered_lines(path):
        text = raw.decode("utf-8", errors="surrogateescape")
        line = _Line(text.rstrip("\r\n"), f"{path}:{number}")
        if line.text.strip():
            block.append(line)
        elif block:
            yield block
            block = []
    if block:
        yield block


def _torn(lines: Sequence[_Line]) -> BadLine | None:
    """Return the fault of a sentence that is not UTF-8 text, or None."""
    return next((BadLine(NOT_UTF8, line.where, CONVERT) for line in lines if is_torn([line.text])), None)


def _sentence_of_row(row: Row, index: int) -> TaggedExample | BadLine:
    words = row.values.get("words", row.values.get("tokens"))
    tags = row.values.get("tags")
    if not _is_list_of_texts(words) or not words:
        what = f"lacks a list of words; its fields are {', '.join(row.values)}"
        return BadLine(what, row.where, 'write {"words": [...], "tags": [...]}')
    if tags is not None and (not _is_list_of_texts(tags) or len(tags) != len(words)):
        return BadLine(f"needs a tag as text for each of its {len(words)} words", row.where, _MEND_LINE)
    key, document = str(row.values.get("id", index)), index
    return TaggedExample(key, tuple(words), None if tags is None else tuple(tags), document, row.where)


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) and text for text in value)


def _columns_split(*stems: str, first: tuple[str, ...] = ()) -> Split:
    names = [f"{stem}.{suffix}" for stem in stems for suffix in ("txt", "conll", "tsv", "iob", "iob2", "bio")]
    rows = {f"{stem}.jsonl": read_tagged_rows for stem in stems}
    return Split({name: read_columns for name in (*first, *names)} | rows)


def _conllu_task(name: str, title: str, *, column: str, labels: tuple[str, ...] = ()) -> Task:
    read = conllu_reader(column)
    splits = {split: Split({f"{split}.conllu": read, f"*{split}.conllu": read}) for split in _SPLITS}
    return Task(name, title, TAG, ("accuracy",), splits, labels=labels, folders=("ud", "UD_English-EWT"))


_SPLITS = ("train", "dev", "test")
_WNUT17_TYPES = ("corporation", "creative-work", "group", "location", "person", "product")
# universaldependencies.org/u/pos
_UPOS = "ADJ ADP ADV AUX CCONJ DET INTJ NOUN NUM PART PRON PROPN PUNCT SCONJ SYM VERB X"
_OWN_SPLITS = {
    "train": _columns_split("train"),
    "dev": _columns_split("dev", "valid", "validation"),
    "test": _columns_split("test"),
}

TASKS: tuple[Task, ...] = (
    Task(
        "ner",
        "CoNLL-2003 NER",
        TAG,
        metrics=("span_f1", "accuracy"),
        splits={
            "train": _columns_split("train", first=("eng.train",)),
            "dev": _columns_split("dev", "valid", "validation", "testa", first=("eng.testa",)),
            "test": _columns_split("test", "testb", first=("eng.testb",)),
        },
        folders=("conll", "conll2003", "CoNLL-2003", "ner"),
        # Devlin et al. 2018, 5.3: "the maximal document context provided by the data".
        settings={"text.longest": 512, "text.context": "document"}
        | {f"features.{key}": value for key, value in PUBLISHED_FEATURES},
    ),
    Task(
        "wnut17",
        "WNUT-17",
        TAG,
        metrics=("span_f1", "accuracy"),
        splits={
            "train": _columns_split("train", first=("wnut17train.conll",)),
            "dev": _columns_split("dev", first=("emerging.dev.conll",)),
            "test": _columns_split("test", first=("emerging.test.annotated",)),
        },
        labels=("O", *(f"{prefix}-{type}" for type in _WNUT17_TYPES for prefix in "BI")),
        folders=("wnut17", "WNUT17"),
    ),
    _conllu_task("pos", "UD part of speech", column="upos", labels=tuple(_UPOS.split())),
    _conllu_task("xpos", "UD language-specific part of speech", column="xpos"),
    _conllu_task("feats", "UD features", column="feats"),
    _conllu_task("deprel", "UD relation to the head", column="deprel"),
    Task("tags", "own tags", TAG, metrics=("accuracy", "macro_f1"), splits=_OWN_SPLITS, own=True),
)
