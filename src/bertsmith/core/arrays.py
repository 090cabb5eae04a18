"""Array helpers: ranges of indices, safe opening of .npy files, and .npy files that grow."""

import math
import os
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from bertsmith.core.errors import UserError
from bertsmith.core.files import check_regular
from bertsmith.core.mapped_files import note_mapped

Numbers = NDArray[np.int64]


def ranges(first: NDArray[Any], count: NDArray[Any]) -> Numbers:
    """Return first, first + 1, ... for each first number and count, one range after the other."""
    # The offset to add to 0, 1, 2, ... is the same for a whole range.
    numbers: Numbers = np.repeat(first - (np.cumsum(count, dtype=np.int64) - count), count)
    numbers += np.arange(len(numbers))
    return numbers


def open_array(file: Path, *, remedy: str) -> NDArray[Any]:
    """Map the array of an .npy file into memory, read-only.

    Raise a UserError with this remedy if the file is damaged, and FileNotFoundError if it is missing.
    """
    check_regular(file, remedy=remedy)
    try:
        note_mapped(file)
        with warnings.catch_warnings(action="error"):  # numpy warns if it had to repair the header
            return npy.open_memmap(file, mode="r")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(file), remedy=remedy) from error
    except Exception as error:  # numpy parses a header as Python: tokenize.TokenError, SyntaxError, ...
        reason = getattr(error, "strerror", None) or str(error)[:100]
        raise UserError(f"is not a whole .npy file ({reason})", where=str(file), remedy=remedy) from error


class GrowingNpy:
    """An .npy file to which rows are appended; their number is written into its header at the end."""

    def __init__(self, path: Path, dtype: str, row_shape: tuple[int, ...] = (), *, rows: int = 0) -> None:
        """Open a new file or, if `rows` is not 0, an existing one, keeping its first `rows` rows."""
        self.rows = rows
        self._dtype, self._row_shape = np.dtype(dtype), row_shape
        self._file = path.open("r+b" if rows else "wb")
        self._write_header()
        self._data_start = self._file.tell()
        self._file.truncate(self._data_start + rows * self._dtype.itemsize * math.prod(row_shape))
        self._file.seek(0, os.SEEK_END)

    def append(self, rows: NDArray[Any]) -> None:
        """Append these rows."""
        assert rows.shape[1:] == self._row_shape
        self._file.write(np.ascontiguousarray(rows, self._dtype).data)
        self.rows += len(rows)

    def flush(self) -> None:
        """Return when all rows are on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Complete the file; no rows can be appended afterwards."""
        if not self._file.closed:
            self._file.seek(0)
            self._write_header()
            assert self._file.tell() == self._data_start
            self._file.close()

    def _write_header(self) -> None:
        # numpy pads a header, so that it can be overwritten in place with a larger number of rows.
        shape = (self.rows, *self._row_shape)
        header = {"descr": npy.dtype_to_descr(self._dtype), "fortran_order": False, "shape": shape}
        npy.write_array_header_1_0(self._file, header)

    def __enter__(self) -> "GrowingNpy":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
