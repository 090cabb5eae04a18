"""One event of a file system that fails or kills: Python imports this file when a process of a job starts.

`kill_and_resume.py --faults` sets the variable below: the folder that is watched, the number of the event
that fails (0: none), how, and the file that gets the number of all events at the end.
"""

import atexit
import errno
import os
import signal
import sys
from pathlib import Path

SETTING = "BERTSMITH_BENCH_FAULT"
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "os.link"}
"""The audit events that change a folder, beside those that open a file to write."""


def watch(folder: str, number: int, fault: str, told: str) -> None:
    """Count the events in a folder, and let one of them fail."""
    seen = 0
    # What is not finished has a hidden name beside it.
    places = (folder, str(Path(folder).with_name(f".{Path(folder).name}")))

    def happened(path: object) -> None:
        nonlocal seen
        if not isinstance(path, str | bytes) or not os.fsdecode(path).startswith(places):
            return
        seen += 1
        if seen == number and fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if seen == number:
            code = getattr(errno, fault)
            raise OSError(code, os.strerror(code), os.fsdecode(path))

    def heard(event: str, arguments: tuple[object, ...]) -> None:
        if event in CHANGES or event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES:
            happened(arguments[0])

    sync = os.fsync

    def fsync(handle: int) -> None:
        happened(str(Path(f"/proc/self/fd/{handle}").readlink()))
        sync(handle)

    os.fsync = fsync
    sys.addaudithook(heard)
    if not number:
        process = os.getpid()
        atexit.register(lambda: os.getpid() == process and Path(told).write_text(str(seen)))


if SETTING in os.environ:
    watched, event, kind, result = os.environ[SETTING].split("|")
    del os.environ[SETTING]  # the processes that this one starts do not fail as well
    watch(watched, int(event), kind, result)
