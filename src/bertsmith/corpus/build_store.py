"""Build a token store: workers prepare blocks of text; this process writes the results in order.

    read_blocks -> prepare_block, in the workers -> DuplicateFilter -> StoreWriter

A worker prepares a block (cleaning, decontamination, sentences, tokens) independently of others. Work that
depends on the order of documents (duplicates, the files) is done by this process. So the store does not
depend on the workers.
"""

import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.errors import UserError
from bertsmith.core.files import COMPRESSED_SUFFIXES, check_not_taken
from bertsmith.core.processes import Job, Workers, results_in_order
from bertsmith.core.progress import progress_bar
from bertsmith.corpus import readers
from bertsmith.corpus.clean import Cleaning, clean_document
from bertsmith.corpus.decontaminate import TaskTexts
from bertsmith.corpus.documents import EncodingErrors, check_language, spaced_sentences
from bertsmith.corpus.duplicates import (
    DuplicateFilter,
    DuplicateKind,
    Signature,
    exact_fingerprint,
    near_signature,
)
from bertsmith.corpus.token_store import StoreWriter, TokenisedDocuments, writing_store
from bertsmith.text.extend_vocabulary import with_words, words_for
from bertsmith.text.fast_encoder import FastEncoder
from bertsmith.text.lexicon import UNIT_KINDS, Lexicon, UnitFinder, count_units
from bertsmith.text.tokenizer import Tokenizer

SentenceRule = Literal["split", "line"]


@dataclass(frozen=True, slots=True)
class CorpusSettings:
    """All settings that, with the text and the tokenizer, decide the contents of a store."""

    format: readers.TextFormat = "auto"
    field: str = "text"
    encoding_errors: EncodingErrors = "strict"
    sentences: SentenceRule = "split"
    language: str = "en"
    cleaning: Cleaning = Cleaning()
    duplicates: DuplicateKind = "none"
    exclude: tuple[Path, ...] = ()
    lexicons: tuple[Path, ...] = ()
    add_words: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class PipelineResources:
    """Inputs of a worker's state; pickled to other processes and other machines."""

    tokenizer: Tokenizer
    settings: CorpusSettings
    task_texts: TaskTexts | None
    lexicon: Lexicon | None


def load_resources(tokenizer: Tokenizer, settings: CorpusSettings) -> PipelineResources:
    """Read all files named in the settings and return the resources of a pipeline."""
    return PipelineResources(
        tokenizer=tokenizer,
        settings=settings,
        task_texts=TaskTexts.read(settings.exclude) if settings.exclude else None,
        lexicon=Lexicon.read(settings.lexicons) if settings.lexicons else None,
    )


class PipelineState:
    """State of one worker that prepares blocks."""

    def __init__(self, resources: PipelineResources) -> None:
        self.settings, self.task_texts = resources.settings, resources.task_texts
        self.encoder = FastEncoder(resources.tokenizer)
        self.units = UnitFinder(resources.lexicon, resources.tokenizer) if resources.lexicon else None


@dataclass(frozen=True, slots=True)
class PreparedBlock:
    """The kept documents of a block, and counts of the dropped ones."""

    documents: TokenisedDocuments
    words: NDArray[np.int64]  # per document, as split by the tokenizer
    fingerprints: Sequence[bytes]
    signatures: Sequence[Signature | None]
    dropped: Mapping[str, int]  # documents by reason
    text_bytes: int
    file_bytes: int  # read from disk for this block


# Measured on English Wikipedia: xz compresses it 3.7 times, and each byte of it takes 0.5 bytes in a store.
_UNPACKED_PER_PACKED = 3.5
_STORED_PER_BYTE = 0.5


@dataclass(frozen=True, slots=True)
class CorpusReport:
    """Contents of a store, dropped documents, and the time taken."""

    out: Path
    documents: int
    sentences: int
    tokens: int
    tokens_per_word: float
    unknown_rate: float | None  # None: the vocabulary has no unknown token
    marked: dict[str, int]  # phrases and entities; empty without a lexicon
    added_words: int  # added to the vocabulary
    dropped: dict[str, int]  # documents by reason
    task_files: dict[str, dict[str, int]]  # numbers of texts searched for, and too short to search for
    seconds: float
    megabytes_per_second: float  # of text


@dataclass(slots=True)
class _Counts:
    """Counts gathered while blocks are written."""

    words: int = 0
    text_bytes: int = 0
    marked: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)


def build_store(
    sources: Sequence[str], out: Path, *, vocabulary: Path, settings: CorpusSettings, workers: Workers
) -> CorpusReport:
    """Write the store of these texts; the bytes are the same for any number of workers."""
    started = time.monotonic()
    check_not_taken(out)
    check_language(settings.language)
    files = readers.find_sources(sources)
    tokenizer = Tokenizer.load(vocabulary)
    added = words_for(tokenizer, settings.add_words)
    if settings.add_words:
        tokenizer = with_words(tokenizer, added)
    resources = load_resources(tokenizer, settings)
    _check_disk(files, out)
    with writing_store(out, tokenizer, with_units=resources.lexicon is not None) as writer:
        counts = _write_all(files, resources, writer=writer, workers=workers)
        dropped = {reason: count for reason, count in sorted(counts.dropped.items()) if count}
        if not writer.documents:
            reasons = ", ".join(f"{reason} {count}" for reason, count in dropped.items())
            remedy = f"all documents were dropped: {reasons}" if reasons else "the sources contain no text"
            raise UserError("there is nothing to store", where=", ".join(sources), remedy=remedy)
        # Nothing that depends on the machine, so that the manifest is the same wherever the store is made.
        task_files = resources.task_texts.files if resources.task_texts else ()
        summary: dict[str, Any] = {
            "tokens_per_word": writer.tokens / counts.words,
            "unknown_rate": _unknown_rate(writer, tokenizer),
            "marked": {kind: counts.marked[kind] for kind in UNIT_KINDS[1:]} if resources.lexicon else {},
            "dropped": dropped,
            "task_files": {it.name: {"texts": it.texts, "too_short": it.too_short} for it in task_files},
            "added_words": len(added),
        }
        paths = ("exclude", "lexicons", "add_words")
        names = {key: [path.name for path in getattr(settings, key)] for key in paths}
        stated = {"sources": [file.name for file in files], **asdict(settings), **names}
        writer.finish(settings=stated, summary=summary)
    seconds = time.monotonic() - started
    return CorpusReport(
        out=out,
        documents=writer.documents,
        sentences=writer.sentences,
        tokens=writer.tokens,
        **summary,
        seconds=seconds,
        megabytes_per_second=counts.text_bytes / 1e6 / seconds,
    )


