"""Phrases and entities: the longest entries of a lexicon that stand in tokenised text, from left to right.

Entries are compared as token ids, so that they match whatever the tokenizer makes equal, and in text without
spaces too: 哈尔滨 is found in the tokens 哈 尔 滨. A match begins and ends with a word.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from bertsmith.ground.errors import UserError
from bertsmith.ground.files import open_text_bytes
from bertsmith.text.fast_encoder import EncodedTexts, FastEncoder
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.text.word_borders import Flags, WordBorders

UnitKind = Literal["phrase", "entity"]
UNIT_KINDS = ("basic", *get_args(UnitKind))
"""The kinds by number: the code of a token is twice its unit's kind, and one more inside the unit."""

Codes = NDArray[np.uint8]
Ids = NDArray[Any]
Lengths = NDArray[np.int64]

_BEGINNING = 3  # ids by which entries are found
_SLOTS_PER_ENTRY = 64  # one place in twenty is then looked at in vain
_FACTOR = np.uint32(0x9E3779B1)  # 2**32 by the golden ratio: Knuth's multiplicative hash


@dataclass(frozen=True, slots=True)
class Lexicon:
    """Phrases and entities as they are written, and the kind of each."""

    kinds: dict[str, UnitKind]

    @classmethod
    def read(cls, files: Sequence[Path]) -> "Lexicon":
        """The entries of all files, one a line, perhaps with a tab and a kind; the first of equals counts."""
        kinds: dict[str, UnitKind] = {}
        for file in files:
            entries = list(_entries(file))
            if not entries:
                remedy = "write a phrase or an entity a line"
                raise UserError("holds no entry", where=str(file), remedy=remedy)
            for text, kind in entries:
                kinds.setdefault(text, kind)
        return cls(kinds)


def _entries(file: Path) -> Iterator[tuple[str, UnitKind]]:
    for number, line in enumerate(_lines(file), start=1):
        text, _, kind = map(str.strip, line.partition("\t"))
        if text:
            yield text, _kind(kind or "entity", where=f"{file}:{number}")


def _kind(name: str, *, where: str) -> UnitKind:
    for kind in get_args(UnitKind):
        if name == kind:
            return cast(UnitKind, kind)
    remedy = "write phrase or entity after the tab, or nothing"
    raise UserError(f"{name!r} is no kind of unit", where=where, remedy=remedy)


def _lines(file: Path) -> list[str]:
    with open_text_bytes(file) as stream:
        content = stream.read()
    try:
        return content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            "is not UTF-8 text", where=f"{file}:{line}", remedy="convert it with iconv"
        ) from error


def count_units(codes: Codes) -> dict[UnitKind, int]:
    """How many phrases and how many entities these codes of tokens mark."""
    return {kind: int(np.count_nonzero(codes == 2 * UNIT_KINDS.index(kind))) for kind in get_args(UnitKind)}


