"""Files of texts through `bertsmith classify` and `bertsmith embed`."""

import bz2
import gzip
import io
import json
import math
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bertsmith as package
from bertsmith.cli import text_files
from bertsmith.cli.text_files import pieces_of
from bertsmith.recipe.finetuning_schema import TextSection
from bertsmith.tasks.task_config import TaskConfig
from tests.command_line import bertsmith, mistake
from tests.commands import commanded
from tests.toy_folder import write_toy_folder
from tests.untrained_heads import numbered_labels, untrained

TEXTS = ["the sun is warm", "my dog runs.", "cold!", "a cat \u2028 sleeps", "tea"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("folders")
    write_toy_folder(place / "plain")
    untrained(place / "classes", {"classify": 3}, **numbered_labels("bad", "fair", "good"))
    note = TaskConfig(task="stsb", kind="regress", metrics=(), pairs=True, text=TextSection(longest=48))
    untrained(place / "numbers", {"classify": 1}, note=note)
    return place


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(text_files, "MAX_LINES", 2)


# ---- lines


def read(path: Path) -> list[str]:
    return [text for piece in pieces_of(path) for text in piece.texts]


@given(
    lines=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\n\r\ufeff"), max_size=8), min_size=1
    ),
    lines_at_once=st.integers(1, 4),
    bytes_at_once=st.integers(1, 20),
    chunk=st.integers(1, 5),
    patience=st.sampled_from([0.0, math.inf]),
)
def test_pieces_are_small_and_together_the_file(
    tmp_path_factory, lines, lines_at_once, bytes_at_once, chunk, patience
):
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "MAX_LINES", lines_at_once)
        patch.setattr(text_files, "MAX_BYTES", bytes_at_once)
        patch.setattr(text_files, "CHUNK_BYTES", chunk)
        pieces = list(pieces_of(path, patience=patience))
    assert [text for piece in pieces for text in piece.texts] == lines
    assert sum(piece.size for piece in pieces) == path.stat().st_size
    assert all(len(piece.texts) <= lines_at_once for piece in pieces)
    assert [number for piece in pieces for number in piece.numbers] == list(range(1, len(lines) + 1))


def test_a_file_is_read_little_further_than_it_is_used(small_pieces, monkeypatch):
    stream = io.BytesIO(b"a line\n" * 100)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=stream))
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 20)
    pieces = pieces_of(Path("-"))
    assert next(pieces).texts == ["a line"] * 2
    assert stream.tell() == 20


def test_lines_that_come_slowly_are_not_waited_for(monkeypatch):
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as stream, os.fdopen(writing, "wb", buffering=0) as writer:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=stream))
        pieces = pieces_of(Path("-"), patience=0.05)
        writer.write(b"one\ntwo\nthr")
        assert next(pieces).texts == ["one", "two"]  # half a line holds up none
        writer.write(b"ee\n")
        assert next(pieces) == text_files.Piece(["three"], [3], ["standard input:3"], 6)
        writer.write(b"four")
        writer.close()
        assert [piece.texts for piece in pieces] == [["four"]]


@pytest.mark.parametrize("door", ["standard input", "fifo"])
def test_lines_that_keep_coming_are_given_all_the_same(tmp_path, monkeypatch, door):
    os.mkfifo(tmp_path / "lines")
    writer = threading.Thread(target=write_slowly, args=(tmp_path / "lines",))
    writer.start()
    source = tmp_path / "lines"
    if door == "standard input":
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=source.open("rb")))
        source = Path("-")
    pieces = [piece.texts for piece in pieces_of(source, patience=0.1)]
    writer.join()
    assert sum(pieces, []) == [str(number) for number in range(30)]
    assert len(pieces) > 3


def write_slowly(path):
    with path.open("wb", buffering=0) as lines:
        for number in range(30):
            lines.write(b"%d\n" % number)
            time.sleep(0.03)


def test_a_patient_reader_waits_for_a_whole_piece(small_pieces, monkeypatch):
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as stream, os.fdopen(writing, "wb", buffering=0) as writer:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=stream))
        writer.write(b"one\n")
        later = threading.Timer(0.3, writer.write, [b"two\nthree\n"])
        later.start()
        assert next(pieces_of(Path("-"))).texts == ["one", "two"]
        later.join()


def test_a_file_without_line_ends_is_given_up_before_all_of_it_is_read(monkeypatch):
    stream = io.BytesIO(b"x" * 10_000)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=stream))
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 20)
    monkeypatch.setattr(text_files, "MAX_LINE_BYTES", 50)
    with pytest.raises(package.UserError, match="standard input:1: is over 50 bytes long"):
        next(pieces_of(Path("-")))
    assert stream.tell() <= 80


def test_only_the_first_line_may_begin_with_a_mark(tmp_path):
    (tmp_path / "marks.txt").write_text("\ufeffone\n\ufefftwo\n", encoding="utf-8")
    assert read(tmp_path / "marks.txt") == ["one", "\ufefftwo"]


