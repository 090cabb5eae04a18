"""Rotary positions of queries and keys (Su et al. 2021), also of normalised ones.

Shapes: T packed tokens, H heads, K head width, F = K / 2 pairs of features.
"""

import torch
from torch import Tensor, library, nn
from torch.nn import functional


class Rotary(nn.Module):
    """Rotary positions: turns pairs of query and key features by an angle that grows with the position."""

    def __init__(self, theta: float) -> None:
        super().__init__()
        self.theta = theta

    def forward(self, query_THK: Tensor, key_THK: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        cosine_TF, sine_TF = self.turns(positions_T, query_THK)
        both = cosine_TF[:, None], sine_TF[:, None]
        return _turned(query_THK, *both), _turned(key_THK, *both)

    def turns(self, positions_T: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [T, F] of the angles that turn pairs of such features, in their type."""
        # Half precision cannot distinguish far positions: angles in fp32, as published, or better.
        exact = torch.float64 if features.dtype == torch.float64 else torch.float32
        turns = _turns_once if torch.compiler.is_compiling() else _turns
        cosine_TF, sine_TF = turns(positions_T, self.theta, features.shape[-1] // 2, exact)
        return cosine_TF.to(features.dtype), sine_TF.to(features.dtype)


class NormalisedRotary(Rotary):
    """Rotary positions of queries and keys that each head scales to a root mean square of 1, without gains.

    Their products then stay within the head width, however large the weights grow (QK-norm; Henry et al.
    2020, Dehghani et al. 2023).
    """

    def __init__(self, theta: float, *, eps: float) -> None:
        super().__init__(theta)
        self.eps = eps

    def forward(self, query_THK: Tensor, key_THK: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(self._scaled(query_THK), self._scaled(key_THK), positions_T)

    def _scaled(self, features_THK: Tensor) -> Tensor:
        scaled_THK = functional.rms_norm(features_THK, features_THK.shape[-1:], eps=self.eps)
        # Autocast gives fp32, which the flash kernel does not support.
        return scaled_THK.to(features_THK.dtype)


def _turns(positions_T: Tensor, theta: float, pairs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [T, F] of the angle that turns each pair of features at each position."""
    exponent_F = torch.arange(pairs, device=positions_T.device, dtype=dtype) / pairs
    angle_TF = positions_T[:, None].to(dtype) * (1.0 / theta**exponent_F)
    return angle_TF.cos(), angle_TF.sin()


# The compiler would compute power, cosine and sine again for each feature of each head of each layer, on the
# way into its products: more work than all other elementwise operations. It treats an operator as opaque, and
# calls one with the same arguments once for all layers.
_turns_once = library.custom_op(
    "bertsmith::rotary_turns",
    _turns,
    mutates_args=(),
    schema="(Tensor positions, float theta, int pairs, ScalarType dtype) -> (Tensor, Tensor)",
)


@_turns_once.register_fake
def _turns_shapes(
    positions_T: Tensor, _theta: float, pairs: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    shape = (positions_T.shape[0], pairs)  # `len` would specialise the graph to this number of tokens
    return positions_T.new_empty(shape, dtype=dtype), positions_T.new_empty(shape, dtype=dtype)


def _turned(features_THK: Tensor, cosine_T1F: Tensor, sine_T1F: Tensor) -> Tensor:
    first, second = features_THK.chunk(2, dim=-1)
    turned = (first * cosine_T1F - second * sine_T1F, second * cosine_T1F + first * sine_T1F)
    return torch.cat(turned, dim=-1)
