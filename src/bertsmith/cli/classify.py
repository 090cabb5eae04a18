"""`bertsmith classify`: predict the class of a text or a pair, or a number for it."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option, echo

from bertsmith.cli import options
from bertsmith.cli.predicting import naming_inputs
from bertsmith.cli.presenting import bars, console, print_json
from bertsmith.cli.text_files import PATIENCE_SECONDS, STANDARD_INPUT, TextSource, computed_pieces
from bertsmith.core.errors import UserError
from bertsmith.inference.outputs import classification_to_json

if TYPE_CHECKING:
    from bertsmith.inference.loaded_model import Bert
    from bertsmith.inference.outputs import Classification
    from bertsmith.inference.text_reader import TextOrPair


def classify(
    *,
    text: Annotated[str | None, Argument(metavar="[TEXT]", help="The text; - reads stdin.")] = None,
    second: Annotated[str | None, Option(metavar="TEXT", help="The second text of a pair.")] = None,
    source: Annotated[
        Path | None,
        Option(
            "--input",
            metavar="FILE",
            help="Instead, one text per line (a tab in a pair) or a table; - is stdin.",
        ),
    ] = None,
    table: options.PairTable,
    asked: options.Asked,
    truncate: options.Truncate = False,
    as_json: options.Json = False,
) -> None:
    """Classify a text or a pair, or thousands of them from a file.

    One text gets a bar for each class. A file gets a line for each of its lines or rows, in pieces of up to
    2,048, or as they arrive if they arrive slowly: label, probability and text with tabs between them, or
    JSON lines with the probabilities of all labels. Several labels are separated by commas, the most probable
    first; the probability is that of the most probable label, even if none is probable enough to be named. A
    model for numbers, such as one for STS-B, gives a number. Without --text, a table is read by the columns
    that the model was fine-tuned on.

    Example: bertsmith classify "A stunning ballet dancer." --model runs/sst2

    Example: bertsmith classify "A boy runs." --second "A boy is outside." --model runs/mnli

    Example: bertsmith classify --input reviews.txt --model runs/sst2 > labels.tsv

    Example: bertsmith classify --input reviews.csv --text review --model runs/sst2 > labels.tsv
    """
    if text == str(STANDARD_INPUT) and source is None:
        text, source = None, STANDARD_INPUT
    if (text is None) == (source is None) or (source is not None and second is not None):
        remedy = "give a text, a text with `second`, or `input=FILE`"
        raise UserError("nothing to classify", remedy=remedy)
    texts = None
    if source is not None:
        texts = table.of(source)
        texts.check(before_opening=True)  # before the model is opened
    bert = asked.open("classify", "score")
    if texts is not None:
        classify_file(bert, texts.as_trained(bert), truncate=truncate, as_json=as_json)
    elif text is not None:
        with naming_inputs(lambda _: "the text" if second is None else "the pair"):
            (found,) = predictions(bert, [text if second is None else (text, second)], truncate=truncate)
        show(found, as_json=as_json)


def predictions(
    bert: "Bert", texts: "Sequence[TextOrPair]", *, truncate: bool
) -> "list[Classification | float]":
    """Predict a class or a number for each text."""
    if "score" in bert.abilities:
        return [*bert.score(texts, truncate=truncate)]
    return [*bert.classify(texts, truncate=truncate)]


def show(found: "Classification | float", *, as_json: bool) -> None:
    """Print the prediction for one text."""
    if as_json:
        print_json(classification_to_json(found))
    elif isinstance(found, float):
        echo(f"{found:.4f}")
    else:
        best_first = sorted(((each, label) for label, each in found.probabilities.items()), reverse=True)
        screen = console()
        for line in bars(best_first):
            screen.print(line)


def classify_file(bert: "Bert", source: TextSource, *, truncate: bool, as_json: bool) -> None:
    """Print the prediction for each text of a file, piece by piece."""
    pieces = computed_pieces(
        bert,
        source,
        lambda piece: predictions(bert, piece.texts, truncate=truncate),
        read_line=text_or_pair,
        truncate=truncate or bert.finetuned is not None,  # a fine-tuned model has its own rule for long texts
        patience=PATIENCE_SECONDS,
    )
    which = "row" if source.is_table else "line"
    for piece, predicted in pieces:
        for number, text, found in zip(piece.numbers, piece.texts, predicted, strict=True):
            if as_json:
                print_json({which: number, **classification_to_json(found)})
            else:
                echo(f"{as_columns(found)}\t{as_cells(text)}")


def text_or_pair(line: str) -> "TextOrPair":
    """Parse a line: a text, or two with a tab between them."""
    first, *others = line.split("\t")
    if len(others) > 1:
        remedy = "leave one text, or two with one tab between them (cut -f1,2 picks columns)"
        raise UserError(f"has {1 + len(others)} columns, a pair has 2", remedy=remedy)
    return (first, others[0]) if others else first


def as_cells(text: "TextOrPair") -> str:
    """Format a text, or both of a pair with a tab between them; tabs and line ends in them become spaces."""
    parts = (text,) if isinstance(text, str) else text
    return "\t".join(re.sub(r"[\t\r\n]", " ", part) for part in parts)


def as_columns(found: "Classification | float") -> str:
    """Format the prediction for a text as columns with tabs between them."""
    if isinstance(found, float):
        return f"{found:.6f}"
    likeliest_first = sorted(found.labels, key=lambda label: -found.probabilities[label])
    return f"{','.join(likeliest_first)}\t{found.probability:.6f}"
