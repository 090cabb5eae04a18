"""Files: atomic writing, reading of plain and compressed files with clear errors, and locks.

The system releases a lock when its process ends in any way, so a lock is never stale.
"""

import bz2
import errno
import fcntl
import gzip
import hashlib
import io
import json
import lzma
import math
import os
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from bertsmith.core.errors import UserError

ABANDONED_SECONDS = 60.0
"""Minimum age of an abandoned file or folder: the writer of a younger one may not have locked it yet."""
_COMPRESSED_STARTS = {
    rb"\x1f\x8b": ".gz",
    rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": ".bz2",  # the three letters alone could begin a text
    rb"\xfd7zXZ\x00": ".xz",
    rb"\x28\xb5\x2f\xfd": ".zst",
}


@contextmanager
def reporting_missing_homes(given: Path | str) -> Iterator[None]:
    """Report a ~name without a home folder (Path.expanduser raises RuntimeError) as a user error."""
    try:
        yield
    except RuntimeError as error:
        if "home directory" not in str(error):
            raise
        remedy = "check the name after the ~, or write the path in full"
        raise UserError("this home folder does not exist", where=str(given), remedy=remedy) from error


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary path next to the target, which replaces the target only if the block succeeds."""
    temporary = _partial(target, target.parent)
    # Next to the target, and so on the same disk: only there is a rename atomic.
    with reporting_write_errors(target, hidden=temporary), made_folder(target.parent):
        try:
            temporary.touch(mode=0o600, exist_ok=False)  # private until it is complete
            with marked_in_use(temporary):
                yield temporary
            temporary.chmod(0o666 & ~_umask())  # other users should be able to read a model folder
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(target: Path, *, replaces: Sequence[str] = ()) -> Iterator[Path]:
    """Yield a temporary folder that becomes the target, or is moved into it, only if the block succeeds.

    In an existing target, files that match `replaces` and were not written again are removed. All files are
    on the disk before the target gets its name. A new target must still be missing or empty at that time.
    """
    with reporting_write_errors(target):
        # Inside an existing target: its parent may be on another disk (a mount, a link) or read-only.
        _remove_leftovers(target, abandoned=time.time() - ABANDONED_SECONDS)
        parent, was_empty = target if target.is_dir() else target.parent, _is_empty(target)
    temporary = _partial(target, parent)
    with reporting_write_errors(target, hidden=temporary), made_folder(parent):
        try:
            temporary.mkdir(mode=0o700)  # private until it is complete
            # The mark ends with this process in any case: `check_not_taken` removes folders without one.
            with marked_in_use(temporary):
                yield temporary
            temporary.chmod(0o777 & ~_umask())
            for file in temporary.rglob("*"):
                file.chmod((0o777 if file.is_dir() else 0o666) & ~_umask())
                reach_the_disk(file)
            reach_the_disk(temporary)
            if was_empty and not _is_empty(target):
                what, remedy = "was written by another process meanwhile", "choose another name"
                raise UserError(what, where=str(target), remedy=remedy)
            if target.is_dir():
                _move_into(target, temporary, replaces)
                reach_the_disk(target)
            else:
                temporary.rename(target)
                reach_the_disk(parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Create a folder and its parents; at the end, remove those new ones that are empty."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        remove_empty(missing)


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove the empty folders among these, deepest first."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def reach_the_disk(path: Path) -> None:
    """Flush a file or a folder's list of names to the disk, so that it survives a power cut (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_empty(folder: Path) -> bool:
    """True if a folder is missing, or contains only files that are still being written."""
    return not folder.is_dir() or all(each.name.endswith(".partial") for each in folder.iterdir())


def _partial(target: Path, parent: Path) -> Path:
    """Return a temporary name, chosen before the file exists, so that a stop cannot leave it behind."""
    return parent / f".{target.name}.{secrets.token_hex(4)}.partial"


@contextmanager
def new_folder(target: Path, *, key: str = "out") -> Iterator[Path]:
    """Yield an atomic folder; raise if the target exists or another process is writing it."""
    check_not_taken(target, key=key)
    with atomic_folder(target) as fresh:
        yield fresh


def check_not_taken(folder: Path, *, key: str = "out") -> None:
    """Raise if the path of a new folder is in use; remove what killed programs left of it."""
    with reporting_write_errors(folder):
        if _remove_leftovers(folder):
            remedy = f"wait for it, or choose another `{key}`"
            raise UserError("is being written by another process", where=str(folder), remedy=remedy)
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            remedy = f"choose another `{key}`, or remove it first"
            raise UserError("already exists", where=str(folder), remedy=remedy)


