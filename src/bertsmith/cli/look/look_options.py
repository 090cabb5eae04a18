"""Shared by the commands of `bertsmith look`: options, texts, and writing a report."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option, echo

from bertsmith.cli.classify import text_or_pair
from bertsmith.cli.predicting import open_model
from bertsmith.cli.presenting import print_json
from bertsmith.cli.text_files import pieces_of
from bertsmith.inference.embedded_models import embedded_models_for

if TYPE_CHECKING:
    from bertsmith.inference.loaded_model import Bert
    from bertsmith.inference.text_reader import TextOrPair
    from bertsmith.insight.report import Report

Out = Annotated[
    Path,
    Option(
        "--out",
        metavar="FOLDER",
        help="Folder of the table (.txt, .json), the picture (.png) and, of heads, a view (.html).",
    ),
]
Texts = Annotated[
    Path, Option("--input", metavar="FILE", help="One text a line, a tab between the two of a pair.")
]
Longest = Annotated[
    int,
    Option("--longest", min=8, help="Truncate texts to this many tokens; 128 in the published study."),
]
Seed = Annotated[int, Option("--seed", min=0, help="Seed of random weights, masks and samples.")]


def open_for_looking(model: Path | None, device: str, ability: str = "look") -> "Bert":
    """Open the model, or the embedded one with an ability, in fp32: studies compare small differences."""
    return open_model(model, ability, device=device, precision="fp32")


def name_of_model(model: Path | None, ability: str = "look") -> str:
    """Return the model's name in tables and pictures."""
    return names_of_models([embedded_models_for(ability)[0] if model is None else model])[0]


def names_of_models(models: Sequence[Path]) -> list[str]:
    """Return the shortest unique ends of the models' paths: a/model and b/model."""
    paths = [model.resolve().parts for model in models]
    names = []
    for path in paths:
        others = [other for other in paths if other != path]
        length = 1
        while any(other[-length:] == path[-length:] for other in others):
            length += 1
        names.append(str(Path(*path[-length:])))
    return names


def texts_or_pairs(source: Path) -> "list[TextOrPair]":
    """Return all texts and pairs of a file."""
    return [text for piece in pieces_of(source, text_or_pair) for text in piece.texts]


def leave(reports: "Sequence[Report]", out: Path, *, as_json: bool) -> None:
    """Write reports into a folder, and print them."""
    from bertsmith.insight.report import plain, write_report

    for report in reports:
        write_report(report, out)
    if as_json:
        print_json({report.name: plain(report.values) for report in reports})
        return
    for report in reports:
        echo(report.text())
    for report in reports:
        view = "" if report.view is None else ", .html"
        echo(f"written to {out}: {report.name} (.txt, .json, .png{view})")
