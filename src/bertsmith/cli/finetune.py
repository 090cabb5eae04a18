"""`bertsmith finetune`: from a trained encoder and labelled data to a model that does a task."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option, echo

from bertsmith.cli.stopping import STOPPED
from bertsmith.cli.watching import duration, watching
from bertsmith.ground.errors import UserError
from bertsmith.recipe.toml_text import value_text

if TYPE_CHECKING:
    from bertsmith.finetuning.folder import Assignment
    from bertsmith.finetuning.job import FinetuningResult
    from bertsmith.studies.cells import Spread, Stopped
    from bertsmith.tasks.task import Task

PERCENT = 100


def finetune(
    task: Annotated[str, Argument(metavar="TASK", help="sst2, mnli, squad2, ner ... or custom.")],
    data: Annotated[Path, Option(help="The task's folder, or your own file.")],
    out: Annotated[Path, Option(help="Run folder; a run found there goes on.")],
    model: Annotated[Path | None, Option(help="Model folder; without it the small own one.")] = None,
    text: Annotated[str, Option(help="custom: column of the text.")] = "",
    second: Annotated[str, Option(help="custom: column of the second text of a pair.")] = "",
    label: Annotated[str, Option(help="custom: column of the label or number.")] = "",
    kind: Annotated[str, Option(help="custom: classify, multilabel or regress.")] = "classify",
    epochs: Annotated[float | None, Option(help="Passes through the training data (run.epochs).")] = None,
    lr: Annotated[float | None, Option(help="Peak learning rate (optim.peak_lr).")] = None,
    seed: Annotated[int | None, Option(help="Seed (run.seed).")] = None,
    seeds: Annotated[int, Option(min=1, help="So many runs with seeds 0, 1, 2 ..., and their spread.")] = 1,
    grid: Annotated[bool, Option("--grid", help="The paper's grid of settings.")] = False,
    skip_bad: Annotated[bool, Option("--skip-bad", help="Leave bad lines out and count them.")] = False,
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
    from bertsmith.finetuning.folder import Assignment  # torch loads here, not for --help
    from bertsmith.finetuning.recipes import finetuning_recipe
    from bertsmith.inference.default_model import DEFAULT_MODEL

    given = {"run.epochs": epochs, "optim.peak_lr": lr, "run.seed": seed}
    short = [f"{key}={value_text(value)}" for key, value in given.items() if value is not None]
    chosen = _task(task, text=text, second=second, label=label, kind=kind, data=data)
    recipe = finetuning_recipe(chosen, [*short, *(settings or [])])
    start = DEFAULT_MODEL if model is None else model.expanduser()
    assignment = Assignment(chosen, recipe, start, data.expanduser(), out.expanduser(), skip_bad)
    if grid and seeds > 1:
        what, remedy = "the grid's runs have one seed", "give --grid or --seeds; --seed sets the grid's"
        raise UserError(what, where="--grid --seeds", remedy=remedy)
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
        facts = {"folder": str(result.folder), "seconds": result.seconds, "measures": result.measures}
        echo(json.dumps({**facts, "finished": result.finished}))
        return
    if not result.finished:
        echo(f"stopped after {result.steps:,} steps; give the same command again to go on ({result.folder})")
        return
    for split, measures in result.measures.items():
        for name, value in measures.items():
            echo(f"  {split} {name.replace('_', ' ')}: {PERCENT * value:.2f}")
    echo(f"{result.examples:,} examples, {result.steps:,} steps, {duration(result.seconds)}")
    echo(f"model: {result.folder / 'model'}")


def _task(name: str, *, text: str, second: str, label: str, kind: str, data: Path) -> "Task":
    from bertsmith.tasks.catalogue import task_named
    from bertsmith.tasks.custom import CustomSpec, custom_task, has_own_dev

    if name != "custom":
        if text or label or second:
            remedy = "leave them out, or fine-tune `custom`"
            raise UserError(f"{name} knows its own columns", where="--text, --second, --label", remedy=remedy)
        return task_named(name)
    if not (text and label):
        what = "a task of your own needs the names of its columns"
        raise UserError(what, remedy="give --text COLUMN and --label COLUMN")
    if kind not in ("classify", "multilabel", "regress"):
        remedy = "choose classify, multilabel or regress"
        raise UserError(f"unknown kind {kind!r}", where="--kind", remedy=remedy)
    share = 0.0 if has_own_dev(data.expanduser()) else 0.1
    spec = CustomSpec(text=text, second=second, label=label, kind=kind, dev_share=share)  # type: ignore[arg-type]
    return custom_task(spec)


def _run_one(assignment: "Assignment", *, as_json: bool) -> None:
    from bertsmith.finetuning.job import finetune as job

    with watching(live_line, as_json=as_json) as watch:
        result = job(assignment, watch)
    show(result, as_json=as_json)
    if not result.finished:
        raise Exit(STOPPED)


def _run_many(assignment: "Assignment", *, seeds: int, as_json: bool) -> None:
    """Run the seeds, or the paper's grid where there is only one."""
    from bertsmith.studies.cells import Stopped, over_grid, over_seeds, run_cells

    cells = over_seeds(assignment, seeds) if seeds > 1 else over_grid(assignment)
    try:
        with watching(live_line, as_json=as_json) as watch:
            results = run_cells(cells, watch)
    except Stopped as stopped:
        show_stop(stopped, as_json=as_json)
        raise Exit(STOPPED) from None
    named = {cell.name: result for cell, result in zip(cells, results, strict=True)}
    show_many(named, as_json=as_json)


def show_stop(stopped: "Stopped", *, as_json: bool) -> None:
    """Print in which run a study was stopped."""
    told = f"stopped in {stopped}; give the same command again to go on"
    echo(json.dumps({"finished": False, "stopped_in": str(stopped)}) if as_json else told)


def show_many(results: "dict[str, FinetuningResult]", *, as_json: bool) -> None:
    """Print what each run came to, which one did best, and how the runs spread."""
    from bertsmith.studies.cells import best_of, spreads_of

    best, spreads = best_of(results), spreads_of(list(results.values()))
    if as_json:
        runs = {name: result.measures for name, result in results.items()}
        told = {
            split: {name: asdict(spread) for name, spread in held.items()} for split, held in spreads.items()
        }
        echo(json.dumps({"finished": True, "runs": runs, "best": best, "spreads": told}))
        return
    for name, result in results.items():
        echo(f"{name}: {_told(result)}")
    for split, held in spreads.items():
        for name, spread in held.items():
            echo(f"{split} {name.replace('_', ' ')}: {_spread(spread)}")
    if best:
        echo(f"best: {best} ({results[best].folder})")


def _told(result: "FinetuningResult") -> str:
    for split, measures in result.measures.items():
        return f"{split} " + ", ".join(f"{name} {PERCENT * value:.2f}" for name, value in measures.items())
    return "finished; there is no development set"


def _spread(spread: "Spread") -> str:
    mean, median, deviation = (PERCENT * value for value in (spread.mean, spread.median, spread.deviation))
    return f"mean {mean:.2f}, median {median:.2f}, deviation {deviation:.2f} over {spread.runs} runs"
