"""`bertsmith look direction`: measure attention to the left and right, and the loss of a task without."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from bertsmith.cli import options
from bertsmith.cli.look import look_options as looking
from bertsmith.core.errors import UserError

if TYPE_CHECKING:
    from bertsmith.inference.loaded_model import Bert
    from bertsmith.inference.text_reader import TextOrPair
    from bertsmith.insight.direction import Side, TaskLoss


def direction(
    out: looking.Out,
    model: options.Model = None,
    texts: Annotated[
        Path | None, Option("--input", metavar="FILE", help="One text a line, a tab between two of a pair.")
    ] = None,
    data: Annotated[
        Path | None,
        Option(help="Instead: the data of the model's task; also measures its loss with one side hidden."),
    ] = None,
    longest: looking.Longest = 128,
    seed: looking.Seed = 0,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Show if heads look left or right, and the loss of a task when one side of each word is hidden.

    Hidden means: in every layer a word sees only itself, special tokens and the words of the other side;
    [CLS] and [SEP] still see all. Networks with random weights serve as a control of the fractions.

    Example: bertsmith look direction --input texts.txt --out look/

    Example: bertsmith look direction --model runs/rte --data glue/RTE --out look/
    """
    from bertsmith.insight.direction import direction_report, study_direction
    from bertsmith.insight.random_control import of_untrained

    if (texts is None) == (data is None):
        remedy = "give one of `input=FILE` and `data=FOLDER`"
        raise UserError("nothing to look at", remedy=remedy)
    bert, loss = looking.open_for_looking(model, device), None
    if data is not None:
        given, loss = _task(bert, model, data, device)
    else:
        assert texts is not None
        given = looking.texts_or_pairs(texts)
    study = partial(study_direction, texts=given, longest=longest)
    found, untrained = study(bert), of_untrained(bert, study, seed=seed)
    report = direction_report(found, untrained, loss, model=looking.name_of_model(model))
    looking.leave([report], out, as_json=as_json)


def _task(bert: "Bert", model: Path | None, data: Path, device: str) -> "tuple[list[TextOrPair], TaskLoss]":
    """Return the texts of a task, and its metric with both sides and without either."""
    from bertsmith.finetuning.predict import predict_labelled
    from bertsmith.insight.direction import TaskLoss, one_sided_metrics
    from bertsmith.tasks.example_types import TextExample

    if model is None or bert.finetuned is None:
        what, remedy = "only a fine-tuned model has a task", "give its run with `model`"
        raise UserError(what, key="data", remedy=remedy)
    file = predict_labelled([model], data, device=device)
    texts = [each.texts for each in file.examples if isinstance(each, TextExample)]
    if not texts:
        what = f"a {file.config.kind.name} task does not have plain texts to look at"
        raise UserError(what, where=str(data), remedy="give a run that classifies or scores texts")
    metric = file.config.deciding_metric.name
    values = {"both sides": file.metrics()[metric]}
    sides: tuple[Side, ...] = ("left", "right")
    for side in sides:
        found = one_sided_metrics(bert, file.examples, file.encoded, hidden=side)
        values[f"{side} hidden"] = found[metric]
    if metric in (constant := file.baseline()):
        values["constant answer"] = constant[metric]
    return texts, TaskLoss(file.task.title, metric, len(file.examples), values)
