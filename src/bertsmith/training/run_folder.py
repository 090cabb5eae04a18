"""The folder of a run: its files, the state of the run in it, its lock, and the model card."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertsmith.core.errors import UserError
from bertsmith.core.files import (
    lock_for_this_process,
    open_lock_file,
    read_json,
    remove_empty,
    sha256_of,
    write_text,
)
from bertsmith.recipe.load import Difference, differences
from bertsmith.training.checkpoint_storage import newest_sound_step
from bertsmith.training.distributed import ALONE, World

LOCK = ".lock"
MANIFEST = "model.sha256"
"""File with the checksums of the finished model's files, in the format of sha256sum."""
FOR_PEOPLE = {".md", ".png", ".jsonl"}
"""Endings of files in the model that no program reads again: users may change them."""
PARTIAL = ".partial"
"""Ending of the names of files that are being written (core/files.py)."""
MAX_DIFFERENCES = 6
OTHER_RUN = "give `out` a new folder, or undo the change"
Block = list[str]
"""Lines of one block of the card; blocks are separated by a blank line."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of a run folder; some of them show if its run has begun or is finished."""

    path: Path
    config_file: str
    """Name of the file with the run's settings, which exists as soon as the run has begun."""
    result_file: str
    """Name of the file that a run writes last."""
    early_files: frozenset[str] = frozenset()
    """Names of files that a new run writes before its config; a killed start may leave only these."""
    caches: tuple[str, ...] = ()
    """Names of folders that are rebuilt with the same contents if they are missing."""

    @property
    def checkpoints(self) -> Path:
        """Return the folder of resumable states."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """Return the folder of the finished model."""
        return self.path / "model"

    @property
    def config(self) -> Path:
        """Return the file with the run's settings."""
        return self.path / self.config_file

    @property
    def result(self) -> Path:
        """Return the file that a run writes last."""
        return self.path / self.result_file

    @property
    def begun(self) -> bool:
        """True if a run has begun in this folder."""
        return self.config.is_file()

    @property
    def finished(self) -> bool:
        """True if the run in this folder is finished."""
        return self.result.is_file()

    def write_manifest(self) -> None:
        """Write the checksums of the finished model's files."""
        files = (each for each in sorted(self.model.rglob("*")) if each.is_file())
        kept = (each for each in files if each.suffix not in FOR_PEOPLE)
        lines = (f"{sha256_of(each)}  {each.relative_to(self.path).as_posix()}\n" for each in kept)
        write_text(self.path / MANIFEST, "".join(lines))

    def damage(self) -> str:
        """Return the first file of the finished model that is missing or was changed, or ""."""
        manifest = self.path / MANIFEST  # missing in runs of earlier versions
        text = manifest.read_bytes().decode(errors="replace") if manifest.is_file() else ""
        for digest, name in re.findall(r"([0-9a-f]{64})  ([^\0\n]+)", text):
            if not (self.path / name).is_file() or sha256_of(self.path / name) != digest:
                return str(name)
        return ""

    def ended_whole(self, world: World) -> bool:
        """True, in every process, if the run is finished and its model sound; all must call it.

        Raises if the model is damaged and cannot be made again from a saved state.
        """

        def whole() -> bool:
            if not self.finished or not (name := self.damage()):
                return self.finished
            if newest_sound_step(self.checkpoints) is None:
                remedy = "restore it from a copy, or remove the folder and run again: there is no saved state"
                raise UserError(
                    "has changed since the run wrote it", where=str(self.path / name), remedy=remedy
                )
            return False

        return world.broadcast(float(bool(world.on_main(whole)))) > 0

    def put_damaged_model_aside(self) -> str:
        """Rename a finished run's damaged model, and return a message; "" if it is sound.

        Call it after reading everything that the new model is made from.
        """
        if not self.finished or not (name := self.damage()):
            return ""
        aside = self.path / "model.damaged"
        shutil.rmtree(aside, ignore_errors=True)
        if self.model.exists():
            self.model.rename(aside)
        for file in (self.result_file, MANIFEST):
            (self.path / file).unlink(missing_ok=True)
        said = f"the model is made again, and the damaged one kept as {aside.name}"
        return f"{self.path / name}: has changed since the run wrote it; {said}"

    def check_no_unknown_files(self) -> None:
        """Raise if the folder contains files that a killed start of a run cannot have left, but not a run."""
        if self.begun or not self.path.exists():
            return
        known = {LOCK, *self.early_files, *self.caches}
        if self.path.is_dir() and all(
            file.name in known or file.name.endswith(PARTIAL) for file in self.path.iterdir()
        ):
            return
        remedy = "give `out` a new folder, or the folder of a run to resume"
        raise UserError("contains files, but not a run", where=str(self.path), remedy=remedy)

    def check_same_run(
        self,
        asked: Mapping[str, Any],
        begun_with: Callable[[], Mapping[str, Any]] | None = None,
        *,
        free: Set[str] = frozenset(),
        remedy: Callable[[Sequence[Difference]], str] = lambda _: OTHER_RUN,
    ) -> None:
        """Raise if the folder contains a run with another request, or files of something else.

        Only the keys of `asked` are compared with what the run began with, which is its config file if this
        is JSON. `free` are keys of the recipe that may change. Without a remedy a change is allowed.
        """
        self.check_no_unknown_files()
        if not self.begun:
            return
        known = begun_with() if begun_with else read_json(self.config, remedy="give `out` a new folder")
        found = differences({key: known.get(key, {}) for key in asked}, asked)
        changed = [replace(each, key=each.key.removeprefix("recipe.")) for each in found]
        changed = [each for each in changed if each.key not in free]
        if changed and (told := remedy(changed)):
            more = len(changed) - MAX_DIFFERENCES
            listed = [*map(_told, changed[:MAX_DIFFERENCES]), *([f"and {more} more"] if more > 0 else [])]
            raise UserError(f"contains another run: {'; '.join(listed)}", where=str(self.path), remedy=told)

    def remove_partial_files(self) -> None:
        """Remove half-written files and folders of killed processes."""
        for leftover in self.path.glob(f".*{PARTIAL}"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    @contextmanager
    def locked(self, world: World = ALONE) -> Iterator[None]:
        """Lock the folder against other processes; if no run begins inside, remove the files made here."""
        missing = [each for each in (self.path, *self.path.parents) if not each.exists()]
        handle = world.on_main(lambda: _lock(self.path))
        try:
            yield
        finally:
            if handle is not None and not self.begun:
                for cache in self.caches:
                    shutil.rmtree(self.path / cache, ignore_errors=True)
                (self.path / LOCK).unlink(missing_ok=True)
                remove_empty(missing)
            if handle is not None:
                os.close(handle)


def _told(change: Difference) -> str:
    """Return a change in words, without hashes."""
    hashes = [each for each in (change.before, change.now) if each is not None]
    if not all(isinstance(each, str) and re.fullmatch("[0-9a-f]{64}", each) for each in hashes):
        return str(change)
    whose, _, file = change.key.partition(".")
    of = f"the {whose.removesuffix('_files')}"
    return f"{file} of {of} has changed since" if file else f"{of} has changed since"


def _lock(folder: Path) -> int:
    handle = open_lock_file(folder / LOCK)
    try:
        lock_for_this_process(handle)
    except OSError as error:
        os.close(handle)
        held = isinstance(error, BlockingIOError | PermissionError)
        what = "another run is using this folder" if held else f"cannot be locked ({error.strerror})"
        remedy = "wait for it or stop it, or give `out` another folder"
        raise UserError(what, where=str(folder), remedy=remedy) from error
    return handle


# ---- the card of the finished model, as Markdown: its description, its training and its results


def card_text(
    title: str, introduction: str, blocks: Sequence[Block], *, caveat: str, header: Mapping[str, Any]
) -> str:
    """Return a card: header for model hubs, title, introduction, blocks of facts and results, caveat."""
    # JSON is YAML too, and quotes what needs it.
    front = [
        "---",
        *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in header.items()),
        "---",
    ]
    whole = [front, [f"# {title}"], [introduction], *blocks, [caveat]]
    return "\n\n".join("\n".join(block) for block in whole) + "\n"


def usage_block(code: str) -> Block:
    """Return Python code that uses the model, as a block."""
    return [*_heading("Usage"), "", "```python", *code.splitlines(), "```"]


def facts_block(facts: Iterable[str], *, heading: str = "") -> Block:
    """Return facts as a list."""
    return [*_heading(heading), *(f"- {fact}" for fact in facts)]


def table_block(columns: Sequence[str], rows: Iterable[Sequence[str]], *, heading: str = "") -> Block:
    """Return results as a table."""
    header, *body = (f"| {' | '.join(cells)} |" for cells in (columns, *rows))
    return [*_heading(heading), header, "|---" * len(columns) + "|", *body]


def _heading(text: str) -> Block:
    return [f"## {text}"] if text else []
