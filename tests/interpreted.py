"""What tests of Triton kernels share: on a GPU, or on a CPU by Triton's interpreter."""

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter multiplies the bits of bf16; the tensor cores round fp32.
HALF = torch.float16 if INTERPRETED else torch.bfloat16
OTHER = (torch.float32, 1e-5) if INTERPRETED else (torch.bfloat16, 1e-2)


def largest_difference(ours, plain):
    """Over all tensors, relative to the largest value of each."""
    return max(
        ((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, plain, strict=True)
    )
