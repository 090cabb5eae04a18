"""Cells: the pieces of work of studies, each identified by a hash of everything that decides its result.

Equal work of several trials, and of several studies, is one cell, and is done once. The hash is known before
training. It does not cover the machine, the threads and the version of torch: these are written into the
cell, and reports mention mixtures.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from bertsmith.core.errors import UserError
from bertsmith.core.files import read_json, write_json
from bertsmith.core.measures import Metric
from bertsmith.recipe.load import leaves
from bertsmith.recipe.section import Section
from bertsmith.training.callbacks import ProgressCallback

COMPUTES: dict[str, int] = {"bilstm": 2}
"""Version of the computation of a part of the code, by names such as "objective masked"; 1 if it is not
listed.

Increase it if the part computes something else on purpose: cells of the old version are then made again. A
test compares the losses of a few steps of each part with stored ones.
"""
INERT: dict[str, Any] = {
    "pretrain model.cell": 4096,
    "finetune sparse.gradual": "off",
    "finetune sparse.keep_zeros": False,
    "finetune sparse.begin_at": 0.0,
    "finetune sparse.early_at": "off",
    "finetune head.reader": "linear",
}
"""Value of a new recipe key, by kind and key ("pretrain examples.new"), that leaves runs as they were before
the key existed. A key with this value is left out of the hash, so that older cells stay valid.
"""

CELL, RUN, RESULT, FAILURE, LOG, LOCK = "cell.json", "run", "result.json", "failure.json", "log.txt", ".lock"
GONE = "model-removed"
"""Empty file that marks a cell with a removed model: it is made again if a stage needs it."""
KEPT = "model-kept"
"""Empty file that marks a cell with a model that no study removes."""
CONFIG = "config.json"
"""File of a model folder with the sizes of the model."""
PREDICTIONS = "predictions-{split}.npz"
SHOWN_DIGITS = 12
"""Hexadecimal digits of a key in the name of a cell's folder."""


@dataclass(frozen=True, slots=True)
class Data:
    """A store or the files of a task, with hashes of their content."""

    path: Path
    content: Mapping[str, str]
    """Hash of each part: of a store, or of the examples of each split."""
    size: int = 0
    """Tokens of a store or training examples of a task, for estimates of time."""


@dataclass(frozen=True, slots=True)
class Model:
    """An existing model folder, with hashes of the files that decide its computation."""

    folder: Path
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a finished cell."""

    metrics: Mapping[str, Mapping[str, float]]
    """Metrics by split."""
    split: str
    """Split that decides between trials; empty if the model was not evaluated."""
    metric: Metric
    """Metric that decides between trials."""
    steps: int
    seconds: float
    made_with: Mapping[str, str | int] = field(default_factory=dict)
    """Code, torch, device and threads, which may also change the result."""
    peak_bytes: int = 0
    """Peak memory of the cell on a GPU."""
    room_bytes: int = 0
    """Memory of the GPU that cells of a study can share."""

    def to_json(self) -> dict[str, Any]:
        """Return the result for JSON."""
        kept = ("name", "title", "unit", "larger_is_better")
        return {**asdict(self), "metric": {key: getattr(self.metric, key) for key in kept}}

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> "Result":
        """Restore a result from JSON."""
        return cls(**{**values, "metric": Metric(**values["metric"])})


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a cell failed."""

    reason: str
    where: str = ""
    """Name of the failed cell, which may be an input of this one."""
    repeats: bool = False
    """True if the same work would fail again on any machine, so that it is not repeated."""


@dataclass(frozen=True, slots=True)
class Work:
    """A stage, its folder, and the folders of its inputs."""

    stage: "Stage"
    folder: Path
    inputs: Mapping[str, Path]
    callback: ProgressCallback


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of stage; its functions are at the top of a module, as cells run in separate processes."""

    name: str
    run: Callable[[Work], Result | None]
    """Do the work, or resume it; return None if it was asked to stop before its end."""
    parts: Callable[["Stage"], list[str]]
    """Return the names of the parts of the code that compute the result (`COMPUTES`)."""
    idle: Callable[[Any], frozenset[str]]
    """Return the keys of a recipe that do not decide the result."""
    work: Callable[["Stage"], float]
    """Estimate the operations of a stage, to begin with the longest and to show the remaining time."""


@dataclass(frozen=True)
class Stage:
    """A piece of work in a study."""

    kind: Kind
    recipe: Section
    """Complete recipe with a value for each "auto" that decides the result."""
    data: Data
    inputs: Mapping[str, "Stage | Model"] = field(default_factory=dict)
    """Stages or model folders that the work begins with, for example "model" and "teacher"."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Everything else that decides the result, for example the columns of a user's own table."""

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Return everything that decides the result, for JSON."""
        idle, kind = self.kind.idle(self.recipe), self.kind.name
        values = leaves(self.recipe.model_dump(mode="json"))
        inert = {key for key, value in values.items() if INERT.get(f"{kind} {key}", ...) == value}
        return {
            "kind": kind,
            "computes": {part: COMPUTES.get(part, 1) for part in self.kind.parts(self)},
            "recipe": {key: value for key, value in values.items() if key not in idle | inert},
            "data": dict(self.data.content),
            "inputs": {
                name: each.key if isinstance(each, Stage) else dict(each.files)
                for name, each in self.inputs.items()
            },
            "options": dict(self.options),
        }

    @cached_property
    def key(self) -> str:
        """Return the hash of everything that decides the result."""
        return _hash(self.facts)

    @cached_property
    def shape(self) -> str:
        """Return a hash that is equal for stages with the same memory: with other seeds, rates or weights."""
        recipe = {
            key: value
            for key, value in self.facts["recipe"].items()
            if key != "run.seed" and (not key.startswith("optim.") or key == "optim.algorithm")
        }
        inputs = {name: _sizes(each) for name, each in self.inputs.items()}
        return _hash({**self.facts, "recipe": recipe, "inputs": inputs, "data": {}})

    @property
    def by_clock(self) -> bool:
        """True if the time of the work decides its result."""
        return bool(self.facts["recipe"].get("run.minutes", "off") != "off")

    @property
    def name(self) -> str:
        """Return the name of the cell's folder."""
        return f"{self.kind.name}-{self.key[:SHOWN_DIGITS]}"

    @property
    def stages_before(self) -> list["Stage"]:
        """Return the inputs that are stages themselves."""
        return [each for each in self.inputs.values() if isinstance(each, Stage)]


