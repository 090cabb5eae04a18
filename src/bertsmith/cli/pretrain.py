"""`bertsmith pretrain`: train a model from a token store."""

import time
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option, echo

from bertsmith.cli import options
from bertsmith.cli.finetune import stoppable
from bertsmith.cli.presenting import print_json
from bertsmith.cli.request import Place, Sweep, lines_of
from bertsmith.cli.spelling import Setting
from bertsmith.cli.terminal import STOPPED, duration, progress_display
from bertsmith.core.errors import UserError
from bertsmith.core.measures import LOSS, Metric, brief
from bertsmith.core.wording import counted

AUTO = "auto"

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bertsmith.pretraining.pretrain import PretrainingResult
    from bertsmith.recipe.schema import Recipe
    from bertsmith.studies.sweep import PretrainingTrial
    from bertsmith.training.early_stopping import EarlyStopping


@dataclass(frozen=True, kw_only=True)
class PretrainRequest(options.Budget, options.Machine):
    """A pre-training, or a sweep of several."""

    recipe: Annotated[str, Argument(metavar="RECIPE", help="auto, a preset (bert-base) or a TOML file.")] = (
        field(kw_only=False)
    )
    store: Annotated[Place, Option(help="Token store made by `bertsmith corpus`.")]
    out: Annotated[Place, Option(help="Run folder; a run found there resumes.")]
    start_from: Annotated[
        str,
        Setting("start.model"),
        Option("--from", metavar="MODEL", help="Continue from this model: a folder, or org/name."),
    ] = ""
    add_words: Annotated[
        str,
        Setting("start.add_words"),
        Option(metavar="FILE", help="Words added to that model's vocabulary."),
    ] = ""
    tokens: Annotated[
        int | None,
        Setting("run.tokens", also={"run.budget": "tokens"}),
        Option(help="Budget in tokens (run.tokens)."),
    ] = None
    size: Annotated[str, Option(metavar="SIZE", help="auto: use the shape tiny, mini, small or base.")] = ""
    objective: Annotated[str, Option(help="auto: masked or replaced (examples.objective).")] = ""
    batch: Annotated[
        int | None,
        Setting("batch.sequences", also={"batch.by": "sequences"}),
        Option(help="Sequences a step (batch.sequences)."),
    ] = None
    max_length: Annotated[
        int | None,
        Setting("examples.stages", derived=["examples.stages"]),
        Option(help="Longest sequence, in one stage (examples.stages)."),
    ] = None
    settings: options.Settings = None
    sweep: Annotated[
        Sweep,
        Option(metavar="KEY=VALUES", help="A run for each value, with commas between; several: the grid."),
    ] = None
    stop_if_flat: Annotated[
        bool, Option("--stop-if-flat", help="End a run that learns only word frequencies.")
    ] = False

    def recipe_for(self, report: "Callable[[str], None]") -> "Recipe":
        """Return the recipe of the run; that of auto is chosen now, and the choice reported."""
        check_one_budget(steps=self.steps, tokens=self.tokens, minutes=self.minutes)
        if str(self.recipe) != AUTO:
            for key, value in (("size", self.size), ("objective", self.objective)):
                if value:
                    remedy = "set model.layers and model.width, or examples.objective, with `settings`"
                    raise UserError(f"is an option of auto, not of {self.recipe}", key=key, remedy=remedy)
            return self._loaded(self.recipe)
        from bertsmith.pretraining.auto_recipe import AutoRequest, auto_recipe

        asked = AutoRequest(self._loaded, Path(self.store), Path(self.out), self.size, self.objective)
        return auto_recipe(asked, report)

    def trials(self) -> "list[PretrainingTrial]":
        """Return the runs of the sweep; none if no sweep is requested."""
        if self.sweep is None:
            return []
        from bertsmith.studies.sweep import points_of, trials_of

        check_one_budget(steps=self.steps, tokens=self.tokens, minutes=self.minutes)
        if str(self.recipe) == AUTO:
            remedy = "sweep over a preset, or over the recipe.toml in the folder of a run of auto"
            raise UserError("auto chooses one recipe", key="sweep", remedy=remedy)
        loaded = partial(self._loaded, self.recipe, ())
        return trials_of(points_of(self.sweep), loaded, store=Path(self.store), out=Path(self.out))

    def _loaded(
        self, base: "Path | str", below: "Sequence[tuple[str, str]]" = (), swept: "Sequence[str]" = ()
    ) -> "Recipe":
        """Load a preset or file with settings below the given ones, and those of a point of a sweep above."""
        given = [*below, *self.given(tuning=False)]
        return chosen_recipe(str(base), given, lines_of(self.settings), self.max_length, swept)


