"""Token stores: the file format, a reader, and a writer with bounded memory.

manifest.json            contents of the store, its settings, and the sha256 of every other file
tokenizer/               the tokenizer that made the ids
shard-00000.tokens ...   token ids, little-endian; every shard but the last has `shard_tokens` of them
shard-00000.units  ...   only with a lexicon: per token one byte, 2 * kind of its unit, + 1 inside the unit
sentence_starts.npy      the first token of each sentence, and the end of the last sentence
document_starts.npy      the first sentence of each document, and the end of the last document
token_counts.npy         number of occurrences of each id
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from bertsmith.core.arrays import GrowingNpy, open_array, ranges
from bertsmith.core.errors import UserError
from bertsmith.core.files import atomic_folder, check_not_taken, read_json, sha256_of, write_json
from bertsmith.core.mapped_files import note_mapped
from bertsmith.core.progress import progress_bar
from bertsmith.text.fast_encoder import IdType, smallest_id_type
from bertsmith.text.lexicon import UNIT_KINDS
from bertsmith.text.tokenizer import Tokenizer

FORMAT = "bertsmith token store"
VERSION = 1
MANIFEST, TOKENIZER = "manifest.json", "tokenizer"
SENTENCE_STARTS, DOCUMENT_STARTS = "sentence_starts.npy", "document_starts.npy"
TOKEN_COUNTS = "token_counts.npy"
SHARD_TOKENS = 1 << 26
MAKE_ANEW = "make the store again with `bertsmith corpus`"


class FileEntry(BaseModel):
    """Expected size and checksum of a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    bytes: NonNegativeInt
    sha256: str


