"""Writing files so that a half-written one cannot exist, and reading small JSON files with clear errors."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bertsmith.ground.errors import UserError


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """A temporary path beside the target that takes the target's name only if the block succeeds."""
    with _told_if_it_cannot_be_written(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            temporary.chmod(0o666 & ~_umask())  # mkstemp makes it private; a model folder is meant to be read
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(target: Path, *, replaces: Sequence[str] = ()) -> Iterator[Path]:
    """A temporary folder that becomes the target, or whose files move into it, only if the block succeeds.

    A target that exists loses the files of the patterns in `replaces` that were not written anew.
    """
    with _told_if_it_cannot_be_written(target):
        # Inside a target that exists: beside it, it may be another disk (a mount, a link) or read-only.
        place = target if target.is_dir() else target.parent
        place.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=place))
        try:
            yield temporary
            _open_to_readers(temporary)
            if target.is_dir():
                _move_into(target, temporary, replaces)
            else:
                temporary.rename(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _open_to_readers(folder: Path) -> None:
    """Undo the privacy of temporary files: a model folder is meant to be read."""
    folder.chmod(0o777 & ~_umask())
    for file in folder.iterdir():
        file.chmod(0o666 & ~_umask())


def _move_into(target: Path, fresh: Path, replaces: Sequence[str]) -> None:
    # The large files first: config.json must not speak of weights that did not arrive.
    files = sorted(fresh.iterdir(), key=lambda file: -file.stat().st_size)
    for file in files:
        file.replace(target / file.name)
    written = {file.name for file in files}
    for old in (file for pattern in replaces for file in target.glob(pattern)):
        if old.name not in written:
            old.unlink()


def write_text(target: Path, text: str) -> None:
    """Write a UTF-8 text file whole or not at all."""
    with atomic_path(target) as temporary:
        temporary.write_bytes(text.encode("utf-8"))


def write_json(target: Path, value: Any) -> None:
    """Write a value as readable JSON, whole or not at all."""
    write_text(target, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_text(source: Path, *, remedy: str) -> str:
    """The text of a UTF-8 file; the remedy is what to do if it is missing or not text."""
    try:
        # From bytes: a lone carriage return stays what it is. Some editors put a mark at the very start.
        return source.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(source), remedy=remedy) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"is not UTF-8 text (byte {error.start})", where=str(source), remedy=remedy
        ) from error


def read_json(source: Path, *, remedy: str) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        value = json.loads(read_text(source, remedy=remedy))
    except (
        ValueError,
        RecursionError,
    ) as error:  # not JSON, a number of thousands of digits, endless nesting
        raise UserError(f"is not valid JSON ({error})", where=str(source), remedy=remedy) from error
    if not isinstance(value, dict):
        raise UserError("holds no JSON object", where=str(source), remedy=remedy)
    return value


@contextmanager
def _told_if_it_cannot_be_written(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = "choose a place that can be written"
        raise UserError(f"cannot be written ({reason})", where=str(target), remedy=remedy) from error


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
