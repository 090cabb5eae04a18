import bz2
import gzip
import hashlib
import lzma
import os
import sys
import tracemalloc

import pytest
import zstandard

from bertsmith.core.errors import UserError
from bertsmith.core.files import open_text_bytes, read_json, sha256_of

TEXT = "".join(f"Line {number} of a text.\n" for number in range(3_000)).encode()
PACKERS = {
    ".txt": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,  # as the program does
}
PACKED = [suffix for suffix in PACKERS if suffix != ".txt"]


def complaint(path) -> str:
    with pytest.raises(UserError) as caught, open_text_bytes(path) as file:
        file.read()
    return caught.value.line()


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_file_is_unpacked_by_its_suffix(tmp_path, suffix):
    path = tmp_path / f"text{suffix}"
    path.write_bytes(PACKERS[suffix](TEXT))
    with open_text_bytes(path) as file:
        assert file.read(10) == TEXT[:10]
        assert file.read() == TEXT[10:]


@pytest.mark.parametrize("suffix", PACKED)
def test_files_packed_one_after_the_other_are_one_text(tmp_path, suffix):
    path = tmp_path / f"text{suffix.upper()}"
    path.write_bytes(PACKERS[suffix](TEXT) + PACKERS[suffix](b"more"))
    with open_text_bytes(path) as file:
        assert file.read() == TEXT + b"more"


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.999])
def test_a_packed_file_that_was_cut_off_is_named(tmp_path, suffix, kept):
    path = tmp_path / f"text{suffix}"
    packed = PACKERS[suffix](TEXT)
    path.write_bytes(packed[: int(kept * len(packed))])
    assert complaint(path).startswith(f"{path}: is not a whole {suffix} file")


@pytest.mark.parametrize("suffix", PACKED)
def test_a_packed_file_with_other_content_is_named(tmp_path, suffix):
    path = tmp_path / f"text{suffix}"
    path.write_bytes(TEXT)
    assert complaint(path).startswith(f"{path}: is not a whole {suffix} file")


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_a_packed_file_with_damaged_bytes_is_named(tmp_path, suffix):
    path = tmp_path / f"text{suffix}"
    damaged = bytearray(PACKERS[suffix](TEXT))
    middle = len(damaged) // 2
    damaged[middle : middle + 40] = bytes(40)
    path.write_bytes(damaged)
    assert complaint(path).startswith(f"{path}: is not a whole {suffix} file")


@pytest.mark.parametrize("suffix", PACKED)
def test_a_packed_file_without_its_suffix_is_reported_with_the_one_it_needs(tmp_path, suffix):
    path = tmp_path / "text.txt"
    path.write_bytes(PACKERS[suffix](TEXT))
    assert complaint(path).endswith(
        f"is compressed, but its name has another suffix; give it a name that ends in {suffix}"
    )


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    assert "cannot be read (No such file" in complaint(tmp_path / "none.gz")
    assert "cannot be read (Is a directory)" in complaint(tmp_path)


def test_zstandard_that_is_not_installed_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "text.zst").write_bytes(b"x")
    assert complaint(tmp_path / "text.zst").endswith("pip install 'bertsmith[data]'")


def test_the_sha256_of_a_file_is_that_of_its_bytes(tmp_path):
    (tmp_path / "file").write_bytes(TEXT)
    assert sha256_of(tmp_path / "file") == hashlib.sha256(TEXT).hexdigest()
    with pytest.raises(UserError, match="cannot be read"):
        sha256_of(tmp_path / "none")


def test_a_small_packed_file_unpacks_little_at_a_time(tmp_path):
    file = tmp_path / "bomb.zst"
    file.write_bytes(zstandard.ZstdCompressor().compress(bytes(300_000_000)))
    assert file.stat().st_size < 100_000
    tracemalloc.start()
    with open_text_bytes(file) as unpacked:
        for _ in range(100):
            assert len(unpacked.read(1 << 20)) == 1 << 20
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 80_000_000


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"]
)
def test_a_pipe_or_device_is_no_json_file(make, tmp_path):
    make(tmp_path / "config.json")
    with pytest.raises(UserError, match="config.json: is a pipe or a device, not a file; download it again"):
        read_json(tmp_path / "config.json", remedy="download it again")
