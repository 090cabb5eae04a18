"""`bertsmith look layers` and `changes`: the distance that layers move tokens, and changes by fine-tuning."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from bertsmith.cli import options
from bertsmith.cli.look import look_options as looking
from bertsmith.core.errors import UserError

if TYPE_CHECKING:
    from bertsmith.insight.report import Report

PictureOption = Annotated[
    Path, Option("--out", metavar="FILE", help="Picture (.png) to write, with .txt and .json next to it.")
]


def layers(
    models: Annotated[list[Path], Option("--model", metavar="FOLDER...", help="Model folders.")],
    texts: looking.Texts,
    out: PictureOption,
    longest: looking.Longest = 128,
    seed: looking.Seed = 0,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Show how far each layer moves a token: L2 distance and angle between its input and output.

    Lan et al. 2019 compared BERT and ALBERT by this figure: if layers share their weights, tokens move more
    evenly. Each model is compared with three networks with random weights.

    Example: bertsmith look layers --model models/bert models/albert --input texts.txt --out layers.png
    """
    from bertsmith.insight.layer_distances import layer_distances, layers_report, untrained_distances

    picture = _checked(out)
    given = looking.texts_or_pairs(texts)
    found, untrained = {}, {}
    for name, model in zip(names := looking.names_of_models(models), models, strict=True):
        if names.count(name) > 1:
            raise UserError("is given twice", where=str(model), remedy="name each model once")
        bert = looking.open_for_looking(model, device)
        found[name] = layer_distances(bert, given, longest=longest)
        untrained[name] = untrained_distances(bert, given, longest=longest, seed=seed)
    _leave(layers_report(found, untrained), picture, as_json=as_json)


def changes(
    before: Annotated[Path, Argument(metavar="BEFORE", help="Model folder that was fine-tuned.")],
    after: Annotated[Path, Argument(metavar="AFTER", help="Result of the training: a run or model folder.")],
    out: PictureOption,
    texts: Annotated[
        Path | None, Option("--input", metavar="FILE", help="Texts to compare the layers on, too.")
    ] = None,
    longest: looking.Longest = 128,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Show what fine-tuning changed, layer by layer: weights and, given texts, their states.

    Example: bertsmith look changes models/bert-base runs/sst2 --input texts.txt --out changes.png
    """
    from bertsmith.insight.changes import changes_report, state_changes, weight_changes

    picture = _checked(out)
    given = looking.texts_or_pairs(texts) if texts is not None else []
    one, other = (looking.open_for_looking(each, device) for each in (before, after))
    weights = weight_changes(one, other)
    states = state_changes(one, other, given, longest=longest) if given else []
    names = looking.names_of_models([before, after])
    _leave(changes_report(weights, states, names=names), picture, as_json=as_json)


def _checked(out: Path) -> Path:
    if out.suffix.lower() != ".png":
        raise UserError(
            "is not the name of a picture", where=f"`out={out}`", remedy="use a file name that ends in .png"
        )
    return out


def _leave(report: "Report", picture: Path, *, as_json: bool) -> None:
    looking.leave([replace(report, name=picture.stem)], picture.parent, as_json=as_json)
