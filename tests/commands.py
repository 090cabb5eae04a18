"""`python -m bertsmith` in a process of its own, forked from one that has torch loaded already.

A fresh interpreter needs seconds to import torch; what a command does afterwards is the same. It may have no
processes of its own: one that is forked so is a daemon.
"""

import io
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import IO, Any

import torch

from tests.worlds import start


@dataclass(frozen=True)
class Command:
    """A command at work, with our ends of its standard streams."""

    process: Any
    stdin: IO[str]
    stdout: IO[str]
    stderr: IO[str]

    @property
    def returncode(self) -> int | None:
        """How it ended, or None while it works."""
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def wait(self, seconds: float = 60) -> int | None:
        """How it ended; None where it has not by then."""
        self.process.join(seconds)
        return self.returncode


@contextmanager
def commanded(*words: object, stdout: int | None = None, unbuffered: bool = False) -> Iterator[Command]:
    """Give a command, which writes to the file `stdout` where there is one; at the end it is no longer there.

    It is killed where it does not end by itself within a minute.
    """
    (in_there, in_here), (out_here, out_there), (err_here, err_there) = (os.pipe() for _ in range(3))
    if stdout is not None:
        os.dup2(stdout, out_there)
    theirs = [Connection(each) for each in (in_there, out_there, err_there)]
    environment = dict(os.environ)  # that of the process it is forked from is older
    process, conversation = start(_obey, [str(word) for word in words], theirs, environment, unbuffered)
    for each in (conversation, *theirs):
        each.close()
    with os.fdopen(in_here, "w") as ours, os.fdopen(out_here) as output, os.fdopen(err_here) as errors:
        command = Command(process, ours, output, errors)
        try:
            yield command
            command.wait()
        finally:
            process.kill()
            process.join()


def _obey(
    _: Connection,
    words: list[str],
    streams: list[Connection],
    environment: dict[str, str],
    unbuffered: bool,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin = os.fdopen(0, closefd=False)
    written = os.fdopen(1, "wb", 0 if unbuffered else -1, closefd=False)
    sys.stdout = io.TextIOWrapper(written, write_through=unbuffered)
    sys.stderr = os.fdopen(2, "w", 1, closefd=False)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # heard even if these tests do not hear it
    torch.set_num_threads(1)
    sys.argv = ["bertsmith", *words]
    code: object = 0
    try:
        runpy.run_module("bertsmith", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    try:  # as an interpreter does at its end, with this code where it cannot
        sys.stdout.flush()
    except OSError:
        traceback.print_exc()
        code = 120
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    sys.exit(code)
