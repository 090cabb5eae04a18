"""`bertsmith likelihood`: compute how probable a text is, and each of its words."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from typer import Argument, Option, echo

from bertsmith.cli import options
from bertsmith.cli.classify import as_cells
from bertsmith.cli.predicting import naming_inputs, open_model
from bertsmith.cli.presenting import bar, console, print_json
from bertsmith.cli.text_files import PATIENCE_SECONDS, STANDARD_INPUT, TextSource, computed_pieces
from bertsmith.core.errors import UserError
from bertsmith.inference.outputs import likelihood_to_json
from bertsmith.tasks.table_format import TableFormat

if TYPE_CHECKING:
    from bertsmith.inference.loaded_model import Bert
    from bertsmith.inference.outputs import Likelihood

Rows = list[dict[str, Any]]


def likelihood(
    text: Annotated[str | None, Argument(metavar="[TEXT]", help="The text; - reads stdin.")] = None,
    source: Annotated[
        Path | None,
        Option("--input", metavar="FILE", help="Instead, one text a line, or a table; - reads stdin."),
    ] = None,
    column: options.TextColumn = "",
    delimiter: options.Delimiter = "",
    encoding: options.Encoding = "",
    columns: options.Columns = "",
    skip_bad: options.SkipBad = False,
    words: Annotated[bool, Option("--words", help="Also the log-probability of each word.")] = False,
    out: Annotated[
        Path | None,
        Option(metavar="FILE", help="Write a table (.csv, .tsv, .jsonl, .parquet ...) instead of printing."),
    ] = None,
    model: options.Model = None,
    base: options.Base = None,
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    truncate: options.Truncate = False,
    as_json: options.Json = False,
) -> None:
    """Compute how probable a text is: log-likelihood, perplexity and bits a character.

    A masked model gives the pseudo-log-likelihood (Salazar et al. 2020): each token is masked once and
    predicted from all others, so a text of n tokens is read n times. A model that reads from one side gives
    the likelihood, and reads a text once. Special tokens are not scored. Compare texts by one model only;
    across vocabularies, compare bits a character (white space is not counted).

    A file gets a line for each of its lines or rows: log-likelihood in nats, tokens, perplexity, bits a
    character and text, with tabs between them. With --words, each word is a line with its log-probability, an
    empty line between texts.

    Example: bertsmith likelihood "The cats annoy Tim." --words

    Example: bertsmith likelihood --input sentences.txt --model runs/base > scores.tsv

    Example: bertsmith likelihood --input reviews.csv --text review --truncate --out scores.csv
    """
    if text == str(STANDARD_INPUT) and source is None:
        text, source = None, STANDARD_INPUT
    if (text is None) == (source is None):
        raise UserError("there is no text to score", remedy="give a text, or --input FILE")
    form = TableFormat.parse(delimiter=delimiter, encoding=encoding, columns=columns)
    texts = None
    if source is not None:
        texts = TextSource(source, column, form=form, skip_bad=skip_bad)
        texts.check()  # before the model is opened
    if out is not None:
        check_table_file(out, source)
    bert = open_model(model, "fill", device=device, precision=precision, base=base)
    if texts is None:
        with naming_inputs(lambda _: "the text"):
            (found,) = bert.likelihood([cast(str, text)], truncate=truncate)
        scored = iter([("text", 1, cast(str, text), found)])
        if out is None and not as_json:
            show(found, words=words)
            return
    else:
        scored = scored_texts(
            bert, texts, truncate=truncate, patience=PATIENCE_SECONDS if out is None else math.inf
        )
    if out is not None:
        written = write(out, scored, words=words)
        shown = f"{written:,} {'text' if written == 1 else 'texts'} -> {out}"
        echo(json.dumps({"texts": written, "out": str(out)}) if as_json else shown)
    else:
        print_lines(scored, words=words, as_json=as_json)


Scored = tuple[str, int, str, "Likelihood"]
"""Word for the place of a text (line, row or text), its number there, the text and its likelihood."""


def scored_texts(bert: "Bert", source: TextSource, *, truncate: bool, patience: float) -> Iterator[Scored]:
    """Yield the likelihood of each text of a file, piece by piece."""
    which = "row" if source.is_table else "line"
    pieces = computed_pieces(
        bert,
        source,
        lambda piece: bert.likelihood(map(str, piece.texts), truncate=truncate),
        truncate=truncate,
        patience=patience,
    )
    for piece, found in pieces:
        for number, text, each in zip(piece.numbers, piece.texts, found, strict=True):
            yield which, number, str(text), each


def show(found: "Likelihood", *, words: bool) -> None:
    """Print the likelihood of one text, and a bar for the probability of each of its words if requested."""
    from rich.cells import cell_len

    pseudo = "pseudo-" if found.is_pseudo else ""
    width = max((cell_len(each.word) for each in found.words), default=0)
    for each in found.words if words else ():
        padded = each.word + " " * (width - cell_len(each.word))
        console().print(f"  {padded}  {each.log_probability:8.2f}  {bar(math.exp(each.log_probability))}")
    echo(f"{pseudo}log-likelihood {found.log_likelihood:.2f} nats, {found.tokens} tokens")
    echo(f"{pseudo}perplexity {found.perplexity:.4g}, {found.bits_per_character:.3f} bits a character")


def print_lines(scored: Iterator[Scored], *, words: bool, as_json: bool) -> None:
    """Print the likelihood of each text as a line, or a line for each of its words."""
    begun = False
    for place, number, text, found in scored:
        if as_json:
            numbered = {} if place == "text" else {place: number}
            print_json({**numbered, **likelihood_to_json(found, with_words=words)})
        elif words:
            if begun:
                echo()
            begun = True
            for each in found.words:
                echo(f"{each.word}\t{each.log_probability:.6f}")
        else:
            numbers = f"{found.perplexity:.6g}\t{found.bits_per_character:.6f}"
            echo(f"{found.log_likelihood:.6f}\t{found.tokens}\t{numbers}\t{as_cells(text)}")


def check_table_file(out: Path, source: Path | None) -> None:
    """Raise if tables are not written in the format of this name, or if it is the input."""
    from bertsmith.tasks.table_files import TABLE_WRITERS

    if out.suffix.lower() not in TABLE_WRITERS:
        remedy = f"name a file that ends in {', '.join(TABLE_WRITERS)}"
        raise UserError("is not the name of a table", where=str(out), remedy=remedy)
    if source is not None and out.exists() and source.resolve() == out.resolve():
        raise UserError("is the input itself", where=str(out), remedy="name another file for the table")


def write(out: Path, scored: Iterator[Scored], *, words: bool) -> int:
    """Write a table with a row for each text, or for each word; return the number of texts."""
    from bertsmith.tasks.table_files import write_table

    rows: Rows = []
    texts = 0
    for place, number, _, found in scored:
        texts += 1
        numbers = likelihood_to_json(found, with_words=words)
        rows += [{place: number, **each} for each in (numbers["words"] if words else [numbers])]
    write_table(out, rows)
    return texts
