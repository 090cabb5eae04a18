"""Bundles come back exactly as they were written, and damaged ones are refused in words."""

import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.core.errors import UserError
from bertsmith.interchange.bundle import Bundle, crc32c
from tests import bundle_writer as writer
from tests.bundle_writer import write_bundle

RANDOM = np.random.default_rng(7)
ARRAYS = {
    "a/half": RANDOM.standard_normal((3, 2)).astype(np.float16),
    "a/single": RANDOM.standard_normal((2, 3, 4)).astype(np.float32),
    "a/double": RANDOM.standard_normal(5),
    "b/int": RANDOM.integers(-(2**31), 2**31, 6, np.int32),
    "b/long": RANDOM.integers(-(2**63), 2**63 - 1, (2, 2), np.int64),
    "c/empty": np.zeros((0, 3), np.float32),
    "c/scalar": np.float32(2.5).reshape(()),
} | {f"layer_{index}/kernel": RANDOM.standard_normal((4, index)).astype(np.float32) for index in range(1, 12)}


def assert_holds(bundle: Bundle, arrays: dict[str, np.ndarray]) -> None:
    assert bundle.names() == tuple(sorted(arrays))
    for name, array in arrays.items():
        assert bundle.shape(name) == array.shape
        assert bundle.tensor(name).dtype == array.dtype
        np.testing.assert_array_equal(bundle.tensor(name), array)


def test_every_type_and_shape_comes_back_exactly(tmp_path: Path) -> None:
    write_bundle(tmp_path / "x.ckpt", ARRAYS)
    assert_holds(Bundle(tmp_path / "x.ckpt"), ARRAYS)


def test_variables_are_found_in_several_data_files(tmp_path: Path) -> None:
    write_bundle(tmp_path / "x.ckpt", ARRAYS, shards=3)
    assert_holds(Bundle(tmp_path / "x.ckpt"), ARRAYS)


def test_an_index_compressed_with_snappy_reads_like_a_plain_one(tmp_path: Path) -> None:
    repeating = {f"{'/layer' * 30}_{index}": np.zeros(index, np.float32) for index in range(20)}
    write_bundle(tmp_path / "x.ckpt", ARRAYS | repeating, compress=writer.snappy)
    assert_holds(Bundle(tmp_path / "x.ckpt"), ARRAYS | repeating)


@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_bfloat16_comes_as_float32(tmp_path: Path, shape: tuple[int, ...]) -> None:
    exact = (
        RANDOM.integers(-100, 100, shape).astype(np.float32).reshape(shape)
    )  # eight bits suffice for these
    write_bundle(tmp_path / "x.ckpt", {"w": writer.bfloat16(exact)})
    assert_holds(Bundle(tmp_path / "x.ckpt"), {"w": exact})


def test_what_is_read_may_be_changed_without_changing_the_file(tmp_path: Path) -> None:
    write_bundle(tmp_path / "x.ckpt", {"w": np.ones(3, np.float32)})
    Bundle(tmp_path / "x.ckpt").tensor("w")[:] = 0
    assert Bundle(tmp_path / "x.ckpt").tensor("w").sum() == 3


def test_a_flipped_data_byte_is_rejected_naming_the_variable(tmp_path: Path) -> None:
    write_bundle(tmp_path / "x.ckpt", {"a": np.ones(8, np.float32), "b": np.ones(8, np.float32)})
    data = tmp_path / "x.ckpt.data-00000-of-00001"
    flip(data, 40)
    assert Bundle(tmp_path / "x.ckpt").tensor("a").sum() == 8
    with pytest.raises(UserError, match=r"data-00000-of-00001: is damaged: the checksum of 'b'.*; download"):
        Bundle(tmp_path / "x.ckpt").tensor("b")


def test_a_flipped_index_byte_is_rejected_wherever_it_stands(tmp_path: Path) -> None:
    write_bundle(tmp_path / "x.ckpt", {"w": np.ones(3, np.float32)})
    whole = (tmp_path / "x.ckpt.index").read_bytes()
    unnoticed = [
        position for position in range(len(whole) - 48) if flip_is_unnoticed(tmp_path, whole, position)
    ]
    assert len(unnoticed) == 13  # the meta block: it says nothing and is never looked at


def flip_is_unnoticed(folder: Path, whole: bytes, position: int) -> bool:
    (folder / "x.ckpt.index").write_bytes(whole)
    flip(folder / "x.ckpt.index", position)
    try:
        assert Bundle(folder / "x.ckpt").tensor("w").tolist() == [1, 1, 1]
    except UserError as error:
        assert "x.ckpt.index" in error.where and "download the checkpoint again" in error.remedy
        return False
    return True


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 0x10
    file.write_bytes(content)


