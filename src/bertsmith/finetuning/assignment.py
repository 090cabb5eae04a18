"""What a fine-tuning run was asked to do, as its folder remembers it, and whether it may resume there."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from bertsmith.core.errors import UserError
from bertsmith.core.files import read_json, sha256_of, write_json
from bertsmith.inference.adapter_folder import ADAPTER_FILES
from bertsmith.inference.finetuned_folder import MIX_FILE
from bertsmith.inference.model_path import model_folder
from bertsmith.model.sentence_modules import transformer_folder
from bertsmith.model.tensor_files import WEIGHT_FILES
from bertsmith.recipe.finetuning_schema import FinetuningRecipe
from bertsmith.recipe.load import Difference, differences, leaves
from bertsmith.recipe.toml_text import toml_text
from bertsmith.tasks.example_types import Example
from bertsmith.tasks.task import Task
from bertsmith.text.tokenizer_files import TOKENIZER_FILES
from bertsmith.training.checkpoint_storage import STATE, saved_steps, step_folder
from bertsmith.training.run_folder import RunFolder

ASSIGNMENT = "assignment.json"
RESULT = "result.json"
MAX_DIFFERENCES = 6
EPOCHS, FREE_KEYS = "run.epochs", frozenset({"run.keep_state", "run.patience_seconds"})
"""More epochs lengthen a finished run; what touches nothing that is learned may change at any time."""
ENDED_AFTER = "ended_after"
"""In a saved state: the epochs of the run that ended with it."""
MODEL_FILES, TEACHER_FILES, EXAMPLES = "model_files", "teacher_files", "examples"
"""Under these keys of the assignment are hashes: of the files of the initial model and of the teachers, and
of what was read."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What was asked for."""

    task: Task
    recipe: FinetuningRecipe
    model: Path
    data: Path
    out: Path
    skip_bad: bool = False
    reason: str = ""
    """Why the recipe has the settings that were chosen for the model and the data; empty if none were."""

    def to_json(self) -> dict[str, Any]:
        """What a run found in the folder must agree with to be resumed, the examples aside."""
        return {
            "recipe": leaves(self.recipe.model_dump(mode="json")),
            "custom": dict(self.task.custom),
            "model": str(self.model.resolve()),
            MODEL_FILES: hashes_of_files(transformer_folder(model_folder(self.model))),
            "data": str(self.data.resolve()),
            **self._teachers(),
        }

    def _teachers(self) -> dict[str, Any]:
        """Of which files the teachers are, if there are any: a run that resumes must hear the same ones."""
        names = self.recipe.distill.teachers
        return {TEACHER_FILES: {each: hashes_of_files(model_folder(each)) for each in names}} if names else {}


def finetuning_folder(out: Path) -> RunFolder:
    """The folder of a fine-tuning run; its result is the last thing that it writes."""
    return RunFolder(out, ASSIGNMENT, RESULT)


def check_same_run(assignment: Assignment) -> None:
    """Raise if the folder holds a run with another assignment, or something that is no run.

    A finished run that is to have more epochs is the same one.
    """
    folder = finetuning_folder(assignment.out)
    folder.check_no_unknown_files()
    if folder.begun:
        known = read_json(folder.config, remedy="give --out a new folder")
        _check_same_assignment(known, with_begun_micro_tokens(assignment))


def lengthens_a_run(assignment: Assignment) -> bool:
    """Whether the run in the folder, which was checked, has ended with fewer epochs."""
    folder = finetuning_folder(assignment.out)
    if not folder.begun:
        return False
    known = read_json(folder.config, remedy="give --out a new folder")
    return bool(known["recipe"][EPOCHS] != assignment.recipe.run.epochs)


def with_begun_micro_tokens(assignment: Assignment) -> Assignment:
    """Where it is left to us, a pass has as many tokens as when the run began: others would round, and drop,
    other values."""
    folder, run = finetuning_folder(assignment.out), assignment.recipe.run
    if run.micro_tokens != "auto" or not folder.begun:
        return assignment
    known = read_json(folder.config, remedy="give --out a new folder").get("recipe", {})
    begun_with = known.get("run.micro_tokens")
    return with_micro_tokens(assignment, begun_with) if isinstance(begun_with, int) else assignment


def with_micro_tokens(assignment: Assignment, micro_tokens: int) -> Assignment:
    """The same with so many tokens in a pass."""
    run = assignment.recipe.run.model_copy(update={"micro_tokens": micro_tokens})
    return replace(assignment, recipe=assignment.recipe.model_copy(update={"run": run}))


