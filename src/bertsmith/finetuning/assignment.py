"""The assignment of a fine-tuning run: written into its folder, and compared before the run resumes there."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from bertsmith.core.files import read_json, sha256_of, write_json
from bertsmith.inference.adapter_folder import ADAPTER_FILES
from bertsmith.inference.finetuned_folder import MIX_FILE
from bertsmith.inference.model_path import model_folder
from bertsmith.model.folder.sentence_modules import transformer_folder
from bertsmith.model.folder.tensor_files import WEIGHT_FILES
from bertsmith.recipe.finetuning_schema import FinetuningRecipe, SparseSection
from bertsmith.recipe.idle_keys import FINETUNING_KEYS, free_at_resume
from bertsmith.recipe.load import Difference, leaves
from bertsmith.recipe.toml_text import toml_text
from bertsmith.tasks.example_types import Example
from bertsmith.tasks.task import Task
from bertsmith.text.tokenizer_files import TOKENIZER_FILES
from bertsmith.training.checkpoint_storage import STATE, saved_steps, step_folder
from bertsmith.training.run_folder import OTHER_RUN, RunFolder

ASSIGNMENT = "assignment.json"
RESULT = "result.json"
EPOCHS, FREE_KEYS = "run.epochs", free_at_resume(FINETUNING_KEYS)
"""More epochs lengthen a finished run; keys that do not affect what is learned may change at any time."""
ENDED_AFTER = "ended_after"
"""Key in a saved state: the epochs of the run that ended with this state."""
MODEL_FILES, TEACHER_FILES, EXAMPLES = "model_files", "teacher_files", "examples"
"""Keys of the assignment that contain hashes: of the initial model's files, the teachers' files and the
examples that were read."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The task, recipe, model, data and folder of a run."""

    task: Task
    recipe: FinetuningRecipe
    model: Path
    data: Path
    out: Path
    skip_bad: bool = False
    reason: str = ""
    """Reason for the settings that were chosen to suit the model and the data; empty if none were."""

    def to_json(self) -> dict[str, Any]:
        """Return what must be equal in the folder for a run to resume, except the examples."""
        return {
            "recipe": leaves(self.recipe.model_dump(mode="json")),
            "custom": dict(self.task.custom),
            "model": str(self.model.resolve()),
            MODEL_FILES: hashes_of_files(transformer_folder(model_folder(self.model))),
            "data": str(self.data.resolve()),
            **self._teachers(),
        }

    def _teachers(self) -> dict[str, Any]:
        """Return hashes of the teachers' files, if any: a resumed run must use the same teachers."""
        names = self.recipe.distill.teachers
        return {TEACHER_FILES: {each: hashes_of_files(model_folder(each)) for each in names}} if names else {}


def finetuning_folder(out: Path) -> RunFolder:
    """Return the folder of a fine-tuning run, which is finished once the result file is written."""
    return RunFolder(out, ASSIGNMENT, RESULT)


def check_same_run(assignment: Assignment) -> None:
    """Raise if the folder contains a run with another assignment, or files that do not belong to a run.

    A finished run that is given more epochs counts as the same run.
    """
    folder = finetuning_folder(assignment.out)

    def remedy(changed: Sequence[Difference]) -> str:
        if [each.key for each in changed] != [EPOCHS]:
            return OTHER_RUN
        if _can_be_lengthened(assignment, changed[0].before):
            return ""
        if not folder.finished:
            return (
                f"{OTHER_RUN}: the epochs decide the learning rates from the first step on; a run can be "
                "lengthened when it is finished"
            )
        return (
            f"{OTHER_RUN}: a finished run without run.minutes can be lengthened where its last state was "
            f"kept (run.keep_state); to continue, start from its model: `model={assignment.out}` "
            "`out=NEW` `run.epochs=MORE`"
        )

    folder.check_same_run(with_begun_micro_tokens(assignment).to_json(), free=FREE_KEYS, remedy=remedy)


def lengthens_a_run(assignment: Assignment) -> bool:
    """True if the run in the folder has other epochs; call `check_same_run` first: they can only be fewer."""
    folder = finetuning_folder(assignment.out)
    if not folder.begun:
        return False
    known = read_json(folder.config, remedy="give `out` a new folder")
    return bool(known["recipe"][EPOCHS] != assignment.recipe.run.epochs)


def with_begun_micro_tokens(assignment: Assignment) -> Assignment:
    """Return the assignment with the micro_tokens that the run began with, if they are "auto".

    With another number, rounding and dropout would differ.
    """
    folder, run = finetuning_folder(assignment.out), assignment.recipe.run
    if run.micro_tokens != "auto" or not folder.begun:
        return assignment
    known = read_json(folder.config, remedy="give `out` a new folder").get("recipe", {})
    begun_with = known.get("run.micro_tokens")
    return with_micro_tokens(assignment, begun_with) if isinstance(begun_with, int) else assignment


def with_micro_tokens(assignment: Assignment, micro_tokens: int) -> Assignment:
    """Return the assignment with this number of tokens in a forward pass."""
    run = assignment.recipe.run.model_copy(update={"micro_tokens": micro_tokens})
    return replace(assignment, recipe=assignment.recipe.model_copy(update={"run": run}))


def hashes_of(splits: Mapping[str, Sequence[Example]]) -> dict[str, str]:
    """Return a hash of each split's examples; their positions in the file do not count."""
    return {name: _hash_of_examples(examples) for name, examples in splits.items()}


def write_assignment(folder: RunFolder, assignment: Assignment, hashes: Mapping[str, str]) -> None:
    """Write the assignment file, which marks the run as begun."""
    folder.remove_partial_files()
    write_json(folder.config, {**assignment.to_json(), EXAMPLES: hashes})


def recipe_toml(recipe: FinetuningRecipe) -> str:
    """Return the recipe as complete TOML."""
    return toml_text(recipe.model_dump())


def _can_be_lengthened(assignment: Assignment, epochs: float) -> bool:
    """True if the run in the folder has ended after fewer epochs and its last state was kept."""
    checkpoints = finetuning_folder(assignment.out).checkpoints
    steps, recipe = saved_steps(checkpoints), assignment.recipe
    follows_steps = recipe.run.minutes == "off" and recipe.sparse == SparseSection()
    if not steps or recipe.run.epochs <= epochs or not follows_steps:
        return False
    # Its checksum is verified later, when the folder is locked.
    state = read_json(step_folder(checkpoints, steps[-1]) / STATE, remedy="give `out` a new folder")
    return bool(state["scalars"].get(ENDED_AFTER) == epochs)


def hashes_of_files(model: Path) -> dict[str, str]:
    """Return a hash of each file of a model folder that affects what the model computes."""
    patterns = ("config.json", *WEIGHT_FILES, *TOKENIZER_FILES, *ADAPTER_FILES, MIX_FILE)
    files = sorted({file for pattern in patterns for file in model.glob(pattern)})
    return {file.name: _hash_of_file(file, file.stat().st_size, file.stat().st_mtime_ns) for file in files}


@cache
def _hash_of_file(file: Path, _size: int, _changed: int) -> str:
    """Return the hash of a file, cached because the runs of a study share their model."""
    return sha256_of(file)


def _hash_of_examples(examples: Sequence[Example]) -> str:
    digest = hashlib.sha256()
    for example in examples:
        # Cached fields (tokens) are not part of an example's identity.
        names = [field.name for field in fields(example) if field.compare and field.name != "where"]
        digest.update(repr([getattr(example, name) for name in names]).encode())
    return digest.hexdigest()