def _remove_leftovers(target: Path, *, abandoned: float = math.inf) -> bool:
    """Remove leftovers of killed programs from before this time; return True if a program is writing now."""
    name = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.partial")
    found = []
    # `atomic_folder` creates its temporary folder in one of these two.
    for parent in [each for each in (target, target.parent) if each.is_dir()]:
        for path in [each for each in parent.iterdir() if name.fullmatch(each.name) and each.is_dir()]:
            with suppress(FileNotFoundError):  # its writer has just finished
                found.append(is_in_use(path))
                if found[-1] is False and path.stat().st_mtime < abandoned:
                    shutil.rmtree(path, ignore_errors=True)
    return True in found


def _move_into(target: Path, fresh: Path, replaces: Sequence[str]) -> None:
    """Move files into an existing folder, and remove other files there that match `replaces`."""
    # The large files first: config.json must not describe weights that were not moved.
    files = [path for path in fresh.rglob("*") if path.is_file()]
    written = set()
    for file in sorted(files, key=lambda file: -file.stat().st_size):
        place = target / file.relative_to(fresh)
        place.parent.mkdir(exist_ok=True)
        file.replace(place)
        written.add(place)
    for old in (file for pattern in replaces for file in target.glob(pattern)):
        if old not in written:
            old.unlink()


def write_text(target: Path, text: str) -> None:
    """Write a UTF-8 text file atomically."""
    with atomic_path(target) as temporary:
        temporary.write_bytes(text.encode("utf-8"))


def write_json(target: Path, value: Any) -> None:
    """Write a value as indented JSON, atomically."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    # A lone surrogate, from a file name that is not UTF-8, is written as JSON's \\udcff.
    write_text(target, text.encode("utf-8", "backslashreplace").decode())


def read_text(source: Path, *, remedy: str) -> str:
    """Read a UTF-8 text file; the remedy is for a file that is missing or not text."""
    try:
        # From bytes, to keep lone carriage returns. Some editors write a byte-order mark at the start.
        return source.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(source), remedy=remedy) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"is not UTF-8 text (byte {error.start})", where=str(source), remedy=remedy
        ) from error


def check_regular(source: Path, *, remedy: str) -> None:
    """Raise if the source is a pipe or a device, which reading might never finish or never start."""
    if source.exists() and not source.is_file() and not source.is_dir():
        raise UserError("is a pipe or a device, not a file", where=str(source), remedy=remedy)


def read_json(source: Path, *, remedy: str) -> dict[str, Any]:
    """Read the object in a JSON file."""
    check_regular(source, remedy=remedy)
    try:
        value = json.loads(read_text(source, remedy=remedy))
    except (ValueError, RecursionError) as error:
        # Not JSON, a number of thousands of digits, or endless nesting.
        raise UserError(f"is not valid JSON ({error})", where=str(source), remedy=remedy) from error
    if not isinstance(value, dict):
        raise UserError("is not a JSON object", where=str(source), remedy=remedy)
    return value


def open_text_bytes(path: Path) -> BinaryIO:
    """Open a file's bytes, unpacked if it is named .gz, .bz2, .xz or .zst; reading errors name the file."""
    opener = _OPENERS.get(path.suffix.lower(), _open_plain)
    try:
        if opener is not _open_plain and path.is_file() and path.stat().st_size == 0:
            raise EOFError("it is empty")
        stream = opener(path)
    except _READING_ERRORS as error:
        raise _unreadable(path, error) from error
    return io.BufferedReader(_NamedReading(path, stream), 1 << 17)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from error


def compression_of(start: bytes) -> str:
    """Return the suffix for a compressed file with these first bytes, or "" if it is not compressed."""
    return next((suffix for magic, suffix in _COMPRESSED_STARTS.items() if re.match(magic, start)), "")


