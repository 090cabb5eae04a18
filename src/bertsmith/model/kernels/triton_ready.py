"""Requirements of our Triton kernels, checked only here. Nothing loads Triton before it is used."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import torch


def compiles() -> bool:
    """True if Triton, which torch for CUDA includes on Linux, can compile kernels here.

    It requires a C compiler, and a writable folder that programs may be loaded from: a slim container may
    lack both.
    """
    has_compiler = os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang", "cc")))
    return find_spec("triton") is not None and bool(has_compiler) and _takes_programs(_cache_folder())


def _cache_folder() -> Path:
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")


def _takes_programs(folder: Path) -> bool:
    """True if a folder, or its nearest existing parent, is writable and may contain programs to run."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    runs = not os.statvfs(there).f_flag & os.ST_NOEXEC if hasattr(os, "ST_NOEXEC") else True
    return runs and os.access(there, os.W_OK | os.X_OK)


COMPILES = compiles()
"""True if kernels can be compiled; checked once, so that compiled steps read it as a constant."""


def triton_runs_on(device: torch.device) -> bool:
    """True if kernels for this device can be compiled: Ampere or newer, because they use bf16."""
    return COMPILES and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def needs_operator() -> bool:
    """True if a kernel must be called as an operator, which loads torch's compiler (1.5 s)."""
    return torch.is_grad_enabled() or torch.compiler.is_compiling()


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors that share a kernel's programs; 1 for Triton's interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
