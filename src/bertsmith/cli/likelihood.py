"""`bertsmith likelihood`: compute how probable a text is, and each of its words."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option, echo

from bertsmith.cli import options
from bertsmith.cli.classify import as_cells
from bertsmith.cli.predicting import naming_inputs
from bertsmith.cli.presenting import bar, console, print_json
from bertsmith.cli.text_files import PATIENCE_SECONDS, STANDARD_INPUT, TextSource, computed_pieces
from bertsmith.core.errors import UserError
from bertsmith.core.wording import counted
from bertsmith.inference.outputs import likelihood_to_json
from bertsmith.tasks.table_files import TABLE_WRITERS, write_table

if TYPE_CHECKING:
    from bertsmith.inference.loaded_model import Bert
    from bertsmith.inference.outputs import Likelihood


def likelihood(
    *,
    text: Annotated[str | None, Argument(metavar="[TEXT]", help="The text; - reads stdin.")] = None,
    source: Annotated[
        Path | None,
        Option("--input", metavar="FILE", help="Instead, one text per line, or a table; - reads stdin."),
    ] = None,
    words: Annotated[bool, Option("--words", help="Also the log-probability of each word.")] = False,
    out: Annotated[
        Path | None,
        Option(
            metavar="FILE", help="For a file: write a table (.csv, .tsv, .jsonl, .parquet) instead of lines."
        ),
    ] = None,
    table: options.TextTable,
    asked: options.Asked,
    truncate: options.Truncate = False,
    as_json: options.Json = False,
) -> None:
    """Compute how probable a text is: log-likelihood, perplexity and bits a character.

    A masked model gives the pseudo-log-likelihood (Salazar et al. 2020): each token is masked once and
    predicted from all others, so a text of n tokens is read n times. A model that reads from one side gives
    the likelihood, and reads a text once. Special tokens are not scored. Compare texts by one model only;
    across vocabularies, compare bits a character (white space is not counted).

    A file gets a line for each of its texts: number, log-likelihood in nats, tokens, perplexity, bits a
    character and text, with tabs between them. With --words each word gets a line: number of its text, word,
    start, end and log-probability.

    Example: bertsmith likelihood "The cats annoy Tim." --words

    Example: bertsmith likelihood --input sentences.txt --model runs/base > scores.tsv

    Example: bertsmith likelihood --input reviews.csv --text review --truncate --out scores.csv
    """
    if text == str(STANDARD_INPUT) and source is None:
        text, source = None, STANDARD_INPUT
    if (text is None) == (source is None) or (source is None and out is not None):
        remedy = "give a text, or `input=FILE`, which may have an `out`"
        raise UserError("nothing to score", remedy=remedy)
    texts = table.of(source or STANDARD_INPUT)
    if text is None:
        texts.check()  # before the model is opened
    if out is not None:
        check_table_file(out, texts)
    bert = asked.open("fill", "extend")
    if text is None:
        score_file(bert, texts, out, words=words, truncate=truncate, as_json=as_json)
        return
    with naming_inputs(lambda _: "the text"):
        (found,) = bert.likelihood([text], truncate=truncate)
    if as_json:
        print_json(likelihood_to_json(found, with_words=words))
    else:
        show(found, words=words)


def score_file(
    bert: "Bert", source: TextSource, out: Path | None, *, words: bool, truncate: bool, as_json: bool
) -> None:
    """Print the likelihood of each text of a file, piece by piece, or write a table of them."""
    which, rows = "row" if source.is_table else "line", []
    pieces = computed_pieces(
        bert,
        source,
        lambda piece: bert.likelihood(map(str, piece.texts), truncate=truncate),
        truncate=truncate,
        patience=PATIENCE_SECONDS if out is None else math.inf,
    )
    for piece, found in pieces:
        for number, text, each in zip(piece.numbers, piece.texts, found, strict=True):
            if out is not None:
                rows += rows_of(number, str(text), each, words=words)
            elif as_json:
                print_json({which: number, **likelihood_to_json(each, with_words=words)})
            else:
                for row in rows_of(number, str(text), each, words=words):
                    cells = (f"{x:.6g}" if isinstance(x, float) else as_cells(str(x)) for x in row.values())
                    echo("\t".join(cells))
    if out is not None:
        write_table(out, rows)
        if as_json:
            print_json({"rows": len(rows), "out": str(out)})
        else:
            echo(f"{counted(len(rows), 'row')} -> {out}")


def rows_of(number: int, text: str, found: "Likelihood", *, words: bool) -> list[dict[str, Any]]:
    """Return the row of a text, or a row for each of its words."""
    told = likelihood_to_json(found, with_words=words)
    if words:
        return [{"number": number, **each} for each in told["words"]]
    names = ("log_likelihood", "tokens", "perplexity", "bits_per_character")
    return [{"number": number, **{name: told[name] for name in names}, "text": text}]


def show(found: "Likelihood", *, words: bool) -> None:
    """Print the likelihood of one text, and a bar for the probability of each of its words if requested."""
    from rich.cells import cell_len

    width = max((cell_len(each.word) for each in found.words), default=0)
    for each in found.words if words else ():
        padded = each.word + " " * (width - cell_len(each.word))
        console().print(f"  {padded}  {each.log_probability:8.2f}  {bar(math.exp(each.log_probability))}")
    pseudo = "pseudo-" if found.is_pseudo else ""
    echo(f"{pseudo}log-likelihood {found.log_likelihood:.2f} nats, {found.tokens} tokens")
    echo(f"{pseudo}perplexity {found.perplexity:.4g}, {found.bits_per_character:.3f} bits a character")


def check_table_file(out: Path, source: TextSource) -> None:
    """Raise if tables are not written in the format of this name, or if it is the input."""
    if out.suffix.lower() not in TABLE_WRITERS:
        remedy = f"use a file name that ends in {', '.join(TABLE_WRITERS)}"
        raise UserError("is not a table format", where=str(out), remedy=remedy)
    if out.exists() and source.path.is_file() and out.samefile(source.path):
        raise UserError("is the input itself", where=str(out), remedy="choose another file for the table")
