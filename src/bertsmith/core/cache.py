"""Cache of expensive results in ~/.cache/bertsmith; if it is full, the oldest files are removed.

An array file ends with the SHA-256 of its contents, which numpy does not read: a file that was changed or
cut off is never used.
"""

import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from numpy.typing import NDArray

from bertsmith.core.arrays import open_array
from bertsmith.core.errors import UserError
from bertsmith.core.files import ABANDONED_SECONDS, atomic_path, is_in_use

Kind = Literal["encodings", "features", "teacher-scores", "blimp"]
LIMIT, DEFAULT_LIMIT = "BERTSMITH_CACHE_GB", 20.0
_DIGEST_BYTES, _CHUNK = hashlib.sha256().digest_size, 1 << 20
_used: set[Path] = set()
"""Files that this process read or wrote, and may still have mapped into memory."""

log = logging.getLogger("bertsmith")


class CachedFile(NamedTuple):
    """A file of the cache."""

    used: float
    """Time of the last reading or writing, in seconds since 1970."""
    bytes: int
    kind: str
    path: Path


def cache_root() -> Path:
    """Return the cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bertsmith"


def cache_folder(kind: Kind) -> Path:
    """Return the folder for this kind; raise if the limit of the cache is not valid."""
    size_limit()
    return cache_root() / kind


def cached_array(file: Path) -> NDArray[Any] | None:
    """Map a cached array into memory; return None if it is missing or damaged."""
    try:
        if _is_whole(file):
            array = open_array(file, remedy="remove it")
            mark_used(file)
            return array
        log.warning("%s: is damaged; it is rebuilt", file)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("%s: cannot be read (%s); it is rebuilt", file, error)
    return None


@contextmanager
def caching_array(file: Path) -> Iterator[Path]:
    """Yield a path to write an .npy file to; at the end, append its digest and move it to `file`."""
    with atomic_path(file) as temporary:
        yield temporary
        with temporary.open("r+b") as written:
            digest = hashlib.file_digest(written, "sha256").digest()
            written.write(digest)  # the position is the end of the file
    make_room_after(file)


def mark_used(file: Path) -> None:
    """Mark a file as used now; this process never removes it to make room."""
    with suppress(OSError):  # the cache may be read-only
        os.utime(file)
    _used.add(file)


def make_room_after(written: Path) -> None:
    """Remove the oldest files if the cache is above its limit, except files that this process uses."""
    mark_used(written)
    files, limit = cached_files(), size_limit()
    total = sum(each.bytes for each in files)
    for each in files:
        if total > limit and each.path not in _used and remove(each):
            total -= each.bytes


def cached_files() -> list[CachedFile]:
    """List the cached files, the oldest first; remove half-written files of killed processes."""
    found = []
    for kind in get_args(Kind):
        for folder, _, names in os.walk(cache_folder(kind)):
            for path in (Path(folder, name) for name in names):
                with suppress(OSError):  # another process may have removed it
                    if not path.name.endswith(".partial"):
                        found.append(CachedFile(path.stat().st_mtime, path.stat().st_size, kind, path))
                    elif time.time() - path.stat().st_mtime > ABANDONED_SECONDS and is_in_use(path) is False:
                        path.unlink()
    return sorted(found)


def size_limit() -> float:
    """Return the size limit of the cache in bytes; raise if the variable for it is not valid."""
    given = os.environ.get(LIMIT, "") or str(DEFAULT_LIMIT)
    try:
        gigabytes = float(given)
        if not gigabytes >= 0:
            raise ValueError
    except ValueError as error:
        remedy = "give a number of gigabytes, for example 20, or inf"
        raise UserError(f"{given!r} is not a valid size", where=LIMIT, remedy=remedy) from error
    return gigabytes * 1e9


def remove(cached: CachedFile) -> bool:
    """Remove a file; return False if that is not possible."""
    try:
        cached.path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _is_whole(file: Path) -> bool:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        rest = os.fstat(opened.fileno()).st_size - _DIGEST_BYTES
        while rest > 0 and (chunk := opened.read(min(rest, _CHUNK))):
            digest.update(chunk)
            rest -= len(chunk)
        return opened.read() == digest.digest()
