"""`bertsmith finetune`: train a model for a task from an encoder and labelled data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from typer import Argument, Exit, Option, echo

from bertsmith.cli import options
from bertsmith.cli.presenting import print_json
from bertsmith.cli.request import Place, Request, SettingsGiven, is_given, lines_of
from bertsmith.cli.spelling import Setting
from bertsmith.cli.terminal import STOPPED, Line, duration, progress_display
from bertsmith.core.errors import UserError
from bertsmith.core.wording import counted

if TYPE_CHECKING:
    from bertsmith.finetuning.assignment import Assignment
    from bertsmith.finetuning.finetune import FinetuningResult
    from bertsmith.studies.sweep import Trial
    from bertsmith.tasks.metrics import ClassScores, Metric
    from bertsmith.tasks.task import Task
    from bertsmith.training.callbacks import ProgressCallback

Result = TypeVar("Result")


OWN = "custom"
STUDIES = ("seeds", "grid", "lr_grid", "random", "folds")
"""Parameters that ask for several runs; they exclude each other."""
PERCENT = 100
SHOWN_CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class TrainedOn(Request):
    """A task, its data, and the folder of a run."""

    task: Annotated[
        str, Argument(metavar="TASK", help="sst2, mnli, squad2, ner ... or custom, for your table.")
    ] = OWN
    data: Annotated[Any, Option(help="The task's folder, or your own file.")] = field(kw_only=False)
    out: Annotated[Place, Option(help="Run folder; a run found there resumes.")]
    model: Annotated[Place | None, Option(help="Model folder; by default the embedded encoder.")] = None

    def assignment(self, task: "Task", *, settings: SettingsGiven, skip_bad: bool) -> "Assignment":
        """Return the run of a task, with the settings that suit the model and the data."""
        from bertsmith.finetuning.assignment import Assignment
        from bertsmith.finetuning.suited_settings import suited_recipe
        from bertsmith.inference.embedded_models import default_model

        model = Path(self.model) if self.model is not None else default_model()
        recipe, reason = suited_recipe(
            task, self.data, model, lines_of(settings), options=self.given(), skip_bad=skip_bad
        )
        return Assignment(task, recipe, model, self.data, Path(self.out), skip_bad, reason)


@dataclass(frozen=True, kw_only=True)
class OwnTable(options.Table):
    """The options for a user's own table; empty if not given."""

    text: Annotated[str, Option(help="custom: column of the text.")] = ""
    text2: Annotated[str, Option(help="custom: column of the second text of a pair.")] = ""
    label: Annotated[str, Option(help="custom: column of the label or number.")] = ""
    kind: Annotated[str, Option(help="custom: classify (the default), multilabel or regress.")] = ""
    separator: Annotated[str, Option(help="custom: separator of the labels in a cell; a comma.")] = ""
    id: Annotated[str, Option(help="custom: column of the ids.")] = ""
    dev: Annotated[Any, Option(help="custom: the development file.")] = None
    dev_share: Annotated[
        float | None,
        Option(min=0, max=0.9, help="custom: without --dev, this fraction of each class; 0.1."),
    ] = None
    test_share: Annotated[
        float | None, Option(min=0, max=0.9, help="custom: test the finished model on this fraction.")
    ] = None
    folds: Annotated[
        int | None, Option(min=2, help="custom: cross-validate with this many folds, one run each.")
    ] = None

    def task_named(self, name: str, data: Path) -> "Task":
        """Return the user's own task, or a published one; raise if that has options for an own table."""
        from bertsmith.tasks.catalogue import task_named

        if name == OWN:
            return self._own_task(data)
        task = task_named(name)
        given = [each.name for each in fields(OwnTable) if is_given(getattr(self, each.name))]
        if given:
            where, remedy = ", ".join(f"`{each}`" for each in given), f"remove them, or fine-tune `{OWN}`"
            raise UserError(f"{task.name} defines its own columns and parts", where=where, remedy=remedy)
        return task

    def _own_task(self, data: Path) -> "Task":
        from bertsmith.tasks.custom import CustomSpec, custom_task, has_own_dev

        self._check()
        kept = {"kind": self.kind, "separator": self.separator, "test_fraction": self.test_share}
        spec = CustomSpec(self.text, self.label, second=self.text2, key=self.id)
        spec = replace(spec, **{name: value for name, value in kept.items() if value})  # type: ignore[arg-type]
        # The development set is a named file, a file next to the data, or a fraction of the data.
        if self.dev is not None:
            self._check_no_part("`dev` names the development file")
            if not self.dev.is_file():
                remedy = "name a table as `data` is"
                raise UserError("no such file", where=f"`dev={self.dev}`", remedy=remedy)
            return custom_task(replace(spec, dev_fraction=0.0, dev=str(self.dev.resolve())), self.form)
        if has_own_dev(data):
            self._check_no_part(f"{data} already has a development file")
            return custom_task(replace(spec, dev_fraction=0.0), self.form)
        chosen = spec if self.dev_share is None else replace(spec, dev_fraction=self.dev_share)
        return custom_task(chosen, self.form)

    def _check(self) -> None:
        """Raise if an option is missing or does not apply."""
        if not (self.text and self.label):
            what = "your own task needs the names of its columns"
            remedy = (
                "give `text=COLUMN` and `label=COLUMN`; for tagged words fine-tune tags, for answers in "
                "passages squad (docs/finetuning.md describes their files)"
            )
            raise UserError(what, remedy=remedy)
        if self.test_share and self.dev_share == 0:
            what = "without a development set, the test set would select the model"
            raise UserError(what, key="test_share", remedy="remove `dev_share=0`")
        if self.folds and self.dev_share is not None:
            what = "each fold is the development set of a run"
            raise UserError(what, key="dev_share", remedy="remove it")
        from bertsmith.tasks.kinds.registry import TEXT_KINDS, text_kind_named

        if self.separator and not (self.kind and text_kind_named(self.kind).many_labels):
            many = [name for name, kind in TEXT_KINDS.items() if kind.many_labels]
            remedy = f"remove it, or add `kind={' or '.join(many)}`"
            raise UserError("is for several labels per text", key="separator", remedy=remedy)

    def _check_no_part(self, what: str) -> None:
        """Raise if a part of the data is requested as the development set, but the data already have one."""
        for key, given in (("dev_share", self.dev_share), ("folds", self.folds)):
            if given is not None:
                raise UserError(what, key=key, remedy="remove it")


