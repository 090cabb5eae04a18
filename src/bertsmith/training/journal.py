"""The journal of a run: metrics.jsonl, TensorBoard events, and the versions of code and libraries.

Each line is a JSON object with a step and a kind. NaN and infinity are written as null, which every JSON
reader supports. When a run resumes, lines after the step of its saved state are removed.
"""

import hashlib
import json
import logging
import math
import platform
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self

import torch

from bertsmith.core.errors import UserError
from bertsmith.core.files import atomic_path, write_json, write_text
from bertsmith.core.version import VERSION
from bertsmith.training.distributed import World

METRICS_FILE = "metrics.jsonl"
PACKAGE = Path(__file__).parent.parent
SOURCE_SUFFIXES = {".py", ".toml", ".html", ".css", ".js"}
Kind = Literal["train", "held-out", "event"]

log = logging.getLogger("bertsmith")


class Journal:
    """The files of metrics and events that one process writes, line by line."""

    def __init__(self, metrics: BinaryIO, board: Any) -> None:
        self.metrics, self.board = metrics, board

    @classmethod
    def open(cls, folder: Path, *, resume_step: int) -> Self:
        """Open the journal of a run folder and remove lines after the resumed step; 0 begins a new one."""
        path = folder / METRICS_FILE
        _cut_back(path, resume_step)
        with _reporting_write_errors(path):
            metrics = path.open("ab")
            # TensorBoard hides the events from this step on that an earlier start has written.
            return cls(metrics, _open_board(folder / "tensorboard", resume_step + 1 if resume_step else 0))

    def write(self, kind: Kind, step: int, values: Mapping[str, float | int | str]) -> None:
        """Append one line; once this returns, killing the process does not lose it."""
        assert not {"step", "kind"} & values.keys(), "step and kind are separate arguments"
        # JSON does not have NaN and infinity; every reader supports null.
        nan = {
            name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)
        }
        plain = {name: None if name in nan else value for name, value in values.items()}
        entry = {"step": step, "kind": kind} | plain
        with _reporting_write_errors(Path(self.metrics.name)):
            self.metrics.write(json.dumps(entry, ensure_ascii=False, allow_nan=False).encode() + b"\n")
            self.metrics.flush()
            if self.board is not None:
                for name, value in values.items():
                    if not isinstance(value, str):
                        self.board.add_scalar(f"{name}/{kind}", value, step)

    def close(self) -> None:
        """Finish both files."""
        # Closing tries again to write what could not be written before.
        with _reporting_write_errors(Path(self.metrics.name)):
            self.metrics.close()
            if self.board is not None:
                self.board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RunJournal:
    """The journal of a run of any number of processes: the main one writes; if it fails, all end."""

    def __init__(self, folder: Path, world: World, *, resume_step: int) -> None:
        self.world = world
        self.journal = world.on_main(lambda: Journal.open(folder, resume_step=resume_step))

    def write(self, kind: Kind, step: int, values: Mapping[str, float | int | str]) -> None:
        """Append one line; every process must call it."""
        journal = self.journal
        self.world.on_main(lambda: journal.write(kind, step, values) if journal is not None else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.journal is not None:
            self.journal.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return every line of a run's journal, in order, without an incomplete last line."""
    return [entry for _, entry in _entries(folder / METRICS_FILE)]


def write_versions(folder: Path) -> None:
    """Write versions.json and source.sha256: the libraries, the machine and the code behind a run."""
    versions = {
        "bertsmith": VERSION,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numpy", "tokenizers")},
        "cuda": torch.version.cuda or "none",
        **machine(),
    }
    write_json(folder / "versions.json", versions)
    write_text(folder / "source.sha256", package_hash() + "\n")


def machine() -> dict[str, str | int]:
    """Return the machine that runs this process: system, GPUs or processor, and threads."""
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "platform": platform.platform(),
        "device": ", ".join(gpus) or platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
    }


@cache
def package_hash() -> str:
    """Return the hash of this process's code, read once: later changes on disk do not affect the process."""
    return source_hash(PACKAGE)


def source_hash(root: Path) -> str:
    """Return one hash over the names and contents of a package's source files."""
    files = {file.relative_to(root).as_posix(): file for file in root.rglob("*")}
    digest = hashlib.sha256()
    for name in sorted(name for name, file in files.items() if file.suffix in SOURCE_SUFFIXES):
        content = files[name].read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _cut_back(path: Path, resume_step: int) -> None:
    """Keep the lines up to a step; 0 keeps nothing, because a new run writes its step 0 itself."""
    kept = [line for line, entry in _entries(path) if resume_step and entry["step"] <= resume_step]
    content = b"".join(line + b"\n" for line in kept)
    # Written anew and renamed, so that a full disk cannot destroy it.
    if not path.exists() or path.read_bytes() != content:
        with atomic_path(path) as temporary:
            temporary.write_bytes(content)


def _entries(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Return each line with its object; drop an incomplete last line, which a killed process left."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    entries = [(line, _parsed(line)) for line in lines]
    if entries and not entries[-1][1]:
        entries.pop()
    for number, (_, entry) in enumerate(entries, start=1):
        if not entry:
            remedy = "restore or remove the line"
            raise UserError("is not a line of a journal", where=f"{path}:{number}", remedy=remedy)
    return entries


def _parsed(line: bytes) -> dict[str, Any]:
    """Return the object on a line, or an empty one if the line is not an object with a step."""
    with suppress(ValueError, RecursionError):
        entry = json.loads(line)
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            return entry
    return {}


def _open_board(folder: Path, purge_step: int) -> Any:
    """Return a writer of TensorBoard events, or None if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        log.warning("TensorBoard events are not written: pip install bertsmith[track]")
        return None
    _hide_errors_of_boards()
    return SummaryWriter(log_dir=str(folder), purge_step=purge_step)


@cache
def _hide_errors_of_boards() -> None:
    """Suppress tracebacks of TensorBoard's thread: its error is raised and reported at the next write."""
    print_traceback = threading.excepthook

    def hook(error: threading.ExceptHookArgs) -> None:
        if type(error.thread).__name__ != "_AsyncWriterThread":
            print_traceback(error)

    threading.excepthook = hook


@contextmanager
def _reporting_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what, remedy = f"cannot be written ({error.strerror})", "free disk space or choose another `out`"
        raise UserError(what, where=str(path), remedy=remedy) from error
