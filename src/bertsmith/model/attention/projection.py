"""The inputs of a layer's attention, before its product or with what that gave.

Shapes: T packed tokens, R of them that are requested, H heads, K head width, D model width, J = H K.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from bertsmith.model.attention.rotary import Rotary
from bertsmith.model.attention.rule import AttentionRule
from bertsmith.model.kernels.torch_internals import learns_bias
from bertsmith.packed import Layout, Rows

Vectors = tuple[Tensor, Tensor, Tensor]
"""Query, key and value [T, H, K]."""


@dataclass(frozen=True, slots=True)
class Projection:
    """The inputs of attention; some kernels take the product of query, key and value whole, or do without."""

    hidden_TD: Tensor
    linear: Callable[[Tensor], Tensor]
    """The layer that gives query, key and value in one product."""
    head_width: int
    rotary: Rotary | None
    positions_T: Tensor
    rows: Rows
    """Rows that are computed further; every row is a key and a value for them."""
    learns: bool = False
    vectors: Vectors | None = None
    """Query, key and value if they were computed before."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the product, which autocast decides."""
        device, dtype = self.hidden_TD.device.type, self.hidden_TD.dtype
        cast = torch.is_autocast_enabled(device) and dtype != torch.float64
        return torch.get_autocast_dtype(device) if cast else dtype

    def whole(self) -> tuple[Tensor, Tensor | None]:
        """Return the product [T, 3, H, K], and its bias [3 J] if the caller sums the gradient of that."""
        if self.rotary is None and learns_bias(self.linear):
            bias_3J = self.linear.bias
            product_T3J = functional.linear(self.hidden_TD, self.linear.weight, bias_3J.detach())
        else:
            bias_3J, product_T3J = None, self.linear(self.hidden_TD)
        return self._in_heads(product_T3J), bias_3J

    def apart(self) -> Vectors:
        """Return query, key and value, turned to their positions."""
        if self.vectors is not None:
            return self.vectors
        query_THK, key_THK, value_THK = self._in_heads(self.linear(self.hidden_TD)).unbind(1)
        if self.rotary is not None:
            query_THK, key_THK = self.rotary(query_THK, key_THK, self.positions_T)
        return query_THK, key_THK, value_THK

    def _in_heads(self, product_T3J: Tensor) -> Tensor:
        heads = product_T3J.shape[1] // (3 * self.head_width)
        return product_T3J.view(-1, 3, heads, self.head_width)


Attend = Callable[[Projection, Layout, AttentionRule], Tensor]
"""Gives each requested row's mix of the values of its own sequence, heads side by side [R, J]."""