def test_marks_carriage_returns_and_a_missing_last_newline_are_no_text(tmp_path):
    (tmp_path / "odd.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\nfour")
    assert read(tmp_path / "odd.txt") == ["one", "two\rthree", "four"]


def test_a_line_that_is_no_text_is_reported_by_its_number(tmp_path, monkeypatch):
    (tmp_path / "odd.txt").write_bytes(b"one\n\xff\xfe\n")
    with pytest.raises(package.UserError, match=r"odd.txt:2: is not UTF-8 text \(byte 0\)"):
        read(tmp_path / "odd.txt")
    monkeypatch.setattr(text_files, "MAX_LINE_BYTES", 10)
    (tmp_path / "odd.txt").write_bytes(b"one\n" + b"x" * 11)
    with pytest.raises(package.UserError, match="odd.txt:2: is over 10 bytes long"):
        read(tmp_path / "odd.txt")


@pytest.mark.parametrize(
    ("pack", "remedy"), [(gzip.compress, "zcat FILE.gz"), (bz2.compress, "bzcat FILE.bz2")]
)
def test_packed_bytes_on_the_standard_input_are_reported(monkeypatch, pack, remedy):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(pack(b"a line\n" * 100))))
    with pytest.raises(package.UserError) as refused:
        read(Path("-"))
    assert str(refused.value) == f"standard input: is compressed; unpack it: {remedy} | bertsmith ..."


