"""Ranges of indices, and .npy files: damaged ones and those that grow."""

import os
import random
import warnings
from pathlib import Path

import numpy as np
import pytest

from bertsmith.core.arrays import GrowingNpy, open_array, ranges
from bertsmith.core.errors import UserError


@pytest.mark.parametrize(
    ("first", "count"), [([5, 0, 2], [2, 0, 3]), ([], []), ([7], [1]), ([3, 3], [0, 0]), ([0, 9], [4, 4])]
)
def test_ranges_are_those_of_python(first: list[int], count: list[int]) -> None:
    found = ranges(np.array(first, np.int32), np.array(count, np.int32))
    pairs = zip(first, count, strict=True)
    assert found.tolist() == [number for one, many in pairs for number in range(one, one + many)]
    assert found.dtype == np.int64


@pytest.mark.parametrize("row_shape", [(), (3,)])
@pytest.mark.parametrize("chunks", [[], [2], [1, 0, 4]])
def test_a_growing_file_is_what_numpy_saves(tmp_path: Path, row_shape, chunks: list[int]) -> None:
    rows = [np.random.default_rng(0).random((count, *row_shape)) for count in chunks]
    with GrowingNpy(tmp_path / "grown.npy", "<f4", row_shape=row_shape) as file:
        for each in rows:
            file.append(each)
    whole = np.concatenate([np.empty((0, *row_shape)), *rows]).astype("<f4")
    assert np.array_equal(np.load(tmp_path / "grown.npy"), whole)
    assert file.rows == len(whole)


def test_a_growing_file_goes_on_from_the_rows_that_are_whole(tmp_path: Path) -> None:
    path, rows = tmp_path / "grown.npy", np.arange(12, dtype="<f4").reshape(4, 3)
    with GrowingNpy(path, "<f4", (3,)) as file:
        file.append(rows[:3])
        file.flush()
    with GrowingNpy(path, "<f4", (3,), rows=2) as file:
        file.append(rows[2:])
    assert np.array_equal(np.load(path), rows)


DAMAGE = (b"'", b'"', b"(", b")", b"{", b"[", b",", b"-", b"\n", b"\\", b"0", b"L", b"\0", b"\xff", b"")


def test_a_damaged_header_is_an_error_of_the_user_whatever_the_damage(tmp_path: Path) -> None:
    path, chance = tmp_path / "numbers.npy", random.Random(0)
    np.save(path, np.arange(50))
    whole, refused = path.read_bytes(), 0
    with warnings.catch_warnings(record=True) as warned:
        for _ in range(2000):
            at = chance.randrange(128)
            path.write_bytes(whole[:at] + chance.choice(DAMAGE) + whole[at + 1 :])
            try:
                assert open_array(path, remedy="make it again").size <= 50
            except UserError as error:
                refused += 1
                assert error.line().startswith(f"{path}: is not a whole .npy file (")
                assert error.line().endswith("); make it again") and len(error.what) < 140
    assert refused > 1000 and not warned


def test_a_pipe_is_no_array_and_a_missing_file_is_another_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npy")
    with pytest.raises(UserError, match="is a pipe or a device"):
        open_array(tmp_path / "pipe.npy", remedy="")
    with pytest.raises(FileNotFoundError):
        open_array(tmp_path / "missing.npy", remedy="")
