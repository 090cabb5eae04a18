"""Decontamination: find the texts of a task in a corpus, so that models are not trained on its test data.

Brown et al. 2020 (appendix C) did this for GPT-3: texts are compared as runs of 13 words, in lower case and
without punctuation. A text of 8 to 12 words must occur whole; shorter texts occur by chance and are ignored.
In scripts without spaces each character counts as a word; runs are as long as 13 words are in characters.
"""

import csv
import io
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.errors import UserError
from bertsmith.core.files import COMPRESSED_SUFFIXES, open_text_bytes
from bertsmith.corpus.readers import parquet_strings
from bertsmith.corpus.word_hashes import Hashes, run_hash, run_hashes, words_of

Numbers = NDArray[np.int64]

RUN_WORDS = 13  # Brown et al. 2020, appendix C: N is at most 13
MIN_WORDS = 8  # and at least 8
_TEXTS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class TaskFile:
    """A task's file: the number of its distinct texts that can be searched for, and of those too short."""

    name: str
    texts: int
    too_short: int


@dataclass(frozen=True, slots=True)
class TaskTexts:
    """The texts of tasks, with an index of their runs by length."""

    files: tuple[TaskFile, ...]
    texts: tuple[str, ...]
    file_of_text: NDArray[np.int32]
    runs: dict[int, "_Runs"]
    prefixes: "_Prefixes"

    @classmethod
    def read(cls, paths: Sequence[Path]) -> "TaskTexts":
        """Read the texts of all files: each cell of a table, each string of JSON, each line of plain text."""
        found = _Found()
        files = tuple(found.add(path) for path in paths)
        file_of_text = np.repeat(np.arange(len(files), dtype=np.int32), [file.texts for file in files])
        runs = {}
        for length in sorted(found.runs):
            hashes, texts, firsts = map(np.concatenate, zip(*found.runs[length], strict=True))
            ascending, order = np.unique(hashes, return_index=True)  # the first of equal runs is used
            runs[length] = _Runs(ascending, texts[order].astype(np.int32), firsts[order].astype(np.int32))
        prefixes = np.concatenate([np.empty(0, np.uint64), *found.prefixes])
        return cls(files, tuple(found.texts), file_of_text, runs, _Prefixes.of(prefixes))

    def match(self, text: str) -> str | None:
        """Return the name of the first task file with a text that occurs in this text, or None."""
        words = words_of(text)
        for index in self.prefixes.indices(words.hashes):
            for length, runs in self.runs.items():
                if index + length > len(words):
                    continue
                run = runs.find(run_hash(words.hashes[index : index + length]))
                # Equal hashes do not prove a match; equal words do.
                if run and words.run(index, length) == words_of(self.texts[run.text]).run(run.first, length):
                    return self.files[int(self.file_of_text[run.text])].name
        return None


class _Run(NamedTuple):
    text: int
    first: int  # word of the text


@dataclass(frozen=True, slots=True)
class _Runs:
    """The runs of one length: their hashes in ascending order, and the text and the word of each start."""

    hashes: Hashes
    texts: NDArray[np.int32]
    firsts: NDArray[np.int32]

    def find(self, run: np.uint64) -> _Run | None:
        """Return the text and first word of the run with this hash, or None."""
        at = int(np.searchsorted(self.hashes, run))
        if at == len(self.hashes) or self.hashes[at] != run:
            return None
        return _Run(int(self.texts[at]), int(self.firsts[at]))


@dataclass(frozen=True, slots=True)
class _Prefixes:
    """The first MIN_WORDS words of all runs of all lengths; every text is searched for these only."""

    hashes: Hashes
    maybe: NDArray[np.bool_]  # by the upper bits of a hash: True if any prefix has these bits

    @classmethod
    def of(cls, hashes: Hashes) -> "_Prefixes":
        """Build an index of these hashes of MIN_WORDS words."""
        # At least 16 slots per hash, so that few other runs hit a used slot; 64 MiB at most.
        slots = 1 << int(np.clip(16 * len(hashes), 1 << 12, 1 << 26) - 1).bit_length()
        maybe = np.zeros(slots, bool)
        maybe[_upper_bits(hashes, slots)] = True
        return cls(np.unique(hashes), maybe)

    def indices(self, words: Hashes) -> list[int]:
        """Return the indices in a text at which a run may begin."""
        if len(words) < MIN_WORDS or not len(self.hashes):
            return []
        hashes = run_hashes(words, MIN_WORDS)
        # One table lookup rules out nearly all of them; a binary search for each would be slower.
        indices = np.flatnonzero(self.maybe.take(_upper_bits(hashes, len(self.maybe))))
        nearest = np.searchsorted(self.hashes, hashes[indices]).clip(max=len(self.hashes) - 1)
        return [int(index) for index in indices[self.hashes[nearest] == hashes[indices]]]


def _upper_bits(hashes: Hashes, slots: int) -> Numbers:
    return (hashes >> np.uint64(65 - slots.bit_length())).astype(np.int64)


