import errno
import json
import logging
import math
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.core.errors import UserError
from bertsmith.training.journal import PACKAGE, Journal, read_metrics, source_hash, write_versions


def write_run(folder, *, first, last, resume_step=0, loss=1.0):
    """A start of a run that journals some steps."""
    with Journal.open(folder, resume_step=resume_step) as journal:
        for step in range(first, last + 1):
            journal.write("train", step, {"loss": loss})


def steps_and_losses(folder):
    return [(entry["step"], entry["loss"]) for entry in read_metrics(folder)]


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    journal = Journal.open(tmp_path, resume_step=0)
    journal.write("held-out", 5, {"token_loss": 2.5, "note": "größer"})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 5, "kind": "held-out", "token_loss": 2.5, "note": "größer"
    }  # fmt: skip
    journal.close()


def test_a_resumed_run_forgets_what_lies_past_its_state(tmp_path):
    write_run(tmp_path, first=1, last=6)
    write_run(tmp_path, first=5, last=7, resume_step=4, loss=2.0)
    assert steps_and_losses(tmp_path) == [
        (1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0), (6, 2.0), (7, 2.0)
    ]  # fmt: skip


def test_the_lines_that_stay_are_not_touched(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(
        b'{"step":1,  "kind":"train"}\n{"step": 2, "kind": "train"}\n{"step": 3, "kind": "train"}\n'
    )
    Journal.open(tmp_path, resume_step=2).close()
    assert file.read_bytes() == b'{"step":1,  "kind":"train"}\n{"step": 2, "kind": "train"}\n'
    assert [each.name for each in tmp_path.glob(".*")] == []


def test_a_run_that_begins_anew_has_an_empty_journal(tmp_path):
    write_run(tmp_path, first=0, last=3)
    write_run(tmp_path, first=0, last=0, loss=2.0)
    assert steps_and_losses(tmp_path) == [(0, 2.0)]


@given(st.integers(0, 200))
def test_a_journal_torn_anywhere_keeps_its_whole_lines(kept):
    lines = [json.dumps({"step": step, "kind": "train", "note": "größer"}).encode() for step in range(1, 4)]
    content = b"\n".join(lines)[:kept]
    whole = sum(len(b"\n".join(lines[:count])) <= kept for count in range(1, 4))
    with TemporaryDirectory() as folder:
        (Path(folder) / "metrics.jsonl").write_bytes(content)
        assert [entry["step"] for entry in read_metrics(Path(folder))] == list(range(1, whole + 1))


@pytest.mark.parametrize(
    "torn", [b'{"step": 4, "ki', b'{"step": 4, "kind": "train", "note": "\xc3', b"\x00\x00"]
)
def test_a_torn_last_line_is_mended(torn, tmp_path):
    write_run(tmp_path, first=1, last=3)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    assert len(read_metrics(tmp_path)) == 3
    write_run(tmp_path, first=4, last=4, resume_step=3)
    assert [step for step, _ in steps_and_losses(tmp_path)] == [1, 2, 3, 4]


def test_a_last_line_that_lacks_only_its_end_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "kind": "train", "loss": 1.0}')
    write_run(tmp_path, first=2, last=2, resume_step=1)
    assert steps_and_losses(tmp_path) == [(1, 1.0), (2, 1.0)]


@pytest.mark.parametrize("line", ["{", "[]", '{"kind": "train"}', ""])
def test_a_broken_line_in_the_middle_is_reported_by_its_number(line, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: is not a line of a journal; restore or remove"):
        Journal.open(tmp_path, resume_step=2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_null(value, tmp_path):
    with Journal.open(tmp_path, resume_step=0) as journal:
        journal.write("train", 1, {"loss": value})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "kind": "train", "loss": null}\n'


def test_a_place_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        Journal.open(tmp_path / "file", resume_step=0)


def test_tensorboard_shows_the_numbers_without_what_a_resume_undid(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_run(tmp_path, first=1, last=6)
    write_run(tmp_path, first=5, last=5, resume_step=4, loss=2.0)
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss/train")] == [
        (1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0)
    ]  # fmt: skip


def test_without_tensorboard_the_journal_is_written_and_says_what_is_missing(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with caplog.at_level(logging.WARNING, logger="bertsmith"):
        write_run(tmp_path, first=1, last=2)
    assert len(read_metrics(tmp_path)) == 2
    assert [record.message.count("bertsmith[track]") for record in caplog.records] == [1]


def test_a_run_says_with_what_it_was_made(tmp_path):
    write_versions(tmp_path)
    versions = json.loads((tmp_path / "versions.json").read_text())
    assert {"bertsmith", "python", "torch", "numpy", "tokenizers", "device", "threads"} <= versions.keys()
    assert all(versions.values())
    assert (tmp_path / "source.sha256").read_text() == source_hash(PACKAGE) + "\n"


def test_the_source_hash_changes_with_a_file_and_ignores_what_python_compiles(tmp_path):
    package = tmp_path / "package"
    (package / "room").mkdir(parents=True)
    (package / "room" / "one.py").write_text("1")
    before = source_hash(package)
    (package / "room" / "one.pyc").write_text("compiled")
    assert source_hash(package) == before
    (package / "room" / "one.py").write_text("2")
    changed = source_hash(package)
    (package / "room" / "one.py").rename(package / "room" / "two.py")
    assert len({before, changed, source_hash(package)}) == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
def test_a_full_disk_is_reported_also_where_closing_writes_once_more():
    message = r"/dev/full: cannot be written \(No space left on device\); free disk space"
    with pytest.raises(UserError, match=message), Journal(Path("/dev/full").open("ab"), None) as journal:
        journal.write("train", 1, {"loss": 1.0})


class FullBoard:
    def add_scalar(self, *_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_too_full_for_tensorboard_is_reported(tmp_path):
    with pytest.raises(UserError, match="No space left"), (tmp_path / "metrics.jsonl").open("ab") as file:
        Journal(file, FullBoard()).write("train", 1, {"loss": 1.0})
    with pytest.raises(UserError, match="No space left"), (tmp_path / "metrics.jsonl").open("ab") as file:
        Journal(file, FullBoard()).close()