class Manifest(BaseModel):
    """Contents of a store, its settings, and the size and checksum of each file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: str = FORMAT
    version: int = VERSION
    tokenizer: str
    vocabulary: PositiveInt
    token_type: IdType
    units: list[str]  # kinds of units: code // 2 is an index into this list
    shard_tokens: PositiveInt
    documents: PositiveInt
    sentences: PositiveInt
    tokens: PositiveInt
    settings: dict[str, Any]
    summary: dict[str, Any]
    files: dict[str, FileEntry]

    @property
    def shards(self) -> list[str]:
        """Names of the shards without suffix; all but the last are full."""
        return [shard_name(number) for number in range(-(-self.tokens // self.shard_tokens))]


def shard_name(number: int) -> str:
    """Return the name of a shard's files, without suffix."""
    return f"shard-{number:05d}"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a store; raise if it is not a store or has another version."""
    if not (folder / MANIFEST).is_file():
        what = "is not a token store" if folder.is_dir() else "is not a folder"
        remedy = "give the folder that `bertsmith corpus ... --out FOLDER` wrote"
        raise UserError(what, where=str(folder), remedy=remedy)
    values = read_json(folder / MANIFEST, remedy=MAKE_ANEW)
    if values.get("format") != FORMAT:
        raise UserError("is not the manifest of a token store", where=str(folder / MANIFEST))
    if values.get("version") != VERSION:
        what = f"is a store of format version {values.get('version')!r}, but this program reads {VERSION}"
        raise UserError(what, where=str(folder), remedy=MAKE_ANEW)
    try:
        return Manifest.model_validate(values)
    except ValidationError as error:
        from bertsmith.recipe.validation_errors import file_error  # its schemas take a moment to build

        raise file_error(error, values, Manifest, where=str(folder / MANIFEST), remedy=MAKE_ANEW) from error


Offsets = NDArray[np.int64]

MAX_READERS = 8  # more would only wait for the disk


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Return the sha256 of the tokenizer.json that this tokenizer saves."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        return sha256_of(Path(folder) / "tokenizer.json")


class TokenStore:
    """An open token store; reads only requested data, and can be pickled to other processes."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.tokens, self.vocabulary = manifest.tokens, manifest.vocabulary
        self.tokenizer_hash = manifest.tokenizer
        self.has_units = bool(manifest.units)
        self._tokenizer: Tokenizer | None = None
        # The manifest has the sha256 of every other file, so its own hash identifies the whole store.
        self.hash = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
        # Check sizes only: reading a hundred gigabytes at every start would take longer than many runs.
        _check_files(folder, manifest)
        self.sentence_starts = _open_starts(folder / SENTENCE_STARTS, manifest.sentences, manifest.tokens)
        self.document_starts = _open_starts(folder / DOCUMENT_STARTS, manifest.documents, manifest.sentences)
        self.token_counts = _open_array(folder / TOKEN_COUNTS, manifest.vocabulary)
        self._tokens = self._open_shards("tokens", np.dtype(manifest.token_type).newbyteorder("<"))
        self._units = self._open_shards("units", np.dtype(np.uint8)) if self.has_units else []

    @classmethod
    def open(cls, folder: Path | str) -> "TokenStore":
        """Open the store in this folder, checking sizes; only `verify` checks contents."""
        path = Path(folder).expanduser().absolute()
        return cls(path, read_manifest(path))

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        # Reopened in the other process: pickling the arrays would copy the whole store.
        return TokenStore.open, (self.folder,)

    def gather(self, starts: Offsets, lengths: Offsets) -> NDArray[np.int64]:
        """Return the token ids of these spans, one after the other; a span may cross shards."""
        return self._gather(self._tokens, starts, lengths=lengths).astype(np.int64)

    def gather_units(self, starts: Offsets, lengths: Offsets) -> NDArray[np.uint8]:
        """Return the unit codes of the tokens of these spans."""
        if not self.has_units:
            remedy = "make the store with `bertsmith corpus ... --lexicon FILE`"
            raise UserError("was made without phrases and entities", where=str(self.folder), remedy=remedy)
        return self._gather(self._units, starts, lengths=lengths).astype(np.uint8, copy=False)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that made the ids; it is loaded once."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.load(self.folder / TOKENIZER)
        return self._tokenizer

    def verify(self) -> None:
        """Read every file and compare its sha256 with the manifest; raise for the first that differs."""
        entries = self.manifest.files
        paths = [self.folder / name for name in entries]
        # Threads are enough: hashing releases the GIL.
        readers = ThreadPoolExecutor(min(MAX_READERS, os.cpu_count() or 1))
        try:
            sums = readers.map(sha256_of, paths)
            with progress_bar("checking the store", sum(it.bytes for it in entries.values())) as advance:
                for path, entry, found in zip(paths, entries.values(), sums, strict=True):
                    if found != entry.sha256:
                        what = "has changed since it was written (its sha256 differs)"
                        raise UserError(what, where=str(path), remedy=MAKE_ANEW)
                    advance(entry.bytes)
        finally:
            readers.shutdown(cancel_futures=True)

    def _open_shards(self, suffix: str, kind: np.dtype[Any]) -> list[NDArray[Any]]:
        paths = [self.folder / f"{name}.{suffix}" for name in self.manifest.shards]
        for path in paths:
            note_mapped(path)
        # As plain arrays: slicing an np.memmap costs several times as much.
        return [np.asarray(np.memmap(path, dtype=kind, mode="r")) for path in paths]

    def _gather(self, shards: list[NDArray[Any]], starts: Offsets, *, lengths: Offsets) -> NDArray[Any]:
        indices = ranges(np.asarray(starts, np.int64), np.asarray(lengths, np.int64))
        first, last = (int(indices.min()), int(indices.max())) if indices.size else (0, 0)
        if first < 0 or last >= self.tokens:
            raise IndexError(f"a span exceeds the {self.tokens} tokens of the store")
        size = self.manifest.shard_tokens
        if first // size == last // size:  # nearly always: one shard holds 64 million tokens
            return shards[first // size][indices - first // size * size]
        # Spans over several shards: read each shard once, for all tokens in it.
        shard_of, found = indices // size, np.empty(len(indices), shards[0].dtype)
        for number in range(first // size, last // size + 1):
            here = np.flatnonzero(shard_of == number)
            found[here] = shards[number][indices[here] - number * size]
        return found


def _check_files(folder: Path, manifest: Manifest) -> None:
    """Raise for the first file that is missing, has the wrong size, or is not in the manifest."""
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
    """Open an array of `count` starts and the end of the last item."""
    starts = _open_array(file, count + 1)
    if starts[0] != 0 or starts[-1] != end:
        raise UserError(
            f"runs from {starts[0]} to {starts[-1]} instead of 0 to {end}", where=str(file), remedy=MAKE_ANEW
        )
    return starts


def _open_array(file: Path, length: int) -> NDArray[np.int64]:
    array = open_array(file, remedy=MAKE_ANEW)
    if array.dtype != np.int64 or array.shape != (length,):
        what = f"holds {array.dtype} of shape {array.shape} instead of {length} whole numbers of 64 bits"
        raise UserError(what, where=str(file), remedy=MAKE_ANEW)
    return np.asarray(array)


# ---- writing: files are appended to as documents arrive


@dataclass(frozen=True, slots=True)
class TokenisedDocuments:
    """Documents as one row of tokens, with the lengths of sentences and documents."""

    tokens: NDArray[Any]
    sentence_lengths: NDArray[np.int64]  # in tokens
    document_lengths: NDArray[np.int64]  # in sentences
    units: NDArray[np.uint8] | None = None

    def only(self, wanted: NDArray[np.bool_]) -> "TokenisedDocuments":
        """Return the documents with a True flag."""
        if wanted.all():
            return self
        # Repeat each document's flag for its sentences, and then for their tokens.
        sentences = np.repeat(wanted, self.document_lengths)
        tokens = np.repeat(sentences, self.sentence_lengths)
        return TokenisedDocuments(
            tokens=self.tokens[tokens],
            sentence_lengths=self.sentence_lengths[sentences],
            document_lengths=self.document_lengths[wanted],
            units=None if self.units is None else self.units[tokens],
        )


class StoreWriter:
    """Appends documents to the files of a store, and finally writes the manifest."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, *, with_units: bool, shard_tokens: int) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        self._vocabulary, self._shard_tokens = tokenizer.vocabulary_size, shard_tokens
        self._type = smallest_id_type(self._vocabulary)
        self._tokens = _ShardFiles(folder, "tokens", size=shard_tokens)
        self._units = _ShardFiles(folder, "units", size=shard_tokens) if with_units else None
        self._sentence_starts = _RunningSums(folder / SENTENCE_STARTS)
        self._document_starts = _RunningSums(folder / DOCUMENT_STARTS)
        self.token_counts = np.zeros(self._vocabulary, np.int64)

    def add(self, documents: TokenisedDocuments) -> None:
        """Append documents; documents and their sentences must not be empty."""
        tokens, units = documents.tokens, documents.units
        assert documents.sentence_lengths.min(initial=1) > 0, "an empty sentence"
        assert documents.document_lengths.min(initial=1) > 0, "an empty document"
        assert documents.sentence_lengths.sum() == len(tokens)
        assert documents.document_lengths.sum() == len(documents.sentence_lengths)
        assert tokens.max(initial=0) < self._vocabulary
        assert (units is None) == (self._units is None)
        self._tokens.append(tokens.astype(np.dtype(self._type).newbyteorder("<"), copy=False))
        if self._units is not None and units is not None:
            assert len(units) == len(tokens)
            self._units.append(units)
        self._sentence_starts.append(documents.sentence_lengths)
        self._document_starts.append(documents.document_lengths)
        self.token_counts += np.bincount(tokens, minlength=self._vocabulary)

    @property
    def tokens(self) -> int:
        """Number of tokens written so far."""
        return self._sentence_starts.last

    @property
    def sentences(self) -> int:
        """Number of sentences written so far."""
        return self._document_starts.last

    @property
    def documents(self) -> int:
        """Number of documents written so far."""
        return self._document_starts.count

    def finish(self, *, settings: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
        """Close the files and write the manifest."""
        self.close()
        self._tokenizer.save(self._folder / TOKENIZER)
        np.save(self._folder / TOKEN_COUNTS, self.token_counts)
        files = sorted(path for path in self._folder.rglob("*") if path.is_file())
        entries = {
            path.relative_to(self._folder).as_posix(): FileEntry(
                bytes=path.stat().st_size, sha256=sha256_of(path)
            )
            for path in files
        }
        manifest = Manifest(
            tokenizer=entries[f"{TOKENIZER}/tokenizer.json"].sha256,
            vocabulary=self._vocabulary,
            token_type=self._type,
            units=[] if self._units is None else list(UNIT_KINDS),
            shard_tokens=self._shard_tokens,
            documents=self.documents,
            sentences=self.sentences,
            tokens=self.tokens,
            settings=dict(settings),
            summary=dict(summary),
            files=entries,
        )
        # Last, so that a folder with a manifest is a complete store.
        write_json(self._folder / MANIFEST, manifest.model_dump())

    def close(self) -> None:
        """Close the files; nothing can be added afterwards."""
        for file in (self._tokens, self._units, self._sentence_starts, self._document_starts):
            if file is not None:
                file.close()


@contextmanager
def writing_store(
    folder: Path, tokenizer: Tokenizer, *, with_units: bool = False, shard_tokens: int = SHARD_TOKENS
) -> Iterator[StoreWriter]:
    """Yield a writer; its files appear under `folder` only if the block, which must `finish` it, succeeds."""
    check_not_taken(folder)
    with atomic_folder(folder) as temporary:
        writer = StoreWriter(temporary, tokenizer, with_units=with_units, shard_tokens=shard_tokens)
        try:
            yield writer
        finally:
            writer.close()


class _ShardFiles:
    """A row of values cut into files of `size` values each."""

    def __init__(self, folder: Path, suffix: str, *, size: int) -> None:
        self._folder, self._suffix, self._size = folder, suffix, size
        self._written = 0
        self._file: BinaryIO | None = None

    def append(self, values: NDArray[Any]) -> None:
        while len(values):
            if self._file is None:
                name = shard_name(self._written // self._size)
                self._file = (self._folder / f"{name}.{self._suffix}").open("xb")
            remaining = self._size - self._written % self._size
            self._file.write(np.ascontiguousarray(values[:remaining]).data)
            self._written += min(remaining, len(values))
            values = values[remaining:]
            # Close a full file at once; the next one is created only if there is a value for it.
            if self._written % self._size == 0:
                self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class _RunningSums:
    """An .npy file of starts: running sums of lengths, from 0 on."""

    def __init__(self, path: Path) -> None:
        self._file, self.last = GrowingNpy(path, "<i8"), 0
        self._file.append(np.zeros(1, np.int64))

    @property
    def count(self) -> int:
        return self._file.rows - 1

    def append(self, lengths: NDArray[np.int64]) -> None:
        if len(lengths):
            ends = self.last + np.cumsum(lengths)
            self._file.append(ends)
            self.last = int(ends[-1])

    def close(self) -> None:
        self._file.close()
