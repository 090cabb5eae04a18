"""On what device and in what precision a model is asked, and what becomes of a reader who leaves early."""

import json
import os
import re
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from bertsmith.cli.app import main
from bertsmith.inference.loaded_model import PRECISIONS
from tests.command_line import bertsmith, mistake
from tests.commands import commanded
from tests.toy_folder import write_toy_folder
from tests.untrained_heads import numbered_labels, untrained

WORDS = {
    "fill": ("a [MASK]",),
    "next": ("a cat", "a dog"),
    "answer": ("who?", "--passage-text", "a cat"),
    "classify": ("a cat",),
    "tag": ("a cat",),
    "compare": ("a cat", "a dog"),
    "embed": ("--input", "texts.txt", "--out", "vectors.npy"),
}
CLOSED_PIPE = 141


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("folders")
    write_toy_folder(place / "plain")
    untrained(place / "classes", {"classify": 3}, **numbered_labels("bad", "fair", "good"))
    return place


# ---- where


@pytest.mark.parametrize("verb", WORDS)
def test_every_verb_asks_on_the_device_that_is_named(verb, folders, capsys):
    told = mistake(capsys, verb, *WORDS[verb], "--model", folders / "plain", "--device", "abacus")
    assert "cannot use the device 'abacus'" in told


def test_what_torch_says_of_a_device_is_cut_between_words(folders, capsys):
    told = mistake(capsys, "fill", "a [MASK]", "--model", folders / "plain", "--device", "gpu")
    reason = re.search(r"cannot use the device 'gpu' \((.*) \.\.\.\); choose auto or cpu, or cuda", told)[1]
    with pytest.raises(RuntimeError) as whole:
        torch.empty(0, device="gpu")
    assert str(whole.value).startswith(f"{reason} ")


@pytest.mark.parametrize("verb", [*WORDS, "serve"])
def test_every_verb_tells_which_precisions_there_are(verb, folders, capsys):
    model = f"m={folders / 'plain'}" if verb == "serve" else folders / "plain"
    port = ("--port", "0") if verb == "serve" else ()
    told = mistake(capsys, verb, *WORDS.get(verb, port), "--model", model, "--precision", "fp3")
    assert f"unknown precision 'fp3'; choose one of {', '.join(PRECISIONS)}" in told


def test_the_precision_that_is_named_is_the_one_that_answers(folders, capsys, monkeypatch):
    monkeypatch.setattr("bertsmith.inference.precision.has_bf16_products", lambda: True)
    words = ("next", "a cat runs in the rain", "my dog", "--model", folders / "plain", "--device", "cpu")
    found = {
        precision: json.loads(bertsmith(capsys, *words, "--json", "--precision", precision).out)
        for precision in ("fp32", "bf16")
    }
    assert json.loads(bertsmith(capsys, *words, "--json").out) in found.values()
    shares = [found[precision]["probability"] for precision in found]
    assert shares[0] != shares[1]
    assert shares[0] == pytest.approx(shares[1], abs=0.02)


# ---- an output that takes nothing


@pytest.mark.parametrize(
    ("form", "unbuffered"),
    [((), False), (("--json",), False), (("--json",), True), (("--json", "--top", "2000"), False)],
)
def test_a_full_disk_behind_the_standard_output_is_reported_in_one_line(form, unbuffered, folders):
    words = ("fill", "a [MASK]", *form, "--model", folders / "plain")
    with (
        Path("/dev/full").open("wb") as full,
        commanded(*words, stdout=full.fileno(), unbuffered=unbuffered) as asked,
    ):
        assert asked.stderr.read() == (
            "bertsmith: standard output: cannot be written (No space left on device); "
            "free disk space, or choose another output\n"
        )
    assert asked.returncode == 2


def test_the_standard_output_is_itself_again_after_a_command(folders, capsys):
    before = sys.stdout
    bertsmith(capsys, "fill", "a [MASK]", "--model", folders / "plain")
    assert sys.stdout is before


# ---- a reader who leaves


@contextmanager
def nobody_reading():
    """A standard output whose reader has left."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as unread, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", unread)
        patch.setattr(sys, "stderr", sys.stderr)  # the end of a command wraps both
        yield
        # What the stream still holds can go nowhere: it shall be closed without a complaint.
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), writing)


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_reader_who_leaves_ends_the_command_as_other_tools(form, folders, monkeypatch):
    words = ("fill", "a [MASK]", "--model", str(folders / "plain"))
    monkeypatch.setattr(sys, "argv", ["bertsmith", *words, *form])
    with nobody_reading(), pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == CLOSED_PIPE


def test_lines_for_a_reader_of_one_line_leave_no_word_behind(folders, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("my dog runs in the cold rain\n" * 5000)  # more lines than any pipe holds
    with commanded("classify", "--input", texts, "--model", folders / "classes") as asked:
        assert asked.stdout.readline().endswith("\tmy dog runs in the cold rain\n")
        asked.stdout.close()
        assert asked.stderr.read() == ""
    assert asked.returncode == CLOSED_PIPE
