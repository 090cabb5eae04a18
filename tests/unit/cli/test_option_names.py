"""Words of the command line: what stands behind two dashes, and completion by the tab key."""

import os
import subprocess
import sys
from pathlib import Path

import bertsmith as package
from tests.command_line import bertsmith

SOURCE = str(Path(package.__file__).parents[1])


def test_what_stands_behind_two_dashes_is_no_option(capsys):
    told = bertsmith(capsys, "answer", "--passage-text", "tea", "--", "--text")
    assert told.code == 0 and "tea" in told.out  # and not: give exactly one passage


def test_verbs_are_completed_by_the_tab_key():
    variables = {"_BERTSMITH_COMPLETE": "complete_bash", "COMP_WORDS": "bertsmith c", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "bertsmith"],
        env={**os.environ, **variables, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
    )
    assert set(done.stdout.split()) == {
        "cache",
        "checkpoint",
        "choose",
        "classify",
        "compare",
        "corpus",
        "cost",
    }, done.stderr
