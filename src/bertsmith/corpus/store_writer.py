"""Writing a token store, in memory that does not grow with it: files are appended to as documents arrive."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from bertsmith.corpus.store_format import (
    DOCUMENT_STARTS,
    MANIFEST,
    SENTENCE_STARTS,
    SHARD_TOKENS,
    TOKEN_COUNTS,
    TOKENIZER,
    FileEntry,
    Manifest,
    shard_name,
)
from bertsmith.ground.files import atomic_folder, refuse_if_taken, sha256_of, write_json
from bertsmith.text.fast_encoder import smallest_id_type
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.text.units import UNIT_KINDS


@dataclass(frozen=True, slots=True)
class TokenisedDocuments:
    """Documents as one row of tokens, with the lengths of sentences and documents."""

    tokens: NDArray[Any]
    sentence_lengths: NDArray[np.int64]  # in tokens
    document_lengths: NDArray[np.int64]  # in sentences
    units: NDArray[np.uint8] | None = None

    def only(self, wanted: NDArray[np.bool_]) -> "TokenisedDocuments":
        """The documents that are wanted."""
        if wanted.all():
            return self
        sentences = np.repeat(wanted, self.document_lengths)
        tokens = np.repeat(sentences, self.sentence_lengths)
        return TokenisedDocuments(
            tokens=self.tokens[tokens],
            sentence_lengths=self.sentence_lengths[sentences],
            document_lengths=self.document_lengths[wanted],
            units=None if self.units is None else self.units[tokens],
        )


@dataclass(frozen=True, slots=True)
class StorePlan:
    """What must be known before the first token is written."""

    tokenizer: Tokenizer
    with_units: bool = False
    shard_tokens: int = SHARD_TOKENS


class StoreWriter:
    """Appends documents to the files of a store and, at the end, states them in a manifest."""

    def __init__(self, folder: Path, plan: StorePlan) -> None:
        self._folder, self._plan = folder, plan
        self._vocabulary = plan.tokenizer.vocabulary_size
        self._type = smallest_id_type(self._vocabulary)
        self._tokens = _ShardFiles(folder, "tokens", size=plan.shard_tokens)
        self._units = _ShardFiles(folder, "units", size=plan.shard_tokens) if plan.with_units else None
        self._sentence_starts = _GrowingArray(folder / SENTENCE_STARTS)
        self._document_starts = _GrowingArray(folder / DOCUMENT_STARTS)
        self.token_counts = np.zeros(self._vocabulary, np.int64)

    def add(self, documents: TokenisedDocuments) -> None:
        """Append documents; none of them, and none of their sentences, is empty."""
        self._check(documents)
        self._tokens.append(documents.tokens.astype(np.dtype(self._type).newbyteorder("<"), copy=False))
        if self._units is not None and documents.units is not None:
            self._units.append(documents.units)
        self._sentence_starts.append_lengths(documents.sentence_lengths)
        self._document_starts.append_lengths(documents.document_lengths)
        self.token_counts += np.bincount(documents.tokens, minlength=self._vocabulary)

    @property
    def tokens(self) -> int:
        """How many tokens were written so far."""
        return self._sentence_starts.last

    @property
    def sentences(self) -> int:
        """How many sentences were written so far."""
        return self._document_starts.last

    @property
    def documents(self) -> int:
        """How many documents were written so far."""
        return self._document_starts.count - 1

    def finish(self, *, settings: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
        """Close the files and write the manifest."""
        self.close()
        self._plan.tokenizer.save(self._folder / TOKENIZER)
        np.save(self._folder / TOKEN_COUNTS, self.token_counts)
        files = sorted(path for path in self._folder.rglob("*") if path.is_file())
        entries = {path.relative_to(self._folder).as_posix(): _entry(path) for path in files}
        manifest = Manifest(
            tokenizer=entries[f"{TOKENIZER}/tokenizer.json"].sha256,
            vocabulary=self._vocabulary,
            token_type=self._type,
            units=list(UNIT_KINDS) if self._plan.with_units else [],
            shard_tokens=self._plan.shard_tokens,
            documents=self.documents,
            sentences=self.sentences,
            tokens=self.tokens,
            settings=dict(settings),
            summary=dict(summary),
            files=entries,
        )
        write_json(self._folder / MANIFEST, manifest.model_dump())

    def close(self) -> None:
        """Close the files; nothing can be added after."""
        for file in (self._tokens, self._units, self._sentence_starts, self._document_starts):
            if file is not None:
                file.close()

    def _check(self, documents: TokenisedDocuments) -> None:
        assert documents.sentence_lengths.min(initial=1) > 0, "an empty sentence"
        assert documents.document_lengths.min(initial=1) > 0, "an empty document"
        assert documents.sentence_lengths.sum() == len(documents.tokens)
        assert documents.document_lengths.sum() == len(documents.sentence_lengths)
        assert documents.tokens.max(initial=0) < self._vocabulary
        assert (documents.units is not None) == self._plan.with_units
        assert documents.units is None or len(documents.units) == len(documents.tokens)


@contextmanager
def writing_store(folder: Path, plan: StorePlan) -> Iterator[StoreWriter]:
    """A writer whose files appear under `folder` only if the block, which must `finish` it, succeeds."""
    refuse_if_taken(folder)
    with atomic_folder(folder) as temporary:
        writer = StoreWriter(temporary, plan)
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
            room = self._size - self._written % self._size
            self._open_file().write(np.ascontiguousarray(values[:room]).data)
            self._written += min(room, len(values))
            values = values[room:]
            if self._written % self._size == 0:
                self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open_file(self) -> BinaryIO:
        if self._file is None:
            number = self._written // self._size
            self._file = (self._folder / f"{shard_name(number)}.{self._suffix}").open("xb")
        return self._file


class _GrowingArray:
    """An .npy file of running sums whose length becomes known when it is closed."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("xb")
        self.count, self.last = 0, 0
        self._write_header()
        self._append(np.zeros(1, np.int64))

    def append_lengths(self, lengths: NDArray[np.int64]) -> None:
        if len(lengths):
            self._append(self.last + np.cumsum(lengths))

    def close(self) -> None:
        if not self._file.closed:
            self._file.seek(0)
            self._write_header()
            self._file.close()

    def _append(self, values: NDArray[np.int64]) -> None:
        self._file.write(values.astype("<i8", copy=False).data)
        self.count += len(values)
        self.last = int(values[-1])

    def _write_header(self) -> None:
        # numpy leaves room in the header for the length to grow, so that it can be written over in place.
        facts = {"descr": "<i8", "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self._file, facts)


def _entry(path: Path) -> FileEntry:
    return FileEntry(bytes=path.stat().st_size, sha256=sha256_of(path))
