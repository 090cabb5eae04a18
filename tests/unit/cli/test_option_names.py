"""One thing has one name on every verb; the names of before are understood and not shown; tabs complete."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import bertsmith as package
from bertsmith.cli.verb import OLD_NAMES
from tests.command_line import bertsmith, mistake

SOURCE = str(Path(package.__file__).parents[1])


@pytest.mark.parametrize("verb", OLD_NAMES)
def test_help_shows_the_new_name_alone(capsys, verb):
    told = bertsmith(capsys, verb, "--help").out
    for old, new in OLD_NAMES[verb].items():
        assert f"{new} " in told
        assert f"{old} " not in told


def test_old_names_do_what_the_new_ones_do(capsys, tmp_path):
    (tmp_path / "my.csv").write_text("a,b,c\n" + "".join(f"x{n},y{n},{n % 2}\n" for n in range(8)))
    words = ("inspect", tmp_path / "my.csv", "--text", "a", "--label", "c", "--dev-share", "0", "--json")
    new = bertsmith(capsys, *words, "--text2", "b")
    assert new.code == 0 and '"examples": 8' in new.out
    assert bertsmith(capsys, *words, "--second", "b").out == new.out
    assert bertsmith(capsys, *words, "--second=b").out == new.out
    assert bertsmith(capsys, "inspect", "--data", *words[1:], "--text2", "b").out == new.out


def test_a_file_has_one_place_on_the_line(capsys, tmp_path):
    for words in (
        ("embed", "a.txt", "--input", "b.txt", "--out", tmp_path / "v.npy"),
        ("inspect", "a.csv", "--data", "b.csv", "--text", "a", "--label", "b"),
        ("import-tf", "source", "out", "--out", "out"),
        ("import-tf", "source"),
    ):
        assert mistake(capsys, *words)


def test_what_stands_behind_two_dashes_is_no_option(capsys):
    told = bertsmith(capsys, "answer", "--passage-text", "tea", "--", "--text")
    assert told.code == 0 and "tea" in told.out  # and not: one passage is wanted


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