@dataclass(frozen=True, kw_only=True)
class Tuning(options.Machine, options.Rates):
    """The settings of fine-tuning that are changed most."""

    epochs: Annotated[
        float | None,
        Setting("run.epochs"),
        Option(help="Passes through the training data (run.epochs); more lengthen a finished run."),
    ] = None
    minutes: Annotated[
        float | None,
        Setting("run.minutes"),
        Option(help="Take no more steps after this many minutes, set-up included."),
    ] = None
    batch: Annotated[int | None, Setting("run.examples"), Option(help="Examples a step (run.examples).")] = (
        None
    )
    max_length: Annotated[
        int | None, Setting("text.longest"), Option(help="Longest sequence in tokens (text.longest).")
    ] = None
    patience: Annotated[
        int | None,
        Setting("run.patience", also={"run.keep": "best"}),
        Option(help="End after this many evaluations without improvement; keep the best."),
    ] = None
    tune_thresholds: Annotated[
        bool,
        Setting("answers.label_thresholds", value="tuned"),
        Option("--tune-thresholds", help="Tune the thresholds for giving labels (answers.label_thresholds)."),
    ] = False
    limit: Annotated[
        int | None, Setting("run.limit"), Option(help="Maximum examples of each split (run.limit).")
    ] = None
    seed: Annotated[int | None, Setting("run.seed"), Option(help="Seed (run.seed).")] = None


