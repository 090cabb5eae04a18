"""`bertsmith finetune` and `glue`: from a trained encoder and labelled data to models that do tasks."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option, echo

from bertsmith.cli.terminal import STOPPED, duration, progress_display
from bertsmith.core.errors import UserError
from bertsmith.recipe.toml_text import value_text

if TYPE_CHECKING:
    from bertsmith.finetuning.assignment import Assignment
    from bertsmith.finetuning.finetune import FinetuningResult
    from bertsmith.studies.sweep import Stopped
    from bertsmith.tasks.task import Task


OWN = "custom"


def finetune(
    task: Annotated[str, Argument(metavar="TASK", help="sst2, mnli, squad2, ner ... or custom.")],
    data: Annotated[Path, Option(help="The task's folder, or your own file.")],
    out: Annotated[Path, Option(help="Run folder; a run found there resumes.")],
    model: Annotated[Path | None, Option(help="Model folder; without it the small own one.")] = None,
    text: Annotated[str, Option(help="custom: column of the text.")] = "",
    second: Annotated[str, Option(help="custom: column of the second text of a pair.")] = "",
    label: Annotated[str, Option(help="custom: column of the label or number.")] = "",
    kind: Annotated[str, Option(help="custom: classify (the default), multilabel or regress.")] = "",
    separator: Annotated[str, Option(help="custom: what parts the labels in a cell; a comma.")] = "",
    key: Annotated[str, Option("--id", help="custom: column of the ids.")] = "",
    dev: Annotated[Path | None, Option(help="custom: the development file.")] = None,
    dev_share: Annotated[
        float | None, Option(min=0, max=0.9, help="custom: else this fraction of the data, by the ids; 0.1.")
    ] = None,
    epochs: Annotated[float | None, Option(help="Passes through the training data (run.epochs).")] = None,
    lr: Annotated[float | None, Option(help="Peak learning rate (optim.peak_lr).")] = None,
    seed: Annotated[int | None, Option(help="Seed (run.seed).")] = None,
    seeds: Annotated[int, Option(min=1, help="So many runs, from --seed (0) on, and their spread.")] = 1,
    grid: Annotated[bool, Option("--grid", help="The paper's grid of settings.")] = False,
    skip_bad: Annotated[bool, Option("--skip-bad", help="Skip bad lines and count them.")] = False,
    settings: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="Any other setting, repeatable.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON lines, for machines.")] = False,
) -> None:
    """Fine-tune a model for a task, with the task's published settings.

    Examples:

    bertsmith finetune sst2 --model MODEL --data glue/SST-2 --out runs/sst2

    bertsmith finetune squad2 --model MODEL --data squad/ --out runs/squad2

    bertsmith finetune custom --data my.csv --text review --label stars --out runs/mine

    bertsmith finetune mrpc --model MODEL --data glue/MRPC --out runs/mrpc --seeds 5
    """
    from bertsmith.finetuning.assignment import Assignment
    from bertsmith.finetuning.task_recipe import finetuning_recipe
    from bertsmith.inference.model_path import DEFAULT_MODEL

    given = {"run.epochs": epochs, "optim.peak_lr": lr, "run.seed": seed}
    short = [f"{key}={value_text(value)}" for key, value in given.items() if value is not None]
    own = _OwnTable(text, second, label, kind, separator, key, dev, dev_share)
    chosen = _own_task(own, data.expanduser()) if task == OWN else _published_task(task, own)
    overrides = [*short, *(settings or [])]
    recipe = finetuning_recipe(chosen, overrides)
    start = DEFAULT_MODEL if model is None else model.expanduser()
    assignment = Assignment(chosen, recipe, start, data.expanduser(), out.expanduser(), skip_bad)
    if grid:
        _check_grid(overrides, seeds)
    if grid or seeds > 1:
        _run_many(assignment, seeds=seeds, as_json=as_json)
    else:
        _run_one(assignment, as_json=as_json)


def live_line(values: dict[str, float]) -> str:
    """The numbers a person watches."""
    parts = [f"step {values['step']:,.0f}", f"epoch {values['epoch']:.1f}", f"loss {values['loss']:.4f}"]
    return "  ".join([*parts, f"ETA {duration(values['eta_seconds'])}"])


def show(result: "FinetuningResult", *, as_json: bool) -> None:
    """Print how a run ended."""
    if as_json:
        summary = {"folder": str(result.folder), "seconds": result.seconds, "measures": result.metrics}
        echo(json.dumps({**summary, "finished": result.finished}))
        return
    if not result.finished:
        echo(f"stopped after {result.steps:,} steps; give the same command again to resume ({result.folder})")
        return
    for split, metrics in result.metrics.items():
        for name, value in metrics.items():
            echo(f"  {split} {name.replace('_', ' ')}: {_metric_text(name, value)}")
    echo(f"{result.examples:,} examples, {result.steps:,} steps, {duration(result.seconds)}")
    echo(f"model: {result.folder / 'model'}")


@dataclass(frozen=True, slots=True)
class _OwnTable:
    """The options about one's own table; empty where none was given."""

    text: str
    second: str
    label: str
    kind: str
    separator: str
    key: str
    dev: Path | None
    dev_share: float | None

    def flags(self) -> list[str]:
        """The options that were given."""
        spelled = {"key": "--id", "dev_share": "--dev-share"}
        given = [name for name, value in asdict(self).items() if value not in ("", None)]
        return [spelled.get(name, f"--{name}") for name in given]


