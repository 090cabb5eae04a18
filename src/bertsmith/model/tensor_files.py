"""Tensors in files: safetensors whole or in shards, and old pytorch_model.bin without letting it run code."""

import pickle
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bertsmith.ground.errors import UserError
from bertsmith.ground.files import read_json, write_json

SINGLE, SHARDED = "model.safetensors", "model.safetensors.index.json"
OLD_SINGLE, OLD_SHARDED = "pytorch_model.bin", "pytorch_model.bin.index.json"
WEIGHT_FILES = (
    *(SINGLE, SHARDED, "model-*-of-*.safetensors"),
    *(OLD_SINGLE, OLD_SHARDED, "pytorch_model-*-of-*.bin"),
)
"""Patterns of all that may hold weights: a save replaces them, or a reader might prefer an old one."""
BROKEN = "download or save the folder again"
LONGEST_NAME = 200
NOT_TENSORS = (
    *(pickle.UnpicklingError, struct.error, EOFError, OSError),
    *(
        RuntimeError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        AssertionError,
        OverflowError,
    ),
)
"""All that torch.load was seen to raise at files that are not its own."""


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a model folder with its name; safetensors before the older form."""
    for single, index in ((SINGLE, SHARDED), (OLD_SINGLE, OLD_SHARDED)):
        if (folder / single).is_file():
            return iter(_read_file(folder / single).items())
        if (folder / index).is_file():
            return _read_shards(folder / index)
    remedy = f"a model folder holds {SINGLE} (or {SHARDED} with its shards, or {OLD_SINGLE})"
    raise UserError("holds no weights", where=str(folder), remedy=remedy)


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int) -> None:
    """Store tensors as one safetensors file, or in shards with an index where they exceed the shard size."""
    shards = _split(tensors, shard_bytes)
    if len(shards) == 1:
        _write_file(folder / SINGLE, shards[0])
        return
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_file(folder / name, shard)
        file_of |= dict.fromkeys(shard, name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / SHARDED, {"metadata": {"total_size": total}, "weight_map": file_of})


def _write_file(file: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:  # how a full disk looks from here
        raise OSError(str(error)) from error


def _split(tensors: Mapping[str, Tensor], shard_bytes: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if shards[-1] and used + tensor.nbytes > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.nbytes
    return shards


def _read_shards(index: Path) -> Iterator[tuple[str, Tensor]]:
    file_of = _read_index(index)
    for file in sorted(set(file_of.values())):
        held = _read_file(file)
        for name in (name for name, place in file_of.items() if place == file):
            if name not in held:
                what = f"{name} is missing, though the index says it is here"
                raise UserError(what, where=str(file), remedy=BROKEN)
            yield name, held[name]


def _read_index(index: Path) -> dict[str, Path]:
    weight_map = read_json(index, remedy=BROKEN).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError("has no weight_map", where=str(index), remedy=BROKEN)
    for name, file in weight_map.items():
        # A shard is a plain file name: an index must not reach outside its folder.
        if not isinstance(file, str) or not _is_shard(index.parent, file):
            what = f"weight_map sends {name} to {file!r}, which is not in the folder"
            raise UserError(what, where=str(index), remedy=BROKEN)
    return {name: index.parent / file for name, file in weight_map.items()}


def _is_shard(folder: Path, file: str) -> bool:
    plain = Path(file).name == file and file.endswith((".safetensors", ".bin")) and len(file) < LONGEST_NAME
    return plain and (folder / file).is_file()


def _read_file(file: Path) -> dict[str, Tensor]:
    return _read_safetensors(file) if file.suffix == ".safetensors" else _read_old(file)


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    _refuse_stand_in(file)
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"is not a whole safetensors file ({error})", where=str(file), remedy=BROKEN
        ) from error


def _refuse_stand_in(file: Path) -> None:
    """Stop at what a clone without large-file support leaves in place of the weights, or at no permission."""
    try:
        with file.open("rb") as opened:
            beginning = opened.read(64)
    except OSError as error:
        remedy = "give yourself the right to read it"
        raise UserError(f"cannot be read ({error.strerror})", where=str(file), remedy=remedy) from error
    if beginning.startswith(b"version https://git-lfs"):
        raise UserError("is only a git-lfs pointer", where=str(file), remedy="run git lfs pull there")


def _read_old(file: Path) -> dict[str, Tensor]:
    _refuse_stand_in(file)
    try:
        # weights_only refuses everything that is not plain tensors: a pickle could run code.
        held = torch.load(file, map_location="cpu", weights_only=True)
    except NOT_TENSORS as error:
        what = f"is not a whole weights file, or holds more than tensors ({type(error).__name__})"
        raise UserError(what, where=str(file), remedy=f"{BROKEN}, as safetensors") from error
    if not isinstance(held, dict) or not all(_is_plain(name, tensor) for name, tensor in held.items()):
        raise UserError("holds something other than named tensors", where=str(file), remedy=BROKEN)
    return held


def _is_plain(name: object, tensor: object) -> bool:
    dense = isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.device.type == "cpu"
    return isinstance(name, str) and dense
