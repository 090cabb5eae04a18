"""Fine-tune on every GLUE task in a folder, and put the results into one table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bertsmith.core.errors import UserError
from bertsmith.core.files import write_json, write_text
from bertsmith.core.progress import progress_bar
from bertsmith.finetuning.assignment import Assignment
from bertsmith.finetuning.evaluation import below_baseline
from bertsmith.finetuning.splits import read_splits
from bertsmith.insight.report import Cell, Table
from bertsmith.studies import sweep
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.glue_leaderboard import Average, glue_averages
from bertsmith.tasks.glue_tasks import TASKS
from bertsmith.tasks.published_scores import published_scores
from bertsmith.tasks.task import Task, has_split
from bertsmith.tasks.task_recipe import finetuning_recipe
from bertsmith.training.callbacks import ProgressCallback
from bertsmith.training.distributed import refuse_several_processes

PERCENT = 100
PUBLISHED_SOURCES = (
    "Published figures are on the test sets: Devlin et al. 2018, table 1; humans: Nangia & Bowman 2019."
)
PUBLISHED_SYSTEMS = ("human", "BERT Large", "BERT Base", "OpenAI GPT", "BiLSTM+ELMo+Attn")


@dataclass(frozen=True, slots=True)
class GlueRow:
    """One task of the table."""

    task: Task
    examples: int
    seconds: float
    spreads: dict[str, dict[str, sweep.Spread]]
    """Spreads by split and metric; over the best run alone if settings were searched."""
    baselines: dict[str, dict[str, float]] = field(default_factory=dict)
    """Scores of the constant answer, by split and metric."""
    best: str = ""
    """Name of the best run on the development set if settings were searched, else empty."""
    failures: dict[str, str] = field(default_factory=dict)
    """Reasons of runs that failed, by name."""


@dataclass(frozen=True, slots=True)
class GlueTable:
    """All tasks found, and the usual averages."""

    rows: tuple[GlueRow, ...]
    averages: tuple[Average, ...]
    missing: tuple[str, ...]
    """Tasks without training data in the folder."""


@dataclass(frozen=True, slots=True)
class GlueRequest:
    """Model, data and settings of a GLUE table."""

    model: Path
    data: Path
    """Folder that contains the tasks' folders."""
    out: Path
    seeds: int = 1
    settings: tuple[str, ...] = ()
    """Overrides for the recipes of all tasks."""
    options: tuple[tuple[str, str], ...] = ()
    """Overrides by the names of their options (`task_recipe.finetuning_recipe`)."""
    tasks: tuple[str, ...] = ()
    """Names of the tasks to run; empty for every task found."""
    search: int = 0
    """Number of runs with random settings for each task; the best on dev counts. 0: no search."""
    lr_grid: bool = False
    """True to try the paper's four learning rates for each task; the best on dev counts."""
    skip_bad: bool = False


def glue(request: GlueRequest, callback: ProgressCallback) -> GlueTable:
    """Fine-tune on every task found; reuse the runs that an earlier call has finished."""
    refuse_several_processes("the runs of a study have one process each")
    wanted = {task_named(name).name for name in request.tasks}
    data, in_folder = request.data, tasks_in(request.data)
    found = [(task, folder) for task, folder in in_folder if not wanted or task.name in wanted]
    present = {task.name for task, _ in in_folder}
    if lacking := wanted - present:
        what = f"lacks training data of {', '.join(sorted(lacking))}"
        raise UserError(what, where=str(data), remedy="add them, or remove them from `tasks`")
    if not found:
        names = ", ".join(dict.fromkeys(task.folders[0] for task in _trained()))
        empty = "does not contain a GLUE task with training data"
        what = empty if data.is_dir() else "this folder does not exist"
        raise UserError(what, where=str(data), remedy=f"give the folder with some of {names}")
    trials = {task.name: _trials(request, task, folder) for task, folder in found}
    # Read all tasks before the first training, so that a bad line is not found after hours of training.
    with progress_bar("reading tasks", len(found)) as advance:
        for task, folder in found:
            read_splits(task, folder, skip_bad=request.skip_bad)
            advance(1)
    results = iter(sweep.run_trials([trial for each in trials.values() for trial in each], callback))
    rows = []
    for task, _ in found:
        of_task = {trial.name: next(results) for trial in trials[task.name]}
        seconds = sum(result.seconds for result in of_task.values())
        best = sweep.best_of(of_task) if request.search or request.lr_grid else ""
        counted = [of_task[best]] if best else sweep.ran_to_their_end(of_task.values())
        examples, baselines = (counted[0].examples, counted[0].baselines) if counted else (0, {})
        spreads, failed = sweep.spreads_of(counted), sweep.failures(of_task)
        rows.append(GlueRow(task, examples, seconds, spreads, baselines, best, failed))
    missing = tuple(task.title for task in _trained() if task.name not in present)
    table = GlueTable(tuple(rows), tuple(glue_averages(_means(rows))), missing)
    write_text(request.out / "table.md", table_text(table))
    write_json(request.out / "table.json", plain_table(table))
    return table


