"""The whole command line in this process, as a shell sees it."""

import sys
from dataclasses import dataclass

import pytest

from bertsmith.cli.app import main


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