@pytest.mark.parametrize("kept", [0, 1, 47, 48, 200, -1])
def test_a_truncated_index_is_rejected(tmp_path: Path, kept: int) -> None:
    write_bundle(tmp_path / "x.ckpt", ARRAYS)
    index = tmp_path / "x.ckpt.index"
    index.write_bytes(index.read_bytes()[:kept])
    with pytest.raises(UserError, match="truncated"):
        Bundle(tmp_path / "x.ckpt")


def test_truncated_data_is_rejected_naming_the_variable(tmp_path: Path) -> None:
    write_bundle(tmp_path / "x.ckpt", {"w": np.ones(8, np.float32)})
    data = tmp_path / "x.ckpt.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(UserError, match="'w': it is truncated; download"):
        Bundle(tmp_path / "x.ckpt").tensor("w")


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"x\.ckpt\.index: cannot be read \(No such file"):
        Bundle(tmp_path / "x.ckpt")
    write_bundle(tmp_path / "x.ckpt", {"v": np.ones(1), "w": np.ones(1)}, shards=2)
    (tmp_path / "x.ckpt.data-00001-of-00002").unlink()
    with pytest.raises(UserError, match=r"data-00001-of-00002: cannot be read \(No such file"):
        Bundle(tmp_path / "x.ckpt").tensor("w")


def test_an_absurdly_large_index_is_not_even_read(tmp_path: Path) -> None:
    with (tmp_path / "x.ckpt.index").open("wb") as index:
        index.truncate(1 << 40)
    with pytest.raises(UserError, match="too large for a checkpoint index"):
        Bundle(tmp_path / "x.ckpt")


def test_an_unknown_variable_is_named(tmp_path: Path) -> None:
    write_bundle(tmp_path / "x.ckpt", ARRAYS)
    with pytest.raises(UserError, match="the variable 'nothing'"):
        Bundle(tmp_path / "x.ckpt").tensor("nothing")


# Files whose checksums are right and whose content is not.

RAW = struct.pack("<4f", 1, 2, 3, 4)
TRUE = {"dtype": 1, "shape": (4,), "place": (0, 0, 16), "crc": writer.masked(writer.crc32c(RAW))}


def bundle_of(folder: Path, entry: bytes, *, header: bytes | None = None, name: bytes = b"w") -> Bundle:
    records = [(b"", writer.header(1) if header is None else header), (name, entry)]
    writer.write_table(folder / "x.ckpt.index", records)
    (folder / "x.ckpt.data-00000-of-00001").write_bytes(RAW)
    return Bundle(folder / "x.ckpt")


