"""Data of Python calls as files: data frames and lists as JSON lines, and errors in terms of Python."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertsmith.core.errors import Spelling, UserError, spelled
from bertsmith.core.files import write_text
from bertsmith.finetuning.assignment import ASSIGNMENT
from bertsmith.training.callbacks import ProgressCallback

Rows = list[dict[str, Any]]
_FILE_STEM = re.compile(r"[A-Za-z0-9_-]+")


class RowFiles:
    """Files of rows, with their names in the Python call."""

    def __init__(self, spelling: Spelling) -> None:
        self.spelling = spelling
        """Spelling of settings in the Python call."""
        self.names: dict[Path, str] = {}
        """Expression for each file of rows in the Python call."""
        self.written: list[Path] = []
        """Files written by this call, each before the folder that was created for it."""

    def path(self, data: Any, place: Path, name: str) -> Path:
        """Return the given path, or the path of a new file with these rows or new folder of splits."""
        if isinstance(data, str | Path):
            return Path(data).expanduser()
        if not (isinstance(data, Mapping) and data and _columns_in(data) is None):
            return self._write(place.with_name(f"{place.name}.jsonl"), _rows_of(data), name)
        for split in data:
            if not _FILE_STEM.fullmatch(str(split)):
                raise UserError(f"{split!r} is not a split", remedy='name them "train", "dev" and "test"')
        files = {place / f"{split}.jsonl": split for split in data}
        if stale := [each for each in sorted(place.glob("*")) if each not in files]:
            what = (
                f"is left from an earlier call, and would be read together with {', '.join(map(str, data))}"
            )
            raise UserError(what, where=str(stale[0]), remedy="pass another out, or remove it first")
        for file, split in files.items():
            self._write(file, _rows_of(data[split]), f'{name}["{split}"]')
        return place

    def _write(self, file: Path, rows: Rows, name: str) -> Path:
        self.names[file] = name
        lines = (json.dumps(row, ensure_ascii=False, default=_plain) for row in rows)
        text = "".join(f"{line}\n" for line in lines)
        if file.exists():
            # The rows of a run that is to resume, or a file of the user, which could not be restored.
            if not file.is_file() or file.read_bytes() != text.encode():
                del self.names[file]  # the error is about the file itself
                remedy = "pass another out, or remove it first"
                raise UserError("already exists and contains other rows", where=str(file), remedy=remedy)
            return file
        made = [] if file.parent.exists() else [file.parent]
        write_text(file, text)
        self.written = [file, *self.written, *made]
        return file

    def remove(self) -> None:
        """Remove the files and folders that this call created."""
        for path in self.written:
            if path.is_file():
                path.unlink()
            elif path.is_dir() and not any(path.iterdir()):
                path.rmdir()

    def in_python_words(self, text: str) -> str:
        """Return a message with arguments instead of options, and rows instead of lines of a file."""
        for file, name in self.names.items():
            for path in dict.fromkeys((str(file), str(file.resolve()))):
                text = re.sub(re.escape(path) + r":(\d+)", rf"row \1 of {name}", text)
                text = text.replace(path, name)
        return spelled(text, self.spelling)


@dataclass(frozen=True, slots=True)
class PythonCallback:
    """Shows the progress of a run, and its messages in terms of Python."""

    display: ProgressCallback
    rows: RowFiles

    def on_message(self, text: str) -> None:
        """Show a message, warnings included."""
        self.display.on_message(self.rows.in_python_words(text))

    def on_step(self, progress: float, values: dict[str, Any]) -> None:
        """Show a line of metrics."""
        self.display.on_step(progress, values)

    def on_progress(self, progress: float) -> None:
        """Show that a step is done."""
        self.display.on_progress(progress)

    def on_deadline(self, seconds: float, total: float) -> None:
        """Show the progress of a run with a time budget."""
        self.display.on_deadline(seconds, total)

    def on_signal(self, text: str) -> None:
        """Show a message from a signal handler."""
        self.display.on_signal(text)


@contextmanager
def python_words(rows: RowFiles) -> Iterator[None]:
    """Raise errors inside in terms of arguments and rows, not of options and files."""
    try:
        yield
    except UserError as error:
        error = error.spelled(rows.spelling)
        what, where, remedy = map(rows.in_python_words, (error.what, error.where, error.remedy))
        raise replace(error, what=what, where=where, remedy=remedy) from error


@contextmanager
def rows_beside(folder: Path, spelling: Spelling) -> Iterator[RowFiles]:
    """Yield files of rows that stay next to a run, and are removed if the run does not begin."""
    rows = RowFiles(spelling)
    try:
        with python_words(rows):
            yield rows
    except BaseException:
        if not any(folder.glob(ASSIGNMENT)) and not any(folder.glob(f"*/{ASSIGNMENT}")):
            rows.remove()
        raise


def _columns_in(data: Mapping[Any, Any]) -> Rows | None:
    """Return the rows of a dict of columns, or None for a dict of splits."""
    columns: dict[str, list[Any]] = {}
    for name, column in data.items():
        if (cells := _cells_of(column)) is None:
            return None
        columns[str(name)] = cells
    lengths = {name: len(cells) for name, cells in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise UserError(f"the columns of data differ in length: {listed}", remedy="give each row a cell")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _cells_of(column: Any) -> list[Any] | None:
    """Return the cells of a column, or None for rows, a frame or a path."""
    if (
        isinstance(column, str | Path | Mapping)
        or hasattr(column, "columns")
        or hasattr(column, "column_names")
    ):
        return None
    for method in ("tolist", "to_list", "to_pylist"):  # numpy, pandas; polars; Arrow
        if hasattr(column, method):
            column = getattr(column, method)()
            break
    if not isinstance(column, list | tuple) or any(isinstance(cell, Mapping) for cell in column):
        return None
    return list(column)


def _rows_of(data: Any) -> Rows:
    """Return rows as dicts; a frame is recognised by its methods, without importing its library."""
    for method in ("to_dicts", "to_pylist", "to_list"):  # polars; Arrow; datasets
        if hasattr(data, method):
            data = getattr(data, method)()
            break
    else:
        if hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas
            data = data.to_dict(orient="records")
    if isinstance(data, Mapping) and (columns := _columns_in(data)) is not None:
        data = columns
    if not isinstance(data, list | tuple) or not all(isinstance(row, Mapping) for row in data):
        what = f"data are {type(data).__name__}, not rows with named columns"
        raise UserError(what, remedy="pass a path, a data frame, a list of dicts or a dict of columns")
    if not data:
        raise UserError("data are empty", remedy="pass some rows")
    return [{str(name): cell for name, cell in row.items()} for row in data]


def _plain(cell: Any) -> Any:
    """Return a cell of numpy, or anything else, in a form for JSON."""
    return cell.tolist() if hasattr(cell, "tolist") else str(cell)
