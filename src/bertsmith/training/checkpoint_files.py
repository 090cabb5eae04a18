"""Saved states as folders: complete or not there, checked before they are trusted, and never in the way.

A state is written into `.step-00001000.partial` and becomes `step-00001000` by one rename, after everything
in it has reached the disk. Folders whose names begin with a dot are remains of a run that was killed.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bertsmith.ground.errors import UserError
from bertsmith.ground.files import read_json, sha256_of

CHECKSUMS, STATE = "checksums.json", "state.json"
HASHING_THREADS = 4
log = logging.getLogger("bertsmith")


def step_folder(folder: Path, step: int) -> Path:
    """Where the state of a step is kept."""
    return folder / f"step-{step:08}"


def hidden(target: Path, purpose: str) -> Path:
    """The name that a state's folder has while it is not to be found."""
    return target.with_name(f".{target.name}.{purpose}")


def saved_steps(folder: Path) -> list[int]:
    """The steps whose states are there, oldest first."""
    names = (re.fullmatch(r"step-(\d{8,})", path.name) for path in folder.glob("step-*"))
    return sorted(int(name[1]) for name in names if name)


def write_durably(target: Path, pieces: Iterable[bytes | memoryview]) -> str:
    """Write a new file through to the disk; its sha256."""
    digest = hashlib.sha256()
    with target.open("xb") as file, ThreadPoolExecutor(max_workers=1) as beside:
        for piece in pieces:
            hashed = beside.submit(digest.update, piece)  # both let other threads run: one waits for the disk
            file.write(piece)
            hashed.result()
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def seal(partial: Path, state: dict[str, Any], checksums: dict[str, str]) -> None:
    """Add what makes a folder of tensors a state, and give it its name."""
    _refuse_missing_shares(partial, checksums)
    target = partial.with_name(partial.name.removeprefix(".").removesuffix(".partial"))
    checksums = checksums | {STATE: write_durably(partial / STATE, [_as_json(state)])}
    write_durably(partial / CHECKSUMS, [_as_json(dict(sorted(checksums.items())))])
    _reach_the_disk(partial)
    replaced = hidden(target, "replaced")
    if target.exists():  # the same step again, after the run went back to an earlier state
        target.rename(replaced)
    partial.rename(target)
    _reach_the_disk(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def tidy(folder: Path) -> None:
    """Remove what a killed run left behind, and take back a state that it had put aside for its successor."""
    for replaced in folder.glob(".step-*.replaced"):
        target = replaced.with_name(replaced.name.removeprefix(".").removesuffix(".replaced"))
        if not target.exists():
            replaced.rename(target)
    for remains in folder.glob(".step-*"):
        shutil.rmtree(remains)


def newest_sound_step(folder: Path) -> int | None:
    """The newest step whose state is whole; damaged ones that are newer are reported and put aside."""
    for step in reversed(saved_steps(folder)):
        target = step_folder(folder, step)
        damage = _damage(target)
        if not damage:
            return step
        aside = target.with_name(f"{target.name}.damaged")
        log.error("%s: is damaged (%s); kept aside as %s", target, damage, aside.name)
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    return None


def _damage(target: Path) -> str:
    """What is wrong with a state's files, or nothing."""
    try:
        return _difference(target, read_json(target / CHECKSUMS, remedy=""))
    except UserError as error:
        if isinstance(error.__cause__, PermissionError):  # not the state's fault
            raise
        return f"{Path(error.where).name}: {error.what}"


def _difference(target: Path, checksums: dict[str, Any]) -> str:
    """The first file that is not as the checksums say, or nothing."""
    present = {file.name for file in target.iterdir()} - {CHECKSUMS}
    if present != set(checksums):
        return f"{sorted(present ^ set(checksums))[0]}: {CHECKSUMS} and the folder disagree about it"
    names = sorted(checksums)
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        found = threads.map(sha256_of, (target / name for name in names))
        wrong = [name for name, digest in zip(names, found, strict=True) if digest != checksums[name]]
    return f"{wrong[0]}: its contents do not match its checksum" if wrong else ""


def _refuse_missing_shares(partial: Path, names: Iterable[str]) -> None:
    missing = [name for name in names if not (partial / name).exists()]
    if missing:
        what = f"{missing[0]}, which another process wrote, cannot be seen from the main one"
        remedy = "choose a place for the run that all its machines share"
        raise UserError(what, where=str(partial.parent), remedy=remedy)


def _as_json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _reach_the_disk(folder: Path) -> None:
    """Make the names in a folder as durable as the files behind them."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
