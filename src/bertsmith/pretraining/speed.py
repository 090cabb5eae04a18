"""How much arithmetic a step is, and what share of a GPU's published peak that is."""

import re

import torch

from bertsmith.model.network import Network

PEAK_FLOPS = {
    # Dense bf16 with fp32 accumulation, from the vendors' data sheets.
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
"""By words of torch's name for the GPU; longer names first where one begins with another."""


def flops_per_step(network: Network, *, tokens: int, sequences: int, predicted: int) -> float:
    """Multiplications and additions of a forward and a backward pass; recomputation is not counted."""
    shape = network.shape
    width, of_queries = shape.width, 3 * shape.width**2
    of_rest = width**2 + 2 * width * shape.inner
    # The last layer mixes all tokens, but goes on with predicted ones and, for pairs, one of each sequence.
    wanted = predicted + (sequences if {"nsp", "sop"} & set(network.heads) else 0)
    weights = shape.layers * of_queries * tokens + of_rest * ((shape.layers - 1) * tokens + wanted)
    pairs = shape.layers * tokens * (tokens / max(1, sequences))
    words = (width * shape.embedding_width + shape.embedding_width * shape.vocabulary) * predicted
    # A weight costs 2 operations forward and 4 backward; scores and mix cost 4 x width a pair of tokens.
    return 6 * (weights + words) + 12 * width * pairs


def peak_of(device: torch.device) -> float | None:
    """The published bf16 peak of this GPU, or None where it is not known."""
    if device.type != "cuda":
        return None
    return peak_by_name(torch.cuda.get_device_name(device))


def peak_by_name(name: str) -> float | None:
    """The published bf16 peak of the GPU of this name; an L40 is no L4, and an RTX A1000 no A100."""
    return next((peak for known, peak in PEAK_FLOPS.items() if re.search(rf"\b{known}\b", name)), None)
