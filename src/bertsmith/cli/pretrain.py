"""`bertsmith pretrain`: from a token store to a pre-trained model."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option, echo

from bertsmith.ground.errors import UserError
from bertsmith.recipe.toml_text import value_text

if TYPE_CHECKING:
    from rich.progress import Progress

    from bertsmith.pretraining.job import PretrainingResult
    from bertsmith.pretraining.setup import Watch

SECONDS_BETWEEN_LINES = 10.0
STOPPED = 130


def pretrain(
    recipe: Annotated[str, Argument(metavar="RECIPE", help="A preset (bert-base) or a TOML file.")],
    store: Annotated[Path, Option(help="Token store made by `bertsmith corpus`.")],
    out: Annotated[Path, Option(help="Run folder; a run found there goes on.")],
    start_from: Annotated[str, Option("--from", metavar="MODEL", help="Go on from this model folder.")] = "",
    add_words: Annotated[str, Option(metavar="FILE", help="Words added to that model's vocabulary.")] = "",
    steps: Annotated[int | None, Option(help="Budget in steps (run.steps).")] = None,
    minutes: Annotated[float | None, Option(help="Budget in minutes (run.minutes).")] = None,
    settings: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="Any other setting, repeatable.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON lines, for machines.")] = False,
) -> None:
    """Pre-train an encoder.

    A run that was stopped (Ctrl-C, SIGTERM, a crash) goes on when the same command is given again. All
    settings with their published values: bertsmith recipe show bert-base

    Examples:

    bertsmith pretrain bert-base --store store/ --out runs/base

    bertsmith pretrain bert-tiny --store store/ --out runs/tiny --minutes 2

    bertsmith pretrain bert-base --from MODEL --store store/ --out runs/domain --steps 5000

    torchrun --nproc-per-node 8 -m bertsmith pretrain bert-base --store store/ --out runs/base
    """
    from bertsmith.pretraining.job import pretrain as job  # torch loads here, not for --help
    from bertsmith.recipe.load import load_recipe

    chosen = load_recipe(recipe, [*_shorthands(start_from, add_words, steps, minutes), *(settings or [])])
    with _watch(as_json) as watch:
        result = job(chosen, store=store.expanduser(), out=out.expanduser(), watch=watch)
    if result.main_process:
        show(result, as_json=as_json)
    if result.state == "stopped":
        raise Exit(STOPPED)


def _shorthands(start_from: str, add_words: str, steps: int | None, minutes: float | None) -> list[str]:
    """Each flag as the recipe key it stands for."""
    given = {
        "start.model": start_from or None,
        "start.add_words": add_words or None,
        "run.steps": steps,
        "run.minutes": minutes,
        "run.budget": "steps" if steps is not None else "minutes" if minutes is not None else None,
    }
    if steps is not None and minutes is not None:
        raise UserError("a run has one budget", where="--steps and --minutes", remedy="give one of them")
    return [f"{key}={value_text(value)}" for key, value in given.items() if value is not None]


class JsonWatch:
    """Prints each remark and each line of metrics as one JSON object."""

    def note(self, text: str) -> None:
        """Print a remark."""
        echo(json.dumps({"note": text}))

    def step(self, progress: float, values: dict[str, Any]) -> None:
        """Print a line of metrics."""
        # As in metrics.jsonl: a number that is none (a gradient that broke) is null, for JSON knows no NaN.
        broken = [name for name, value in values.items() if isinstance(value, float) and not isfinite(value)]
        echo(json.dumps({"progress": round(progress, 6), **values, **dict.fromkeys(broken)}))


class LineWatch:
    """Prints remarks, and now and then a line of metrics, for logs."""

    def __init__(self) -> None:
        self.last_line = 0.0

    def note(self, text: str) -> None:
        """Print a remark."""
        echo(text)

    def step(self, progress: float, values: dict[str, Any]) -> None:
        """Print a line of metrics, unless the last one is only seconds old."""
        if time.monotonic() - self.last_line >= SECONDS_BETWEEN_LINES or progress >= 1:
            self.last_line = time.monotonic()
            echo(f"{progress:6.1%}  {live_line(values)}")


class BarWatch:
    """Keeps one live line on a terminal, with remarks above it."""

    def __init__(self, bar: "Progress") -> None:
        self.bar = bar
        self.task = bar.add_task("starting", total=1.0)

    def note(self, text: str) -> None:
        """Print a remark above the line."""
        self.bar.console.print(text, markup=False, highlight=False)

    def step(self, progress: float, values: dict[str, Any]) -> None:
        """Renew the line."""
        self.bar.update(self.task, completed=progress, description=live_line(values))


@contextmanager
def _watch(as_json: bool) -> "Iterator[Watch]":
    if as_json or not sys.stderr.isatty():
        yield JsonWatch() if as_json else LineWatch()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (BarColumn(bar_width=20), TaskProgressColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield BarWatch(bar)


def live_line(values: dict[str, Any]) -> str:
    """The numbers a person watches: loss, accuracy, speed, how long it will take."""
    parts = [f"step {values['step']:,}", f"loss {values['loss']:.3f}"]
    if "mlm_accuracy" in values:
        parts.append(f"MLM {values['mlm_accuracy']:.1%}")
    if "pair_accuracy" in values:
        parts.append(f"pairs {values['pair_accuracy']:.1%}")
    parts.append(f"{values['tokens_per_second']:,.0f} tokens/s")
    if values.get("mfu"):
        parts.append(f"MFU {values['mfu']:.1%}")
    parts.append(f"ETA {_duration(values['eta_seconds'])}")
    return "  ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def show(result: "PretrainingResult", *, as_json: bool) -> None:
    """Print how the run ended."""
    facts = {"state": result.state, "folder": str(result.folder), "steps": result.steps}
    if as_json:
        numbers = {"tokens": result.tokens, "seconds": round(result.seconds, 1), "held_out": result.held_out}
        echo(json.dumps({**facts, **numbers}))
        return
    spent = f"{result.steps:,} steps and {result.tokens:,} tokens ({_duration(result.seconds)})"
    echo(f"{result.state} after {spent}")
    for name, value in result.held_out.items():
        echo(f"  held-out {name.replace('_', ' ')}: {value:.4f}")
    if result.state == "stopped":
        echo(f"saved; give the same command again to go on ({result.folder})")
        return
    echo(f"model: {result.folder / 'model'}")
    if (result.folder / "curves.png").is_file():  # without matplotlib there are none
        echo(f"curves: {result.folder / 'curves.png'}")
