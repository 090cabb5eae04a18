"""`bertsmith study`: run your own study, and show its progress."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit, Option, echo

from bertsmith.cli import options
from bertsmith.cli.presenting import print_json
from bertsmith.cli.terminal import STOPPED, duration, progress_display
from bertsmith.cli.verb import App
from bertsmith.core.errors import UserError
from bertsmith.core.wording import counted

study = App(
    help="Train many variants, compare them over seeds, and report the differences with intervals.",
)


@study.command("run")
def run_own(
    file: Annotated[Path, Argument(metavar="STUDY", help="A study in TOML.")],
    out: Annotated[Path, Option(help="Folder of the report; the same command continues a study there.")],
    cells: Annotated[
        Path | None, Option(help="Folder of the runs, shared by studies; by default cells/ next to --out.")
    ] = None,
    seeds: Annotated[
        int | None, Option(min=1, help="Number of seeds, in place of `seeds` in the file.")
    ] = None,
    together: Annotated[int, Option(min=1, help="Maximum runs at once on one device.")] = 1,
    devices: Annotated[
        str, Option(help="GPUs by number, for example 0,1; or cpu. By default the first GPU, if any.")
    ] = "",
    threads: Annotated[
        int | None,
        Option(
            min=1, help="CPU threads of each run; by default OMP_NUM_THREADS, or cores divided by --together."
        ),
    ] = None,
    keep_models: Annotated[
        bool,
        Option("--keep-models", help="Keep every trained model, not only the ones that runs still need."),
    ] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Only print the runs and their approximate time.")
    ] = False,
    as_json: options.JsonLines = False,
) -> None:
    """Run a study: all trials over all seeds, and a report with intervals.

    Equal work is done once, also across studies that share --cells. A trial that fails is a row with its
    reason. Stopped or killed, the same command continues and repeats nothing.

    Example: bertsmith study run nsp.toml --out lab/nsp --seeds 3 --together 2

    \b
    # nsp.toml
    question = "Do next-sentence pairs help?"
    seeds = 3
    finetuning_seeds = 2
    \b
    [stages.model]                     # pre-training: a preset or file, and a store
    recipe = "bert-tiny"
    store = "store/"
    set = { "run.steps" = 2000 }
    \b
    [stages.sst2]                      # fine-tuning: a task, data, a stage or a model folder
    task = "sst2"
    data = "glue/SST-2"
    model = "model"
    \b
    [trials.pairs]                     # the first trial is the baseline
    [trials."no pairs"]
    "model.examples.pairs" = "full-sentences"
    \b
    [grid]                             # each trial with each combination of values
    "sst2.optim.peak_lr" = [3e-5, 5e-5]
    """
    from bertsmith.studies.cells import Cells
    from bertsmith.studies.own_study import read_study
    from bertsmith.studies.scheduler import Places, Stopped
    from bertsmith.studies.study import plan_of, run_study

    out = out.resolve()  # runs remember the folders that they begin with
    places = Places(_devices(devices), together, threads or _threads(together))
    found = read_study(file, device="cuda" if any(places.devices) else "cpu", seeds=seeds)
    shared = Cells(cells.resolve() if cells is not None else out.parent / "cells")
    if dry_run:
        plan = plan_of(found, shared, places)
        if as_json:
            print_json(plan)
        else:
            _show(plan)
            echo(f"time: {_time_text(plan['seconds_left'])}")
        return
    try:
        with progress_display(live_line, as_json=as_json) as callback:
            report = run_study(found, out, shared, places, callback, keeps_models=keep_models)
    except Stopped:
        text = "stopped; run the same command again to continue"
        print_json({"finished": False}) if as_json else echo(text)
        raise Exit(STOPPED) from None
    if as_json:
        print_json({"finished": True, **report.values})
    else:
        echo(f"\n{report.text()}")
        echo(f"report: {out / report.name}.txt, .md, .json, .html")


@study.command("status")
def show_status(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="Folder of a study (--out).")],
    as_json: options.JsonLines = False,
) -> None:
    """Show the progress of a study: runs that are done, running or failed, and the minutes left.

    Example: bertsmith study status lab/nsp
    """
    from bertsmith.studies.study import read_status

    status = read_status(folder)
    if as_json:
        print_json(status)
        return
    _show(status)
    if status["works"]:
        echo(f"time left: {_time_text(status['seconds_left'])}")
    elif status["counts"]["waiting"] or status["counts"]["running"]:
        echo("no process is running it: run the command of the study again to continue")


def _show(status: dict[str, Any]) -> None:
    """Print the cells of a study by state, each running or failed cell, and impossible trials."""
    runs = counted(len(status["cells"]), "run")
    echo(f"{runs} ({status['wanted']} wanted, equal ones once): {_counts(status['counts'])}")
    for each in status["cells"]:
        if each["state"] == "running":
            echo(f"  {each['cell']}: {each['fraction']:.0%}")
        if each["reason"]:
            echo(f"  {each['cell']} failed: {each['reason']}")
    for name, reason in status["impossible"].items():
        echo(f"  {name} is impossible: {reason}")


def _counts(states: Mapping[str, Any]) -> str:
    return ", ".join(f"{states[state]} {state}" for state in ("done", "running", "failed", "waiting"))


def live_line(values: dict[str, Any]) -> str:
    """Format the progress of a study."""
    return f"{_counts(values)}  ETA {_time_text(values['seconds_left'])}"


def _time_text(seconds: float | None) -> str:
    return "unknown until the first runs are done" if seconds is None else duration(seconds)


def _devices(given: str) -> tuple[str, ...]:
    """Return the values of CUDA_VISIBLE_DEVICES, one for each place."""
    if given == "cpu":
        return ("",)
    named = tuple(each.strip() for each in given.split(","))
    if given and (not all(named) or "cpu" in named or len(set(named)) < len(named)):
        remedy = "write GPUs by number, each once, for example 0,1; or cpu"
        raise UserError(f"{given!r} is not a list of GPUs", key="devices", remedy=remedy)
    import torch

    if torch.cuda.is_available():
        return named if given else (os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],)
    if given:
        raise UserError("torch sees no CUDA GPU", key="devices", remedy="remove it, or give cpu")
    return ("",)


def _threads(together: int) -> int:
    """Return the first number of OMP_NUM_THREADS, or else an equal share of the cores."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if wanted.isdecimal() and int(wanted):
        return int(wanted)
    return max(1, (os.cpu_count() or 1) // together)
