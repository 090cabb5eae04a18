import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bertsmith.core import progress as progress_room
from bertsmith.core.errors import TRUNCATE, UserError
from bertsmith.core.files import atomic_folder, atomic_path, check_not_taken, read_json, write_json
from bertsmith.core.progress import progress_bar, progress_within


def test_an_error_is_one_line_of_where_what_and_remedy():
    assert UserError("is\nodd", where="a.txt:3", remedy="mend it").line() == "a.txt:3: is odd; mend it"
    assert str(UserError("is odd")) == "is odd"


def test_an_error_carries_the_input_it_is_about_as_data():
    error = UserError("is empty", index=3, remedy=TRUNCATE)
    assert error.line() == "text 3: is empty; shorten it, split it, or pass `truncate=True`"
    moved = replace(error, field="question", index=error.index + 2)
    assert (moved.field, moved.index, moved.remedy) == ("question", 5, TRUNCATE)
    assert str(moved).startswith("question 5: ")
    assert str(replace(error, where="line 7 of a.txt")).startswith("line 7 of a.txt: is empty")


def test_an_error_comes_whole_out_of_another_process():
    error = pickle.loads(pickle.dumps(UserError("is odd", where="a.txt", index=1, remedy="mend it")))
    assert (error.what, error.where, error.index, error.remedy) == ("is odd", "a.txt", 1, "mend it")
    assert str(error) == "a.txt: is odd; mend it"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    target = tmp_path / "deep" / "file.json"
    write_json(target, {"a": 1})
    with pytest.raises(RuntimeError), atomic_path(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert read_json(target, remedy="") == {"a": 1}
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize(("atomic", "maker"), [(atomic_path, "touch"), (atomic_folder, "mkdir")])
def test_a_stop_in_the_moment_of_making_leaves_nothing(tmp_path, monkeypatch, atomic, maker):
    make = getattr(Path, maker)

    def stopped_at_once(path, *args, **options):
        make(path, *args, **options)
        if path.suffix == ".partial":
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, maker, stopped_at_once)
    with pytest.raises(KeyboardInterrupt), atomic(tmp_path / "target"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_written_file_can_be_read_by_others(tmp_path):
    write_json(tmp_path / "file.json", {})
    assert (tmp_path / "file.json").stat().st_mode & 0o044 == 0o044


def test_a_folder_gets_all_its_files_or_none(tmp_path):
    target = tmp_path / "model"
    with pytest.raises(RuntimeError), atomic_folder(target) as fresh:
        (fresh / "one").write_text("1")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with atomic_folder(target) as fresh:
        (fresh / "one").write_text("1")
    assert [file.name for file in target.iterdir()] == ["one"]


def test_a_folder_is_written_through_a_link_to_another_place(tmp_path):
    real = tmp_path / "elsewhere" / "real"
    real.mkdir(parents=True)
    (tmp_path / "link").symlink_to(real)
    with atomic_folder(tmp_path / "link") as fresh:
        assert fresh.parent == tmp_path / "link"  # on the same disk as the target, whatever that is
        (fresh / "one").write_text("1")
    assert [file.name for file in real.iterdir()] == ["one"]


LEFT_BEHIND = """
import os, signal, sys
from pathlib import Path
from bertsmith.core.files import atomic_folder
with atomic_folder(Path(sys.argv[1])) as fresh:
    (fresh / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("is_there", [False, True])
def test_what_a_killed_program_left_is_removed_and_what_others_write_is_not(tmp_path, is_there):
    target = tmp_path / "store"
    if is_there:
        target.mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(it for it in sys.path if it)}
    subprocess.run([sys.executable, "-c", LEFT_BEHIND, target], env=environment, check=False)
    assert len(list(tmp_path.rglob("half"))) == 1
    with atomic_folder(tmp_path / "store.b"):  # its name begins with that of the other
        check_not_taken(target)
        assert list(tmp_path.rglob("half")) == []
        assert len(list(tmp_path.glob(".store.b.*"))) == 1
    with atomic_folder(target) as fresh:
        with pytest.raises(UserError, match="store: is being written by another process; wait for it, or"):
            check_not_taken(target)
        assert fresh.is_dir()


@pytest.mark.parametrize("is_there", [False, True])
def test_a_folder_that_another_process_wrote_meanwhile_stays(tmp_path, is_there):
    target = tmp_path / "model"
    if is_there:
        target.mkdir()
    with (
        pytest.raises(UserError, match="was written by another process meanwhile"),
        atomic_folder(target) as one,
    ):
        (one / "weights").write_text("1")
        with atomic_folder(target) as other:
            (other / "weights").write_text("2")
    assert [(file.name, file.read_text()) for file in target.iterdir()] == [("weights", "2")]


def test_a_place_is_taken_unless_it_is_an_empty_folder(tmp_path):
    check_not_taken(tmp_path)
    check_not_taken(tmp_path / "new")
    (tmp_path / "file").write_text("")
    for taken in (tmp_path, tmp_path / "file"):
        with pytest.raises(UserError, match="already exists; choose another `out`, or remove it first"):
            check_not_taken(taken)


def test_what_cannot_be_written_is_reported_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file", tmp_path / "file" / "below"):
        with (
            pytest.raises(UserError, match=r"cannot be written \(.*\); choose a writable place"),
            atomic_folder(target),
        ):
            pass
    with pytest.raises(UserError, match="cannot be written"):
        write_json(tmp_path / "file" / "below.json", {})


@pytest.mark.parametrize("atomic", [atomic_path, atomic_folder])
def test_a_file_that_cannot_be_read_meanwhile_is_not_reported_as_one_that_cannot_be_written(tmp_path, atomic):
    missing = tmp_path / "input" / "a.txt"
    with pytest.raises(FileNotFoundError, match="a.txt"), atomic(tmp_path / "target"):
        missing.read_text()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_and_a_missing_place_are_reported_by_the_target(tmp_path):
    with pytest.raises(UserError) as full, atomic_path(tmp_path / "a.txt"):
        Path("/dev/full").write_text("x")
    assert full.value.where == str(tmp_path / "a.txt")
    assert full.value.what == "cannot be written (No space left on device)"
    for target in (tmp_path / "new", tmp_path):
        with pytest.raises(UserError, match="cannot be written") as failed, atomic_folder(target) as fresh:
            (fresh / "no" / "folder").write_text("x")
        assert failed.value.where == str(target)
    assert list(tmp_path.iterdir()) == []


def test_json_that_is_none_is_reported_in_one_line(tmp_path):
    file = tmp_path / "odd.json"
    for text in ("{", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"):
        file.write_text(text)
        with pytest.raises(UserError, match="is not valid JSON"):
            read_json(file, remedy="mend it")
    file.write_bytes(b"\xef\xbb\xbf{}")
    assert read_json(file, remedy="") == {}


@pytest.mark.parametrize("terminal", [True, False])
def test_a_progress_bar_is_drawn_only_on_a_terminal(terminal, monkeypatch, capsys):
    monkeypatch.setattr(progress_room, "PATIENCE_SECONDS", -1.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar("counting", 5) as advance:
        advance(2)
        advance(3)
    said = capsys.readouterr().err
    assert ("counting" in said and "100%" in said) == terminal
    assert (said == "") == (not terminal)


def test_a_terminal_has_room_for_one_bar(monkeypatch, capsys):
    monkeypatch.setattr(progress_room, "PATIENCE_SECONDS", -1.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar("outer", None) as advance:
        advance(1)
        with progress_bar("inner", 2) as within:
            within(2)
    with progress_bar("later", 1) as advance:
        advance(1)
    said = capsys.readouterr().err
    assert "outer" in said and "later" in said and "inner" not in said


def test_a_bar_says_what_it_is_a_part_of(monkeypatch, capsys):
    monkeypatch.setattr(progress_room, "PATIENCE_SECONDS", -1.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    for number in (1, 2):
        with progress_within(f"network {number}"), progress_bar("texts", 1) as advance:
            advance(1)
    with progress_bar("alone", 1) as advance:
        advance(1)
    said = capsys.readouterr().err
    assert "network 1: texts" in said and "network 2: texts" in said
    assert "alone" in said and ": alone" not in said


def test_what_is_done_in_a_moment_draws_nothing(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar("counting", 5) as advance:
        advance(5)
    assert capsys.readouterr().err == ""


def test_a_message_is_of_readable_length_and_its_control_characters_are_spelled_out():
    line = UserError("the label 'a\x1b[31mb\ud800\u202ec' is unknown", where="my.tsv:2").line()
    assert line == r"my.tsv:2: the label 'a\x1b[31mb\ud800\u202ec' is unknown"
    assert len(UserError("x" * 1_000_000, remedy="y").line()) < 2100


@pytest.mark.parametrize("atomic", [atomic_path, atomic_folder])
def test_a_failed_write_leaves_none_of_the_folders_that_it_made(tmp_path, atomic):
    (tmp_path / "there").mkdir()
    with pytest.raises(ZeroDivisionError), atomic(tmp_path / "there" / "a" / "b" / "c"):
        raise ZeroDivisionError
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]


def test_what_a_killed_writer_left_inside_a_folder_is_removed_by_the_next_one(tmp_path):
    left = tmp_path / "out" / ".out.01234567.partial"
    left.mkdir(parents=True)
    (left / "half").touch()
    young = left.with_name(".out.89abcdef.partial")  # its writer may not have marked it yet
    young.mkdir()
    os.utime(left, (0, 0))
    with atomic_folder(tmp_path / "out") as fresh:
        (fresh / "whole").touch()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"whole", young.name}
