"""`bertsmith evaluate` and `predict`: run a fine-tuned model, or an ensemble, on a file."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from typer import Argument, Option, echo

from bertsmith.cli import options
from bertsmith.cli.finetune import show_classes, show_comparison
from bertsmith.cli.presenting import print_json
from bertsmith.core.errors import UserError
from bertsmith.tasks.table_format import TableFormat

if TYPE_CHECKING:
    from bertsmith.inference.loaded_model import Precision

RunsArgument = Annotated[list[Path], Argument(metavar="RUN...", help="Folders of `bertsmith finetune` runs.")]
EnsembleOption = Annotated[bool, Option("--ensemble", help="Let several models predict together.")]


def evaluate(
    models: RunsArgument,
    data: Annotated[Path, Option(help="A labelled file, or the task's folder.")],
    split: Annotated[str, Option(help="Split of the folder; by default dev.")] = "",
    ensemble: EnsembleOption = False,
    delimiter: options.Delimiter = "",
    encoding: options.Encoding = "",
    columns: options.Columns = "",
    skip_bad: options.SkipBad = False,
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    base: options.Base = None,
    as_json: options.Json = False,
) -> None:
    """Evaluate a fine-tuned model by its task's official metrics.

    Also prints the scores of the constant answer, the papers' figures, and the scores of each class.

    Examples:

    bertsmith evaluate runs/sst2 --data glue/SST-2/dev.tsv

    bertsmith evaluate runs/mnli --data glue/MNLI --split dev-mismatched

    bertsmith evaluate --ensemble runs/a runs/b runs/c --data glue/SST-2
    """
    from bertsmith.finetuning.predict import Reading, predict_labelled
    from bertsmith.tasks.kinds.registry import metric_named
    from bertsmith.tasks.published_scores import published_lines

    _check_members(models, ensemble=ensemble)
    form = TableFormat.parse(delimiter=delimiter, encoding=encoding, columns=columns)
    reading = Reading(form, skip_bad, split)
    chosen = cast("Precision", precision)  # opening a model rejects any other
    file = predict_labelled(models, data, reading=reading, device=device, precision=chosen, base=base)
    metrics = file.metrics()
    for warning in file.warnings:
        echo(warning, err=True)
    baseline, classes = file.baseline(), file.class_scores()
    if as_json:
        summary = {"examples": len(file.examples), "skipped": file.skipped, "measures": metrics}
        of_classes = {label: asdict(scores) for label, scores in classes.items()}
        print_json({**summary, "baseline": baseline, "classes": of_classes})
        return
    skipped = f" ({file.skipped:,} bad lines skipped)" if file.skipped else ""
    echo(f"{file.task.title}, {len(file.examples):,} examples{skipped}")
    for name, value in metrics.items():
        echo(f"  {name.replace('_', ' ')}: {metric_named(name).text(value)}")
    show_comparison(file.config.deciding_metric, metrics, baseline, split="")
    for line in published_lines(file.task.name, file.split):
        echo(f"  {line}")
    show_classes(classes, split="")


def predict(
    models: RunsArgument,
    data: Annotated[Path, Option("--input", help="File in the task's format; labels are not needed.")],
    out: Annotated[Path, Option(help="File to write; its ending is the format.")],
    ensemble: EnsembleOption = False,
    official: Annotated[Path | None, Option(help="Also write the GLUE site's TSV into this folder.")] = None,
    split: Annotated[str, Option(help="Split of the file, if its name does not show it.")] = "",
    with_text: Annotated[bool, Option("--with-text", help="Write each text with its prediction.")] = False,
    delimiter: options.Delimiter = "",
    encoding: options.Encoding = "",
    columns: options.Columns = "",
    skip_bad: options.SkipBad = False,
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    base: options.Base = None,
    as_json: options.Json = False,
) -> None:
    """Write a model's prediction for each example of a file.

    The file's name determines its format: .tsv, .csv, .jsonl, .json or .parquet, with the prediction and the
    probability of each class or option. Under any other name tagged words become columns for conlleval. A
    name without an ending is, for answers, a folder with the three JSON files of the SQuAD scripts.

    Examples:

    bertsmith predict runs/sst2 --input new.tsv --out predictions.tsv

    bertsmith predict runs/mine --input new.csv --with-text --out predictions.csv

    bertsmith predict --ensemble runs/a runs/b runs/c --input new.tsv --out predictions.tsv
    """
    from bertsmith.finetuning.predict import (
        Reading,
        check_ending,
        predict,
        task_config_in,
        write_official,
        write_predictions,
    )
    from bertsmith.tasks.glue_leaderboard import submission_file

    _check_members(models, ensemble=ensemble)
    _check_not_input(data, out)
    form = TableFormat.parse(delimiter=delimiter, encoding=encoding, columns=columns)
    if config := task_config_in(models[0]):  # before anything is computed
        check_ending(config.kind, out)
    chosen = cast("Precision", precision)
    reading = Reading(form, skip_bad, split)
    file = predict(models, data, reading=reading, device=device, precision=chosen, base=base)
    _check_not_input(file.path, out)  # if a folder was given, the file is known only now
    if official is not None:
        _check_not_input(file.path, official / submission_file(file.task, file.split))
    # The official file first: for a task that the site rejects, no file is written.
    submitted = [] if official is None else [write_official(official, file)]
    names = [str(path) for path in (*write_predictions(out, file, with_text=with_text), *submitted)]
    if as_json:
        print_json({"examples": len(file.examples), "skipped": file.skipped, "written": names})
        return
    echo(f"{len(file.examples):,} examples -> {', '.join(names)}")
    if file.skipped:
        echo(f"{file.skipped:,} bad lines were skipped")


def _check_members(models: Sequence[Path], *, ensemble: bool) -> None:
    """Raise for several models without --ensemble."""
    if len(models) > 1 and not ensemble:
        remedy = "add `ensemble` to let them predict together, or give one folder"
        raise UserError("several models were given", remedy=remedy)


def _check_not_input(data: Path, out: Path) -> None:
    """Raise if the predictions would overwrite the texts."""
    if data.is_file() and out.exists() and data.samefile(out):
        raise UserError(
            "is the input itself", where=str(out), remedy="choose another file for the predictions"
        )
