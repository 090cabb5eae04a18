"""The folder of a fine-tuning run: what it was asked to do, and whether it may go on."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith.ground.errors import UserError
from bertsmith.ground.files import read_json, sha256_of, write_json
from bertsmith.recipe.finetuning import FinetuningRecipe
from bertsmith.recipe.load import leaves
from bertsmith.recipe.toml_text import toml_text, value_text
from bertsmith.tasks.task import Task

ASSIGNMENT = "assignment.json"
RESULT = "result.json"


@dataclass(frozen=True, slots=True)
class Assignment:
    """What was asked for."""

    task: Task
    recipe: FinetuningRecipe
    model: Path
    data: Path
    out: Path
    skip_bad: bool = False

    def facts(self) -> dict[str, Any]:
        """What a run found in the folder must agree with to be gone on with."""
        config = self.model / "config.json"
        return {
            "recipe": leaves(self.recipe.model_dump(mode="json")),
            "model": str(self.model),
            "model_config": sha256_of(config) if config.is_file() else "",
            "data": str(self.data),
            "skip_bad": self.skip_bad,
        }


@dataclass(frozen=True, slots=True)
class TuningFolder:
    """The places in a run folder."""

    path: Path

    @property
    def model(self) -> Path:
        """The finished model folder."""
        return self.path / "model"

    @property
    def checkpoints(self) -> Path:
        """Resumable states."""
        return self.path / "checkpoints"

    @property
    def finished(self) -> bool:
        """Whether the result was written, which is the last thing a run does."""
        return (self.path / RESULT).is_file()

    def result(self) -> dict[str, Any]:
        """What a finished run came to."""
        return read_json(self.path / RESULT, remedy="remove the folder and run again")


def open_folder(assignment: Assignment) -> TuningFolder:
    """The run's folder, new or as it was left; one that holds another run is refused."""
    folder = TuningFolder(assignment.out)
    known = folder.path / ASSIGNMENT
    if known.is_file():
        _refuse_other_assignment(read_json(known, remedy="give --out a new folder"), assignment)
    elif folder.path.exists() and any(folder.path.iterdir()):
        remedy = "give --out a new folder, or that of a run to go on with"
        raise UserError("holds files but no run", where=str(folder.path), remedy=remedy)
    else:
        folder.path.mkdir(parents=True, exist_ok=True)
        write_json(known, assignment.facts())
    return folder


def recipe_toml(recipe: FinetuningRecipe) -> str:
    """The recipe as complete TOML."""
    return toml_text(recipe.model_dump())


def clear_states(folder: TuningFolder) -> None:
    """Remove the resumable states of a run that is finished."""
    shutil.rmtree(folder.checkpoints, ignore_errors=True)


def _refuse_other_assignment(known: dict[str, Any], assignment: Assignment) -> None:
    asked = assignment.facts()
    ours, theirs = ({**facts.get("recipe", {}), **facts, "recipe": ""} for facts in (asked, known))
    changed = [key for key in ours if ours[key] != theirs.get(key)]
    if changed:
        values = ((key, value_text(theirs.get(key, "")), value_text(ours[key])) for key in changed[:4])
        listed = "; ".join(f"{key}: {there} there, {now} now" for key, there, now in values)
        remedy = "give --out a new folder, or take the change back"
        raise UserError(f"holds another run: {listed}", where=str(assignment.out), remedy=remedy)
