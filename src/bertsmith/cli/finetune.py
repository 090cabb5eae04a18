"""`bertsmith finetune`: train a model for a task from an encoder and labelled data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from typer import Argument, Exit, Option, echo

from bertsmith.cli import options
from bertsmith.cli.presenting import print_json
from bertsmith.cli.spelling import Setting
from bertsmith.cli.terminal import STOPPED, Line, duration, progress_display
from bertsmith.core.errors import UserError
from bertsmith.core.wording import counted
from bertsmith.tasks.table_format import TableFormat

if TYPE_CHECKING:
    from bertsmith.finetuning.assignment import Assignment
    from bertsmith.finetuning.finetune import FinetuningResult
    from bertsmith.studies.sweep import Trial
    from bertsmith.tasks.metrics import ClassScores, Metric
    from bertsmith.tasks.task import Task
    from bertsmith.training.callbacks import ProgressCallback

Result = TypeVar("Result")


OWN = "custom"
PERCENT = 100
SHOWN_CLASSES = 10


def finetune(
    task: Annotated[str, Argument(metavar="TASK", help="sst2, mnli, squad2, ner ... or custom.")],
    data: Annotated[Path, Option(help="The task's folder, or your own file.")],
    out: Annotated[Path, Option(help="Run folder; a run found there resumes.")],
    model: Annotated[Path | None, Option(help="Model folder; without it the embedded encoder.")] = None,
    text: Annotated[str, Option(help="custom: column of the text.")] = "",
    second: Annotated[str, Option("--text2", help="custom: column of the second text of a pair.")] = "",
    label: Annotated[str, Option(help="custom: column of the label or number.")] = "",
    kind: Annotated[str, Option(help="custom: classify (the default), multilabel or regress.")] = "",
    separator: Annotated[str, Option(help="custom: what parts the labels in a cell; a comma.")] = "",
    key: Annotated[str, Option("--id", help="custom: column of the ids.")] = "",
    dev: Annotated[Path | None, Option(help="custom: the development file.")] = None,
    dev_share: Annotated[
        float | None,
        Option(min=0, max=0.9, help="custom: else this fraction of each class of the data; 0.1."),
    ] = None,
    test_share: Annotated[
        float | None, Option(min=0, max=0.9, help="custom: test the finished model on this fraction.")
    ] = None,
    folds: Annotated[
        int | None, Option(min=2, help="custom: so many runs, each developed on another fold of the data.")
    ] = None,
    delimiter: options.Delimiter = "",
    encoding: options.Encoding = "",
    columns: options.Columns = "",
    epochs: Annotated[
        float | None,
        Setting("run.epochs"),
        Option(help="Passes through the data (run.epochs); more lengthen a finished run."),
    ] = None,
    minutes: Annotated[
        float | None,
        Setting("run.minutes"),
        Option(help="Take no more steps after this many minutes, set-up included."),
    ] = None,
    lr: Annotated[
        float | None, Setting("optim.peak_lr"), Option(help="Peak learning rate (optim.peak_lr).")
    ] = None,
    batch: Annotated[
        int | None, Setting("run.examples"), Option(help="Examples a step (run.examples).")
    ] = None,
    max_length: Annotated[
        int | None, Setting("text.longest"), Option(help="Longest sequence in tokens (text.longest).")
    ] = None,
    patience: Annotated[
        int | None,
        Setting("run.patience"),
        Option(help="End early after so many evaluations without a better one; keep the best."),
    ] = None,
    tune_thresholds: Annotated[
        bool, Option("--tune-thresholds", help="Tune when a label is given (answers.label_thresholds).")
    ] = False,
    limit: Annotated[
        int | None, Setting("run.limit"), Option(help="Most examples of each split (run.limit).")
    ] = None,
    device: Annotated[
        str | None, Setting("run.device"), Option(help="auto, cpu or cuda (run.device).")
    ] = None,
    precision: Annotated[
        str | None, Setting("run.precision"), Option(help="auto, fp32, bf16 or fp16 (run.precision).")
    ] = None,
    seed: Annotated[int | None, Setting("run.seed"), Option(help="Seed (run.seed).")] = None,
    seeds: Annotated[
        int, Option(min=1, help="Number of runs, with seeds from --seed (0) on; reports their spread.")
    ] = 1,
    grid: Annotated[bool, Option("--grid", help="The paper's grid of settings.")] = False,
    lr_grid: Annotated[
        bool, Option("--lr-grid", help="The paper's four learning rates for GLUE; the best on dev.")
    ] = False,
    search: Annotated[
        int | None,
        Option(min=1, help="Number of runs with random rates, batches, epochs; bad ones end early."),
    ] = None,
    quick: Annotated[
        bool, Option("--quick", help="Solve a linear head on the frozen encoder, in seconds; tune nothing.")
    ] = False,
    skip_bad: Annotated[bool, Option("--skip-bad", help="Skip bad lines and count them.")] = False,
    settings: options.Settings = None,
    as_json: options.JsonLines = False,
) -> None:
    """Fine-tune a model for a task, with the task's published settings.

    Examples:

    bertsmith finetune sst2 --model MODEL --data glue/SST-2 --out runs/sst2

    bertsmith finetune squad2 --model MODEL --data squad/ --out runs/squad2

    bertsmith finetune custom --data my.csv --text review --label stars --out runs/mine

    bertsmith finetune custom --data my.csv --text review --label stars --out runs/mine --folds 5

    bertsmith finetune mrpc --model MODEL --data glue/MRPC --out runs/mrpc --seeds 5

    bertsmith finetune sst2 --model MODEL --data glue/SST-2 --out runs/lora --set head.encoder=lora --lr 5e-4

    bertsmith finetune ner --data conll/ --out runs/ner --set head.encoder=frozen-features

    torchrun --nproc-per-node 8 -m bertsmith finetune mnli --model MODEL --data glue/MNLI --out runs/mnli
    """
    from bertsmith.finetuning.assignment import Assignment
    from bertsmith.finetuning.suited_settings import suited_recipe
    from bertsmith.inference.embedded_models import default_model

    rows = [
        ("epochs", "run.epochs", epochs),
        ("minutes", "run.minutes", minutes),
        ("lr", "optim.peak_lr", lr),
        ("batch", "run.examples", batch),
        ("max_length", "text.longest", max_length),
        ("patience", "run.patience", patience),
        ("patience", "run.keep", None if patience is None else "best"),
        ("tune_thresholds", "answers.label_thresholds", "tuned" if tune_thresholds else None),
        ("limit", "run.limit", limit),
        ("device", "run.device", device),
        ("precision", "run.precision", precision),
        ("seed", "run.seed", seed),
        ("quick", "head.encoder", "frozen-linear" if quick else None),
    ]
    given = options.settings_of(rows)
    parts, form = (dev, dev_share, test_share, folds), (delimiter, encoding, columns)
    own = OwnTable(text, second, label, kind, separator, key, *parts, *form)
    chosen = own_task(own, data) if task == OWN else published_task(task, own)
    start = model or default_model()
    recipe, reason = suited_recipe(chosen, data, start, settings or [], options=given, skip_bad=skip_bad)
    assignment = Assignment(chosen, recipe, start, data, out, skip_bad, reason)
    study = _Study(seeds, grid=grid, lr_grid=lr_grid, search=search or 0, folds=folds or 0)
    study.check([*(line for _, line in given), *(settings or [])])
    if quick:
        _check_quick(chosen, study, minutes)
    if study.flags():
        _run_many(study.trials(assignment), as_json=as_json)
    else:
        run_one(assignment, as_json=as_json)


def live_line(values: dict[str, Any]) -> str:
    """Format the numbers of the live line."""
    parts = [f"step {values['step']:,.0f}", f"epoch {values['epoch']:.1f}", f"loss {values['loss']:.4f}"]
    for name, value in values.get("development", {}).items():
        parts.append(f"dev {name.replace('_', ' ')} {_metric_text(name, value)}")
    return "  ".join([*parts, f"ETA {duration(values['eta_seconds'])}"])


def show(result: "FinetuningResult", *, as_json: bool) -> None:
    """Print the result of a run."""
    if as_json:
        summary = {"folder": str(result.folder), "seconds": result.seconds, "measures": result.metrics}
        of_classes = {
            split: {label: asdict(scores) for label, scores in each.items()}
            for split, each in result.classes.items()
        }
        compared = {
            "baselines": result.baselines,
            "references": result.references,
            "classes": of_classes,
        }
        if result.layer_weights:
            compared["layer_weights"] = result.layer_weights
        print_json({**summary, **compared, "finished": result.finished})
        return
    if not result.finished:
        steps = counted(result.steps, "step")
        echo(f"stopped after {steps}; give the same command again to resume ({result.folder})")
        return
    for split, metrics in result.metrics.items():
        for name, value in metrics.items():
            echo(f"  {split} {name.replace('_', ' ')}: {_metric_text(name, value)}")
        if result.deciding is not None:
            show_comparison(result.deciding[0], metrics, result.baselines.get(split, {}), split=split)
            for name, by_split in result.references.items():
                show_comparison(result.deciding[0], metrics, by_split.get(split, {}), split=split, named=name)
        show_classes(result.classes.get(split, {}), split=split)
    if result.layer_weights:
        from bertsmith.finetuning.finetuned_model import weights_text

        echo(f"  learned weights of the layers: {weights_text(result.layer_weights)}")
    examples, steps = counted(result.examples, "example"), counted(result.steps, "step")
    echo(f"{examples}, {steps}, {duration(result.seconds)}")
    echo(f"model: {result.folder / 'model'}")


def show_comparison(
    metric: "Metric",
    metrics: Mapping[str, float],
    baseline: Mapping[str, float],
    *,
    split: str,
    named: str = "constant answer",
) -> None:
    """Print the metrics of a simpler answer, and a warning if the model does not beat it."""
    from bertsmith.finetuning.evaluation import below_baseline

    if baseline:
        listed = (f"{name.replace('_', ' ')} {_metric_text(name, value)}" for name, value in baseline.items())
        echo(f"  {split} {named}: ".replace("   ", "  ") + ", ".join(listed))
    for warning in below_baseline(metric, metrics, baseline, split=split or "here", named=f"the {named}"):
        echo(f"  {warning}")


def show_classes(classes: "Mapping[str, ClassScores]", *, split: str) -> None:
    """Print precision, recall and F1 of the classes, the worst first."""
    worst = sorted(classes.items(), key=lambda each: each[1].f1)
    for label, scores in worst[:SHOWN_CLASSES]:
        numbers = {"precision": scores.precision, "recall": scores.recall, "F1": scores.f1}
        listed = ", ".join(f"{name} {PERCENT * value:.2f}" for name, value in numbers.items())
        echo(f"  {split} {label!r}: {listed}, support {scores.support:,}".replace("   ", "  ", 1))
    if worst[SHOWN_CLASSES:]:
        echo(f"  ... and {len(worst) - SHOWN_CLASSES:,} more classes (--json, or result.json)")


@dataclass(frozen=True, slots=True)
class OwnTable:
    """The options for a user's own table; empty if not given."""

    text: str
    second: str
    label: str
    kind: str
    separator: str
    key: str
    dev: Path | None
    dev_share: float | None
    test_share: float | None
    folds: int | None
    delimiter: str
    encoding: str
    columns: str

    def flags(self) -> list[str]:
        """Return the options that were given."""
        spelled = {"second": "text2", "key": "id"}
        given = [name for name, value in asdict(self).items() if value not in ("", None)]
        return [f"`{spelled.get(name, name)}`" for name in given]


