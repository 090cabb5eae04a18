"""Damaged files, odd names and faults of the disk: each is one line that names the file, and no traceback."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

import bertsmith
from bertsmith.core.errors import UserError
from bertsmith.core.files import atomic_folder, atomic_path, write_json
from bertsmith.corpus.documents import documents_of
from bertsmith.corpus.readers import parquet_strings, read_blocks
from bertsmith.model.folder.tensor_files import read_safetensors, write_safetensors
from bertsmith.tasks.tables import rows_of
from tests.command_line import mistake

NOT_UTF8 = os.fsdecode(b"caf\xe9")


def read_corpus(path):
    return [list(documents_of(block)) for block in read_blocks([path])]


def read_strings(path):
    return list(parquet_strings(path))


def read_rows(path):
    return list(rows_of(path))


@pytest.mark.parametrize("read", [read_corpus, read_strings, read_rows])
def test_parquet_with_bytes_that_are_not_utf8_is_not_whole(tmp_path: Path, read) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["some words"] * 9}), path, compression="none")
    damaged = b"some" if read is read_rows else b"text"
    path.write_bytes(path.read_bytes().replace(damaged, b"\xff" + damaged[1:]))
    with pytest.raises(UserError, match="a.parquet: is not a whole Parquet file"):
        read(path)


@pytest.mark.parametrize(
    "words",
    [("fill", "a [MASK]"), ("corpus", "~nosuchuser/x", "--vocab", "."), ("tag", "A text."), ("serve",)],
)
def test_a_home_of_nobody_is_named(capsys, words) -> None:
    option = "--out" if words[0] == "corpus" else "--model"
    line = mistake(capsys, *words, option, "~nosuchuser/x")
    assert "~nosuchuser/x: this home folder does not exist; check the name after the ~" in line
    with pytest.raises(UserError, match="this home folder does not exist"):
        bertsmith.load("~nosuchuser/x")


@pytest.mark.parametrize("option", ["--out", "--data"])
def test_an_argument_that_is_not_utf8_is_named(capsys, option) -> None:
    line = mistake(capsys, "finetune", "sst2", option, NOT_UTF8)
    assert "argument 4 (caf\\udce9): is not UTF-8; rename the file" in line


def test_a_file_name_that_is_not_utf8_can_be_written_down(tmp_path: Path) -> None:
    write_json(tmp_path / "facts.json", {"file": NOT_UTF8})
    assert (tmp_path / "facts.json").read_text("utf-8") == '{\n  "file": "caf\\udce9"\n}\n'


def test_a_locale_without_utf8_takes_utf8_words() -> None:
    settings = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [
        sys.executable,
        "-m",
        "bertsmith",
        "fill",
        "In Zürich we [MASK].",
        "--top",
        "1",
        "--device",
        "cpu",
    ]
    told = subprocess.run(words, env=settings, capture_output=True, encoding="utf-8", timeout=300)
    assert told.returncode == 0 and "In Zürich we [MASK]." in told.stdout, told


def test_weights_with_metadata_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(3.0), "a": torch.ones(2, 2)}
    metadata = {"format": "pt", "fingerprint": "é", "base": "x"}
    written = set()
    for number in range(20):
        write_safetensors(tmp_path / str(number), tensors, metadata)
        written.add((tmp_path / str(number)).read_bytes())
    assert len(written) == 1
    assert torch.equal(read_safetensors(tmp_path / "0")["b"], tensors["b"])


def test_a_limit_of_file_sizes_names_no_hidden_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError) as told, atomic_folder(tmp_path / "model") as folder:
        raise_in_file(folder / "inner" / "weights")
    assert told.value.line().startswith(f"{tmp_path}/model/inner/weights: cannot be written (File too large)")


def raise_in_file(path: Path) -> None:
    with atomic_path(path):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))


FULL_DISK = """
import errno, os, sys
from pathlib import Path
from tensorboard.summary.writer.record_writer import RecordWriter
from bertsmith.core.errors import UserError
from bertsmith.training.journal import Journal

def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

try:
    with Journal.open(Path(sys.argv[1]), resume_step=0) as journal:
        RecordWriter.write = full
        for step in range(10_000):
            journal.write("train", step, {"loss": 1.0})
except UserError as error:
    print(error.what)
"""


def test_tensorboard_without_room_is_one_error(tmp_path: Path) -> None:
    told = subprocess.run([sys.executable, "-c", FULL_DISK, tmp_path], capture_output=True, text=True)
    assert told.stdout == "cannot be written (No space left on device)\n"
    assert "Traceback" not in told.stderr


CUT_OFF = """
import os, sys
from pathlib import Path
from bertsmith.core.arrays import open_array
array = open_array(Path(sys.argv[1]), remedy="")
os.truncate(sys.argv[1], 4096)
array.sum()
"""


def test_a_file_that_is_cut_off_while_it_is_read_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones(1 << 20))
    told = subprocess.run([sys.executable, "-c", CUT_OFF, tmp_path / "a.npy"], capture_output=True, text=True)
    assert told.returncode == 2
    expected = (
        f"bertsmith: {tmp_path}/a.npy: was cut off while it was read: it has 4096 bytes instead of 8388736"
    )
    assert told.stderr == f"{expected}; restore it, then run the command again\n"
