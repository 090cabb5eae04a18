"""Building a token store: blocks go to the workers, their results come back in order and are written."""

import shutil
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.corpus.duplicates import DuplicateFilter
from bertsmith.corpus.prepare import (
    CorpusSettings,
    Materials,
    PreparedBlock,
    Tools,
    gather_materials,
    prepare_block,
)
from bertsmith.corpus.readers import Block, find_sources, read_blocks, size_on_disk
from bertsmith.corpus.store_writer import StorePlan, StoreWriter, writing_store
from bertsmith.corpus.workers import Crew, results_in_order
from bertsmith.ground.errors import UserError
from bertsmith.ground.files import COMPRESSED_SUFFIXES, refuse_if_taken
from bertsmith.ground.processes import Job
from bertsmith.ground.progress import progress_bar
from bertsmith.text.added_words import with_words, words_for
from bertsmith.text.sentences import check_language
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.text.units import UNIT_KINDS, count_units

# Measured on English Wikipedia: xz packs it 3.7 times, and a byte of it takes 0.5 bytes of a store.
_UNPACKED_PER_PACKED = 3.5
_STORED_PER_BYTE = 0.5


@dataclass(frozen=True, slots=True)
class CorpusReport:
    """What a store holds, what was left out of it, and how long it took."""

    out: Path
    documents: int
    sentences: int
    tokens: int
    tokens_per_word: float
    unknown_rate: float | None  # None: the vocabulary has no unknown token
    marked: dict[str, int]  # phrases and entities; empty without a lexicon
    added_words: int  # to the vocabulary
    dropped: dict[str, int]  # documents by reason
    task_files: dict[str, dict[str, int]]  # texts looked for, and texts too short to tell
    seconds: float
    megabytes_per_second: float  # of text


@dataclass(slots=True)
class _Tally:
    """What is counted while blocks are written."""

    words: int = 0
    text_bytes: int = 0
    marked: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)


def build_store(
    sources: Sequence[str], out: Path, *, vocabulary: Path, settings: CorpusSettings, crew: Crew
) -> CorpusReport:
    """Write the store of these texts; the same bytes for any crew."""
    started = time.monotonic()
    refuse_if_taken(out)
    check_language(settings.language)
    files = find_sources(sources)
    tokenizer, added = _extended(Tokenizer.load(vocabulary), settings)
    materials = gather_materials(tokenizer, settings)
    plan = StorePlan(materials.tokenizer, with_units=materials.lexicon is not None)
    _check_room(files, out)
    with writing_store(out, plan) as writer:
        tally = _write_all(files, materials, writer=writer, crew=crew)
        if not writer.documents:
            raise UserError("nothing is left to store", where=", ".join(sources), remedy=_why(tally))
        facts = {**_facts(writer, tally, materials), "added_words": added}
        writer.finish(settings=_described(settings, files), summary=facts)
    seconds = time.monotonic() - started
    return CorpusReport(
        out=out,
        documents=writer.documents,
        sentences=writer.sentences,
        tokens=writer.tokens,
        **facts,
        seconds=seconds,
        megabytes_per_second=tally.text_bytes / 1e6 / seconds,
    )


def _extended(tokenizer: Tokenizer, settings: CorpusSettings) -> tuple[Tokenizer, int]:
    """The tokenizer with the words that are to be added, and how many of them are new to it."""
    words = words_for(tokenizer, settings.add_words)
    return (with_words(tokenizer, words) if settings.add_words else tokenizer), len(words)


def _write_all(files: Sequence[Path], materials: Materials, *, writer: StoreWriter, crew: Crew) -> _Tally:
    settings, tally = materials.settings, _Tally()
    blocks = read_blocks(files, format=settings.format, field=settings.field, errors=settings.encoding_errors)
    job: Job[Block, PreparedBlock] = Job(Tools, materials, prepare_block)
    duplicates = DuplicateFilter(settings.duplicates)
    with (
        progress_bar("preparing the corpus", size_on_disk(files)) as advance,
        closing(results_in_order(blocks, job, crew)) as results,
    ):
        for block in results:
            _write_block(block, duplicates, writer=writer, tally=tally)
            advance(block.file_bytes)
    return tally


def _write_block(
    block: PreparedBlock, duplicates: DuplicateFilter, *, writer: StoreWriter, tally: _Tally
) -> None:
    prints = zip(block.fingerprints, block.signatures, strict=True)
    wanted = np.array([not duplicates.is_duplicate(*each) for each in prints], np.bool_)
    documents = block.documents.only(wanted)
    writer.add(documents)
    if documents.units is not None:
        tally.marked += Counter(count_units(documents.units))
    tally.dropped.update(block.dropped)
    tally.dropped.update({"duplicate": int(np.count_nonzero(~wanted))})
    tally.words += int(block.words[wanted].sum())
    tally.text_bytes += block.text_bytes


def _facts(writer: StoreWriter, tally: _Tally, materials: Materials) -> dict[str, Any]:
    """What the manifest says of the text, beside the counts; nothing that depends on the machine."""
    files = materials.task_texts.files if materials.task_texts else ()
    return {
        "tokens_per_word": writer.tokens / tally.words,
        "unknown_rate": _unknown_rate(writer, materials.tokenizer),
        "marked": {kind: tally.marked[kind] for kind in UNIT_KINDS[1:]} if materials.lexicon else {},
        "dropped": {reason: count for reason, count in sorted(tally.dropped.items()) if count},
        "task_files": {file.name: {"texts": file.texts, "too_short": file.too_short} for file in files},
    }


def _unknown_rate(writer: StoreWriter, tokenizer: Tokenizer) -> float | None:
    try:
        return int(writer.token_counts[tokenizer.unknown_id]) / writer.tokens
    except UserError:  # byte-level vocabularies can do without an unknown token
        return None


def _described(settings: CorpusSettings, files: Sequence[Path]) -> dict[str, Any]:
    """The settings as the manifest states them, with names of files instead of paths of this machine."""
    names = {
        key: [path.name for path in getattr(settings, key)] for key in ("exclude", "lexicons", "add_words")
    }
    return {"sources": [file.name for file in files], **asdict(settings), **names}


def _why(tally: _Tally) -> str:
    if not tally.dropped.total():
        return "the sources hold no text"
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(tally.dropped.items()) if count)
    return f"all documents were dropped: {reasons}"


def _check_room(files: Sequence[Path], out: Path) -> None:
    """Complain before the work if the disk cannot hold the store; a guess, on the low side."""
    sizes = [(file, file.stat().st_size) for file in files if file.is_file()]
    needed = _STORED_PER_BYTE * sum(
        size * (_UNPACKED_PER_PACKED if file.suffix.lower() in COMPRESSED_SUFFIXES else 1)
        for file, size in sizes
    )
    place = next(folder for folder in (out, *out.absolute().parents) if folder.is_dir())
    disk = shutil.disk_usage(place)
    if disk.total and needed > disk.free:  # /proc and the like are of no size
        what = f"about {needed / 1e9:,.3f} GB are needed there and {disk.free / 1e9:,.3f} GB are free"
        raise UserError(what, where=str(out), remedy="make room, or choose another --out")
