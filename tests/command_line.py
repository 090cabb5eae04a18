"""The whole command line in this process, as a shell sees it."""

import sys
from dataclasses import dataclass
from functools import cache

import pytest
import typer.main

from bertsmith.cli.app import main

# Typer makes the commands of all verbs anew for each call, which takes ten times as long as many a call.
COMMAND_OF = cache(typer.main.get_command)


@dataclass(frozen=True)
class Told:
    """What a command printed, and how it ended."""

    code: int
    out: str
    err: str


def bertsmith(capsys: pytest.CaptureFixture[str], *words: object) -> Told:
    """Give a command; 0 is its code where it just ends."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bertsmith", *map(str, words)])
        patch.setattr(typer.main, "get_command", COMMAND_OF)
        try:
            main()
            code: object = 0
        except SystemExit as ended:
            code = ended.code
    printed = capsys.readouterr()
    return Told(code if isinstance(code, int) else 0, printed.out, printed.err)


def mistake(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What a command says of the user's mistake: one line, and the code 2."""
    told = bertsmith(capsys, *words)
    assert told.code == 2, told
    (line,) = [line for line in told.err.splitlines() if line.startswith("bertsmith: ")]
    assert told.err.strip() == line
    return line
