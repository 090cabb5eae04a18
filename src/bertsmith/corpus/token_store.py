"""What a token store's folder holds: the names of its files, and the manifest that states them.

manifest.json            what the store holds, how it was made, and the sha256 of every other file
tokenizer/               the tokenizer the ids belong to
shard-00000.tokens ...   token ids, little-endian; every shard but the last holds `shard_tokens` of them
shard-00000.units  ...   only with a lexicon: one byte a token, 2 * kind where a unit begins, + 1 inside it
sentence_starts.npy      the token at which each sentence starts, and where the last one ends
document_starts.npy      the sentence at which each document starts, and where the last one ends
token_counts.npy         how often each id occurs
"""

import hashlib
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from bertsmith.core.arrays import ranges
from bertsmith.core.errors import UserError
from bertsmith.core.files import read_json, sha256_of
from bertsmith.core.progress import progress_bar
from bertsmith.text.fast_encoder import IdType
from bertsmith.text.tokenizer import Tokenizer

FORMAT = "bertsmith token store"
VERSION = 1
MANIFEST, TOKENIZER = "manifest.json", "tokenizer"
SENTENCE_STARTS, DOCUMENT_STARTS = "sentence_starts.npy", "document_starts.npy"
TOKEN_COUNTS = "token_counts.npy"
SHARD_TOKENS = 1 << 26
MAKE_ANEW = "make the store again with `bertsmith corpus`"


class FileEntry(BaseModel):
    """What a file of the store must look like."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    bytes: NonNegativeInt
    sha256: str


class Manifest(BaseModel):
    """What a store holds, how it was made, and the look of each of its files."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: str = FORMAT
    version: int = VERSION
    tokenizer: str
    vocabulary: PositiveInt
    token_type: IdType
    units: list[str]  # the kinds that unit codes tell apart, code // 2 being the index in this list
    shard_tokens: PositiveInt
    documents: PositiveInt
    sentences: PositiveInt
    tokens: PositiveInt
    settings: dict[str, Any]
    summary: dict[str, Any]
    files: dict[str, FileEntry]

    @property
    def shards(self) -> list[str]:
        """The names of the shards without their suffix; all but the last are full."""
        return [shard_name(number) for number in range(-(-self.tokens // self.shard_tokens))]


def shard_name(number: int) -> str:
    """The name of a shard's files, without their suffix."""
    return f"shard-{number:05d}"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a store, if it is one that this version reads."""
    if not (folder / MANIFEST).is_file():
        what = "holds no token store" if folder.is_dir() else "is no folder"
        remedy = "give the folder that `bertsmith corpus ... --out FOLDER` wrote"
        raise UserError(what, where=str(folder), remedy=remedy)
    values = read_json(folder / MANIFEST, remedy=MAKE_ANEW)
    if values.get("format") != FORMAT:
        raise UserError("is not the manifest of a token store", where=str(folder / MANIFEST))
    if values.get("version") != VERSION:
        what = f"is a store of format version {values.get('version')!r}, and this program reads {VERSION}"
        raise UserError(what, where=str(folder), remedy=MAKE_ANEW)
    try:
        return Manifest.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{key}: {first['msg']}", where=str(folder / MANIFEST), remedy=MAKE_ANEW) from error


Offsets = NDArray[np.int64]

MAX_READERS = 8  # more would only queue for the disk


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
        path = Path(folder).expanduser().absolute()
        return cls(path, read_manifest(path))

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        # Opened anew in the other process: pickling the arrays would copy the whole store.
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
        readers = ThreadPoolExecutor(min(MAX_READERS, os.cpu_count() or 1))
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
        indices = ranges(np.asarray(starts, np.int64), np.asarray(lengths, np.int64))
        first, last = (int(indices.min()), int(indices.max())) if indices.size else (0, 0)
        if first < 0 or last >= self.tokens:
            raise IndexError(f"a span reaches outside the {self.tokens} tokens of the store")
        size = self.manifest.shard_tokens
        if first // size == last // size:  # nearly always: one shard holds 64 million tokens
            return shards[first // size][indices - first // size * size]
        # Spans over several shards: each shard is asked once, for all that lies in it.
        shard_of, found = indices // size, np.empty(len(indices), shards[0].dtype)
        for number in range(first // size, last // size + 1):
            here = np.flatnonzero(shard_of == number)
            found[here] = shards[number][indices[here] - number * size]
        return found


def _check_files(folder: Path, manifest: Manifest) -> None:
    """Raise for the first file that is missing, of another size than stated, or not stated at all."""
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
