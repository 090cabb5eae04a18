"""`bertsmith vocab`: learn a vocabulary from raw text."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from bertsmith.cli import options
from bertsmith.cli.presenting import print_facts, print_json
from bertsmith.cli.terminal import reporting_stops
from bertsmith.core.errors import UserError

if TYPE_CHECKING:
    from bertsmith.corpus.readers import Block
    from bertsmith.text.learn_vocabulary import VocabularyReport


def vocab(  # noqa: PLR0913 - the options of a command
    sources: Annotated[
        list[str], Argument(metavar="TEXT...", help="Files, folders or patterns; - is standard input.")
    ],
    out: Annotated[Path, Option(help="Tokenizer folder to write.")],
    size: Annotated[int, Option(min=1, help="Pieces, special ones included.")] = 30522,
    kind: Annotated[
        Literal["wordpiece", "wordpiece-frequency", "byte-bpe", "unigram"],
        Option(
            help="WordPiece by likelihood (BERT) or by frequency, byte-level BPE (RoBERTa), unigram (ALBERT)."
        ),
    ] = "wordpiece",
    cased: Annotated[bool, Option("--cased", help="Keep case and accents. byte-bpe always does.")] = False,
    unused: Annotated[int, Option(min=0, help="[unused] pieces to add, for your own words.")] = 0,
    alphabet: Annotated[
        int,
        Option(min=1, help="Most frequent characters kept; others are unknown. Not for byte-bpe."),
    ] = 1000,
    min_count: Annotated[int, Option(min=1, help="Join only pairs of pieces that occur this often.")] = 2,
    held_out: Annotated[
        float, Option(min=0.0, max=0.5, help="Fraction of documents to evaluate on, not learned from.")
    ] = 0.01,
    text_format: Annotated[
        Literal["auto", "text", "jsonl", "parquet", "wiki"], Option("--format", help="Format of the text.")
    ] = "auto",
    field: Annotated[str, Option("--text", help="Field or column of the text.")] = "text",
    encoding_errors: Annotated[
        Literal["strict", "replace"], Option(help="strict: stop at bytes that are not UTF-8.")
    ] = "strict",
    workers: Annotated[int, Option(min=1, help="Processes; the result is always the same.")] = (
        os.cpu_count() or 1
    ),
    as_json: options.Json = False,
) -> None:
    """Learn a vocabulary from text.

    Writes a tokenizer folder that bertsmith and the Hugging Face tools open, and prints the tokens per word
    on held-out documents. The same text gives the same files on any number of workers.

    Examples: bertsmith vocab corpus/*.txt.xz --size 30522 --out vocab/,
    bertsmith vocab corpus/*.txt.xz --kind unigram --size 30000 --out albert-vocab/
    """
    from bertsmith.core.files import new_folder
    from bertsmith.core.progress import progress_bar
    from bertsmith.corpus.readers import find_sources, read_blocks, size_on_disk
    from bertsmith.text.learn_vocabulary import VocabularySettings, learn_vocabulary
    from bertsmith.text.word_counts import Counting, count_words

    started = time.monotonic()
    case: Literal["uncased", "cased"] = "cased" if cased else "uncased"
    settings = VocabularySettings(size, kind, case, characters=alphabet, unused=unused, min_count=min_count)
    with reporting_stops(), new_folder(out) as fresh:
        files = find_sources(sources)
        blocks = read_blocks(files, format=text_format, field=field, errors=encoding_errors)
        counting = Counting(texts_of, settings.cutter(), held_out=held_out)
        with progress_bar("counting words", size_on_disk(files)) as advance:
            counts = count_words(watched(blocks, advance), counting, workers=workers)
        if not counts.documents:
            raise UserError(
                "there is no text to learn from", where=", ".join(sources), remedy="give more text"
            )
        learned = learn_vocabulary(counts, settings)
        learned.tokenizer.save(fresh)
    report, seconds = learned.report, time.monotonic() - started
    if as_json:
        print_json({"out": str(out), **asdict(report), "seconds": round(seconds, 1)})
    else:
        show(out, report, seconds)


def texts_of(block: "Block") -> Iterator[str]:
    """Return the texts of a block's documents."""
    from bertsmith.corpus.readers import documents_of

    return (document.text for document in documents_of(block))


def watched(blocks: "Iterable[Block]", advance: Callable[[int], None]) -> "Iterator[Block]":
    """Yield the blocks, reporting the bytes of each."""
    for block in blocks:
        advance(block.file_bytes)
        yield block


def show(out: Path, report: "VocabularyReport", seconds: float) -> None:
    """Print the report as a few lines for people."""
    facts = [("wrote", f"{out} in {seconds:,.1f} s")]
    facts += [("pieces", f"{report.pieces:,}, {report.alphabet:,} of them single characters")]
    if report.pieces < report.pieces_asked_for:
        # A unigram vocabulary does not join pairs, so that --min-count does not apply.
        remedy = "give more text, or a lower `min_count` if pairs are joined"
        why = f"all other pieces are too rare; {remedy}"
        facts += [("", f"fewer than {report.pieces_asked_for:,}: {why}")]
    facts += [
        ("documents", f"{report.documents:,}, {report.held_out_documents:,} of them held out"),
        ("learned from", f"{report.distinct_words:,} distinct words"),
        ("tokens per word", f"{report.tokens_per_word:.4f} on {report.scored_on}"),
        ("unknown words", f"{report.unknown_rate:.4%} of {report.words:,}"),
    ]
    print_facts(facts)