def published_task(name: str, own: OwnTable) -> "Task":
    """Return a published task; raise if options for an own table are given."""
    from bertsmith.tasks.catalogue import task_named

    task = task_named(name)
    if given := own.flags():
        remedy = f"leave them out, or fine-tune `{OWN}`"
        raise UserError(f"{task.name} knows its own columns and parts", where=", ".join(given), remedy=remedy)
    return task


def own_task(own: OwnTable, data: Path) -> "Task":
    """Return the task of a user's own table."""
    from bertsmith.tasks.custom import CustomSpec, custom_task, has_own_dev

    _check_table(own)
    form = TableFormat.parse(delimiter=own.delimiter, encoding=own.encoding, columns=own.columns)
    spec = CustomSpec(own.text, own.label, second=own.second, key=own.key)
    if own.kind:
        spec = replace(spec, kind=own.kind)
    if own.separator:
        spec = replace(spec, separator=own.separator)
    if own.test_share:
        spec = replace(spec, test_fraction=own.test_share)
    # The development set is a named file, a file next to the data, or a fraction of the data.
    if own.dev is not None:
        _check_no_part(own, "`dev` names the development file")
        dev = own.dev.expanduser()
        if not dev.is_file():
            raise UserError("no such file", where=f"`dev={dev}`", remedy="name a table as `data` is")
        return custom_task(replace(spec, dev_fraction=0.0, dev=str(dev.resolve())), form)
    if has_own_dev(data):
        _check_no_part(own, f"{data} has a development file of its own")
        return custom_task(replace(spec, dev_fraction=0.0), form)
    chosen = spec if own.dev_share is None else replace(spec, dev_fraction=own.dev_share)
    return custom_task(chosen, form)