def pretrain(request: PretrainRequest, as_json: options.JsonLines = False) -> None:
    """Pre-train an encoder.

    `auto` chooses shape, batch and learning rate for the budget, the text and this machine, and explains why.

    A run that was stopped (Ctrl-C, SIGTERM, a crash) resumes when the same command is given again. All
    settings with their published values: bertsmith recipe show bert-base

    Examples:

    bertsmith pretrain auto --store store/ --out runs/mine --minutes 30

    bertsmith pretrain bert-base --store store/ --out runs/base

    bertsmith pretrain bert-tiny --store store/ --out runs/tiny --minutes 2 --batch 64 --max-length 128

    bertsmith pretrain bert-base --from MODEL --store store/ --out runs/domain --steps 5000

    bertsmith pretrain electra-small --store store/ --out runs/electra

    bertsmith pretrain bert-base --store store/ --out runs/try --minutes 20 --stop-if-flat

    bertsmith pretrain bert-mini --store store/ --out sweeps/lr --steps 2000 --sweep optim.peak_lr=1e-3,2e-3

    torchrun --nproc-per-node 8 -m bertsmith pretrain bert-base --store store/ --out runs/base
    """
    started = time.monotonic()  # a budget in minutes includes the seconds in which torch loads
    if trials := request.trials():
        _sweep(trials, as_json=as_json)
        return
    from bertsmith.training.early_stopping import EarlyStopping

    stopping = EarlyStopping(if_flat=request.stop_if_flat)
    store, out = Path(request.store), Path(request.out)
    run(request.recipe_for, store=store, out=out, as_json=as_json, started=started, early_stopping=stopping)


def check_one_budget(**budgets: float | None) -> None:
    """Raise if several budgets are given."""
    if len(several := [f"`{name}`" for name, value in budgets.items() if value is not None]) > 1:
        raise UserError("a run has one budget", where=" and ".join(several), remedy="give one of them")


def run(
    recipe: "Recipe | Callable[[Callable[[str], None]], Recipe]",
    *,
    store: Path,
    out: Path,
    as_json: bool,
    started: float,
    early_stopping: "EarlyStopping | None" = None,
) -> None:
    """Run a recipe, or a function's choice of one, and print the result."""
    from bertsmith.objectives.registry import declaration
    from bertsmith.pretraining.pretrain import pretrain as job
    from bertsmith.training.early_stopping import NEVER_EARLY

    shown: dict[str, Metric] = {}
    with progress_display(partial(live_line, shown), as_json=as_json) as callback:
        stopping = early_stopping or NEVER_EARLY
        chosen = recipe(callback.on_message) if callable(recipe) else recipe
        shown |= declaration(chosen).own
        result = job(
            chosen, store=store, out=out, callback=callback, early_stopping=stopping, started=started
        )
    if result.main_process:
        show(result, as_json=as_json)
    if result.state == "stopped":
        raise Exit(STOPPED)


def chosen_recipe(
    recipe: str,
    options: "list[tuple[str, str]]",
    settings: list[str],
    max_length: int | None,
    swept: "Sequence[str]" = (),
) -> "Recipe":
    """Load the recipe with the given options, settings and point of a sweep."""
    from bertsmith.recipe.load import load_recipe

    chosen = load_recipe(recipe, settings, options=options, swept=swept)
    if max_length is None:
        return chosen
    # Maximum number of predicted tokens, as published: 20 of 128, 77 of 512 at a rate of 15 %.
    predictions = ceil(chosen.masking.largest_rate * max_length)
    stage = f"{{fraction=1.0, length={max_length}, predictions={predictions}}}"
    one_stage = ("`max_length`", f"examples.stages=[{stage}]")
    return load_recipe(recipe, settings, options=[*options, one_stage], swept=swept)


def _sweep(trials: "Sequence[PretrainingTrial]", *, as_json: bool) -> None:
    """Run a grid of settings and print its table."""
    from bertsmith.objectives.registry import declaration
    from bertsmith.studies.sweep import run_sweep

    shown = {name: each for trial in trials for name, each in declaration(trial.recipe).own.items()}
    outcomes = stoppable(partial(run_sweep, trials), partial(live_line, shown), as_json=as_json)
    show_sweep(outcomes, trials[0].recipe, as_json=as_json)