@pytest.mark.parametrize(
    ("lie", "complaint"),
    [
        ({"shape": (-1,)}, "'w' an impossible shape"),
        ({"shape": (1 << 62, 1 << 62)}, "'w' an impossible shape"),
        ({"shape": (0, 1 << 62), "place": (0, 0, 0)}, "'w' an impossible shape"),
        ({"shape": (1,) * 33}, "'w' an impossible shape"),
        ({"shape": (5,)}, "do not fill its shape"),
        ({"shape": (1 << 40,), "place": (0, 0, 1 << 42)}, "truncated"),
        ({"place": (0, 0, -16)}, "do not fill its shape"),
        ({"place": (0, 1, 16)}, "truncated"),
        ({"place": (0, -16, 16)}, "truncated"),
        ({"place": (0, 1 << 62, 16)}, "truncated"),
        ({"place": (1, 0, 16)}, "data file 1 of 1"),
        ({"place": (-1, 0, 16)}, "data file -1 of 1"),
        ({"crc": 0}, "checksum of 'w'"),
        ({"dtype": 7}, "'w' as TensorFlow data type 7; float, double"),
        ({"extra": writer.field(7, b"")}, "'w' in slices, as a partitioned variable; save it without"),
        ({"extra": writer.field(1, b"x")}, "text instead of a number"),
        ({"extra": writer.field(2, 3)}, "a number instead of a message"),
        ({"extra": b"\x0f"}, "unknown wire type 7"),
        ({"extra": b"\xff" * 11}, "a number in it does not end"),
        ({"extra": b"\xff"}, "exceeds its end"),
        ({"extra": b"\x42\x7f"}, "exceeds its end"),
    ],
)
def test_an_entry_that_lies_is_rejected(tmp_path: Path, lie: dict[str, object], complaint: str) -> None:
    assert bundle_of(tmp_path, writer.entry(**TRUE)).tensor("w").tolist() == [1, 2, 3, 4]
    with pytest.raises(UserError, match=complaint):
        bundle_of(tmp_path, writer.entry(**TRUE | lie)).tensor("w")


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (writer.header(1, endianness=1), "big-endian"),
        (writer.header(1, min_consumer=2), "newer, unsupported checkpoint format"),
        (writer.header(0), "0 data files"),
        (writer.header(-1), "-1 data files"),
    ],
)
def test_a_header_that_cannot_be_followed_is_rejected(tmp_path: Path, header: bytes, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        bundle_of(tmp_path, writer.entry(**TRUE), header=header)


def test_a_name_that_is_not_text_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not UTF-8"):
        bundle_of(tmp_path, writer.entry(**TRUE), name=b"\xff")


def test_the_pieces_of_a_partitioned_variable_are_not_variables(tmp_path: Path) -> None:
    assert bundle_of(tmp_path, writer.entry(**TRUE), name=b"\0w").names() == ()


def test_a_table_without_a_header_is_rejected(tmp_path: Path) -> None:
    writer.write_table(tmp_path / "x.ckpt.index", [(b"w", writer.entry(**TRUE))])
    with pytest.raises(UserError, match="lacks a header"):
        Bundle(tmp_path / "x.ckpt")


def test_records_out_of_order_are_rejected(tmp_path: Path) -> None:
    for keys in ([b"", b"w", b"v"], [b"", b"w", b"w"]):
        writer.write_table(tmp_path / "x.ckpt.index", [(key, writer.header(1)) for key in keys])
        with pytest.raises(UserError, match="not in order"):
            Bundle(tmp_path / "x.ckpt")


@pytest.mark.parametrize("handle", [(1 << 40, 10), (0, 1 << 40), ((1 << 64) - 1, 1)])
def test_a_block_past_the_end_of_the_file_is_rejected(tmp_path: Path, handle: tuple[int, int]) -> None:
    table = writer.finished_table(b"", [(b"z", writer.varint(handle[0]) + writer.varint(handle[1]))])
    (tmp_path / "x.ckpt.index").write_bytes(table)
    with pytest.raises(UserError, match="exceeds its end"):
        Bundle(tmp_path / "x.ckpt")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "exceeds its end"),
        (b"\0\0\0\0\xff\xff\xff\xff", "exceeds its end"),
        (b"\3\1\1xy\0\0\0\0", "lengths are impossible"),
        (b"\0\xff\xff\x7f\1xy\0\0\0\0", "lengths are impossible"),
        (b"\0\1\x7fxy\0\0\0\0", "exceeds its end"),
    ],
)
def test_a_malformed_block_is_rejected(tmp_path: Path, content: bytes, complaint: str) -> None:
    write_single_block(tmp_path, writer.stored_block(content))
    with pytest.raises(UserError, match=complaint):
        Bundle(tmp_path / "x.ckpt")


@pytest.mark.parametrize(
    ("compressed", "complaint"),
    [
        (b"\x08\x04ab", "does not have the length it claims"),
        (b"\xff\xff\xff\xff\x0f\x04ab", "does not have the length it claims"),
        (b"\x02\x04ab" + b"\xfe\x01\0" * 1000, "does not have the length it claims"),
        (b"\x08\x04ab\xfe\0\0", "before its start"),
        (b"\x08\x04ab\xfe\3\0", "before its start"),
        (b"\x08\xfc\xff\xff\xff\xffab", "exceeds its end"),
        (b"\x08\x04ab\x01", "exceeds its end"),
        (b"", "exceeds its end"),
    ],
)
def test_a_malformed_compressed_block_is_rejected(tmp_path: Path, compressed: bytes, complaint: str) -> None:
    write_single_block(tmp_path, writer.stored_block(b"", compress=lambda _: compressed))
    with pytest.raises(UserError, match=complaint):
        Bundle(tmp_path / "x.ckpt")


def test_an_unknown_compression_is_rejected(tmp_path: Path) -> None:
    stored = b"\2" + struct.pack("<I", writer.masked(writer.crc32c(b"\2")))
    write_single_block(tmp_path, stored)
    with pytest.raises(UserError, match="unknown compression 2"):
        Bundle(tmp_path / "x.ckpt")


def test_variables_over_the_same_bytes_are_rejected(tmp_path):
    write_bundle(tmp_path / "x.ckpt", {"a": np.zeros(64, np.float32)})
    crc = writer.masked(writer.crc32c(bytes(256)))
    records = [
        (f"v{number:04}".encode(), writer.entry(dtype=1, shape=[64], place=(0, 0, 256), crc=crc))
        for number in range(2000)
    ]
    writer.write_table(tmp_path / "x.ckpt.index", [(b"", writer.header(1)), *records])
    with pytest.raises(UserError, match="stores 'v0000' and 'v0001' in the same bytes"):
        Bundle(tmp_path / "x.ckpt")