def _check_table(own: OwnTable) -> None:
    """Raise if an option is missing or has no effect."""
    if not (own.text and own.label):
        what = "a task of your own needs the names of its columns"
        remedy = (
            "give `text=COLUMN` and `label=COLUMN`; for tagged words fine-tune `tags`, for answers in "
            "passages `squad` (docs/finetuning.md says how their files look)"
        )
        raise UserError(what, remedy=remedy)
    if own.test_share and own.dev_share == 0:
        what = "without a development set the test would decide what is kept"
        raise UserError(what, key="test_share", remedy="leave `dev_share=0` out")
    if own.folds and own.dev_share is not None:
        what = "each fold is the development set of a run"
        raise UserError(what, key="dev_share", remedy="leave it out")
    from bertsmith.tasks.kinds.registry import TEXT_KINDS, text_kind_named

    if own.separator and not (own.kind and text_kind_named(own.kind).many_labels):
        many = [name for name, kind in TEXT_KINDS.items() if kind.many_labels]
        remedy = f"leave it out, or add `kind={' or '.join(many)}`"
        raise UserError("a text has one label, which nothing parts", key="separator", remedy=remedy)


def _check_no_part(own: OwnTable, what: str) -> None:
    """Raise if a part of the data is requested as the development set, but there is one already."""
    for key, given in (("dev_share", own.dev_share), ("folds", own.folds)):
        if given is not None:
            raise UserError(what, key=key, remedy="leave it out")


