"""Attention over sequences of up to 128 tokens on CUDA, in half precision, by one kernel for each pass.

Shapes: T packed tokens, H heads, K head width, F = K / 2 pairs of features.

Flash attention is made for sequences that do not fit: it passes over keys block by block, and its backward
pass needs three kernels and gradients of query, key and value that are then copied into one. The kernels here
read and write the whole projection, and turn queries and keys to rotary positions on the way, or sum the
gradient of the projection's bias. Longer sequences that are not turned are computed by `tiled.py`.
"""

from typing import Any

import torch
from torch import Tensor, library

from bertsmith.model.attention import tiled
from bertsmith.model.attention.projection import Projection
from bertsmith.model.attention.rotary import NormalisedRotary
from bertsmith.model.attention.rule import EVERYTHING, AttentionRule
from bertsmith.model.kernels.elementwise import dropout_seed, dropped_values
from bertsmith.model.kernels.triton_ready import needs_operator, triton_runs_on
from bertsmith.packed import SHORT_LENGTH, Layout

MAX_LENGTH = SHORT_LENGTH
HEAD_WIDTHS = (16, 32, 64, 128)
HOPPER, SMALL_BLACKWELL = (9, 0), (12, 0)
"""A program may have 227 KB of shared memory from the first capability on, 99 again from the second."""


def short_takes(inputs: Projection, layout: Layout, rule: AttentionRule) -> bool:
    """True if the kernel for short sequences can run these."""
    # The length is checked last: elsewhere graphs must not depend on it.
    return _kernels_take(inputs, rule) and inputs.head_width in HEAD_WIDTHS and layout.longest <= MAX_LENGTH


def tiled_takes(inputs: Projection, layout: Layout, rule: AttentionRule) -> bool:
    """True if the kernels for longer sequences can run these: they take a product whole, and turn nothing."""
    plain = inputs.vectors is None and inputs.rotary is None
    fits = plain and inputs.head_width in tiled.HEAD_WIDTHS
    return fits and _kernels_take(inputs, rule) and layout.longest <= tiled.MAX_LENGTH


def _kernels_take(inputs: Projection, rule: AttentionRule) -> bool:
    """True if there are kernels for this type, rule and GPU."""
    half = inputs.dtype in (torch.bfloat16, torch.float16)
    everything = not rule.causal and rule.window == EVERYTHING
    if not (half and everything and triton_runs_on(inputs.hidden_TD.device)):
        return False
    return HOPPER <= torch.cuda.get_device_capability(inputs.hidden_TD.device) < SMALL_BLACKWELL


def attend_short(inputs: Projection, layout: Layout, rule: AttentionRule) -> Tensor:
    """Return each requested row's mix of the values of its own sequence.

    What lies in one product is taken so: that spares a copy of all three gradients, and a pass over queries
    and keys to turn them.
    """
    rotary = inputs.rotary
    if inputs.vectors is not None or isinstance(rotary, NormalisedRotary):
        mixed_THK = attend_within(torch.stack(inputs.apart(), dim=1), layout, rule)
    else:
        projected_T3HK, bias_3J = inputs.whole()
        turns_TF = None if rotary is None else rotary.turns(inputs.positions_T, projected_T3HK)
        mixed_THK = attend_within(projected_T3HK, layout, rule, turns_TF, bias_3J)
    return mixed_THK.flatten(1)[inputs.rows]


def attend_within(
    projected_T3HK: Tensor,
    layout: Layout,
    rule: AttentionRule,
    turns_TF: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute attention from a whole projection, without copying any of it in either pass.

    With cosines and sines, queries and keys are turned by them first, as `rotary.Rotary` would. A bias is
    passed if the projection has it without its gradient, which is summed here: that saves a pass over the
    projection's gradient.
    """
    dropped = dropped_values(rule.dropout)
    seed = dropout_seed(projected_T3HK.device) if dropped else None
    if layout.longest > MAX_LENGTH:
        assert turns_TF is None, "kernels do not turn longer sequences"
        return tiled.attend_in_tiles(projected_T3HK, layout, dropped=dropped, seed=seed, bias=bias)
    forward = _forward_operator if needs_operator() else _forward
    cosine_TF, sine_TF = turns_TF or (None, None)
    operands = (projected_T3HK, cosine_TF, sine_TF, layout.starts_S1, seed, bias)
    mixed_THK: Tensor = forward(*operands, layout.longest, dropped)
    return mixed_THK


def _forward(  # noqa: PLR0913 - an operator takes tensors and numbers
    projected: Tensor,
    cosine: Tensor | None,
    sine: Tensor | None,
    starts: Tensor,
    seed: Tensor | None,
    bias: Tensor | None,  # noqa: ARG001 - the projection has it already; the backward pass gives its gradient
    longest: int,
    dropped: int,
) -> Tensor:
    from bertsmith.model.attention.short_triton import forward

    operands = (projected.contiguous(), (cosine, sine), starts, seed)
    return forward(operands, longest=longest, dropped=dropped)


_forward_operator = library.custom_op("bertsmith::short_attention", _forward, mutates_args=())


@_forward_operator.register_fake
def _forward_shape(projected: Tensor, *_: object) -> Tensor:
    return projected.new_empty((projected.shape[0], *projected.shape[2:]))


@library.custom_op("bertsmith::short_attention_backward", mutates_args=())
def _backward(  # noqa: PLR0913
    gradient: Tensor,
    projected: Tensor,
    cosine: Tensor | None,
    sine: Tensor | None,
    starts: Tensor,
    seed: Tensor | None,
    longest: int,
    dropped: int,
    summed: bool,
) -> tuple[Tensor, Tensor]:
    from bertsmith.model.attention.short_triton import backward

    operands = (projected.contiguous(), (cosine, sine), starts, seed)
    return backward(gradient.contiguous(), operands, longest=longest, dropped=dropped, summed=summed)


@_backward.register_fake
def _backward_shapes(_gradient: Tensor, projected: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    sums = projected.new_empty(projected.shape[1:], dtype=torch.float32)
    return projected.new_empty(projected.shape), sums


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - torch's signature
    *tensors, bias, ctx.longest, ctx.dropped = inputs
    ctx.bias_type = None if bias is None else bias.dtype
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: if layers are recomputed, a second reading is an error
    asked = ctx.needs_input_grad[len(saved)]  # the bias, after them
    to_projected, sums = _backward(gradient, *saved, ctx.longest, ctx.dropped, asked)
    to_bias = sums.flatten().to(ctx.bias_type) if asked else None
    return to_projected, None, None, None, None, to_bias, None, None


_forward_operator.register_autograd(_gradients, setup_context=_keep)
