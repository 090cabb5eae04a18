"""Memory-mapped files: if one is cut off while it is read, the process ends with a one-line error.

The system reports it as SIGBUS, at any access. Python's own signal handlers run too late for it.
"""

import ctypes
import os
import signal
from pathlib import Path

from bertsmith.core.errors import UserError

_SIZES: dict[Path, int] = {}
"""Size in bytes of each mapped file when it was mapped."""
_OWNER = os.getpid()


def note_mapped(file: Path) -> None:
    """Remember the size of a file that is about to be mapped, and handle SIGBUS from now on."""
    _SIZES[file] = file.stat().st_size
    handle_bus_errors()


def handle_bus_errors() -> None:
    """Handle SIGBUS in this process. A worker of torch calls it again, because torch replaces the handler."""
    ctypes.CDLL(None).signal(signal.SIGBUS, _HANDLER)


def cut_off() -> UserError | None:
    """Return an error that names the first mapped file that became shorter, or None."""
    for file, size in _SIZES.items():
        if file.is_file() and (now := file.stat().st_size) < size:
            what = f"was cut off while it was read: it has {now} bytes instead of {size}"
            return UserError(what, where=str(file), remedy="restore it, then run the command again")
    return None


def _ended_by_bus_error(_number: int) -> None:
    # The thread was stopped during a memory copy, without a lock; it cannot continue.
    error = cut_off() or UserError("a mapped file cannot be read (bus error)", remedy="check the disk")
    if os.getpid() == _OWNER:  # the parent of a worker reports its end
        os.write(2, f"bertsmith: {error.line()}\n".encode())
    os._exit(2)


_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)(_ended_by_bus_error)