@dataclass(frozen=True, slots=True)
class _Study:
    """The options that turn one run into several."""

    seeds: int
    grid: bool
    lr_grid: bool
    search: int
    folds: int

    def flags(self) -> list[str]:
        """Return the options that were given."""
        given = {**asdict(self), "seeds": self.seeds > 1}
        return [f"`{name}`" for name, value in given.items() if value]

    def check(self, overrides: Sequence[str]) -> None:
        """Raise for two studies at once, or for a setting that the study varies."""
        from bertsmith.studies.sweep import GRID, RATES, SEARCHED

        flags = self.flags()
        if len(flags) > 1:
            remedy = f"give {' or '.join(sorted(flags))}; `seed` sets the seed of each"
            raise UserError("one study has runs of its own kind", where=" ".join(flags), remedy=remedy)
        own: dict[str, Sequence[str]] = {"`grid`": [*GRID], "`lr_grid`": [*RATES], "`search`": SEARCHED}
        keys = own.get(flags[0], ()) if flags else ()
        if taken := [key for line in overrides if (key := line.partition("=")[0].strip()) in keys]:
            name = "search" if self.search else "grid"
            what = f"the {name} has its own values of {taken[0]}"
            raise UserError(what, where=flags[0], remedy=f"leave the setting out, or the {name}")

    def trials(self, assignment: "Assignment") -> "list[Trial]":
        """Return the runs of the study."""
        from bertsmith.studies.sweep import RATES, over_folds, over_grid, over_search, over_seeds

        if self.folds:
            return over_folds(assignment, self.folds)
        if self.search:
            return over_search(assignment, self.search)
        if self.seeds > 1:
            return over_seeds(assignment, self.seeds)
        return over_grid(assignment, RATES if self.lr_grid else None)


