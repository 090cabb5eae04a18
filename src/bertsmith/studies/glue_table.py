"""Every GLUE task that a folder holds, fine-tuned and put into one table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bertsmith.core.errors import UserError
from bertsmith.core.files import write_json, write_text
from bertsmith.core.progress import progress_bar
from bertsmith.finetuning.assignment import Assignment
from bertsmith.finetuning.splits import read_splits
from bertsmith.finetuning.task_recipe import finetuning_recipe
from bertsmith.studies.sweep import Spread, Trial, over_seeds, plain_spreads, run_trials, spreads_of
from bertsmith.tasks.glue_leaderboard import Average, glue_averages
from bertsmith.tasks.glue_tasks import TASKS
from bertsmith.tasks.task import Task, has_split
from bertsmith.training.callbacks import ProgressCallback

PERCENT = 100


@dataclass(frozen=True, slots=True)
class GlueRow:
    """One task of the table."""

    task: Task
    examples: int
    seconds: float
    spreads: dict[str, dict[str, Spread]]
    """By split and metric."""


@dataclass(frozen=True, slots=True)
class GlueTable:
    """All tasks found, and the averages that people report."""

    rows: tuple[GlueRow, ...]
    averages: tuple[Average, ...]
    missing: tuple[str, ...]
    """Tasks without training data in the folder."""


@dataclass(frozen=True, slots=True)
class GlueRequest:
    """What was asked for."""

    model: Path
    data: Path
    """The folder that holds the tasks' folders."""
    out: Path
    seeds: int = 1
    settings: tuple[str, ...] = ()
    """Overrides for the recipes of all tasks."""
    skip_bad: bool = False


def glue(request: GlueRequest, callback: ProgressCallback) -> GlueTable:
    """Fine-tune on every task found; what an earlier call has finished is taken as it is."""
    data, found = request.data, tasks_in(request.data)
    if not found:
        names = ", ".join(dict.fromkeys(task.folders[0] for task in _trained()))
        what = "holds no GLUE task with training data" if data.is_dir() else "there is no such folder"
        raise UserError(what, where=str(data), remedy=f"give the folder that holds some of {names}")
    trials = []
    for task, place in found:
        recipe = finetuning_recipe(task, request.settings)
        out = request.out / task.name
        assignment = Assignment(task, recipe, request.model, place, out, skip_bad=request.skip_bad)
        seeds = over_seeds(assignment, request.seeds)
        trials += [Trial(f"{task.name} {trial.name}", trial.assignment) for trial in seeds]
    # All tasks are read before the first is trained on: a bad line must not be met after hours of training.
    with progress_bar("reading tasks", len(found)) as advance:
        for task, place in found:
            read_splits(task, place, skip_bad=request.skip_bad)
            advance(1)
    results = run_trials(trials, callback)
    rows = []
    for number, (task, _) in enumerate(found):
        of_task = results[number * request.seeds : (number + 1) * request.seeds]
        seconds = sum(result.seconds for result in of_task)
        rows.append(GlueRow(task, of_task[0].examples, seconds, spreads_of(of_task)))
    present = {task.name for task, _ in found}
    missing = tuple(task.title for task in _trained() if task.name not in present)
    table = GlueTable(tuple(rows), tuple(glue_averages(_means(rows))), missing)
    write_text(request.out / "table.md", table_text(table))
    write_json(request.out / "table.json", plain_table(table))
    return table


def tasks_in(data: Path) -> list[tuple[Task, Path]]:
    """The tasks with training data in a folder of GLUE folders, with their places."""
    found = []
    for task in _trained():
        places = [data / folder for folder in task.folders if has_split(task, data / folder, "train")]
        if places:
            found.append((task, places[0]))
    return found


def _trained() -> list[Task]:
    """The tasks that come with training data."""
    return [task for task in TASKS if "train" in task.splits]


def table_text(table: GlueTable) -> str:
    """The table as Markdown, in percent as the papers print it."""
    lines = ["| task | split | metric | mean | median | spread | runs | examples | seconds |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for row in table.rows:
        for split, metrics in row.spreads.items():
            for metric, spread in metrics.items():
                numbers = (spread.mean, spread.median, spread.deviation)
                cells = " | ".join(f"{PERCENT * number:.1f}" for number in numbers)
                end = f"{spread.runs} | {row.examples:,} | {row.seconds:.0f}"
                lines.append(f"| {row.task.title} | {split} | {metric} | {cells} | {end} |")
    lines += ["", "| average | value | |", "|---|---|---|"]
    for average in table.averages:
        value = "–" if average.value is None else f"{PERCENT * average.value:.1f}"
        lacking = f"; missing: {', '.join(average.missing)}" if average.missing else ""
        lines.append(f"| {average.name} | {value} | {average.note}{lacking} |")
    if table.missing:
        lines += ["", f"Without training data here: {', '.join(table.missing)}."]
    return "\n".join(lines) + "\n"


def _means(rows: Sequence[GlueRow]) -> Mapping[str, Mapping[str, float]]:
    """The mean of each metric by task; a second development set stands under its own name."""
    means: dict[str, dict[str, float]] = {}
    for row in rows:
        for split, metrics in row.spreads.items():
            name = row.task.name if split == "dev" else f"{row.task.name}-{split.removeprefix('dev-')}"
            means[name] = {metric: spread.mean for metric, spread in metrics.items()}
    return means


def plain_table(table: GlueTable) -> dict[str, object]:
    """The table for machines."""
    return {
        "tasks": {row.task.name: plain_spreads(row.spreads) for row in table.rows},
        "averages": {average.name: average.value for average in table.averages},
        "missing": list(table.missing),
    }
