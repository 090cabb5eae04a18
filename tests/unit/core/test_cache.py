"""The cache of results: damaged files are not used, and the oldest go first."""

import json
import os

import numpy as np
import pytest

from bertsmith.core import cache
from bertsmith.core.cache import cache_folder, cached_array, cached_files, caching_array
from bertsmith.core.errors import UserError
from bertsmith.core.files import atomic_path
from tests.command_line import bertsmith

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache, "_used", set())
    return tmp_path / "bertsmith" / "features"


def keep(file, values=VALUES):
    with caching_array(file) as temporary, temporary.open("wb") as written:
        np.save(written, values)
    return file


def test_an_array_is_mapped_as_it_was_kept(folder):
    kept = cached_array(keep(folder / "a.npy"))
    assert isinstance(kept, np.memmap) and np.array_equal(kept, VALUES)
    assert cached_array(folder / "b.npy") is None


def changed(content):
    return content[:140] + bytes([content[140] ^ 1]) + content[141:]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-40],
        lambda content: content[:20],
        lambda content: b"",
        lambda content: content + b"more",
        changed,
    ],
    ids=["cut off", "in the header", "empty", "longer", "one bit"],
)
def test_a_damaged_array_is_not_used(folder, caplog, damage):
    file = keep(folder / "a.npy")
    file.write_bytes(damage(file.read_bytes()))
    assert cached_array(file) is None
    assert "is damaged; it is rebuilt" in caplog.text


def test_the_oldest_go_first_and_none_that_is_in_use(folder, monkeypatch):
    old, older = keep(folder / "x" / "old.npy"), keep(folder / "y" / "older.npy")
    for file, when in ((older, 1_000), (old, 2_000)):
        os.utime(file, (when, when))
    size = old.stat().st_size
    monkeypatch.setattr(cache, "_used", set())  # as in a later process
    monkeypatch.setenv("BERTSMITH_CACHE_GB", str(2.5 * size / 1e9))
    new = keep(folder / "new.npy")
    assert {each.path for each in cached_files()} == {old, new}
    monkeypatch.setenv("BERTSMITH_CACHE_GB", "0")
    newest = keep(folder / "newest.npy")
    assert {each.path for each in cached_files()} == {new, newest}


def test_reading_makes_a_file_newer(folder):
    for name in ("a", "b"):
        os.utime(keep(folder / f"{name}.npy"), (1_000, 1_000))
    cached_array(folder / "a.npy")
    assert [each.path.name for each in cached_files()] == ["b.npy", "a.npy"]


def test_what_killed_processes_left_is_removed_and_what_others_write_is_not(folder):
    folder.mkdir(parents=True)
    left = folder / ".a.npy.01234567.partial"
    left.write_bytes(b"half")
    with atomic_path(folder / "b.npy") as writing:
        assert cached_files() == [] and left.exists()  # its writer may be about to lock it
        for each in (left, writing):
            os.utime(each, (1_000, 1_000))
        assert cached_files() == [] and writing.exists() and not left.exists()


def test_a_limit_that_is_no_number_is_rejected(folder, monkeypatch):
    monkeypatch.setenv("BERTSMITH_CACHE_GB", "-1")
    with pytest.raises(UserError, match="BERTSMITH_CACHE_GB: '-1' is not a valid size; give a number of gig"):
        cache_folder("features")


def test_the_command_shows_and_clears_it(folder, capsys, monkeypatch):
    keep(folder / "a.npy")
    assert "features              1 file" in bertsmith(capsys, "cache").out
    assert "removed 1 file, 0.0 MB" in bertsmith(capsys, "cache", "--clear").out
    assert cached_files() == []
    keep(folder / "a.npy")
    monkeypatch.setenv("BERTSMITH_CACHE_GB", "inf")
    told = json.loads(bertsmith(capsys, "cache", "--json", "--clear").out)
    assert told["limit_bytes"] is None and told["removed"]["files"] == 1 and told["features"]["files"] == 0
