"""The files of a state's tensors, in torch.distributed.checkpoint's safetensors form; nothing is pickled.

Each process writes one file with its share, and torch's HuggingFaceStorageReader puts the shares together for
any other number of processes.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from bertsmith.training.checkpoint_files import write_durably

PIECE_BYTES = 8 * 2**20
DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}
"""As the safetensors format calls them."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What this process holds of one tensor."""

    item: WriteItem
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class _Share:
    """The file that one process wrote."""

    name: str
    sha256: str


class StateWriter(HuggingFaceStorageWriter):
    """Writes each process's share as one safetensors file; the main process then seals the folder.

    torch's own writer builds the whole file in memory, twice, and reads it again for a checksum.
    """

    def __init__(self, partial: Path, seal: Callable[[dict[str, str]], None]) -> None:
        super().__init__(str(partial), save_distributed=True)
        self._partial, self._seal = partial, seal

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's share."""
        written: Future[list[WriteResult]] = Future()
        written.set_result(self._write_share(plan, planner) if plan.items else [])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002 - torch's
        """On the main process: seal the folder with the checksums of all shares."""
        shares = {result.storage_data for of_process in results for result in of_process}
        self._seal({share.name: share.sha256 for share in shares})

    def _write_share(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        # Wide elements first, so that every tensor is aligned in the file.
        parts = [_Part(item, _held_here(planner, item)) for item in plan.items]
        parts.sort(key=lambda part: (-part.tensor.itemsize, part.item.index.fqn))
        name = f"shard-{plan.storage_data['shard_index']:05}.safetensors"
        share = _Share(name, write_durably(self._partial / name, _file_pieces(parts)))
        return [WriteResult(part.item.index, part.tensor.nbytes, share) for part in parts]


def _held_here(planner: SavePlanner, item: WriteItem) -> Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor), "everything else is in state.json"
    return tensor.detach()


def _file_pieces(parts: Sequence[_Part]) -> Iterator[bytes | memoryview]:
    """A safetensors file: the length of the header, the header, the tensors one after the other."""
    header = _header(parts)
    yield len(header).to_bytes(8, "little")
    yield header
    for part in parts:
        contents = part.tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        yield from (contents[at : at + PIECE_BYTES] for at in range(0, len(contents), PIECE_BYTES))


def _header(parts: Sequence[_Part]) -> bytes:
    # Under this key torch's reader looks for where in the whole tensor a part belongs.
    offsets = {part.item.index.fqn: {"saved_offsets": _offsets(part.item)} for part in parts}
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
    return spelled + b" " * (-len(spelled) % 8)


def _offsets(item: WriteItem) -> list[int]:
    assert item.tensor_data is not None
    return list(item.tensor_data.chunk.offsets)