def _published_task(name: str, own: _OwnTable) -> "Task":
    from bertsmith.tasks.catalogue import task_named

    task = task_named(name)
    if given := own.flags():
        remedy = f"leave them out, or fine-tune `{OWN}`"
        raise UserError(f"{task.name} knows its own columns and parts", where=", ".join(given), remedy=remedy)
    return task


def _own_task(own: _OwnTable, data: Path) -> "Task":
    from bertsmith.tasks.custom import CustomSpec, custom_task, has_own_dev

    _check_table(own)
    spec = CustomSpec(own.text, own.label, second=own.second, key=own.key)
    if own.kind:
        spec = replace(spec, kind=own.kind)
    if own.separator:
        spec = replace(spec, separator=own.separator)
    # The development set is a file that is named, one that lies beside the data, or a fraction of the data.
    if own.dev is not None:
        _check_no_dev_share(own, "--dev names the development file")
        dev = own.dev.expanduser()
        if not dev.is_file():
            raise UserError("no such file", where=f"--dev {dev}", remedy="name a table as --data is")
        return custom_task(replace(spec, dev_fraction=0.0, dev=str(dev.resolve())))
    if has_own_dev(data):
        _check_no_dev_share(own, f"{data} has a development file of its own")
        return custom_task(replace(spec, dev_fraction=0.0))
    return custom_task(spec if own.dev_share is None else replace(spec, dev_fraction=own.dev_share))


def _check_table(own: _OwnTable) -> None:
    """Raise where an option is missing, or is given that has no effect."""
    if not (own.text and own.label):
        what = "a task of your own needs the names of its columns"
        remedy = (
            "give --text COLUMN and --label COLUMN; for tagged words fine-tune `tags`, for answers in "
            "passages `squad` (docs/finetuning.md says how their files look)"
        )
        raise UserError(what, remedy=remedy)
    from bertsmith.tasks.kinds.registry import TEXT_KINDS

    if own.kind and own.kind not in TEXT_KINDS:
        remedy = f"choose one of {', '.join(TEXT_KINDS)}"
        raise UserError(f"unknown kind {own.kind!r}", where="--kind", remedy=remedy)
    if own.separator and not (own.kind and TEXT_KINDS[own.kind].many_labels):
        many = [name for name, kind in TEXT_KINDS.items() if kind.many_labels]
        remedy = f"leave it out, or add --kind {' or '.join(many)}"
        raise UserError("a text has one label, which nothing parts", where="--separator", remedy=remedy)


def _check_no_dev_share(own: _OwnTable, what: str) -> None:
    if own.dev_share is not None:
        raise UserError(what, where="--dev-share", remedy="leave it out")


def _check_grid(overrides: Sequence[str], seeds: int) -> None:
    """Raise where a setting is given of which the grid has values of its own."""
    from bertsmith.studies.sweep import GRID

    if seeds > 1:
        what, remedy = "the grid's runs have one seed", "give --grid or --seeds; --seed sets the grid's"
        raise UserError(what, where="--grid --seeds", remedy=remedy)
    taken = [key for line in overrides if (key := line.partition("=")[0].strip()) in GRID]
    if taken:
        what = f"the grid has its own values of {taken[0]}"
        raise UserError(what, where="--grid", remedy="leave the setting out, or the grid")