def test_a_block_without_records_that_is_named_again_and_again_is_rejected(tmp_path):
    stored = writer.stored_block(writer.block([]))
    handle = writer.varint(0) + writer.varint(len(stored) - 5)
    handles = [(f"{number:04}".encode(), handle) for number in range(3)]
    (tmp_path / "x.ckpt.index").write_bytes(writer.finished_table(stored, handles))
    with pytest.raises(UserError, match="its blocks are not contiguous"):
        Bundle(tmp_path / "x.ckpt")


def write_single_block(folder: Path, stored: bytes) -> None:
    handle = writer.varint(0) + writer.varint(len(stored) - 5)
    (folder / "x.ckpt.index").write_bytes(writer.finished_table(stored, [(b"z", handle)]))


# Random damage.

SMALL = {name: ARRAYS[name] for name in ("a/single", "b/long", "c/empty", "c/scalar")}


def read_all(prefix: Path) -> dict[str, np.ndarray]:
    bundle = Bundle(prefix)
    return {name: bundle.tensor(name) for name in bundle.names()}


def small_files(compress: Callable[[bytes], bytes] | None) -> tuple[bytes, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        write_bundle(Path(folder, "x"), SMALL, compress=compress)
        return Path(folder, "x.index").read_bytes(), Path(folder, "x.data-00000-of-00001").read_bytes()


FILES = [small_files(None), small_files(writer.snappy)]


def damaged(content: bytes, flips: list[tuple[int, int]], cut: int) -> bytes:
    changed = bytearray(content)
    for position, mask in flips:
        changed[position % len(changed)] ^= mask
    return bytes(changed[: len(changed) - cut])


@given(
    files=st.sampled_from(FILES),
    flips=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=3),
    cut=st.just(0) | st.integers(0, 100),
    where=st.integers(0, 1),
)
def test_a_damaged_bundle_is_rejected_or_read_correctly(
    files: tuple[bytes, bytes], flips: list[tuple[int, int]], cut: int, where: int
) -> None:
    contents = list(files)
    contents[where] = damaged(contents[where], flips, cut)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "x.index").write_bytes(contents[0])
        Path(folder, "x.data-00000-of-00001").write_bytes(contents[1])
        try:
            found = read_all(Path(folder, "x"))
        except UserError:
            return
    assert found.keys() == SMALL.keys()
    for name, array in SMALL.items():
        np.testing.assert_array_equal(found[name], array)


@given(
    compress=st.booleans(),
    flips=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), min_size=1, max_size=3),
    cut=st.just(0) | st.integers(0, 10),
)
def test_nonsense_with_the_right_checksum_is_rejected_or_read(
    compress: bool, flips: list[tuple[int, int]], cut: int
) -> None:
    records = [(b"", writer.header(1)), (b"v", writer.entry(**TRUE)), (b"w", writer.entry(**TRUE))]
    content = writer.block(records)
    if compress:
        nonsense = damaged(writer.snappy(content), flips, cut)
        stored = writer.stored_block(b"", compress=lambda _: nonsense)
    else:
        stored = writer.stored_block(damaged(content, flips, cut))
    with tempfile.TemporaryDirectory() as folder:
        write_single_block(Path(folder), stored)
        Path(folder, "x.ckpt.data-00000-of-00001").write_bytes(RAW)
        try:
            read_all(Path(folder, "x.ckpt"))
        except UserError as error:
            assert error.where and error.remedy


# The checksum.


def test_the_checksum_of_published_vectors() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(b"") == 0


@pytest.mark.parametrize("size", [*range(20), 509, 510, 511, *range(512, 520), 4095, 12_291, 100_001])
def test_the_fast_checksum_equals_the_textbook_one(size: int) -> None:
    data = RANDOM.integers(0, 256, size, np.uint8)
    assert crc32c(data) == crc32c(data.tobytes()) == writer.crc32c(data.tobytes())


@pytest.mark.parametrize("extra", [0, 1, 3, 4, 5])
def test_the_fast_checksum_carries_over_from_chunk_to_chunk(extra: int) -> None:
    data = RANDOM.integers(0, 256, 2 * 96 * 8192 + extra, np.uint8)
    assert crc32c(data) == writer.crc32c(data.tobytes())


def test_the_checksum_takes_arrays_of_any_type_and_shape() -> None:
    array = RANDOM.standard_normal((20, 30, 4)).astype(np.float32)
    assert crc32c(array) == writer.crc32c(array.tobytes())
