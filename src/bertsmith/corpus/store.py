"""The token store: a folder of token ids, memory-mapped, that knows where sentences and documents start."""

import hashlib
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.corpus.store_format import (
    DOCUMENT_STARTS,
    MAKE_ANEW,
    MANIFEST,
    SENTENCE_STARTS,
    TOKEN_COUNTS,
    TOKENIZER,
    Manifest,
    read_manifest,
)
from bertsmith.ground.errors import UserError
from bertsmith.ground.files import sha256_of
from bertsmith.ground.progress import progress_bar
from bertsmith.text.tokenizer import Tokenizer

Offsets = NDArray[np.int64]

MOST_READERS = 8  # more would only queue for the disk


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """The sha256 of the tokenizer.json that this tokenizer saves."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        return sha256_of(Path(folder) / "tokenizer.json")


class TokenStore:
    """An open token store; reads nothing but what is asked for, and can be pickled to other processes."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.tokens, self.vocabulary = manifest.tokens, manifest.vocabulary
        self.tokenizer_hash = manifest.tokenizer
        self.has_units = bool(manifest.units)
        self.hash = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
        _check_files(folder, manifest)
        self.sentence_starts = _open_starts(folder / SENTENCE_STARTS, manifest.sentences, manifest.tokens)
        self.document_starts = _open_starts(folder / DOCUMENT_STARTS, manifest.documents, manifest.sentences)
        self.token_counts = _open_array(folder / TOKEN_COUNTS, manifest.vocabulary)
        self._tokens = self._open_shards("tokens", np.dtype(manifest.token_type).newbyteorder("<"))
        self._units = self._open_shards("units", np.dtype(np.uint8)) if self.has_units else []

    @classmethod
    def open(cls, folder: Path | str) -> "TokenStore":
        """The store in this folder; its sizes are checked here, its contents only by `verify`."""
        place = Path(folder).expanduser().absolute()
        return cls(place, read_manifest(place))

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return TokenStore.open, (self.folder,)

    def gather(self, starts: Offsets, lengths: Offsets) -> NDArray[np.int64]:
        """The token ids of these spans, one after the other; a span may cross shards."""
        return self._gather(self._tokens, starts, lengths=lengths).astype(np.int64)

    def gather_units(self, starts: Offsets, lengths: Offsets) -> NDArray[np.uint8]:
        """The unit codes of the tokens of these spans."""
        if not self.has_units:
            remedy = "make the store with `bertsmith corpus ... --lexicon FILE`"
            raise UserError("holds no phrases or entities", where=str(self.folder), remedy=remedy)
        return self._gather(self._units, starts, lengths=lengths).astype(np.uint8, copy=False)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer the ids belong to."""
        return Tokenizer.load(self.folder / TOKENIZER)

    def verify(self) -> None:
        """Read every file and compare its sha256 with the manifest; the first that differs is named."""
        entries = self.manifest.files
        paths = [self.folder / name for name in entries]
        # Threads are enough: hashing lets go of the interpreter.
        readers = ThreadPoolExecutor(min(MOST_READERS, os.cpu_count() or 1))
        try:
            sums = readers.map(sha256_of, paths)
            with progress_bar("checking the store", sum(it.bytes for it in entries.values())) as advance:
                for path, entry, found in zip(paths, entries.values(), sums, strict=True):
                    if found != entry.sha256:
                        what = "is not as it was written (its sha256 differs)"
                        raise UserError(what, where=str(path), remedy=MAKE_ANEW)
                    advance(entry.bytes)
        finally:
            readers.shutdown(cancel_futures=True)

    def _open_shards(self, suffix: str, kind: np.dtype[Any]) -> list[NDArray[Any]]:
        paths = [self.folder / f"{name}.{suffix}" for name in self.manifest.shards]
        # As plain arrays: a slice of a np.memmap costs several times that of the array it wraps.
        return [np.asarray(np.memmap(path, dtype=kind, mode="r")) for path in paths]

    def _gather(self, shards: list[NDArray[Any]], starts: Offsets, *, lengths: Offsets) -> NDArray[Any]:
        places = _places(np.asarray(starts, np.int64), np.asarray(lengths, np.int64))
        first, last = (int(places.min()), int(places.max())) if places.size else (0, 0)
        if first < 0 or last >= self.tokens:
            raise IndexError(f"a span reaches outside the {self.tokens} tokens of the store")
        size = self.manifest.shard_tokens
        if first // size == last // size:
            return shards[first // size][places - first // size * size]
        numbers, found = places // size, np.empty(len(places), shards[0].dtype)
        for number in range(first // size, last // size + 1):
            here = np.flatnonzero(numbers == number)
            found[here] = shards[number][places[here] - number * size]
        return found


def _check_files(folder: Path, manifest: Manifest) -> None:
    """Complain of the first file that is missing, of another size than stated, or not stated at all."""
    suffixes = {"tokens": np.dtype(manifest.token_type).itemsize, **({"units": 1} if manifest.units else {})}
    expected = {f"{name}.{suffix}" for name in manifest.shards for suffix in suffixes}
    expected |= {SENTENCE_STARTS, DOCUMENT_STARTS, TOKEN_COUNTS}
    if unstated := expected - manifest.files.keys():
        raise UserError(f"does not state {min(unstated)}", where=str(folder / MANIFEST), remedy=MAKE_ANEW)
    for name, entry in manifest.files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != entry.bytes:
            state = "is missing" if found is None else f"has {found} bytes instead of {entry.bytes}"
            raise UserError(state, where=str(folder / name), remedy=MAKE_ANEW)
    for suffix, width in suffixes.items():
        stated = sum(manifest.files[f"{name}.{suffix}"].bytes for name in manifest.shards)
        if stated != manifest.tokens * width:
            what = f"states {manifest.tokens} tokens, but its {suffix} files hold {stated // width}"
            raise UserError(what, where=str(folder / MANIFEST), remedy=MAKE_ANEW)


def _open_starts(file: Path, count: int, end: int) -> Offsets:
    """The starts of so many things, and where the last one ends."""
    starts = _open_array(file, count + 1)
    if starts[0] != 0 or starts[-1] != end:
        raise UserError(
            f"runs from {starts[0]} to {starts[-1]} instead of 0 to {end}", where=str(file), remedy=MAKE_ANEW
        )
    return starts


def _open_array(file: Path, length: int) -> NDArray[np.int64]:
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise UserError(f"is no array ({error})", where=str(file), remedy=MAKE_ANEW) from error
    if array.dtype != np.int64 or array.shape != (length,):
        what = f"holds {array.dtype} of shape {array.shape} instead of {length} whole numbers of 64 bits"
        raise UserError(what, where=str(file), remedy=MAKE_ANEW)
    return np.asarray(array)


def _places(starts: Offsets, lengths: Offsets) -> Offsets:
    """The place of every token of these spans, one after the other."""
    ends = np.cumsum(lengths)
    places: Offsets = np.repeat(starts - (ends - lengths), lengths)
    places += np.arange(len(places))
    return places
