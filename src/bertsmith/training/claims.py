"""A run folder as one process's own: two runs must not write into one place."""

import fcntl
import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bertsmith.ground.errors import UserError

LOCK = ".lock"
PARTIAL = ".partial"
"""How the names of files end that are being written (ground/files.py)."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What keeps other processes out of a folder."""

    folder: Path
    handle: int
    made_folder: bool


def claim(folder: Path) -> Claim:
    """Make the folder this process's own, until `let_go` or `withdraw`; another process's is refused."""
    made_folder = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR)
    except OSError as error:
        what, remedy = f"cannot be written ({error.strerror})", "choose a place that can be written"
        raise UserError(what, where=str(folder), remedy=remedy) from error
    try:
        # Unlike flock's, this lock is not inherited by the processes that build batches: they may live on for
        # seconds after a run was killed, and the same command given again must not fail for that.
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        held = isinstance(error, BlockingIOError | PermissionError)
        what = "another run is working here" if held else f"cannot be locked ({error.strerror})"
        remedy = "wait for it or stop it, or give --out another folder"
        raise UserError(what, where=str(folder), remedy=remedy) from error
    return Claim(folder, handle, made_folder)


def let_go(held: Claim) -> None:
    """Let others in."""
    os.close(held.handle)


def withdraw(held: Claim) -> None:
    """Let others in, and leave nothing of a run that was refused before it began."""
    (held.folder / LOCK).unlink(missing_ok=True)
    if held.made_folder:
        with suppress(OSError):  # somebody else may have put something there
            held.folder.rmdir()
    os.close(held.handle)


def refuse_strangers(folder: Path, own_files: Collection[str]) -> None:
    """Complain if something stands there that a start of a run, ended at any point, could not have left."""
    if folder.exists() and _holds_strangers(folder, {LOCK, *own_files}):
        remedy = "give --out a new folder, or that of a run to go on with"
        raise UserError("holds files but no run", where=str(folder), remedy=remedy)


def remove_partials(folder: Path) -> None:
    """Remove what a process left that was killed while it wrote."""
    for remains in folder.glob(f".*{PARTIAL}"):
        shutil.rmtree(remains) if remains.is_dir() else remains.unlink()


def _holds_strangers(folder: Path, own_files: Collection[str]) -> bool:
    if not folder.is_dir():
        return True
    return any(file.name not in own_files and not file.name.endswith(PARTIAL) for file in folder.iterdir())