@pytest.mark.parametrize("words", [("classify", "--input", "-"), ("embed", "--input", "-", "--out", "v.npy")])
def test_a_closed_standard_input_is_reported_in_one_line(capsys, folders, monkeypatch, tmp_path, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", None)
    line = mistake(capsys, *words, "--model", folders / "classes")
    assert line == "bertsmith: standard input: is closed; pipe the text in, or give a file"


# ---- classify


def test_each_line_gets_its_label_in_order(capsys, folders, file, small_pieces):
    told = bertsmith(capsys, "classify", "--input", file, "--model", folders / "classes")
    expected = package.load(folders / "classes").classify(TEXTS)
    lines = told.out.removesuffix("\n").split("\n")
    assert [line.split("\t")[0] for line in lines] == [each.label for each in expected]
    assert [float(line.split("\t")[1]) for line in lines] == pytest.approx(
        [each.probability for each in expected], abs=1e-5
    )
    assert [line.split("\t")[2] for line in lines] == TEXTS
    told = bertsmith(capsys, "classify", "--input", file, "--model", folders / "classes", "--json")
    found = [json.loads(line) for line in told.out.removesuffix("\n").split("\n")]
    assert [each["line"] for each in found] == [1, 2, 3, 4, 5]
    assert found[2]["probabilities"] == pytest.approx(expected[2].probabilities, abs=1e-5)


def test_a_tab_makes_a_pair_and_the_file_may_be_packed(capsys, folders, tmp_path):
    pairs = [("the sun", "the snow is cold"), ("a", "b")]
    with gzip.open(tmp_path / "pairs.txt.gz", "wt") as packed:
        packed.write("".join("\t".join(pair) + "\n" for pair in pairs))
    told = bertsmith(
        capsys, "classify", "--input", tmp_path / "pairs.txt.gz", "--model", folders / "numbers", "--json"
    )
    expected = package.load(folders / "numbers").score(pairs)
    found = [json.loads(line)["score"] for line in told.out.splitlines()]
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_line_of_three_columns_is_no_pair(capsys, folders, file):
    file.write_text("one\ttwo\none\ttwo\tthree\n")
    line = mistake(capsys, "classify", "--input", file, "--model", folders / "numbers")
    assert line.startswith(f"bertsmith: {file}:2: has 3 columns, a pair has 2; leave one text, or two with")


def test_a_bad_line_is_reported_by_file_and_line_after_those_before_it(capsys, folders, file, small_pieces):
    file.write_text("\n".join([*TEXTS, " ", "more"]))
    told = bertsmith(capsys, "classify", "--input", file, "--model", folders / "classes")
    assert told.code == 2
    assert told.err == f"bertsmith: {file}:6: is empty; remove it, or write some words\n"
    assert len(told.out.removesuffix("\n").split("\n")) == 4


def test_a_line_that_is_typed_is_answered_before_the_next_one(folders):
    with commanded("classify", "--input", "-", "--model", folders / "classes") as asked:
        guard = threading.Timer(60, asked.process.kill)
        guard.start()
        for text in ("the sun\n", "my dog\n"):
            asked.stdin.write(text)
            asked.stdin.flush()
            assert asked.stdout.readline().endswith("\t" + text)
        asked.stdin.close()
        assert asked.wait() == 0
        guard.cancel()


@pytest.mark.parametrize("words", [("classify", "--input"), ("embed", "--out", "v.npy", "--input")])
def test_a_file_without_a_text_is_rejected(capsys, folders, file, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    file.write_bytes(b"")
    line = mistake(capsys, *words, file, "--model", folders / "classes")
    assert line == f"bertsmith: {file}: does not contain a text; write one text per line"


@pytest.mark.parametrize("words", [(), ("a text", "--input", "x"), ("--input", "x", "--second", "y")])
def test_either_a_text_or_a_file_is_classified(capsys, folders, words):
    line = mistake(capsys, "classify", *words, "--model", folders / "classes")
    assert "nothing to classify; give a text" in line


# ---- embed


def test_vectors_of_all_lines_are_written_in_order(capsys, folders, file, small_pieces, tmp_path):
    words = ("embed", "--input", file, "--model", folders / "plain", "--out", tmp_path / "new" / "v.npy")
    for pooling in ("mean", "cls", "max"):
        told = bertsmith(capsys, *words, "--pooling", pooling)
        assert told.out == f"5 vectors of width 64 -> {tmp_path / 'new' / 'v.npy'}\n"
        found = np.load(tmp_path / "new" / "v.npy", mmap_mode="r")
        expected = package.load(folders / "plain").embed(TEXTS, pooling=pooling).numpy()
        assert found.shape == (5, 64) and found.dtype == np.float32
        assert np.allclose(found, expected, atol=1e-5)


def test_length_and_prompt_of_vectors_are_chosen(capsys, folders, file, tmp_path):
    words = ("embed", "--input", file, "--model", folders / "plain", "--out", tmp_path / "v.npy")
    bertsmith(capsys, *words, "--no-normalize", "--prompt", "the cat ", "--pooling", "pooler")
    expected = package.load(folders / "plain").embed(
        [f"the cat {text}" for text in TEXTS], pooling="pooler", normalize=False
    )
    assert np.allclose(np.load(tmp_path / "v.npy"), expected.numpy(), atol=1e-5)
    bertsmith(capsys, *words, "--normalize")
    assert np.allclose(np.linalg.norm(np.load(tmp_path / "v.npy"), axis=1), 1, atol=1e-5)


def test_one_vector_is_reported_as_one(capsys, folders, file, tmp_path):
    file.write_text("a cat\n")
    told = bertsmith(
        capsys, "embed", "--input", file, "--model", folders / "plain", "--out", tmp_path / "v.npy"
    )
    assert told.out == f"1 vector of width 64 -> {tmp_path / 'v.npy'}\n"


def test_texts_come_from_the_standard_input_too(capsys, folders, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO("\n".join(TEXTS).encode())))
    words = ("embed", "--input", "-", "--model", folders / "plain", "--out", tmp_path / "v.npy", "--json")
    told = bertsmith(capsys, *words)
    assert json.loads(told.out) == {"texts": 5, "width": 64, "out": str(tmp_path / "v.npy")}
    assert np.load(tmp_path / "v.npy").shape == (5, 64)


def test_a_long_line_is_rejected_by_its_number_or_cut(capsys, folders, file, tmp_path, small_pieces):
    file.write_text("\n".join([*TEXTS[:2], "snow " * 200]))
    words = ("embed", "--input", file, "--model", folders / "plain", "--out", tmp_path / "v.npy")
    line = mistake(capsys, *words)
    assert f"{file}:3: has 202 tokens, but the model takes 128; " in line and "or pass --truncate" in line
    assert bertsmith(capsys, *words, "--truncate").code == 0
    assert np.load(tmp_path / "v.npy").shape == (3, 64)


def test_what_goes_wrong_leaves_no_half_file_and_the_old_one_whole(
    capsys, folders, file, tmp_path, small_pieces
):
    (tmp_path / "v.npy").write_bytes(b"old")
    words = ("embed", "--input", file, "--model", folders / "plain", "--out", tmp_path / "v.npy")
    for text, complaint in (
        ("one\ntwo\nthree\n\n", "texts.txt:4: is empty"),
        ("", "texts.txt: does not contain a text"),
    ):
        file.write_text(text)
        assert complaint in mistake(capsys, *words)
    assert (tmp_path / "v.npy").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts.txt", "v.npy"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_leaves_no_half_file(folders, tmp_path, number):
    words = ("embed", "--input", "-", "--out", tmp_path / "v.npy", "--model", folders / "plain")
    with commanded(*words) as asked:
        while not list(tmp_path.iterdir()):  # until the file is begun
            assert asked.returncode is None
            time.sleep(0.05)
        time.sleep(0.2)  # it is on the disk a moment before the command is bound to remove it
        asked.send_signal(number)
        told = asked.stderr.read()
    assert (asked.returncode, told) == (130, "bertsmith: stopped\n")
    assert list(tmp_path.iterdir()) == []


def test_the_input_is_not_overwritten(capsys, folders, file):
    line = mistake(capsys, "embed", "--input", file, "--model", folders / "plain", "--out", file)
    assert "is the input itself" in line
    assert len(read(file)) == 5