def check_same_examples(folder: RunFolder, hashes: Mapping[str, str]) -> None:
    """Raise if the folder holds a run that read other examples, by the hash of each split."""
    if folder.begun:
        begun_with = read_json(folder.config, remedy="give --out a new folder").get(EXAMPLES, {})
        if changed := [name for name in hashes | begun_with if hashes.get(name) != begun_with.get(name)]:
            what = f"holds a run on other examples: the data have changed since ({', '.join(changed)})"
            remedy = "give --out a new folder, or take the change back"
            raise UserError(what, where=str(folder.path), remedy=remedy)


def hashes_of(splits: Mapping[str, Sequence[Example]]) -> dict[str, str]:
    """A hash of each split's examples, wherever in a file they stand."""
    return {name: _hash_of_examples(examples) for name, examples in splits.items()}


def write_assignment(folder: RunFolder, assignment: Assignment, hashes: Mapping[str, str]) -> None:
    """Write down what the run is asked to do; with this file the run has begun."""
    folder.remove_partial_files()
    write_json(folder.config, {**assignment.to_json(), EXAMPLES: hashes})


def recipe_toml(recipe: FinetuningRecipe) -> str:
    """The recipe as complete TOML."""
    return toml_text(recipe.model_dump())


def _check_same_assignment(known: dict[str, Any], assignment: Assignment) -> None:
    before = {key: value for key, value in known.items() if key != EXAMPLES}
    found = differences(before, assignment.to_json())
    changed = [change for change in found if change.key.removeprefix("recipe.") not in FREE_KEYS]
    only_epochs = [change.key for change in changed] == [f"recipe.{EPOCHS}"]
    if only_epochs and _can_be_lengthened(assignment, before["recipe"][EPOCHS]):
        return
    if changed:
        listed = "; ".join(map(_described, changed[:MAX_DIFFERENCES]))
        more = len(changed) - MAX_DIFFERENCES
        listed += f"; and {more} more" if more > 0 else ""
        remedy = "give --out a new folder, or take the change back"
        if only_epochs and not finetuning_folder(assignment.out).finished:
            remedy += (
                ": the epochs decide the learning rates from the first step on; a run can be lengthened once "
                "it is finished"
            )
        elif only_epochs:
            remedy += (
                ": a finished run without run.minutes can be lengthened where its last state was kept "
                "(run.keep_state); to train "
                f"its model further, start from it: --model {assignment.out} --out NEW --epochs MORE"
            )
        raise UserError(f"holds another run: {listed}", where=str(assignment.out), remedy=remedy)


def _can_be_lengthened(assignment: Assignment, epochs: float) -> bool:
    """Whether the run in the folder has ended after fewer epochs, and its last state is there."""
    checkpoints = finetuning_folder(assignment.out).checkpoints
    steps = saved_steps(checkpoints)
    if not steps or assignment.recipe.run.epochs <= epochs or assignment.recipe.run.minutes != "off":
        return False
    # Only looked at: whether it is whole is checked once the folder is locked.
    state = read_json(step_folder(checkpoints, steps[-1]) / STATE, remedy="give --out a new folder")
    return bool(state["scalars"].get(ENDED_AFTER) == epochs)


def _described(change: Difference) -> str:
    if change.key.startswith(f"{MODEL_FILES}."):
        return f"{change.key.removeprefix(f'{MODEL_FILES}.')} of the model has changed since"
    return str(replace(change, key=change.key.removeprefix("recipe.")))


def hashes_of_files(model: Path) -> dict[str, str]:
    """A hash of each file of a model folder that decides what the model computes."""
    patterns = ("config.json", *WEIGHT_FILES, *TOKENIZER_FILES, *ADAPTER_FILES, MIX_FILE)
    files = sorted({file for pattern in patterns for file in model.glob(pattern)})
    return {file.name: _hash_of_file(file, file.stat().st_size, file.stat().st_mtime_ns) for file in files}


@cache
def _hash_of_file(file: Path, _size: int, _changed: int) -> str:
    """The hash of a file; the runs of a study share their model, and it is read for the first one only."""
    return sha256_of(file)


def _hash_of_examples(examples: Sequence[Example]) -> str:
    digest = hashlib.sha256()
    for example in examples:
        # What is only kept at hand (tokens) is no part of what an example is.
        names = [field.name for field in fields(example) if field.compare and field.name != "where"]
        digest.update(repr([getattr(example, name) for name in names]).encode())
    return digest.hexdigest()
