"""Tensors in files: safetensors whole or in shards, and old pytorch_model.bin without letting it run code."""

import json
import pickle
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bertsmith.core.errors import UserError
from bertsmith.core.files import read_json, write_json

SINGLE, SHARDED = "model.safetensors", "model.safetensors.index.json"
OLD_SINGLE, OLD_SHARDED = "pytorch_model.bin", "pytorch_model.bin.index.json"
SAVED_WEIGHT_FILES = (SINGLE, SHARDED, "model-*-of-*.safetensors")
"""Patterns of what a save replaces: a reader might prefer old shards, or an old whole file."""
WEIGHT_FILES = (*SAVED_WEIGHT_FILES, OLD_SINGLE, OLD_SHARDED, "pytorch_model-*-of-*.bin")
"""Patterns of all files that may contain weights; every reader prefers safetensors to the older form."""
BROKEN = "download or save the folder again"
MAX_NAME = 200
FOR_TORCH = {"format": "pt"}
"""Metadata that transformers requires to open a file."""
NOT_TENSORS = (
    *(pickle.UnpicklingError, struct.error, EOFError, OSError),
    *(RuntimeError, ValueError, KeyError, TypeError, AttributeError),
    *(IndexError, AssertionError, OverflowError),
)
"""Errors that torch.load was seen to raise at foreign files."""


@contextmanager
def safetensors_errors() -> Iterator[None]:
    """Inside, raise safetensors' own error as the usual OSError of a full disk or a damaged file."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from error


def read_safetensors(file: Path, *, remedy: str = BROKEN) -> dict[str, Tensor]:
    """Return the tensors of one file; a damaged or missing file is a user error."""
    _check_readable(file, remedy)
    try:
        with safetensors_errors(), safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    except OSError as error:
        what = f"is not a whole safetensors file ({error})"
        raise UserError(what, where=str(file), remedy=remedy) from error


def read_metadata(file: Path) -> dict[str, str]:
    """Return the metadata in the header of a safetensors file, which was read before."""
    with safetensors_errors(), safe_open(file, framework="pt") as opened:
        return dict(opened.metadata() or {})


def write_safetensors(
    file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Store tensors in one file."""
    with safetensors_errors():
        save_file(dict(tensors), file, metadata=metadata)
    if metadata and len(metadata) > 1:
        _sort_metadata(file)


def _sort_metadata(file: Path) -> None:
    """Sort the metadata of a file by its keys: safetensors writes them in random order."""
    with file.open("r+b") as opened:
        (size,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        assert len(text) <= size
        opened.seek(8)
        opened.write(text.ljust(size))


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a model folder with its name; safetensors before the older form."""
    for single, index in ((SINGLE, SHARDED), (OLD_SINGLE, OLD_SHARDED)):
        if (folder / single).is_file():
            return iter(_read_file(folder / single).items())
        if (folder / index).is_file():
            return _read_shards(folder / index)
    remedy = f"a model folder contains {SINGLE} (or {SHARDED} with its shards, or {OLD_SINGLE})"
    raise UserError("does not contain weights", where=str(folder), remedy=remedy)


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int) -> None:
    """Store tensors as one safetensors file, or in shards with an index if they exceed the shard size."""
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if shards[-1] and used + tensor.nbytes > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.nbytes
    if len(shards) == 1:
        write_safetensors(folder / SINGLE, shards[0], FOR_TORCH)
        return
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_safetensors(folder / file, shard, FOR_TORCH)
        file_of |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / SHARDED, {"metadata": {"total_size": total}, "weight_map": file_of})


def _read_shards(index: Path) -> Iterator[tuple[str, Tensor]]:
    weight_map = read_json(index, remedy=BROKEN).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError("lacks a weight_map", where=str(index), remedy=BROKEN)
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_shard(index.parent, file):
            what = f"weight_map assigns {name} to {file!r}, which is not in the folder"
            raise UserError(what, where=str(index), remedy=BROKEN)
    for shard in sorted({index.parent / file for file in weight_map.values()}):
        held = _read_file(shard)
        for name in (name for name, file in weight_map.items() if file == shard.name):
            if name not in held:
                what = f"{name} is missing, but the index lists it here"
                raise UserError(what, where=str(shard), remedy=BROKEN)
            yield name, held[name]


def _is_shard(folder: Path, file: str) -> bool:
    """True if this is a plain file name: an index must not point outside of its folder."""
    plain = Path(file).name == file and file.endswith((".safetensors", ".bin")) and len(file) < MAX_NAME
    return plain and (folder / file).is_file()


def _read_file(file: Path) -> dict[str, Tensor]:
    """Return the tensors of one file, in either form."""
    if file.suffix == ".safetensors":
        return read_safetensors(file)
    _check_readable(file)
    _check_not_packed(file)
    try:
        # weights_only rejects everything except plain tensors: a pickle could run code.
        held = torch.load(file, map_location="cpu", weights_only=True)
    except NOT_TENSORS as error:
        what = f"is not a whole weights file, or contains more than tensors ({type(error).__name__})"
        raise UserError(what, where=str(file), remedy=f"{BROKEN}, as safetensors") from error
    if not isinstance(held, dict) or not all(_is_plain(name, tensor) for name, tensor in held.items()):
        raise UserError("contains something other than named tensors", where=str(file), remedy=BROKEN)
    return held


def _check_not_packed(file: Path) -> None:
    """Raise at a file that unpacks to more than its size: torch does not compress."""
    try:
        with ZipFile(file) as held:
            entries = held.infolist()
    except (BadZipFile, OSError, ValueError, NotImplementedError):
        return  # the older form, or no weights at all
    if any(entry.compress_type != ZIP_STORED for entry in entries) or (
        sum(entry.file_size for entry in entries) > file.stat().st_size
    ):
        raise UserError("its entries unpack to more than the file", where=str(file), remedy=BROKEN)


def _check_readable(file: Path, remedy: str = BROKEN) -> None:
    """Raise at a git-lfs pointer in place of the weights, or at missing permissions."""
    try:
        with file.open("rb") as opened:
            beginning = opened.read(64)
    except OSError as error:
        if isinstance(error, PermissionError):
            remedy = "give yourself permission to read it"
        raise UserError(f"cannot be read ({error.strerror})", where=str(file), remedy=remedy) from error
    if beginning.startswith(b"version https://git-lfs"):
        raise UserError("is only a git-lfs pointer", where=str(file), remedy="run git lfs pull there")


def _is_plain(name: object, tensor: object) -> bool:
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        return False
    dense = tensor.layout is torch.strided and tensor.device.type == "cpu"
    # One number, repeated a billion times (stride 0), would become a billion numbers when it is copied.
    return dense and tensor.nbytes <= tensor.untyped_storage().nbytes()
