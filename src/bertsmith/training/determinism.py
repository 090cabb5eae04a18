"""Whether only algorithms are used that give the same bits each time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bertsmith.model.torch_internals import (
    enable_onednn,
    fill_new_memory,
    new_memory_is_filled,
    onednn_is_enabled,
)


@contextmanager
def same_bits(wanted: bool) -> Iterator[None]:
    """Inside, the same work gives the same bits on the same machine, if that is wanted."""
    before = _settings()
    if wanted:
        # cuBLAS reads this once, when it is first used; both published values are deterministic.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Filling memory is a guard that costs a pass over every tensor. oneDNN: a CPU without bf16 instructions
    # makes torch give it up for the rest of the process, and the other products round differently.
    _set(wanted, False, True if wanted else before[2])
    try:
        yield
    finally:
        _set(*before)


def _settings() -> tuple[bool, bool, bool]:
    """Whether only deterministic algorithms are allowed, new memory is filled, and oneDNN is used."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        new_memory_is_filled(),
        onednn_is_enabled(),
    )


def _set(deterministic: bool, filling: bool, onednn: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    fill_new_memory(filling)
    enable_onednn(onednn)