class _NamedReading(io.RawIOBase):
    """A stream that names the file in reading errors."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self._path, self._stream = path, stream

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def readinto(self, buffer: Any) -> int:
        try:
            # Return the bytes that have arrived, without filling the buffer: a pipe's writer may be slow.
            one_read = getattr(self._stream, "readinto1", cast(io.BufferedIOBase, self._stream).readinto)
            return int(one_read(buffer))
        except _READING_ERRORS as error:
            raise _unreadable(self._path, error) from error

    def close(self) -> None:
        self._stream.close()
        super().close()


class _ChunkReading(io.RawIOBase):
    """A stream of the chunks that an iterator makes from a file."""

    def __init__(self, file: BinaryIO, chunks: Iterator[bytes]) -> None:
        self._file, self._chunks = file, chunks
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._ready = memoryview(chunk)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _open_zstd(path: Path) -> BinaryIO:
    try:
        import zstandard
    except ImportError as error:
        remedy = "pip install 'bertsmith[data]'"
        raise UserError("reading .zst needs zstandard", where=str(path), remedy=remedy) from error
    # As large a window as `zstd --long=31` uses; the library refuses such files by default.
    unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    file = path.open("rb")
    return cast(BinaryIO, _ChunkReading(file, _zstd_chunks(file, unpacker, zstandard.ZstdError)))


def _zstd_chunks(file: BinaryIO, unpacker: Any, zstd_error: type[Exception]) -> Iterator[bytes]:
    # The library's stream ends without an error if a file was cut off, so frames are tracked here.
    frame = None
    packed = file.read(_ZSTD_READ_BYTES)
    while packed:
        frame = frame or unpacker.decompressobj()
        try:
            yield frame.decompress(packed[:_ZSTD_STEP_BYTES])
        except zstd_error as error:
            raise OSError(str(error)) from error
        # Another frame may follow, as in the output of `cat a.zst b.zst`.
        rest = packed[_ZSTD_STEP_BYTES:]
        packed, frame = (frame.unused_data + rest, None) if frame.eof else (rest, frame)
        packed = packed or file.read(_ZSTD_READ_BYTES)
    if frame is not None:
        raise EOFError("it ends in the middle")


def _open_plain(path: Path) -> BinaryIO:
    file = path.open("rb")
    if suffix := compression_of(file.peek(16)):
        file.close()
        remedy = f"give it a name that ends in {suffix}"
        raise UserError("is compressed, but its name has another suffix", where=str(path), remedy=remedy)
    return file


def _unreadable(path: Path, error: BaseException) -> UserError:
    if isinstance(error, OSError) and error.strerror:
        what = f"cannot be read ({error.strerror})"
        return UserError(what, where=str(path), remedy="check its name and permissions")
    remedy = "download or compress it again, or correct its suffix"
    return UserError(f"is not a whole {path.suffix} file ({error})", where=str(path), remedy=remedy)


_ZSTD_READ_BYTES = 1 << 14
_ZSTD_STEP_BYTES = 1 << 10  # packed; four bytes may unpack to 128 KiB, which are returned at once
_READING_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)
_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.GzipFile,
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _open_zstd,
}
COMPRESSED_SUFFIXES = tuple(_OPENERS)


@contextmanager
def reporting_write_errors(target: Path, *, hidden: Path | None = None) -> Iterator[None]:
    """Report failures to write the target as user errors; errors about other files pass unchanged.

    An error about a file in `hidden`, the temporary path of the target, is reported with the target's name.
    """
    try:
        yield
    except UserError as error:
        if hidden is None or not error.where.startswith(str(hidden)):
            raise
        raise replace(error, where=str(target) + error.where.removeprefix(str(hidden))) from error
    except OSError as error:
        if not _is_about(error, target):
            raise
        reason = error.strerror or str(error)
        remedy = "choose a writable place"
        raise UserError(f"cannot be written ({reason})", where=str(target), remedy=remedy) from error


def _is_about(error: OSError, target: Path) -> bool:
    """True if a disk is full or failing, or the error names the target, a parent folder or a partial file."""
    if not isinstance(error.filename, str | bytes | os.PathLike):
        return error.errno in _NAMELESS_DISK_ERRORS
    named, place = Path(os.fsdecode(error.filename)).absolute(), target.absolute()
    is_partial = str(named).startswith(str(place.parent / f".{place.name}."))
    return is_partial or named.is_relative_to(place) or place.is_relative_to(named)


_NAMELESS_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS, errno.ESTALE}


def _umask() -> int:
    current = os.umask(0)  # reading it requires setting another
    os.umask(current)
    return current


# ---- locks


def open_lock_file(file: Path) -> int:
    """Open an empty file to be locked, with its folder if missing; closing the handle unlocks it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return os.open(file, os.O_CREAT | os.O_RDWR)
    except OSError as error:
        what, remedy = f"cannot be written ({error.strerror})", "choose a writable place"
        raise UserError(what, where=str(file.parent), remedy=remedy) from error


def lock_for_this_process(handle: int) -> None:
    """Lock without waiting; raise OSError if another process holds the lock or the disk has no locks."""
    # Unlike flock's, this lock is not inherited by forked processes: batch-building workers may outlive a
    # killed run by seconds, and running the same command again must not fail because of them.
    fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock while inside; wait if another process holds it."""
    handle = open_lock_file(file)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def marked_in_use(path: Path) -> Iterator[None]:
    """Inside, make `is_in_use` true for the file or folder in every process."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every disk supports locks
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def is_in_use(path: Path) -> bool | None:
    """True if a process has marked a file or folder; None if this disk does not support locks."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(handle)
    return False


def lone_surrogate(text: str) -> str | None:
    """Return a message with the offset of a text's first lone surrogate, or None.

    JSON and Python strings can contain half of a surrogate pair, but UTF-8 files cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} is a lone surrogate ({text[error.start]!a})"
    return None
