"""The folder of a fine-tuning run: what it was asked to do, and whether it may go on."""

import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from bertsmith.ground.errors import UserError
from bertsmith.ground.files import read_json, sha256_of, write_json
from bertsmith.inference.bert import model_folder
from bertsmith.model.tensor_files import WEIGHT_FILES
from bertsmith.recipe.finetuning import FinetuningRecipe
from bertsmith.recipe.load import leaves
from bertsmith.recipe.toml_text import toml_text, value_text
from bertsmith.tasks.examples import Example
from bertsmith.tasks.task import Task
from bertsmith.text.tokenizer_files import TOKENIZER_FILES
from bertsmith.training.claims import claim, let_go, refuse_strangers, remove_partials, withdraw

ASSIGNMENT = "assignment.json"
RESULT = "result.json"
MOST_DIFFERENCES = 6
MODEL_FILES, EXAMPLES = "model_files", "examples"
"""Under these keys of the assignment are hashes: of files that decide the beginning, and of what was read."""


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
        """What a run found in the folder must agree with to be gone on with, the examples aside."""
        return {
            "recipe": leaves(self.recipe.model_dump(mode="json")),
            "custom": dict(self.task.custom),
            "model": str(self.model.resolve()),
            MODEL_FILES: _hashes_of_files(model_folder(self.model)),
            "data": str(self.data.resolve()),
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

    def best(self, step: int) -> Path:
        """The weights that did best so far, where they are not the last ones."""
        return self.path / f"best-{step}.safetensors"

    def forget_best_but(self, step: int) -> None:
        """Remove the best weights of all other steps."""
        for file in self.path.glob("best-*.safetensors"):
            if file != self.best(step):
                file.unlink()

    @property
    def finished(self) -> bool:
        """Whether the result was written, which is the last thing a run does."""
        return (self.path / RESULT).is_file()

    def result(self) -> dict[str, Any]:
        """What a finished run came to."""
        return read_json(self.path / RESULT, remedy="remove the folder and run again")


def refuse_other_run(folder: TuningFolder, assignment: Assignment) -> None:
    """Complain if the folder holds a run with another assignment, or something that is no run."""
    known = folder.path / ASSIGNMENT
    if known.is_file():
        _refuse_other_assignment(read_json(known, remedy="give --out a new folder"), assignment)
    else:
        refuse_strangers(folder.path, ())


def refuse_other_examples(folder: TuningFolder, hashes: Mapping[str, str]) -> None:
    """Complain if the folder holds a run that read other examples, by the hash of each split."""
    known = folder.path / ASSIGNMENT
    if known.is_file():
        begun_with = read_json(known, remedy="give --out a new folder").get(EXAMPLES, {})
        if changed := [name for name in hashes | begun_with if hashes.get(name) != begun_with.get(name)]:
            what = f"holds a run on other examples: the data have changed since ({', '.join(changed)})"
            remedy = "give --out a new folder, or take the change back"
            raise UserError(what, where=str(folder.path), remedy=remedy)


def hashes_of(splits: Mapping[str, Sequence[Example]]) -> dict[str, str]:
    """A hash of each split's examples, wherever in a file they stand."""
    return {name: _hash_of_examples(examples) for name, examples in splits.items()}


@contextmanager
def alone_in(folder: TuningFolder, assignment: Assignment) -> Iterator[None]:
    """While it is open, no other run can work in the folder; one that does not begin leaves nothing there."""
    refuse_other_run(folder, assignment)
    held = claim(folder.path)
    try:
        yield
    finally:
        let_go(held) if (folder.path / ASSIGNMENT).is_file() else withdraw(held)


def begin_folder(folder: TuningFolder, assignment: Assignment, hashes: Mapping[str, str]) -> None:
    """Write down what the run is asked to do, or go on in a folder that says so; inside `alone_in`."""
    remove_partials(folder.path)
    write_json(folder.path / ASSIGNMENT, {**assignment.facts(), EXAMPLES: hashes})


def recipe_toml(recipe: FinetuningRecipe) -> str:
    """The recipe as complete TOML."""
    return toml_text(recipe.model_dump())


def clear_states(folder: TuningFolder) -> None:
    """Remove the resumable states of a run that is finished."""
    shutil.rmtree(folder.checkpoints, ignore_errors=True)
    folder.forget_best_but(0)


def _refuse_other_assignment(known: dict[str, Any], assignment: Assignment) -> None:
    ours = leaves(assignment.facts())
    theirs = leaves({key: value for key, value in known.items() if key != EXAMPLES})
    changed = [key for key in ours | theirs if ours.get(key) != theirs.get(key)]
    if changed:
        listed = "; ".join(_difference(key, theirs, ours) for key in changed[:MOST_DIFFERENCES])
        more = len(changed) - MOST_DIFFERENCES
        listed += f"; and {more} more" if more > 0 else ""
        remedy = "give --out a new folder, or take the change back"
        raise UserError(f"holds another run: {listed}", where=str(assignment.out), remedy=remedy)


def _difference(key: str, theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    if key.startswith(f"{MODEL_FILES}."):
        return f"{key.removeprefix(f'{MODEL_FILES}.')} of the model has changed since"
    return f"{key.removeprefix('recipe.')}: {_told(theirs, key)} there, {_told(ours, key)} now"


def _told(facts: dict[str, Any], key: str) -> str:
    return value_text(facts[key]) if key in facts else "nothing"


def _hashes_of_files(model: Path) -> dict[str, str]:
    """A hash of each file that decides what a run begins with."""
    patterns = ("config.json", *WEIGHT_FILES, *TOKENIZER_FILES)
    files = sorted({file for pattern in patterns for file in model.glob(pattern)})
    return {file.name: _hash_of_file(file, file.stat().st_size, file.stat().st_mtime_ns) for file in files}


@cache
def _hash_of_file(file: Path, _size: int, _changed: int) -> str:
    """The hash of a file; the runs of a study share their model, and it is read for the first one only."""
    return sha256_of(file)


def _hash_of_examples(examples: Sequence[Example]) -> str:
    digest = hashlib.sha256()
    for example in examples:
        names = [field.name for field in fields(example) if field.name != "where"]
        digest.update(repr([getattr(example, name) for name in names]).encode())
    return digest.hexdigest()