class _Found:
    """Texts and their runs, gathered from one file after another."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.runs: dict[int, list[tuple[Hashes, Numbers, Numbers]]] = defaultdict(list)  # by length
        self.prefixes: list[Hashes] = []

    def add(self, path: Path) -> TaskFile:
        """Gather the texts of a file, and count the ones that are long enough."""
        strings = [" ".join(string.split("\n")) for string in task_strings(path)]
        before = len(self.texts)
        for start in range(0, len(strings), _TEXTS_AT_ONCE):
            self._add_lines(strings[start : start + _TEXTS_AT_ONCE])
        used = len(self.texts) - before
        return TaskFile(str(path), used, len(strings) - used)

    def _add_lines(self, strings: list[str]) -> None:
        # Many texts as the lines of one, so that all their words are hashed at once. A run that crosses a
        # line end is not a run of any text.
        words = words_of("\n".join(strings))
        lines = words.lines()
        counts = np.bincount(lines, minlength=len(strings))
        # If more than half of a text is in a script without spaces, count that script's characters.
        characters = words.characters_per_word()
        scales = np.ones(len(counts), np.int64)
        for scale in np.unique(characters[characters > 1]).tolist():
            alike = np.bincount(lines, weights=characters == scale, minlength=len(counts))
            scales[2 * alike > counts] = scale
        # Length of each text's runs: 13 words, or all words of a text of 8 to 12; 0 if it is too short.
        lengths = np.where(counts < MIN_WORDS * scales, 0, np.minimum(counts, RUN_WORDS * scales))
        numbers = len(self.texts) + np.cumsum(lengths > 0) - 1
        begins = np.cumsum(counts) - counts
        for length in sorted(set(lengths.tolist()) - {0}):
            owners = lines[: len(lines) - length + 1]
            indices = np.flatnonzero((lengths[owners] == length) & (lines[length - 1 :] == owners))
            owners = owners[indices]
            hashes = run_hashes(words.hashes, length)[indices]
            self.runs[length].append((hashes, numbers[owners], indices - begins[owners]))
            self.prefixes.append(run_hashes(words.hashes, MIN_WORDS)[indices])
        self.texts += [string for string, length in zip(strings, lengths, strict=True) if length]


_LETTER = re.compile(r"[^\W\d_]")
_NOT_SPACE = re.compile(r"\S")


def task_strings(path: Path) -> list[str]:
    """Return the distinct strings with a letter in a task's file, in order of first appearance."""
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSED_SUFFIXES else path
    suffix = name.suffix.lower()
    if suffix in (".parquet", ".pq"):
        strings = parquet_strings(path)
    else:
        with open_text_bytes(path) as file:
            content = file.read()
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            what = f"is not UTF-8 text (byte {error.start})"
            raise UserError(what, where=f"{path}:{line}", remedy="convert it to UTF-8 (iconv)") from error
        strings = _BY_SUFFIX.get(suffix, _cells)(text, str(path))
    return list(dict.fromkeys(string for string in strings if _LETTER.search(string)))


def _cells(text: str, where: str) -> Iterator[str]:
    """Yield lines of plain text, cut into cells at tabs; in GLUE's tables a quote is a character.

    If every line is a word with its tag, yield the sentences instead.
    """
    del where  # any text is a table of one column
    for pattern in _WORD_LINES:
        if all(pattern.fullmatch(line) for line in islice(_word_lines(text), _LINES_LOOKED_AT)):
            yield from _sentences(text, pattern)
            return
    for line in text.split("\n"):
        yield from line.split("\t")


_WORD_LINES = (
    re.compile(r"(?P<word>\S+)[\t ](?:.*[\t ])?(?:O|[BIESLU]-\S+)\s*"),  # CoNLL-2003 and similar
    re.compile(r"\d+(?:[-.]\d+)?\t(?P<word>[^\t]+)(?:\t[^\t]*+){8}\s*"),  # CoNLL-U
)
"""Line formats with one word and its tags."""
_LINES_LOOKED_AT = 200


def _word_lines(text: str) -> Iterator[str]:
    """Yield the lines with words, without empty lines, comments and document marks."""
    lines = (line for line in text.splitlines() if line.strip())
    return (line for line in lines if not line.startswith(("# ", "-DOCSTART-")))


def _sentences(text: str, pattern: re.Pattern[str]) -> Iterator[str]:
    for is_sentence, lines in groupby(text.splitlines(), key=lambda line: bool(line.strip())):
        if is_sentence:
            found = map(pattern.fullmatch, lines)
            yield " ".join(each["word"] for each in found if each is not None)


def _quoted_cells(text: str, where: str) -> Iterator[str]:
    rows = csv.reader(io.StringIO(text, newline=""))
    try:
        for row in rows:
            yield from row
    except csv.Error as error:
        remedy = "correct the line, or save the table as TSV"
        raise UserError(f"is not CSV ({error})", where=f"{where}:{rows.line_num}", remedy=remedy) from error


def _json_strings(text: str, where: str) -> Iterator[str]:
    """Yield the strings of one JSON value, or of many, one per line."""
    decoder, start = json.JSONDecoder(), 0
    while (found := _NOT_SPACE.search(text, start)) is not None:
        start = found.start()
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            line = text.count("\n", 0, start) + 1
            what, remedy = f"is not valid JSON ({error})", "correct the file or remove it"
            raise UserError(what, where=f"{where}:{line}", remedy=remedy) from error
        # The leaves of the value from left to right, with a stack of values still to open.
        waiting: list[Any] = [value]
        while waiting:
            value = waiting.pop()
            if isinstance(value, str):
                yield value
            elif isinstance(value, dict | list):
                waiting.extend(reversed(value.values() if isinstance(value, dict) else value))
        start = end


_BY_SUFFIX: dict[str, Callable[[str, str], Iterator[str]]] = {
    ".csv": _quoted_cells,
    ".json": _json_strings,
    ".jsonl": _json_strings,
    ".ndjson": _json_strings,
}