def _write_all(
    files: Sequence[Path], resources: PipelineResources, *, writer: StoreWriter, workers: Workers
) -> _Counts:
    settings, counts = resources.settings, _Counts()
    blocks = readers.read_blocks(
        files, format=settings.format, field=settings.field, errors=settings.encoding_errors
    )
    job: Job[readers.Block, PreparedBlock] = Job(PipelineState, resources, prepare_block)
    duplicates = DuplicateFilter(settings.duplicates)
    with (
        progress_bar("preparing the corpus", readers.size_on_disk(files)) as advance,
        closing(results_in_order(blocks, job, workers)) as results,
    ):
        for block in results:
            # Which of two duplicates to keep depends on the order of documents, so this process decides.
            prints = zip(block.fingerprints, block.signatures, strict=True)
            wanted = np.array([not duplicates.is_duplicate(*each) for each in prints], np.bool_)
            documents = block.documents.only(wanted)
            writer.add(documents)
            if documents.units is not None:
                counts.marked += Counter(count_units(documents.units))
            counts.dropped.update(block.dropped)
            counts.dropped.update({"duplicate": int(np.count_nonzero(~wanted))})
            counts.words += int(block.words[wanted].sum())
            counts.text_bytes += block.text_bytes
            advance(block.file_bytes)
    return counts


def _unknown_rate(writer: StoreWriter, tokenizer: Tokenizer) -> float | None:
    try:
        return int(writer.token_counts[tokenizer.unknown_id]) / writer.tokens
    except UserError:  # byte-level vocabularies may lack an unknown token
        return None


def _check_disk(files: Sequence[Path], out: Path) -> None:
    """Raise early if the disk cannot hold the store; the estimate is on the low side."""
    sizes = [(file, file.stat().st_size) for file in files if file.is_file()]
    needed = _STORED_PER_BYTE * sum(
        size * (_UNPACKED_PER_PACKED if file.suffix.lower() in COMPRESSED_SUFFIXES else 1)
        for file, size in sizes
    )
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.is_dir())
    disk = shutil.disk_usage(existing)
    if disk.total and needed > disk.free:  # /proc and similar file systems report size 0
        what = f"about {needed / 1e9:,.3f} GB are needed there and {disk.free / 1e9:,.3f} GB are free"
        raise UserError(what, where=str(out), remedy="make room, or choose another `out`")


# --- in the workers ---


def prepare_block(block: readers.Block, state: PipelineState) -> PreparedBlock:
    """Return the documents of a block as tokens, without documents dropped independently of others."""
    dropped: Counter[str] = Counter()
    kept: list[readers.Document] = []
    for document in readers.documents_of(block):
        cleaned = clean_document(document, state.settings.cleaning)
        if isinstance(cleaned, str):
            dropped[cleaned] += 1
        elif state.task_texts is not None and (task := state.task_texts.match(cleaned.text)):
            dropped[f"contaminated: {task}"] += 1
        else:
            kept.append(cleaned)
    tokenised, words = _tokenise(kept, state)
    if not words.all():
        dropped["empty"] += int(np.count_nonzero(words == 0))
        kept = [document for document, is_full in zip(kept, words > 0, strict=True) if is_full]
    kind = state.settings.duplicates
    return PreparedBlock(
        documents=tokenised,
        words=words[words > 0],
        fingerprints=[exact_fingerprint(document.text) if kind != "none" else b"" for document in kept],
        signatures=[near_signature(document.text) if kind == "near" else None for document in kept],
        dropped=dropped,
        text_bytes=len(block.content),
        file_bytes=block.file_bytes,
    )


def _tokenise(
    documents: Sequence[readers.Document], state: PipelineState
) -> tuple[TokenisedDocuments, NDArray[np.int64]]:
    """Return the documents as tokens, without empty ones, and the number of words in each document."""
    sentences = [document.text.split("\n") for document in documents]
    if state.settings.sentences == "split":
        language = state.settings.language
        sentences = [
            [sentence for line in lines for sentence in spaced_sentences(line, language=language)]
            for lines in sentences
        ]
    # All sentences of the block in one call: the encoder works on whole arrays, and longer arrays are faster.
    # The lengths divide the result into sentences and documents again.
    encoded = state.encoder.encode_many([sentence for group in sentences for sentence in group])
    document_of = np.repeat(np.arange(len(documents)), [len(group) for group in sentences])
    is_full = encoded.lengths > 0
    lengths = np.bincount(document_of[is_full], minlength=len(documents))
    sentence_lengths = encoded.lengths[is_full]
    units = state.units.codes(encoded.ids, sentence_lengths) if state.units else None
    tokenised = TokenisedDocuments(encoded.ids, sentence_lengths, lengths[lengths > 0], units)
    words = np.bincount(document_of, encoded.words, minlength=len(documents)).astype(np.int64)
    return tokenised, np.where(lengths > 0, words, 0)