def tasks_in(data: Path) -> list[tuple[Task, Path]]:
    """Return the tasks that have training data in a folder of GLUE folders, with their folders."""
    found = []
    for task in _trained():
        places = [data / folder for folder in task.folders if has_split(task, data / folder, "train")]
        if places:
            found.append((task, places[0]))
    return found


def _trained() -> list[Task]:
    """Return the tasks that have a training set."""
    return [task for task in TASKS if "train" in task.splits]


def _trials(request: GlueRequest, task: Task, folder: Path) -> list[sweep.Trial]:
    """Return one run of the task for each seed or for each combination of settings."""
    recipe = finetuning_recipe(task, request.settings, options=request.options)
    out = request.out / task.name
    assignment = Assignment(task, recipe, request.model, folder, out, skip_bad=request.skip_bad)
    if request.search:
        trials = sweep.over_search(assignment, request.search)
    elif request.lr_grid:
        trials = sweep.over_grid(assignment, sweep.RATES)
    else:
        trials = sweep.over_seeds(assignment, request.seeds)
    return [replace(trial, name=f"{task.name} {trial.name}") for trial in trials]


def table_text(table: GlueTable) -> str:
    """Format the table as Markdown, in per cent as in the papers."""
    columns = ("task", "split", "metric", "mean", "median", "spread", "constant answer", "runs", "examples")
    lines: list[tuple[Cell, ...]] = []
    published: list[tuple[Cell, ...]] = []
    notes: list[str] = []
    for row, split, spreads in _by_split(table.rows):
        baseline, title = row.baselines.get(split, {}), row.task.title
        for metric, spread in spreads.items():
            numbers = (spread.mean, spread.median, spread.deviation, baseline.get(metric))
            end = (spread.runs, f"{row.examples:,}", f"{row.seconds:.0f}")
            lines.append((title, split, metric, *map(_shown, numbers), *end))
        scores = {score.system: score for score in published_scores(row.task.name, split)}
        metric = next((score.metric for score in scores.values()), "")
        if metric in spreads:
            found = (scores[name].value / PERCENT if name in scores else None for name in PUBLISHED_SYSTEMS)
            published.append((title, split, metric, *map(_shown, (spreads[metric].mean, *found))))
        means = {name: spread.mean for name, spread in spreads.items()}
        notes += below_baseline(row.task.deciding_metric, means, baseline, split=f"{title} {split}")
    notes += [f"{name} failed: {why}" for row in table.rows for name, why in row.failures.items()]
    if best := ", ".join(row.best for row in table.rows if row.best):
        notes.append(f"Best on dev: {best}.")
    averages: list[tuple[Cell, ...]] = []
    for each in table.averages:
        lacking = f"; missing: {', '.join(each.missing)}" if each.missing else ""
        averages.append((each.name, _shown(each.value), f"{each.note}{lacking}"))
    missing = (f"Without training data here: {', '.join(table.missing)}.",) if table.missing else ()
    tables = [Table("GLUE", (*columns, "seconds"), lines, tuple(notes))]
    if published:
        columns = ("task", "split", "metric", "ours", *PUBLISHED_SYSTEMS)
        tables.append(Table("Beside the papers", columns, published, (PUBLISHED_SOURCES,)))
    tables.append(Table("Averages", ("average", "value", ""), averages, missing))
    return "\n\n".join(each.markdown() for each in tables) + "\n"


def _by_split(rows: Sequence[GlueRow]) -> Iterator[tuple[GlueRow, str, dict[str, sweep.Spread]]]:
    return ((row, split, spreads) for row in rows for split, spreads in row.spreads.items())


def _shown(fraction: float | None) -> str:
    return "–" if fraction is None else f"{PERCENT * fraction:.1f}"


def _means(rows: Sequence[GlueRow]) -> Mapping[str, Mapping[str, float]]:
    """Return the mean of each metric by task; a second development set counts as a separate task."""
    means: dict[str, dict[str, float]] = {}
    for row, split, spreads in _by_split(rows):
        name = row.task.name if split == "dev" else f"{row.task.name}-{split.removeprefix('dev-')}"
        means[name] = {metric: spread.mean for metric, spread in spreads.items()}
    return means


def plain_table(table: GlueTable) -> dict[str, object]:
    """Return the table in a form for JSON."""
    return {
        "tasks": {row.task.name: sweep.plain_spreads(row.spreads) for row in table.rows},
        "baselines": {row.task.name: row.baselines for row in table.rows},
        "best": {row.task.name: row.best for row in table.rows if row.best},
        "failed": {name: why for row in table.rows for name, why in row.failures.items()},
        "averages": {average.name: average.value for average in table.averages},
        "missing": list(table.missing),
    }
