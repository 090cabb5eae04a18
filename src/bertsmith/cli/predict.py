"""`bertsmith evaluate` and `predict`: run a fine-tuned model, or an ensemble, on a file."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from typer import Option, echo

from bertsmith.cli import options
from bertsmith.cli.finetune import show_classes, show_comparison
from bertsmith.cli.presenting import print_json
from bertsmith.cli.request import Places, listed
from bertsmith.core.errors import UserError

if TYPE_CHECKING:
    from bertsmith.finetuning.predict import Opening, Reading
    from bertsmith.inference.loaded_model import Precision


@dataclass(frozen=True, kw_only=True)
class PredictionRequest(options.Computing, options.Table):
    """Fine-tuned models, and how their data are read."""

    model: Annotated[
        Places,
        Option(metavar="FOLDER...", help="Folders of `bertsmith finetune` runs; several predict together."),
    ] = field(kw_only=False)
    split: Annotated[
        str, Option(help="Split of the data, if their name does not show it; of a folder, dev by default.")
    ] = ""
    skip_bad: options.SkipBad = False

    @property
    def reading(self) -> "Reading":
        """The way that the data are read."""
        from bertsmith.finetuning.predict import Reading

        return Reading(self.form, self.skip_bad, self.split)

    @property
    def opening(self) -> "Opening":
        """The way that the models are opened."""
        base = None if self.base is None else Path(self.base)
        # Opening a model rejects any other precision.
        return {"device": self.device, "precision": cast("Precision", self.precision), "base": base}


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest(PredictionRequest):
    """An evaluation on labelled data."""

    data: Annotated[Any, Option(help="A labelled file, or the task's folder.")] = field(kw_only=False)


@dataclass(frozen=True, kw_only=True)
class PredictRequest(PredictionRequest):
    """A prediction for new data."""

    data: Annotated[Any, Option("--input", help="File in the task's format; labels are not needed.")] = field(
        kw_only=False
    )


def evaluate(request: EvaluateRequest, as_json: options.Json = False) -> None:
    """Evaluate a fine-tuned model by its task's official metrics.

    Also prints the scores of the constant answer, the papers' figures, and the scores of each class.

    Examples:

    bertsmith evaluate --model runs/sst2 --data glue/SST-2/dev.tsv

    bertsmith evaluate --model runs/mnli --data glue/MNLI --split dev-mismatched

    bertsmith evaluate --model runs/a runs/b runs/c --data glue/SST-2
    """
    from bertsmith.finetuning.predict import predict_labelled
    from bertsmith.tasks.kinds.registry import metric_named
    from bertsmith.tasks.published_scores import published_lines

    file = predict_labelled(listed(request.model), request.data, reading=request.reading, **request.opening)
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
    *,
    request: PredictRequest,
    out: Annotated[Path, Option(help="File to write; its ending is the format.")],
    official: Annotated[Path | None, Option(help="Also write the GLUE site's TSV into this folder.")] = None,
    with_text: Annotated[bool, Option("--with-text", help="Write each text with its prediction.")] = False,
    as_json: options.Json = False,
) -> None:
    """Write a model's prediction for each example of a file.

    The file's name determines its format: .tsv, .csv, .jsonl, .json or .parquet, with the prediction and the
    probability of each class or option. Under any other name tagged words become columns for conlleval. A
    name without an ending is, for answers, a folder with the three JSON files of the SQuAD scripts.

    Examples:

    bertsmith predict --model runs/sst2 --input new.tsv --out predictions.tsv

    bertsmith predict --model runs/mine --input new.csv --with-text --out predictions.csv

    bertsmith predict --model runs/a runs/b runs/c --input new.tsv --out predictions.tsv
    """
    from bertsmith.finetuning.predict import (
        check_ending,
        predict,
        task_config_in,
        write_official,
        write_predictions,
    )
    from bertsmith.tasks.glue_leaderboard import submission_file

    models, data = listed(request.model), request.data
    _check_not_input(data, out)
    if config := task_config_in(models[0]):  # before anything is computed
        check_ending(config.kind, out)
    file = predict(models, data, reading=request.reading, **request.opening)
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


def _check_not_input(data: Path, out: Path) -> None:
    """Raise if the predictions would overwrite the texts."""
    if data.is_file() and out.exists() and data.samefile(out):
        raise UserError(
            "is the input itself", where=str(out), remedy="choose another file for the predictions"
        )
