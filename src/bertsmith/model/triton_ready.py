"""Whether our Triton kernels run here: the one place that says so. Nothing loads Triton before it is used."""

from importlib.util import find_spec

import torch

INSTALLED = find_spec("triton") is not None
"""torch for CUDA brings it on Linux."""


def triton_runs_on(device: torch.device) -> bool:
    """Whether kernels for this device can be compiled: Ampere or newer, as for the bf16 in them."""
    return INSTALLED and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def needs_operator() -> bool:
    """Whether a kernel must be called as an operator, for which torch loads its compiler (1.5 s)."""
    return torch.is_grad_enabled() or torch.compiler.is_compiling()


def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors share the programs of a kernel; Triton's interpreter is one."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
