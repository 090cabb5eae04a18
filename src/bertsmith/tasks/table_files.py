"""Write tables in the format of the file name: TSV, CSV, JSON lines, a JSON array or Parquet."""

import csv
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bertsmith.core.errors import UserError
from bertsmith.core.files import atomic_path

TableRows = Sequence[Mapping[str, Any]]
"""Cells by column name: text, numbers, lists of text; missing cells are empty."""


def write_table(target: Path, rows: TableRows) -> None:
    """Write the rows atomically, in the format of the name's suffix, one of `TABLE_WRITERS`."""
    with atomic_path(target) as temporary:
        TABLE_WRITERS[target.suffix.lower()](temporary, rows)


def _names(rows: TableRows) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _spelled(cell: Any) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.9g}"  # all digits of an fp32 number
    return " ".join(map(_spelled, cell)) if isinstance(cell, list) else str(cell)


def _write_tsv(path: Path, rows: TableRows) -> None:
    names = _names(rows)
    cells = [names, *([_spelled(row.get(name)) for name in names] for row in rows)]
    # Ids, labels and texts are the user's own: replace characters that would end a cell or a line by spaces.
    lines = ("\t".join(re.sub(r"[\t\r\n]", " ", cell) for cell in row) for row in cells)
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())


def _write_csv(path: Path, rows: TableRows) -> None:
    names = _names(rows)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([_spelled(row.get(name)) for name in names] for row in rows)


def _write_json_lines(path: Path, rows: TableRows) -> None:
    path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())


def _write_json(path: Path, rows: TableRows) -> None:
    path.write_bytes((json.dumps(list(rows), ensure_ascii=False, indent=1) + "\n").encode())


def _write_parquet(path: Path, rows: TableRows) -> None:
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError as error:
        remedy = "pip install 'bertsmith[data]', or write .csv"
        raise UserError("writing Parquet needs pyarrow", remedy=remedy) from error
    columns = {name: [row.get(name) for row in rows] for name in _names(rows)}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


TABLE_WRITERS: dict[str, Callable[[Path, TableRows], None]] = {
    ".tsv": _write_tsv,
    ".csv": _write_csv,
    ".jsonl": _write_json_lines,
    ".ndjson": _write_json_lines,
    ".json": _write_json,
    ".parquet": _write_parquet,
    ".pq": _write_parquet,
}
