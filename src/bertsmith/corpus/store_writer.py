"""Writing a token store, in memory that does not grow with it: files are appended to as documents arrive."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.arrays import GrowingNpy
from bertsmith.core.files import atomic_folder, check_not_taken, sha256_of, write_json
from bertsmith.corpus.token_store import (
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
from bertsmith.text.fast_encoder import smallest_id_type
from bertsmith.text.lexicon import UNIT_KINDS
from bertsmith.text.tokenizer import Tokenizer


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
        # A document's flag, given to its sentences and then to their tokens.
        sentences = np.repeat(wanted, self.document_lengths)
        tokens = np.repeat(sentences, self.sentence_lengths)
        return TokenisedDocuments(
            tokens=self.tokens[tokens],
            sentence_lengths=self.sentence_lengths[sentences],
            document_lengths=self.document_lengths[wanted],
            units=None if self.units is None else self.units[tokens],
        )


class StoreWriter:
    """Appends documents to the files of a store and, at the end, states them in a manifest."""

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
        """Append documents; none of them, and none of their sentences, is empty."""
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
        """How many tokens were written so far."""
        return self._sentence_starts.last

    @property
    def sentences(self) -> int:
        """How many sentences were written so far."""
        return self._document_starts.last

    @property
    def documents(self) -> int:
        """How many documents were written so far."""
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
        # Last, so that a folder with a manifest is a whole store.
        write_json(self._folder / MANIFEST, manifest.model_dump())

    def close(self) -> None:
        """Close the files; nothing can be added after."""
        for file in (self._tokens, self._units, self._sentence_starts, self._document_starts):
            if file is not None:
                file.close()


@contextmanager
def writing_store(
    folder: Path, tokenizer: Tokenizer, *, with_units: bool = False, shard_tokens: int = SHARD_TOKENS
) -> Iterator[StoreWriter]:
    """A writer whose files appear under `folder` only if the block, which must `finish` it, succeeds."""
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
            # A full file is closed at once: the next one is made only if there is a value for it.
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