def show_sweep(outcomes: "Sequence[PretrainingResult]", recipe: "Recipe", *, as_json: bool) -> None:
    """Print the result of each run of a sweep, the best first."""
    place = outcomes[0].folder.parent
    if as_json:
        from bertsmith.studies.sweep import row_of

        rows = [{**row_of(each), "folder": str(each.folder)} for each in outcomes]
        best = "" if outcomes[0].early_end else outcomes[0].folder.name
        print_json({"state": "finished", "best": best, "runs": rows})
        return
    from bertsmith.objectives.registry import declaration

    fixed = (each for each in declaration(recipe).fixed.values() if each.short)
    columns = {"fixed loss" if each.short == LOSS.short else each.short: each for each in fixed}
    columns |= {"own loss": LOSS}
    width = max(len("run"), *(len(each.folder.name) for each in outcomes))
    echo(f"{'run':<{width}}  {'steps':>9}  " + "  ".join(f"{title:>14}" for title in columns))
    for each in outcomes:
        cells = [
            metric.text(each.held_out[metric.name]) if metric.name in each.held_out else "-"
            for metric in columns.values()
        ]
        line = f"{each.folder.name:<{width}}  {each.steps:>9,}  " + "  ".join(f"{cell:>14}" for cell in cells)
        echo(line + ("  ended early" if each.early_end else "  failed" if each.failure else ""))
    for each in outcomes:
        if each.early_end:
            echo(f"{each.folder.name} was ended early: {each.early_end}")
        if each.failure:
            echo(f"{each.folder.name} failed: {each.failure}")
    if not outcomes[0].early_end:
        echo(f"best: {outcomes[0].folder.name} ({outcomes[0].folder / 'model'})")
    if (place / "sweep.png").exists():
        echo(f"picture: {place / 'sweep.png'}")


def live_line(shown: "Mapping[str, Metric]", values: dict[str, Any]) -> str:
    """Format the numbers of the live line: loss, accuracy, speed, remaining time."""
    parts = [f"step {values['step']:,}", *brief(shown, values)]
    parts.append(f"{values['tokens_per_second']:,.0f} tokens/s")
    if values.get("mfu"):
        parts.append(f"MFU {values['mfu']:.1%}")
    parts.append(f"ETA {duration(values['eta_seconds'])}")
    return "  ".join(parts)


def show(result: "PretrainingResult", *, as_json: bool) -> None:
    """Print the result of the run."""
    if as_json:
        summary = {
            "state": result.state,
            "folder": str(result.folder),
            "steps": result.steps,
            "tokens": result.tokens,
            "seconds": round(result.seconds, 1),
            "held_out": result.held_out,
            "held_out_before": result.held_out_before,
            "unigram_entropy": round(result.unigram_entropy, 4),
            "saved_step": result.saved_step,
            "early_end": result.early_end,
        }
        print_json(summary)
        return
    from bertsmith.pretraining.learning_watch import WHAT_TO_TRY, above_frequencies
    from bertsmith.pretraining.pretrained_model import held_out_rows

    spent = f"{counted(result.steps, 'step')} and {counted(result.tokens, 'token')}"
    echo(f"{result.state} after {spent} ({duration(result.seconds)})")
    for name, value in held_out_rows(result.declared, result.held_out, result.held_out_before):
        echo(f"  held-out {name}: {value}")
    if result.state == "stopped":
        if result.early_end:
            echo(f"ended early: {result.early_end}; {WHAT_TO_TRY}")
        _show_how_it_resumes(result)
        return
    watched = result.declared.own[result.declared.watched]
    loss = result.held_out.get(watched.name, 0.0)
    if result.declared.baseline == "unigram" and loss >= result.unigram_entropy:
        told = above_frequencies(loss, result.unigram_entropy)
        echo(f"held-out {watched.label}: {told} yet; train longer (--steps, --minutes), or {WHAT_TO_TRY}")
    echo(f"model: {result.folder / 'model'}")
    # A generator exists only for replaced tokens, and curves only with matplotlib.
    others = {"generator": result.folder / "model" / "generator", "curves": result.folder / "curves.png"}
    for name, path in others.items():
        if path.exists():
            echo(f"{name}: {path}")


def _show_how_it_resumes(result: "PretrainingResult") -> None:
    """Print the step that the same command would resume from: steps with an unused gradient are not saved."""
    why = "not saved, because the last steps had no usable gradient"
    if result.saved_step == result.steps:
        again = (
            "the same command again, without --stop-if-flat,"
            if result.early_end
            else "the same command again"
        )
        echo(f"saved; run {again} to resume ({result.folder})")
    elif result.saved_step:
        echo(f"{why}; the same command resumes from step {result.saved_step:,} ({result.folder})")
    else:
        again = "there is no saved state: the same command starts again at step 0"
        echo(f"{why}; {again} ({result.folder})")
