"""Memory that a run may plan with: all free memory, or its share of the whole if it runs next to others.

Sizes that follow from memory decide how sums are rounded. The free memory depends on the neighbours of a run,
so the scheduler of a study sets a share instead.
"""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MEMORY_SHARE = "BERTSMITH_MEMORY_SHARE"
"""Environment variable: the fraction of the whole memory that a process may plan with."""


def share_of(*, free: int, total: int) -> int:
    """Return the bytes that a run may plan with, of a memory with this many free and in total."""
    share = os.environ.get(MEMORY_SHARE)
    return free if share is None else int(float(share) * total)


def plannable_gpu_bytes(device: "torch.device") -> int:
    """Return the bytes of a GPU that a run may plan with."""
    import torch  # a scheduler, which only needs the name above, does not load it

    free, total = torch.cuda.mem_get_info(device)
    return share_of(free=free, total=total)
