"""Finding the texts of a task in a corpus, so that a model is not trained on what it will be tested with.

As Brown et al. 2020 (appendix C) did for GPT-3: texts are compared as runs of 13 words, in lower case and
without punctuation; a text of 8 to 12 words must occur whole; shorter ones occur by chance and do not count.
In a script without spaces, where a character is a word, a run has as many characters as 13 words take.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertsmith.corpus.task_strings import task_strings
from bertsmith.corpus.words import Hashes, Words, run_hash, run_hashes, words_of

Numbers = NDArray[np.int64]

RUN_WORDS = 13  # Brown et al. 2020, appendix C: N is at most 13
SHORTEST_WORDS = 8  # and at least 8
_TEXTS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class TaskFile:
    """A task's file: how many of its different texts can be found in a corpus, how many are too short."""

    name: str
    texts: int
    too_short: int


@dataclass(frozen=True, slots=True)
class TaskTexts:
    """The texts of tasks, and an index of their runs by length."""

    files: tuple[TaskFile, ...]
    texts: tuple[str, ...]
    file_of_text: NDArray[np.int32]
    runs: dict[int, "_Runs"]
    beginnings: "_Beginnings"

    @classmethod
    def read(cls, paths: Sequence[Path]) -> "TaskTexts":
        """The texts of all files: every cell of a table, every string of JSON, every line of a plain text."""
        found = _Found()
        files = tuple(found.add(path) for path in paths)
        file_of_text = np.repeat(np.arange(len(files), dtype=np.int32), [file.texts for file in files])
        return cls(files, tuple(found.texts), file_of_text, found.runs(), found.beginnings())

    def match(self, text: str) -> str | None:
        """The name of the file whose text occurs first in this text, if any does."""
        words = words_of(text)
        places = self.beginnings.places(words.hashes)
        return next((name for place in places if (name := self._owner(words, place))), None)

    def _owner(self, words: Words, place: int) -> str | None:
        """The file that has a run that stands at this place, if any has."""
        for length, runs in self.runs.items():
            if place + length > len(words):
                continue
            run = runs.find(run_hash(words.hashes[place : place + length]))
            # Equal hashes are no proof; equal words are.
            if run and words.run(place, length) == words_of(self.texts[run.text]).run(run.first, length):
                return self.files[int(self.file_of_text[run.text])].name
        return None


class _Run(NamedTuple):
    text: int
    first: int  # word of the text


@dataclass(frozen=True, slots=True)
class _Runs:
    """The runs of one length: their hashes in ascending order, and the text and the word each begins with."""

    hashes: Hashes
    texts: NDArray[np.int32]
    firsts: NDArray[np.int32]

    @classmethod
    def of(cls, hashes: Hashes, texts: Numbers, firsts: Numbers) -> "_Runs":
        """An index of these runs; of equal ones the first counts."""
        ascending, order = np.unique(hashes, return_index=True)
        return cls(ascending, texts[order].astype(np.int32), firsts[order].astype(np.int32))

    def find(self, run: np.uint64) -> _Run | None:
        """Where the run with this hash stands, if there is one."""
        at = int(np.searchsorted(self.hashes, run))
        if at == len(self.hashes) or self.hashes[at] != run:
            return None
        return _Run(int(self.texts[at]), int(self.firsts[at]))


@dataclass(frozen=True, slots=True)
class _Beginnings:
    """The first words of all runs of all lengths: the one thing that every text is searched for."""

    hashes: Hashes
    maybe: NDArray[np.bool_]  # by the upper bits of a hash: whether any beginning has them

    @classmethod
    def of(cls, hashes: Hashes) -> "_Beginnings":
        """An index of these hashes of SHORTEST_WORDS words."""
        slots = 1 << int(np.clip(16 * len(hashes), 1 << 12, 1 << 26) - 1).bit_length()
        maybe = np.zeros(slots, bool)
        maybe[_upper_bits(hashes, slots)] = True
        return cls(np.unique(hashes), maybe)

    def places(self, words: Hashes) -> list[int]:
        """Where in a text a run may begin."""
        if len(words) < SHORTEST_WORDS or not len(self.hashes):
            return []
        hashes = run_hashes(words, SHORTEST_WORDS)
        # One look into a table rules out nearly all; a binary search for each would be slower.
        places = np.flatnonzero(self.maybe.take(_upper_bits(hashes, len(self.maybe))))
        nearest = np.searchsorted(self.hashes, hashes[places]).clip(max=len(self.hashes) - 1)
        return [int(place) for place in places[self.hashes[nearest] == hashes[places]]]


def _upper_bits(hashes: Hashes, slots: int) -> Numbers:
    return (hashes >> np.uint64(65 - slots.bit_length())).astype(np.int64)


class _Found:
    """Texts and their runs, gathered from one file after another."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._runs: dict[int, list[tuple[Hashes, Numbers, Numbers]]] = defaultdict(list)
        self._beginnings: list[Hashes] = []

    def add(self, path: Path) -> TaskFile:
        """Gather the texts of a file; how many were long enough."""
        strings = [" ".join(string.split("\n")) for string in task_strings(path)]
        before = len(self.texts)
        for start in range(0, len(strings), _TEXTS_AT_ONCE):
            self._add(strings[start : start + _TEXTS_AT_ONCE])
        used = len(self.texts) - before
        return TaskFile(str(path), used, len(strings) - used)

    def _add(self, strings: list[str]) -> None:
        words = words_of("\n".join(strings))
        lines = words.lines()
        counts = np.bincount(lines, minlength=len(strings))
        lengths = _run_lengths(words, lines, counts)
        numbers = len(self.texts) + np.cumsum(lengths > 0) - 1
        begins = np.cumsum(counts) - counts
        for length in sorted(set(lengths.tolist()) - {0}):
            owners = lines[: len(lines) - length + 1]
            places = np.flatnonzero((lengths[owners] == length) & (lines[length - 1 :] == owners))
            owners = owners[places]
            hashes = run_hashes(words.hashes, length)[places]
            self._runs[length].append((hashes, numbers[owners], places - begins[owners]))
            self._beginnings.append(run_hashes(words.hashes, SHORTEST_WORDS)[places])
        self.texts += [string for string, length in zip(strings, lengths, strict=True) if length]

    def runs(self) -> dict[int, _Runs]:
        """The index of all runs gathered, shortest first."""
        parts = {length: zip(*self._runs[length], strict=True) for length in sorted(self._runs)}
        return {length: _Runs.of(*map(np.concatenate, columns)) for length, columns in parts.items()}

    def beginnings(self) -> _Beginnings:
        """The index of the first words of all runs gathered."""
        return _Beginnings.of(np.concatenate([np.empty(0, np.uint64), *self._beginnings]))


def _run_lengths(words: Words, lines: Numbers, counts: Numbers) -> Numbers:
    """For each text the length of its runs: 13 words, or all of a text of 8 to 12; 0 if it is too short."""
    characters = words.characters_per_word()
    scales = np.ones(len(counts), np.int64)
    for scale in np.unique(characters[characters > 1]).tolist():
        alike = np.bincount(lines, weights=characters == scale, minlength=len(counts))
        scales[2 * alike > counts] = scale
    return np.where(counts < SHORTEST_WORDS * scales, 0, np.minimum(counts, RUN_WORDS * scales))
