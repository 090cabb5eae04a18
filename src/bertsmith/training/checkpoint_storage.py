"""Checkpoint folders: written atomically, verified by checksum before use, cleaned up after a crash.

A state is written into `.step-00001000.partial` and becomes `step-00001000` by one rename, after everything
in it has reached the disk. Folders with a leading dot in their names are remains of a run that was killed.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from bertsmith.core.errors import UserError
from bertsmith.core.files import reach_the_disk, read_json, sha256_of

CHECKSUMS, STATE = "checksums.json", "state.json"
HASHING_THREADS = 4
log = logging.getLogger("bertsmith")


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of a step's state."""
    return folder / f"step-{step:08}"


def hidden(target: Path, purpose: str) -> Path:
    """Return the name of a state's folder while it must not be found as a state."""
    return target.with_name(f".{target.name}.{purpose}")


def saved_steps(folder: Path) -> list[int]:
    """Return the steps with a state, oldest first."""
    names = (re.fullmatch(r"step-(\d{8,})", path.name) for path in folder.glob("step-*"))
    return sorted(int(name[1]) for name in names if name)


def write_durably(target: Path, pieces: Iterable[bytes | memoryview]) -> str:
    """Write a new file through to the disk; return its sha256."""
    # Not hashed in a second thread: one that cannot start for lack of memory is waited for without end.
    digest = hashlib.sha256()
    with target.open("xb") as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def seal(partial: Path, state: dict[str, Any], checksums: dict[str, str]) -> None:
    """Complete a folder of tensors to a state: write state and checksums, then rename it."""
    # Processes on several machines may each have written into a local folder of the same path.
    if missing := [name for name in checksums if not (partial / name).exists()]:
        what = f"{missing[0]}, which another process wrote, cannot be seen from the main one"
        remedy = "choose a place for the run that all its machines share"
        raise UserError(what, where=str(partial.parent), remedy=remedy)
    target = partial.with_name(partial.name.removeprefix(".").removesuffix(".partial"))
    checksums = checksums | {STATE: write_durably(partial / STATE, [_as_json(state)])}
    write_durably(partial / CHECKSUMS, [_as_json(dict(sorted(checksums.items())))])
    reach_the_disk(partial)  # before the rename: after a power cut, a named folder must not be empty
    replaced = hidden(target, "replaced")
    if target.exists():  # the same step again, after the run resumed from an earlier state
        target.rename(replaced)
    partial.rename(target)
    # Only now may the older state of this step be removed: until here `tidy` would restore it.
    reach_the_disk(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def tidy(folder: Path) -> None:
    """Remove the remains of a killed run, and restore a state that it was about to replace."""
    for replaced in folder.glob(".step-*.replaced"):
        target = replaced.with_name(replaced.name.removeprefix(".").removesuffix(".replaced"))
        if not target.exists():
            replaced.rename(target)
    for remains in folder.glob(".step-*"):
        shutil.rmtree(remains)


def newest_sound_step(folder: Path) -> int | None:
    """Return the newest step with an undamaged state, or None; report and rename newer damaged ones."""
    for step in reversed(saved_steps(folder)):
        target = step_folder(folder, step)
        damage = _damage(target)
        if not damage:
            return step
        aside = target.with_name(f"{target.name}.damaged")
        log.error("%s: is damaged (%s); kept aside as %s", target, damage, aside.name)
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    return None


def check_undamaged(target: Path) -> None:
    """Raise if the files of a state do not match their checksums."""
    if damage := _damage(target):
        raise UserError(f"is damaged ({damage})", where=str(target), remedy="take another step's")


def _damage(target: Path) -> str:
    """Return a description of the damage to a state's files, or ""."""
    try:
        return _difference(target, read_json(target / CHECKSUMS, remedy=""))
    except UserError as error:
        if isinstance(error.__cause__, PermissionError):  # not the state's fault
            raise
        return f"{Path(error.where).name}: {error.what}"


def _difference(target: Path, checksums: dict[str, Any]) -> str:
    """Return a message about the first file that does not match the checksums, or ""."""
    present = {file.name for file in target.iterdir()} - {CHECKSUMS}
    if present != set(checksums):
        return f"{sorted(present ^ set(checksums))[0]}: {CHECKSUMS} and the folder disagree about it"
    names = sorted(checksums)
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        found = threads.map(sha256_of, (target / name for name in names))
        wrong = [name for name, digest in zip(names, found, strict=True) if digest != checksums[name]]
    return f"{wrong[0]}: its contents do not match its checksum" if wrong else ""


def _as_json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


PIECE_BYTES = 8 * 2**20
DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}
"""Names of the dtypes in the safetensors format."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of one tensor that this process holds."""

    item: WriteItem
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class _Shard:
    """The file that one process wrote."""

    name: str
    sha256: str


class StateWriter(HuggingFaceStorageWriter):
    """Writes each process's shard as one safetensors file; the main process then seals the folder.

    torch's own writer builds the whole file in memory, twice, and reads it again for a checksum.
    """

    def __init__(self, partial: Path, seal: Callable[[dict[str, str]], None]) -> None:
        super().__init__(str(partial), save_distributed=True)
        self._partial, self._seal = partial, seal

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's shard."""
        results: list[WriteResult] = []
        if plan.items:  # a process may hold no part of a small model under FSDP
            parts = []
            for item in plan.items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor), "everything else is in state.json"
                parts.append(_Part(item, tensor.detach()))
            # Wide elements first, so that every tensor is aligned in the file.
            parts.sort(key=lambda part: (-part.tensor.itemsize, part.item.index.fqn))
            name = f"shard-{plan.storage_data['shard_index']:05}.safetensors"
            shard = _Shard(name, write_durably(self._partial / name, _file_pieces(parts)))
            results = [WriteResult(part.item.index, part.tensor.nbytes, shard) for part in parts]
        # torch requires a future; the file is written already, because the next step changes the tensors.
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002 - torch's
        """Seal the folder with the checksums of all shards; torch calls it in the main process."""
        shards = {result.storage_data for of_process in results for result in of_process}
        self._seal({shard.name: shard.sha256 for shard in shards})


def _file_pieces(parts: Sequence[_Part]) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file: the length of the header, the header, the tensors one after the other."""
    header = _header(parts)
    yield len(header).to_bytes(8, "little")
    yield header
    for part in parts:  # one at a time and in pieces: a copy of the whole shard may not fit into memory
        contents = part.tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        yield from (contents[at : at + PIECE_BYTES] for at in range(0, len(contents), PIECE_BYTES))


def _header(parts: Sequence[_Part]) -> bytes:
    # torch's reader takes a part's position in the whole tensor from this key.
    offsets = {}
    for part in parts:
        assert part.item.tensor_data is not None
        offsets[part.item.index.fqn] = {"saved_offsets": list(part.item.tensor_data.chunk.offsets)}
    entries: dict[str, object] = {
        "__metadata__": {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    }
    begin = 0
    for part in parts:
        end = begin + part.tensor.nbytes
        entry = {"dtype": DTYPES[part.tensor.dtype], "shape": list(part.tensor.shape)}
        entries[part.item.index.fqn] = entry | {"data_offsets": [begin, end]}
        begin = end
    spelled = json.dumps(entries).encode()
    return spelled + b" " * (-len(spelled) % 8)  # so that the first tensor is aligned, too
