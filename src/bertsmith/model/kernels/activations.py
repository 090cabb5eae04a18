"""Activations by their names in config.json and recipes: the one list, read without torch."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    Activate = Callable[[Tensor], Tensor]


def activation_function(name: str) -> "Activate":
    """Return the function of an activation."""
    return ACTIVATIONS[name]()


def _erf_gelu() -> "Activate":
    from bertsmith.model.kernels.elementwise import gelu

    return gelu


def _squared_relu() -> "Activate":
    from torch.nn import functional

    return lambda values: functional.relu(values).square()


def _of_torch(name: str, **settings: Any) -> "Activate":
    from torch.nn import functional

    return partial(getattr(functional, name), **settings)


ACTIVATIONS: "dict[str, Callable[[], Activate]]" = {
    # "gelu" is the erf form, as in the paper and the 2018 checkpoints; the tanh form is from a later release.
    "gelu": _erf_gelu,
    "gelu_new": partial(_of_torch, "gelu", approximate="tanh"),
    "gelu_pytorch_tanh": partial(_of_torch, "gelu", approximate="tanh"),
    "relu": partial(_of_torch, "relu"),
    "relu2": _squared_relu,  # Primer (So et al. 2021)
    "silu": partial(_of_torch, "silu"),
    "swish": partial(_of_torch, "silu"),
    "tanh": partial(_of_torch, "tanh"),
}
"""A new activation is an entry here, for model folders and recipes."""
