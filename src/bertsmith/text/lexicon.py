"""Phrases and entities: find the longest entries of a lexicon in tokenised text, from left to right.

Entries are compared as token ids, so that they match any text that the tokenizer treats as equal, also in
scripts without spaces: 哈尔滨 is found in the tokens 哈 尔 滨. A match begins and ends at word boundaries.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.errors import UserError
from bertsmith.core.files import open_text_bytes
from bertsmith.text.fast_encoder import FastEncoder
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.text.word_boundaries import Flags, WordBoundaries

UnitKind = Literal["phrase", "entity"]
UNIT_KINDS = ("basic", *get_args(UnitKind))
"""The kinds by number: a token's code is twice its unit's kind, plus one inside the unit."""

Codes = NDArray[np.uint8]
Ids = NDArray[Any]
Lengths = NDArray[np.int64]

_PREFIX = 3  # number of leading ids in the index of entries
_SLOTS_PER_ENTRY = 64  # then one position in twenty is checked needlessly
_FACTOR = np.uint32(0x9E3779B1)  # 2**32 by the golden ratio: Knuth's multiplicative hash


@dataclass(frozen=True, slots=True)
class Lexicon:
    """Phrases and entities as they are written, with the kind of each."""

    kinds: dict[str, UnitKind]

    @classmethod
    def read(cls, files: Sequence[Path]) -> "Lexicon":
        """Read the entries of all files, one per line, perhaps with a tab and a kind; the first one wins."""
        kinds: dict[str, UnitKind] = {}
        for file in files:
            entries = list(_entries(file))
            if not entries:
                remedy = "write one phrase or entity per line"
                raise UserError("contains no entries", where=str(file), remedy=remedy)
            for text, kind in entries:
                kinds.setdefault(text, kind)
        return cls(kinds)


def _entries(file: Path) -> Iterator[tuple[str, UnitKind]]:
    with open_text_bytes(file) as stream:
        content = stream.read()
    try:
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        line_number = content.count(b"\n", 0, error.start) + 1
        where, remedy = f"{file}:{line_number}", "convert it with iconv"
        raise UserError("is not UTF-8 text", where=where, remedy=remedy) from error
    for number, line in enumerate(lines, start=1):
        text, _, name = map(str.strip, line.partition("\t"))
        if not text:
            continue
        if name and name not in get_args(UnitKind):
            remedy = "write phrase or entity after the tab, or nothing"
            raise UserError(f"{name!r} is not a kind of unit", where=f"{file}:{number}", remedy=remedy)
        yield text, cast(UnitKind, name or "entity")


def count_units(codes: Codes) -> dict[UnitKind, int]:
    """Count the phrases and the entities that these token codes mark."""
    return {kind: int(np.count_nonzero(codes == 2 * UNIT_KINDS.index(kind))) for kind in get_args(UnitKind)}


class UnitFinder:
    """Finds the units of a lexicon in token ids."""

    def __init__(self, lexicon: Lexicon, tokenizer: Tokenizer) -> None:
        encoder = FastEncoder(tokenizer)
        self._boundaries, self._id_type = WordBoundaries(tokenizer), np.dtype(encoder.id_type)
        self._code_of: dict[bytes, int] = {}  # by the bytes of the ids
        unusable = np.array(sorted(tokenizer.special_ids))
        for before in ("", " "):  # in a byte-level vocabulary, a word after a space has other pieces
            encoded = encoder.encode_many([before + text for text in lexicon.kinds])
            width, raw, ends = encoded.ids.itemsize, encoded.ids.tobytes(), np.cumsum(encoded.lengths)
            starts = ends - encoded.lengths
            # An entry with an unknown piece would match any text, so it gets no ids and is skipped.
            unusable_before = np.concatenate([[0], np.cumsum(np.isin(encoded.ids, unusable))])
            ends = np.where(unusable_before[ends] > unusable_before[starts], starts, ends)
            spans = zip(starts * width, ends * width, lexicon.kinds.values(), strict=True)
            for start, end, kind in spans:
                if start < end:
                    self._code_of.setdefault(raw[start:end], 2 * UNIT_KINDS.index(kind))
        self._prefixes = _Prefixes(self._code_of, self._id_type)

    def codes(self, ids: Ids, sentence_lengths: Lengths) -> Codes:
        """Return the unit code of each token; outside of entries, each word is a unit of the kind basic."""
        ids = ids.astype(self._id_type, copy=False)
        begins = self._boundaries.begins(ids, sentence_lengths)
        codes = (~begins[:-1]).astype(np.uint8)
        # Avoid running Python for every token: a hash table over whole arrays leaves one position in twenty.
        # Only for these, look up exact prefixes and then whole entries.
        starts = np.flatnonzero(begins[:-1] & self._prefixes.may_start(ids))
        sentence_ends = np.cumsum(sentence_lengths)
        limits = sentence_ends[np.searchsorted(sentence_ends, starts, side="right")]
        raw, width, word_begins, free = ids.tobytes(), self._id_type.itemsize, begins.tobytes(), 0
        for start, limit in zip(starts.tolist(), limits.tolist(), strict=True):
            if start < free:
                continue
            # Take the longest entry that fits, then continue after it. It must end at the end of a word: "New
            # York" is not found in "New Yorker".
            for length in self._prefixes.lengths(raw, start):
                end = start + length
                fits = end <= limit and word_begins[end]
                if fits and (code := self._code_of.get(raw[start * width : end * width])):
                    codes[start], codes[start + 1 : end] = code, code + 1
                    free = end
                    break
        return codes


class _Prefixes:
    """The first ids of entries: a quick check rules out most positions, an exact one gives lengths to try."""

    def __init__(self, rows: Iterable[bytes], id_type: np.dtype[Any]) -> None:
        self._width = id_type.itemsize
        found: dict[bytes, set[int]] = defaultdict(set)
        for row in rows:
            found[row[: _PREFIX * self._width]].add(len(row) // self._width)
        self._lengths = {start: tuple(sorted(lengths, reverse=True)) for start, lengths in found.items()}
        # Flags, not entries: a false positive costs one dictionary lookup, and flags fit into the cache.
        self._taken = np.zeros(1 << (_SLOTS_PER_ENTRY * len(found) + 1).bit_length(), np.bool_)
        for size in range(1, _PREFIX + 1):
            alike = b"".join(start for start in found if len(start) == size * self._width)
            self._taken[self._slots(np.frombuffer(alike, id_type).reshape(-1, size).T)] = True

    def may_start(self, ids: Ids) -> Flags:
        """Return True for each token at which an entry may begin; false positives are possible."""
        may = np.zeros(len(ids), np.bool_)
        for size in range(1, min(_PREFIX, len(ids)) + 1):
            count = len(ids) - size + 1
            may[:count] |= self._taken.take(self._slots([ids[at : at + count] for at in range(size)]))
        return may

    def lengths(self, raw: bytes, start: int) -> Iterator[int]:
        """Yield the lengths of entries that begin with the tokens at this position, the longest first."""
        for size in range(_PREFIX, 0, -1):
            yield from self._lengths.get(raw[start * self._width : (start + size) * self._width], ())

    def _slots(self, columns: Iterable[Ids]) -> NDArray[np.uint32]:
        """Return a slot for each row of ids, given by columns."""
        mixed: Any = np.uint32(0)
        for column in columns:
            mixed = (mixed + column.astype(np.uint32)) * _FACTOR
        slots: NDArray[np.uint32] = mixed >> np.uint32(33 - len(self._taken).bit_length())
        return slots
