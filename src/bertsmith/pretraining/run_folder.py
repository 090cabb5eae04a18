"""The folder of a run: what it was asked to do, with what, and whether it may go on."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from bertsmith.corpus.store import TokenStore
from bertsmith.ground.errors import UserError
from bertsmith.ground.files import read_json, write_json, write_text
from bertsmith.recipe.load import differences, load_recipe, recipe_text
from bertsmith.recipe.schema import Recipe
from bertsmith.training.claims import Claim, let_go, refuse_strangers, remove_partials, withdraw
from bertsmith.training.journal import write_versions

RECIPE = "recipe.toml"
STORE = "store.json"
OWN_FILES = {"plans", STORE, "versions.json", "source.sha256"}
"""What a new run writes before its recipe: a start that ended in between left these and no more."""
FREE_KEYS = {
    f"run.{key}"
    for key in (
        *("loader_workers", "log_every_steps", "evaluate_every_steps", "evaluation_sequences", "device"),
        *("save_every_steps", "save_every_minutes", "keep_last", "keep_at", "parallel"),
    )
}
"""What may change when a run goes on: none of these touches what is learned, beyond rounding."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The places in a run folder."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Resumable states."""
        return self.path / "checkpoints"

    @property
    def plans(self) -> Path:
        """Cached epoch indices; may be deleted, they are rebuilt the same."""
        return self.path / "plans"

    @property
    def model(self) -> Path:
        """The finished model folder."""
        return self.path / "model"

    @property
    def finished(self) -> bool:
        """Whether the model was written, which is the last thing a run does."""
        return (self.model / "config.json").is_file()


def refuse_other_run(folder: RunFolder, recipe: Recipe, store: TokenStore) -> None:
    """Complain if the folder holds a run with another recipe or store, or something that is no run."""
    path = folder.path
    if (path / RECIPE).is_file():
        _refuse_other_recipe(path / RECIPE, recipe)
        _refuse_other_store(path / STORE, store)
    else:
        refuse_strangers(path, OWN_FILES)


def give_up_folder(folder: RunFolder, claim: Claim) -> None:
    """Let others in; of a run that was refused before it began, nothing stays."""
    if (folder.path / RECIPE).is_file():
        let_go(claim)
    else:
        shutil.rmtree(folder.plans, ignore_errors=True)
        withdraw(claim)


def open_run(folder: RunFolder, recipe: Recipe, store: TokenStore) -> None:
    """Start a run folder, or go on in one, after `refuse_other_run`."""
    path = folder.path
    remove_partials(path)
    write_versions(path)
    write_json(path / STORE, {"hash": store.hash, "tokens": store.tokens})
    write_text(path / RECIPE, recipe_text(recipe))


def _refuse_other_recipe(file: Path, recipe: Recipe) -> None:
    changed = [line for line in differences(load_recipe(file), recipe) if line.split(":")[0] not in FREE_KEYS]
    if changed:
        what = f"the run there has another recipe: {'; '.join(changed)}"
        raise UserError(what, where=str(file), remedy="give --out a new folder, or take the change back")


def _refuse_other_store(file: Path, store: TokenStore) -> None:
    known = read_json(file, remedy="start the run anew in another folder")
    if known.get("hash") != store.hash:
        what = "the run there was started with another store"
        raise UserError(
            what, where=str(file), remedy=f"give --store the same folder as before, not {store.folder}"
        )
