"""A kind of stage that takes milliseconds and no torch: a number walks, and each step is saved."""

import os
import time
from pathlib import Path
from typing import Any, Literal, cast

from bertsmith.core.errors import Diverged, DoesNotFit, UserError
from bertsmith.core.files import read_json, write_json
from bertsmith.core.measures import Metric
from bertsmith.recipe.section import Section
from bertsmith.studies.cells import Data, Kind, Result, Stage, Work
from bertsmith.training.callbacks import StopRequested
from bertsmith.training.memory_share import MEMORY_SHARE

SCORE = Metric("score")
STEPS = "steps.txt"
"""File with a line for each step that was taken."""
MODEL = "model/value.json"


class RunOfWalk(Section):
    seed: int = 0
    name: str = ""
    steps: int = 8
    device: str = "cpu"


class Walk(Section):
    factor: float = 1.5
    end: Literal[
        *("", "diverges", "crashes", "is killed", "is always killed"),
        *("bad", "busy", "tight", "wide", "name", "device"),
    ] = ""
    """How the work ends. Tight: with too little memory at its first start; wide: in a share of the memory;
    name, device: with an error about that key."""
    peak: int = 0
    """Bytes that it takes, of 100."""
    seconds: float = 0.0
    """Of each step."""
    run: RunOfWalk = RunOfWalk()


def walk(work: Work) -> Result | None:
    """Take the remaining steps; each is saved, and a file remembers all that were taken."""
    recipe, file = cast(Walk, work.stage.recipe), work.folder / "state.json"
    work.folder.mkdir(exist_ok=True)
    first = not file.exists()
    before = sum(read_json(folder / MODEL, remedy="")["value"] for folder in work.inputs.values())
    state = {"step": 0, "value": before} if first else read_json(file, remedy="")
    write_json(file, state)
    with StopRequested() as stop:
        while state["step"] < recipe.run.steps:
            if state["step"] >= 2:  # by the state, so that a resume ends as it would have ended
                end_early(recipe.end, first=first)
            time.sleep(recipe.seconds)
            with (work.folder / STEPS).open("a") as steps:
                steps.write(f"{state['step']}\n")
            value = (state["value"] * recipe.factor + 0.37 * recipe.run.seed + 0.11) % 1
            state = {"step": state["step"] + 1, "value": value}
            write_json(file, state)
            work.callback.on_step(state["step"] / recipe.run.steps, {})
            if stop.here:
                return None
    write_json(work.folder / MODEL, state)
    made_with = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", MEMORY_SHARE)}
    metrics = {"dev": {"score": state["value"]}}
    return Result(metrics, "dev", SCORE, recipe.run.steps, 0.25, made_with, recipe.peak, 100)


def end_early(how: str, *, first: bool) -> None:
    if how == "diverges":
        raise Diverged("the walk left the world", remedy="take a smaller factor")
    if how == "wide" and float(os.environ[MEMORY_SHARE]) < 1:
        raise DoesNotFit("the road is too narrow to share")
    if how in ("name", "device"):
        raise UserError("does not suit this machine", key=f"run.{how}")
    if how == "bad":
        raise UserError("is too long a walk", key="run.steps")
    if how == "busy":
        raise UserError("somebody else walks here")
    if how == "tight" and first:
        raise DoesNotFit("the road is too narrow")
    if how == "crashes":
        raise ValueError("stumbled")
    if how == "is always killed" or (how == "is killed" and first):
        os.kill(os.getpid(), 9)


def no_parts(_: Stage) -> list[str]:
    return []


def name_is_idle(_: Any) -> frozenset[str]:
    return frozenset({"run.name", "seconds"})


def steps_of(stage: Stage) -> float:
    return cast(Walk, stage.recipe).run.steps


WALK = Kind("walk", walk, no_parts, name_is_idle, steps_of)


def stage(
    *, seed: int = 0, steps: int = 8, name: str = "", before: Stage | None = None, **settings: Any
) -> Stage:
    recipe = Walk(run=RunOfWalk(seed=seed, steps=steps, name=name), **settings)
    return Stage(WALK, recipe, Data(Path("text"), {"text": "0"}), {} if before is None else {"model": before})


class Heard:
    """A callback that remembers what a study says."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.shown: list[dict[str, Any]] = []

    def on_message(self, text: str) -> None:
        self.messages.append(text.partition("] ")[2])

    def on_step(self, progress: float, values: dict[str, Any]) -> None:
        self.shown.append({"progress": progress, **values})

    def on_progress(self, progress: float) -> None: ...

    def on_deadline(self, seconds: float, total: float) -> None: ...

    def on_signal(self, text: str) -> None: ...

    def most_at_once(self) -> int:
        """The most cells that ran beside each other."""
        running = most = 0
        for text in self.messages:
            running += 1 if text.endswith("begins") else -1
            most = max(most, running)
        return most
