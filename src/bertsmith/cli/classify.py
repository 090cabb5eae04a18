"""`bertsmith classify`: the class of a text or a pair, or a number for it."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option, echo

from bertsmith.cli.model_options import (
    DeviceOption,
    JsonOption,
    ModelOption,
    PrecisionOption,
    TruncateOption,
    bars,
    console,
    naming_inputs,
    open_model,
    print_json,
)
from bertsmith.cli.text_files import line_name, pieces_of, reading_bar
from bertsmith.core.errors import UserError
from bertsmith.inference.outputs import classification_to_json

if TYPE_CHECKING:
    from bertsmith.inference.loaded_model import Bert
    from bertsmith.inference.outputs import Classification
    from bertsmith.inference.text_reader import TextOrPair


PATIENCE_SECONDS = 0.1
"""Lines that are typed, or written by a program now and then, are classified before the next ones come."""


def classify(
    text: Annotated[str | None, Argument(metavar="[TEXT]", help="The text.")] = None,
    second: Annotated[str | None, Option(metavar="TEXT", help="The second text of a pair.")] = None,
    source: Annotated[
        Path | None,
        Option("--input", metavar="FILE", help="Instead, one text a line, a tab in a pair; - reads stdin."),
    ] = None,
    model: ModelOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    truncate: TruncateOption = False,
    as_json: JsonOption = False,
) -> None:
    """Classify a text or a pair, or thousands of them from a file.

    One text gets a bar for each class. A file gets a line for each of its lines, in pieces of up to
    2,048, or as they come where they come slowly: label, probability and text with tabs between them, or JSON
    lines with the probabilities of all labels. Several labels stand with commas between them, the most
    probable first, whose probability it is; so it is where no label is probable enough to be named. A model
    for numbers, such as one for STS-B, gives a number.

    Example: bertsmith classify "A stunning ballet dancer." --model runs/sst2

    Example: bertsmith classify "A boy runs." --second "A boy is outside." --model runs/mnli

    Example: bertsmith classify --input reviews.txt --model runs/sst2 > labels.tsv
    """
    if (text is None) == (source is None) or (source is not None and second is not None):
        remedy = "give a text, a text with --second, or --input FILE"
        raise UserError("it is not clear what to classify", remedy=remedy)
    bert = open_model(model, "classify", "score", device=device, precision=precision)
    if source is not None:
        classify_lines(bert, source.expanduser(), truncate=truncate, as_json=as_json)
    elif text is not None:
        with naming_inputs(lambda _: "the text" if second is None else "the pair"):
            (found,) = predictions(bert, [text if second is None else (text, second)], truncate=truncate)
        show(found, as_json=as_json)


def predictions(
    bert: "Bert", texts: "Sequence[TextOrPair]", *, truncate: bool
) -> "list[Classification | float]":
    """What the model predicts for each text: a class, or a number."""
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


def classify_lines(bert: "Bert", source: Path, *, truncate: bool, as_json: bool) -> None:
    """Print the prediction for each line of a file, piece by piece."""
    # Where the lines themselves run over the screen, a bar would only be in their way.
    with nullcontext(lambda _size: None) if sys.stdout.isatty() else reading_bar(source) as advance:
        for piece in pieces_of(source, patience=PATIENCE_SECONDS):
            name = partial(line_name, source, piece.first)
            texts = [text_or_pair(line, where=name(number)) for number, line in enumerate(piece.texts)]
            with naming_inputs(name):
                several = predictions(bert, texts, truncate=truncate)
            for number, (line, found) in enumerate(zip(piece.texts, several, strict=True), piece.first):
                if as_json:
                    print_json({"line": number, **classification_to_json(found)})
                else:
                    echo(f"{as_columns(found)}\t{line}")
            advance(piece.size)


def text_or_pair(line: str, *, where: str) -> "TextOrPair":
    """What stands in a line: a text, or two with a tab between them."""
    first, *others = line.split("\t")
    if len(others) > 1:
        remedy = "leave one text, or two with one tab between them (cut -f1,2 picks columns)"
        raise UserError(f"has {1 + len(others)} columns, a pair has 2", where=where, remedy=remedy)
    return (first, others[0]) if others else first


def as_columns(found: "Classification | float") -> str:
    """The prediction for a text, with tabs in it."""
    if isinstance(found, float):
        return f"{found:.6f}"
    likeliest_first = sorted(found.labels, key=lambda label: -found.probabilities[label])
    return f"{','.join(likeliest_first)}\t{found.probability:.6f}"