class UnitFinder:
    """Finds the units of a lexicon in token ids."""

    def __init__(self, lexicon: Lexicon, tokenizer: Tokenizer) -> None:
        encoder = FastEncoder(tokenizer)
        self._borders, self._id_type = WordBorders(tokenizer), np.dtype(encoder.id_type)
        self._code_of: dict[bytes, int] = {}  # by the bytes of the ids
        unusable = np.array(sorted(tokenizer.special_ids))
        for before in ("", " "):  # a byte-level vocabulary has other pieces for a word after a space
            encoded = encoder.encode_many([before + text for text in lexicon.kinds])
            self._add(_rows(encoded, unusable), list(lexicon.kinds.values()))
        self._beginnings = _Beginnings(self._code_of, self._id_type)

    def codes(self, ids: Ids, sentence_lengths: Lengths) -> Codes:
        """The unit code of each token; where no entry stands, words are units of the kind basic."""
        ids = ids.astype(self._id_type, copy=False)
        begins = self._borders.begins(ids, sentence_lengths)
        codes = (~begins[:-1]).astype(np.uint8)
        for start, end, code in self._matches(ids, begins, sentence_ends=np.cumsum(sentence_lengths)):
            codes[start] = code
            codes[start + 1 : end] = code + 1
        return codes

    def _add(self, rows: list[bytes], kinds: list[UnitKind]) -> None:
        for row, kind in zip(rows, kinds, strict=True):
            if row:
                self._code_of.setdefault(row, 2 * UNIT_KINDS.index(kind))

    def _matches(self, ids: Ids, begins: Flags, *, sentence_ends: Lengths) -> Iterator[tuple[int, int, int]]:
        """Start, end and code of the units; at each word the longest that fits, then on behind it."""
        starts = np.flatnonzero(begins[:-1] & self._beginnings.may_stand(ids))
        limits = sentence_ends[np.searchsorted(sentence_ends, starts, side="right")]
        spelled, width, word_begins, free = ids.tobytes(), self._id_type.itemsize, begins.tobytes(), 0
        for start, limit in zip(starts.tolist(), limits.tolist(), strict=True):
            if start < free:
                continue
            for length in self._beginnings.lengths(spelled, start):
                end = start + length
                fits = end <= limit and word_begins[end]
                if fits and (code := self._code_of.get(spelled[start * width : end * width])):
                    yield start, end, code
                    free = end
                    break


def _rows(encoded: EncodedTexts, unusable: NDArray[np.int64]) -> list[bytes]:
    """The ids of each text as bytes; nothing for a text with an unknown piece: it would match any."""
    width, spelled = encoded.ids.itemsize, encoded.ids.tobytes()
    ends = np.cumsum(encoded.lengths)
    starts = ends - encoded.lengths
    unusable_before = np.concatenate([[0], np.cumsum(np.isin(encoded.ids, unusable))])
    ends = np.where(unusable_before[ends] > unusable_before[starts], starts, ends)
    return [spelled[start:end] for start, end in zip(starts * width, ends * width, strict=True)]


class _Beginnings:
    """The first ids of entries: a quick look rules out most places, an exact one gives the lengths to try."""

    def __init__(self, rows: Iterable[bytes], id_type: np.dtype[Any]) -> None:
        self._width = id_type.itemsize
        found: dict[bytes, set[int]] = defaultdict(set)
        for row in rows:
            found[row[: _BEGINNING * self._width]].add(len(row) // self._width)
        self._lengths = {start: tuple(sorted(lengths, reverse=True)) for start, lengths in found.items()}
        self._taken = np.zeros(1 << (_SLOTS_PER_ENTRY * len(found) + 1).bit_length(), np.bool_)
        for size in range(1, _BEGINNING + 1):
            alike = b"".join(start for start in found if len(start) == size * self._width)
            self._taken[self._slots(np.frombuffer(alike, id_type).reshape(-1, size).T)] = True

    def may_stand(self, ids: Ids) -> Flags:
        """For each token, whether an entry may begin there; now and then it says so in vain."""
        may = np.zeros(len(ids), np.bool_)
        for size in range(1, min(_BEGINNING, len(ids)) + 1):
            places = len(ids) - size + 1
            may[:places] |= self._taken.take(self._slots([ids[at : at + places] for at in range(size)]))
        return may

    def lengths(self, spelled: bytes, start: int) -> Iterator[int]:
        """The lengths of the entries that begin as the tokens at this place do, the longest first."""
        for size in range(_BEGINNING, 0, -1):
            yield from self._lengths.get(spelled[start * self._width : (start + size) * self._width], ())

    def _slots(self, columns: Iterable[Ids]) -> NDArray[np.uint32]:
        """A slot for each row of ids, given by columns."""
        mixed: Any = np.uint32(0)
        for column in columns:
            mixed = (mixed + column.astype(np.uint32)) * _FACTOR
        slots: NDArray[np.uint32] = mixed >> np.uint32(33 - len(self._taken).bit_length())
        return slots
