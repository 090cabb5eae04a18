"""Tensors in files: safetensors whole or in shards, and old pytorch_model.bin without letting it run code."""

import pickle
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
BROKEN = "download or save the folder again"


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
        save_file(dict(shards[0]), folder / SINGLE, metadata={"format": "pt"})
        return
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(dict(shard), folder / name, metadata={"format": "pt"})
        file_of |= dict.fromkeys(shard, name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / SHARDED, {"metadata": {"total_size": total}, "weight_map": file_of})


def remove_stale_tensors(folder: Path, fresh: Path) -> None:
    """Delete weights of an earlier save that the fresh files do not replace: a reader might prefer them."""
    stale = [folder / SINGLE, folder / SHARDED, *folder.glob("model-*-of-*.safetensors")]
    for file in stale:
        if not (fresh / file.name).exists():
            file.unlink(missing_ok=True)


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
        if not isinstance(file, str) or Path(file).name != file or not (index.parent / file).is_file():
            what = f"weight_map sends {name} to {file!r}, which is not in the folder"
            raise UserError(what, where=str(index), remedy=BROKEN)
    return {name: index.parent / file for name, file in weight_map.items()}


def _read_file(file: Path) -> dict[str, Tensor]:
    return _read_safetensors(file) if file.suffix == ".safetensors" else _read_old(file)


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"is not a whole safetensors file ({error})", where=str(file), remedy=BROKEN
        ) from error


def _read_old(file: Path) -> dict[str, Tensor]:
    try:
        # weights_only refuses everything that is not plain tensors: a pickle could run code.
        held = torch.load(file, map_location="cpu", weights_only=True)
    except (
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"is not a safe, whole weights file ({reason})", where=str(file), remedy=BROKEN
        ) from error
    if not isinstance(held, dict) or not all(isinstance(tensor, Tensor) for tensor in held.values()):
        raise UserError("holds something other than named tensors", where=str(file), remedy=BROKEN)
    return held
