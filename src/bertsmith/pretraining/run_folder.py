"""The folder of a run: what it was asked to do, with what, and whether it may go on."""

import fcntl
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bertsmith.corpus.store import TokenStore
from bertsmith.ground.errors import UserError
from bertsmith.ground.files import read_json, write_json, write_text
from bertsmith.recipe.load import differences, load_recipe, recipe_text
from bertsmith.recipe.schema import Recipe
from bertsmith.training.journal import write_versions

RECIPE = "recipe.toml"
STORE = "store.json"
PARTIAL = ".partial"
"""How the names of files end that are being written (ground/files.py)."""
LOCK = ".lock"
OWN_FILES = {LOCK, "plans", STORE, "versions.json", "source.sha256"}
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
    elif path.exists() and _holds_strangers(path):
        remedy = "give --out a new folder, or that of a run to go on with"
        raise UserError("holds files but no run", where=str(path), remedy=remedy)


@dataclass(frozen=True, slots=True)
class Claim:
    """What keeps other processes out of a run folder."""

    handle: int
    made_folder: bool


def claim_folder(folder: RunFolder) -> Claim:
    """Make the folder this process's own until `give_up_folder`; after `refuse_other_run`."""
    made_folder = not folder.path.exists()
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder.path / LOCK, os.O_CREAT | os.O_RDWR)
    except OSError as error:
        what, remedy = f"cannot be written ({error.strerror})", "choose a place that can be written"
        raise UserError(what, where=str(folder.path), remedy=remedy) from error
    try:
        # Unlike flock's, this lock is not inherited by the processes that build batches: they may live on for
        # seconds after a run was killed, and the same command given again must not fail for that.
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        held = isinstance(error, BlockingIOError | PermissionError)
        what = "another run is working here" if held else f"cannot be locked ({error.strerror})"
        remedy = "wait for it or stop it, or give --out another folder"
        raise UserError(what, where=str(folder.path), remedy=remedy) from error
    return Claim(handle, made_folder)


def give_up_folder(folder: RunFolder, claim: Claim) -> None:
    """Let others in; of a run that was refused before it began, nothing stays."""
    if not (folder.path / RECIPE).is_file():
        shutil.rmtree(folder.plans, ignore_errors=True)
        (folder.path / LOCK).unlink(missing_ok=True)
        if claim.made_folder:
            with suppress(OSError):  # somebody else may have put something there
                folder.path.rmdir()
    os.close(claim.handle)


def open_run(folder: RunFolder, recipe: Recipe, store: TokenStore) -> None:
    """Start a run folder, or go on in one, after `refuse_other_run`."""
    path = folder.path
    for remains in path.glob(f".*{PARTIAL}"):  # of a start that was killed while it wrote
        shutil.rmtree(remains) if remains.is_dir() else remains.unlink()
    write_versions(path)
    write_json(path / STORE, {"hash": store.hash, "tokens": store.tokens})
    write_text(path / RECIPE, recipe_text(recipe))


def _holds_strangers(path: Path) -> bool:
    if not path.is_dir():
        return True
    return any(file.name not in OWN_FILES and not file.name.endswith(PARTIAL) for file in path.iterdir())


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
