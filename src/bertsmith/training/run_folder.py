"""The folder of a run: its places, how far a run in it is, the lock that keeps others out, and the card."""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith.core.errors import UserError
from bertsmith.core.files import lock_for_this_process, open_lock_file, remove_empty, sha256_of, write_text
from bertsmith.training.checkpoint_storage import newest_sound_step
from bertsmith.training.distributed import ALONE, World

LOCK = ".lock"
MANIFEST = "model.sha256"
"""What the files of the finished model are, as sha256sum writes and checks it."""
FOR_PEOPLE = {".md", ".png", ".jsonl"}
"""Endings of files in the model that nothing reads again: they may be changed."""
PARTIAL = ".partial"
"""How the names of files end that are being written (core/files.py)."""
Block = list[str]
"""Lines that stand together; a blank line comes before the next block."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The places in a run folder, and the files by which a job tells how far a run in it is."""

    path: Path
    config_file: str
    """Holds what the run was asked to do; it is there as soon as the run has begun."""
    result_file: str
    """The last thing that a run writes."""
    early_files: frozenset[str] = frozenset()
    """What a new run writes before its config: a start that was killed in between left these and no more."""
    caches: tuple[str, ...] = ()
    """Folders that are rebuilt the same where they are gone."""

    @property
    def checkpoints(self) -> Path:
        """Resumable states."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The finished model folder."""
        return self.path / "model"

    @property
    def config(self) -> Path:
        """What the run was asked to do."""
        return self.path / self.config_file

    @property
    def begun(self) -> bool:
        """Whether there is a run in it."""
        return self.config.is_file()

    @property
    def finished(self) -> bool:
        """Whether that run is finished."""
        return (self.path / self.result_file).is_file()

    def write_manifest(self) -> None:
        """Write down what the files of the finished model are."""
        files = (each for each in sorted(self.model.rglob("*")) if each.is_file())
        kept = (each for each in files if each.suffix not in FOR_PEOPLE)
        lines = (f"{sha256_of(each)}  {each.relative_to(self.path).as_posix()}\n" for each in kept)
        write_text(self.path / MANIFEST, "".join(lines))

    def damage(self) -> str:
        """The first file of the finished model that is not as the run wrote it, or nothing."""
        manifest = self.path / MANIFEST  # runs of earlier versions have none
        text = manifest.read_bytes().decode(errors="replace") if manifest.is_file() else ""
        for digest, name in re.findall(r"([0-9a-f]{64})  ([^\0\n]+)", text):
            if not (self.path / name).is_file() or sha256_of(self.path / name) != digest:
                return str(name)
        return ""

    def put_damaged_model_aside(self) -> str:
        """Let a finished run end again from its last state if its model is damaged; says so, or nothing.

        The damaged model is kept. Raises where no state is whole.
        """
        if not self.finished or not (name := self.damage()):
            return ""
        what = "is not as the run wrote it"
        if newest_sound_step(self.checkpoints) is None:
            remedy = "restore it from a copy, or remove the folder and run again: no saved state is there"
            raise UserError(what, where=str(self.path / name), remedy=remedy)
        aside = self.path / "model.damaged"
        shutil.rmtree(aside, ignore_errors=True)
        if self.model.exists():
            self.model.rename(aside)
        (self.path / self.result_file).unlink(missing_ok=True)
        said = f"the model is made again, and the damaged one kept as {aside.name}"
        return f"{self.path / name}: {what}; {said}"

    def ended_whole(self, world: World) -> bool:
        """Whether the run is finished and its model sound; all processes call it and hear the same."""
        sound = world.on_main(lambda: self.finished and not self.damage())
        return world.broadcast(float(bool(sound))) > 0

    def check_no_unknown_files(self) -> None:
        """Raise if there is no run and something that a killed start of one could not have left."""
        if self.begun or not self.path.exists():
            return
        known = {LOCK, *self.early_files, *self.caches}
        if self.path.is_dir() and all(
            file.name in known or file.name.endswith(PARTIAL) for file in self.path.iterdir()
        ):
            return
        remedy = "give --out a new folder, or that of a run to resume"
        raise UserError("holds files but no run", where=str(self.path), remedy=remedy)

    def remove_partial_files(self) -> None:
        """Remove what a process left that was killed while it wrote."""
        for leftover in self.path.glob(f".*{PARTIAL}"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    @contextmanager
    def locked(self, world: World = ALONE) -> Iterator[None]:
        """While it is open, no other process can run here; a run that does not begin leaves nothing."""
        lock = world.on_main(lambda: RunLock.take(self.path))
        try:
            yield
        finally:
            if lock is not None and self.begun:
                lock.release()
            elif lock is not None:
                for cache in self.caches:
                    shutil.rmtree(self.path / cache, ignore_errors=True)
                lock.release_and_remove()


@dataclass(frozen=True, slots=True)
class RunLock:
    """What keeps other processes out of a folder."""

    folder: Path
    handle: int
    made: Sequence[Path]
    """The folder and those above it that were missing."""

    @classmethod
    def take(cls, folder: Path) -> "RunLock":
        """Lock a folder, which is made where it is missing; raises if another process holds the lock."""
        made = [each for each in (folder, *folder.parents) if not each.exists()]
        handle = open_lock_file(folder / LOCK)
        try:
            lock_for_this_process(handle)
        except OSError as error:
            os.close(handle)
            held = isinstance(error, BlockingIOError | PermissionError)
            what = "another run is working here" if held else f"cannot be locked ({error.strerror})"
            remedy = "wait for it or stop it, or give --out another folder"
            raise UserError(what, where=str(folder), remedy=remedy) from error
        return cls(folder, handle, made)

    def release(self) -> None:
        """Let other processes in."""
        os.close(self.handle)

    def release_and_remove(self) -> None:
        """Let other processes in, and leave nothing of a run that was rejected before it began."""
        (self.folder / LOCK).unlink(missing_ok=True)
        remove_empty(self.made)
        os.close(self.handle)


# ---- the card of the finished model, as Markdown: what it is, how it was made, and with which results


def card_text(
    title: str, introduction: str, blocks: Sequence[Block], *, caveat: str, header: Mapping[str, Any]
) -> str:
    """A whole card: what hubs read, its title and introduction, facts and results, what to beware of."""
    # JSON is YAML too, and quotes what needs it.
    front = [
        "---",
        *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in header.items()),
        "---",
    ]
    whole = [front, [f"# {title}"], [introduction], *blocks, [caveat]]
    return "\n\n".join("\n".join(block) for block in whole) + "\n"


def usage_block(code: str) -> Block:
    """How the model is asked, from Python."""
    return [*_heading("Usage"), "", "```python", *code.splitlines(), "```"]


def facts_block(facts: Iterable[str], *, heading: str = "") -> Block:
    """Facts as a list."""
    return [*_heading(heading), *(f"- {fact}" for fact in facts)]


def table_block(columns: Sequence[str], rows: Iterable[Sequence[str]], *, heading: str = "") -> Block:
    """Results as a table."""
    header, *body = (f"| {' | '.join(cells)} |" for cells in (columns, *rows))
    return [*_heading(heading), header, "|---" * len(columns) + "|", *body]


def _heading(text: str) -> Block:
    return [f"## {text}"] if text else []