@dataclass(frozen=True, kw_only=True)
class FinetuneRequest(Tuning, OwnTable, TrainedOn):
    """A fine-tuning, or one of the studies that has several."""

    seeds: Annotated[
        int, Option(min=1, help="Number of runs, with seeds from --seed (0) on; reports their spread.")
    ] = 1
    grid: Annotated[bool, Option("--grid", help="The paper's grid of settings.")] = False
    lr_grid: Annotated[
        bool, Option("--lr-grid", help="The paper's four learning rates for GLUE; the best on dev.")
    ] = False
    random: Annotated[
        int | None,
        Option(min=1, help="Number of runs with random rates, batches, epochs; bad ones end early."),
    ] = None
    quick: Annotated[
        bool,
        Setting("head.encoder", value="frozen-linear"),
        Option("--quick", help="Solve a linear head on the frozen encoder, in seconds; tune nothing."),
    ] = False
    skip_bad: options.SkipBad = False
    settings: options.Settings = None

    def runs(self) -> "tuple[Assignment, list[Trial]]":
        """Return the run, and the runs of the study if one is requested."""
        task = self.task_named(self.task, self.data)
        assignment = self.assignment(task, settings=self.settings, skip_bad=self.skip_bad)
        asked = {"seeds": self.seeds > 1, **{name: getattr(self, name) for name in STUDIES[1:]}}
        studies = [name for name in STUDIES if asked[name]]
        self._check_study(studies)
        if self.quick:
            self._check_quick(task, studies)
        return assignment, self._trials(assignment) if studies else []

    def _check_study(self, studies: Sequence[str]) -> None:
        """Raise for two studies at once, or for a setting that the study varies."""
        from bertsmith.studies.sweep import GRID, RATES, SEARCHED

        if len(studies) > 1:
            named = [f"`{each}`" for each in studies]
            remedy = f"give {' or '.join(sorted(named))}; `seed` sets the seed of each"
            raise UserError("these options exclude each other", where=" ".join(named), remedy=remedy)
        own: dict[str, Sequence[str]] = {"grid": [*GRID], "lr_grid": [*RATES], "random": SEARCHED}
        lines = [*(line for _, line in self.given()), *lines_of(self.settings)]
        keys = own.get(studies[0], ()) if studies else ()
        if taken := [key for line in lines if (key := line.partition("=")[0].strip()) in keys]:
            name = "search" if self.random else "grid"
            what = f"the {name} has its own values of {taken[0]}"
            raise UserError(what, key=studies[0], remedy=f"remove the setting, or the {name}")

    def _trials(self, assignment: "Assignment") -> "list[Trial]":
        from bertsmith.studies.sweep import RATES, over_folds, over_grid, over_search, over_seeds

        if self.folds:
            return over_folds(assignment, self.folds)
        if self.random:
            return over_search(assignment, self.random)
        if self.seeds > 1:
            return over_seeds(assignment, self.seeds)
        return over_grid(assignment, RATES if self.lr_grid else None)

    def _check_quick(self, task: "Task", studies: Sequence[str]) -> None:
        """Raise if a solved head cannot do the task, or if an option needs steps or differing runs."""
        if task.kind.linear_problem is None:
            raise UserError(
                f"{task.title} does not have a linear head to solve", key="quick", remedy="remove it"
            )
        if steps := [each for each in ("minutes", "patience") if getattr(self, each) is not None]:
            what = "a head that is solved takes no steps"
            raise UserError(what, where=f"`quick` `{steps[0]}`", remedy="remove one of them")
        if same := [each for each in studies if each != "folds"]:
            what = "a solved head is the same in every run"
            remedy = f"remove `{same[0]}`, or `quick`"
            raise UserError(what, where=f"`quick` `{same[0]}`", remedy=remedy)


def finetune(request: FinetuneRequest, as_json: options.JsonLines = False) -> None:
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
    assignment, trials = request.runs()
    if trials:
        _run_many(trials, as_json=as_json)
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
        echo(f"stopped after {steps}; run the same command again to resume ({result.folder})")
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
    """Show the progress of a study and return its result; if stopped, print the current run and exit."""
    from bertsmith.studies.scheduler import Stopped

    try:
        with progress_display(line, as_json=as_json) as callback:
            return study(callback)
    except Stopped as stopped:
        text = f"stopped in {stopped}; run the same command again to resume"
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
        return "finished, without a development set"
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