def _check_quick(task: "Task", study: _Study, minutes: float | None) -> None:
    """Raise if a solved head cannot do the task, or if an option needs steps or differing runs."""
    if task.kind.linear_problem is None:
        raise UserError(f"{task.title} has no linear head to solve", key="quick", remedy="leave it out")
    if minutes is not None:
        raise UserError(
            "a head that is solved takes no steps", where="`quick` `minutes`", remedy="leave one of them out"
        )
    if same := [flag for flag in study.flags() if flag != "`folds`"]:
        what = "a solved head is the same in every run"
        raise UserError(what, where=f"`quick` {same[0]}", remedy=f"leave {same[0]} out, or `quick`")


def run_one(assignment: "Assignment", *, as_json: bool) -> None:
    """Fine-tune once and print the result."""
    from bertsmith.finetuning.finetune import finetune as job

    with progress_display(live_line, as_json=as_json) as callback:
        result = job(assignment, callback)
    if result.main_process:
        show(result, as_json=as_json)
    if not result.finished:
        raise Exit(STOPPED)


def _run_many(trials: "list[Trial]", *, as_json: bool) -> None:
    from bertsmith.studies.sweep import run_trials

    results = stoppable(partial(run_trials, trials), as_json=as_json)
    named = {trial.name: result for trial, result in zip(trials, results, strict=True)}
    show_many(named, as_json=as_json)


def stoppable(
    study: "Callable[[ProgressCallback], Result]", line: Line = live_line, *, as_json: bool
) -> "Result":
    """Return the result of a study with its progress shown; if it is stopped, print in which run and exit."""
    from bertsmith.studies.scheduler import Stopped

    try:
        with progress_display(line, as_json=as_json) as callback:
            return study(callback)
    except Stopped as stopped:
        text = f"stopped in {stopped}; give the same command again to resume"
        print_json({"finished": False, "stopped_in": str(stopped)}) if as_json else echo(text)
        raise Exit(STOPPED) from None


def show_many(results: "dict[str, FinetuningResult]", *, as_json: bool) -> None:
    """Print the result of each run, the spread over the runs, and the best run."""
    from bertsmith.studies import sweep

    runs_in_order = sweep.ran_to_their_end(results.values())
    best, spreads = sweep.best_of(results), sweep.spreads_of(runs_in_order)
    baselines = sweep.mean_baselines(runs_in_order)
    if as_json:
        runs = {name: result.metrics for name, result in results.items()}
        summary = {"finished": True, "runs": runs, "best": best, "spreads": sweep.plain_spreads(spreads)}
        ends = {"ended_early": sweep.early_ends(results), "failed": sweep.failures(results)}
        print_json({**summary, "baselines": baselines, **ends})
        return
    for name, result in results.items():
        echo(f"{name}: {_run_text(result)}")
    deciding = runs_in_order[0].deciding
    for split, held in spreads.items():
        for name, spread in held.items():
            if spread.deviation is None:
                continue  # a single run
            values = (spread.mean, spread.median, spread.deviation)
            mean, median, deviation = (_metric_text(name, value) for value in values)
            line = f"mean {mean}, median {median}, deviation {deviation} over {spread.runs} runs"
            echo(f"{split} {name.replace('_', ' ')}: {line}")
        assert deciding is not None  # there is something that was evaluated
        means = {name: spread.mean for name, spread in held.items()}
        show_comparison(deciding[0], means, baselines[split], split=split)
    if best:
        echo(f"best: {best} ({results[best].folder})")


def _run_text(result: "FinetuningResult") -> str:
    """Format the result of a run on its first split; the others are in the run's folder."""
    if result.failure:
        return f"failed: {result.failure}"
    if not result.metrics:
        return "finished; there is no development set"
    split, metrics = next(iter(result.metrics.items()))
    text = f"{split} {', '.join(f'{each} {_metric_text(each, metrics[each])}' for each in metrics)}"
    if result.early_end is not None:
        text += (
            f"; ended early after {counted(result.steps, 'step')} (evaluation {result.early_end.evaluation})"
        )
    return text


def _metric_text(name: str, value: float) -> str:
    from bertsmith.tasks.kinds.registry import metric_named

    return metric_named(name).text(value)
