"""File locks: the system releases them when a process ends, however it ends, so that none is ever stale."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bertsmith.core.errors import UserError


def open_lock_file(file: Path) -> int:
    """A handle of an empty file to be locked, made with its folder; closing it releases the lock."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return os.open(file, os.O_CREAT | os.O_RDWR)
    except OSError as error:
        what, remedy = f"cannot be written ({error.strerror})", "choose a place that can be written"
        raise UserError(what, where=str(file.parent), remedy=remedy) from error


def lock_for_this_process(handle: int) -> None:
    """Lock without waiting; an OSError where another process holds the lock, or the disk knows none."""
    # Unlike flock's, this lock is not inherited by forked processes: those that build batches may live on for
    # seconds after a run was killed, and the same command given again must not fail for that.
    fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """While it is open, this process alone holds the lock; others wait for it."""
    handle = open_lock_file(file)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def marked_in_use(folder: Path) -> Iterator[None]:
    """While it is open, `is_in_use` is true of the folder for every process."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every disk knows locks
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def is_in_use(folder: Path) -> bool:
    """Whether a process has marked the folder; also where this disk knows no locks and nobody can tell."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False