def _sizes(given: "Stage | Model") -> Any:
    """Return the sizes of an input's model: its settings, or the hash of their file."""
    if isinstance(given, Model):
        return given.files.get(CONFIG)
    settings = {key: value for key, value in given.facts["recipe"].items() if key.startswith("model.")}
    return [settings, {name: _sizes(each) for name, each in given.inputs.items()}]


def _hash(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a stage or the reason for its failure; neither if it has not ended yet."""

    stage: Stage
    result: Result | None = None
    failure: Failure | None = None
    predictions: Path | None = None
    """File with the inputs of the deciding metric, if it exists."""

    @property
    def is_final(self) -> bool:
        """True if the work would end in the same way again."""
        return self.result is not None or (self.failure is not None and self.failure.repeats)


@dataclass(frozen=True, slots=True)
class Cells:
    """The folder of all cells; several studies can share it."""

    root: Path

    def folder(self, stage: Stage) -> Path:
        """Return the folder of a stage's cell."""
        return self.root / stage.name

    def outcome(self, stage: Stage) -> Outcome:
        """Read the end of a stage; failures of its inputs count as its own."""
        folder = self.folder(stage)
        if (folder / RESULT).is_file():
            result = Result.of_json(self._read(folder / RESULT))
            return Outcome(stage, result, predictions=folder / RUN / PREDICTIONS.format(split=result.split))
        for before in stage.stages_before:
            if (failure := self.outcome(before).failure) is not None:
                return Outcome(stage, failure=failure)
        if (folder / FAILURE).is_file():
            return Outcome(stage, failure=Failure(**self._read(folder / FAILURE)))
        return Outcome(stage)

    def begin(self, stage: Stage, *, threads: int) -> int:
        """Write the description of a new cell; return the number of threads that it began with."""
        file = self.folder(stage) / CELL
        if not file.is_file():
            write_json(file, {"key": stage.key, **stage.facts, "threads": threads})
        known = self._read(file)
        if known["key"] != stage.key:
            what = "belongs to other work with a key that begins in the same way"
            raise UserError(what, where=str(file.parent), remedy="give the study another `cells`")
        return int(known["threads"])

    def end(self, stage: Stage, outcome: Result | Failure) -> None:
        """Write the end of a cell."""
        folder = self.folder(stage)
        if isinstance(outcome, Result):
            write_json(folder / RESULT, outcome.to_json())
            (folder / FAILURE).unlink(missing_ok=True)
        else:
            write_json(folder / FAILURE, asdict(outcome))

    def lacks_model(self, stage: Stage) -> bool:
        """True if the model of a stage was removed."""
        return (self.folder(stage) / GONE).is_file()

    def keep_model(self, stage: Stage) -> None:
        """Protect the model of a finished stage from later calls and other studies."""
        (self.folder(stage) / KEPT).touch()

    def remove_model(self, stage: Stage) -> None:
        """Remove the model of a finished stage, unless a study keeps it; its result and predictions stay."""
        folder = self.folder(stage)
        if (folder / KEPT).is_file():
            return
        (folder / GONE).touch()  # first, so that no stage begins with half of a model
        for place in ("model", "plans"):
            shutil.rmtree(folder / RUN / place, ignore_errors=True)
        for file in (folder / RUN).glob("*.safetensors"):
            file.unlink()

    def prepare_anew(self, stage: Stage) -> None:
        """Let a stage with a removed model be made again."""
        folder = self.folder(stage)
        shutil.rmtree(folder / RUN, ignore_errors=True)
        for file in (RESULT, GONE):
            (folder / file).unlink(missing_ok=True)

    def _read(self, file: Path) -> dict[str, Any]:
        return read_json(file, remedy=f"remove {file.parent}: the cell is then made again")


def distinct(stages: Iterable[Stage]) -> dict[str, Stage]:
    """Return the stages and their inputs by key, each once, inputs first."""
    found: dict[str, Stage] = {}
    for stage in stages:
        if stage.key not in found:
            found |= distinct(stage.stages_before)
            found[stage.key] = stage
    return found