def _run_one(assignment: "Assignment", *, as_json: bool) -> None:
    from bertsmith.finetuning.finetune import finetune as job

    with progress_display(live_line, as_json=as_json) as callback:
        result = job(assignment, callback)
    show(result, as_json=as_json)
    if not result.finished:
        raise Exit(STOPPED)


def _run_many(assignment: "Assignment", *, seeds: int, as_json: bool) -> None:
    """Run the seeds, or the paper's grid where there is only one."""
    from bertsmith.studies.sweep import Stopped, over_grid, over_seeds, run_trials

    cells = over_seeds(assignment, seeds) if seeds > 1 else over_grid(assignment)
    try:
        with progress_display(live_line, as_json=as_json) as callback:
            results = run_trials(cells, callback)
    except Stopped as stopped:
        show_stop(stopped, as_json=as_json)
        raise Exit(STOPPED) from None
    named = {cell.name: result for cell, result in zip(cells, results, strict=True)}
    show_many(named, as_json=as_json)


def show_stop(stopped: "Stopped", *, as_json: bool) -> None:
    """Print in which run a study was stopped."""
    line = f"stopped in {stopped}; give the same command again to resume"
    echo(json.dumps({"finished": False, "stopped_in": str(stopped)}) if as_json else line)


def show_many(results: "dict[str, FinetuningResult]", *, as_json: bool) -> None:
    """Print what each run came to, which one did best, and how the runs spread."""
    from bertsmith.studies.sweep import best_of, plain_spreads, spreads_of

    best, spreads = best_of(results), spreads_of(list(results.values()))
    if as_json:
        runs = {name: result.metrics for name, result in results.items()}
        summary = {"finished": True, "runs": runs, "best": best, "spreads": plain_spreads(spreads)}
        echo(json.dumps(summary))
        return
    for name, result in results.items():
        line = "finished; there is no development set"
        if result.metrics:  # of its first split: the others stand in the run's own folder
            split, metrics = next(iter(result.metrics.items()))
            line = f"{split} {', '.join(f'{each} {_metric_text(each, metrics[each])}' for each in metrics)}"
        echo(f"{name}: {line}")
    for split, held in spreads.items():
        for name, spread in held.items():
            values = (spread.mean, spread.median, spread.deviation)
            mean, median, deviation = (_metric_text(name, value) for value in values)
            line = f"mean {mean}, median {median}, deviation {deviation} over {spread.runs} runs"
            echo(f"{split} {name.replace('_', ' ')}: {line}")
    if best:
        echo(f"best: {best} ({results[best].folder})")


def _metric_text(name: str, value: float) -> str:
    from bertsmith.tasks.kinds.registry import metric_named

    return metric_named(name).text(value)


def glue(
    data: Annotated[Path, Option(help="The folder that holds CoLA/, SST-2/ and so on.")],
    out: Annotated[Path, Option(help="Folder for all runs; what is finished there is not done again.")],
    model: Annotated[Path | None, Option(help="Model folder; without it the small own one.")] = None,
    seeds: Annotated[int, Option(min=1, help="Runs for each task, from run.seed (0) on.")] = 1,
    skip_bad: Annotated[bool, Option("--skip-bad", help="Skip bad lines and count them.")] = False,
    settings: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="A setting for all tasks, repeatable.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """Fine-tune on every GLUE task found and print one table, with the averages that papers report.

    A call that was stopped or killed resumes with the tasks that are not done yet.

    Example: bertsmith glue --model MODEL --data glue/ --out runs/glue --seeds 3
    """
    from bertsmith.inference.model_path import DEFAULT_MODEL  # torch loads here, not for --help
    from bertsmith.studies.glue_table import GlueRequest, plain_table, table_text
    from bertsmith.studies.glue_table import glue as study
    from bertsmith.studies.sweep import Stopped

    start = DEFAULT_MODEL if model is None else model.expanduser()
    given = tuple(settings or ())
    request = GlueRequest(start, data.expanduser(), out.expanduser(), seeds, given, skip_bad)
    try:
        with progress_display(live_line, as_json=as_json) as callback:
            table = study(request, callback)
    except Stopped as stopped:
        show_stop(stopped, as_json=as_json)
        raise Exit(STOPPED) from None
    echo(json.dumps(plain_table(table)) if as_json else table_text(table))
