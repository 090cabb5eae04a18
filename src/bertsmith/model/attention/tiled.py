"""Attention over sequences of up to 512 tokens on CUDA, in half precision, if some have more than 128.

Shapes: T packed tokens, H heads, K head width.

Like flash attention, it passes over keys tile by tile and keeps the normaliser of each softmax, and with
dropout a bit for each score: 0.6 GiB in a step of BERT-Base over 65,536 tokens. But it reads and writes the
whole projection, while flash attention's three gradients are copied into one, and it sums the gradient of the
projection's bias on the way. Sequences of up to 128 tokens are left to the kernels of `short.py`, which
process all scores of a sequence at once.
"""

from typing import Any

import torch
from torch import Tensor, library

from bertsmith.model.kernels.triton_ready import needs_operator
from bertsmith.packed import Layout

MAX_LENGTH = 512
HEAD_WIDTHS = (16, 32, 64)


def words_of(dropped: int) -> int:
    """Return the words of bits per token and head: one for 32 keys, 0 without dropout."""
    return MAX_LENGTH // 32 if dropped else 0


def attend_in_tiles(
    projected_T3HK: Tensor, layout: Layout, *, dropped: int, seed: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Return each token's mix of its sequence's values, for `short.attend_within`."""
    forward = _forward_operator if needs_operator() else _forward
    operands = (projected_T3HK, layout.starts_S1, seed, bias)
    mixed_THK: Tensor = forward(*operands, layout.longest, dropped)[0]
    return mixed_THK


def _forward(  # noqa: PLR0913 - an operator takes tensors and numbers
    projected: Tensor,
    starts: Tensor,
    seed: Tensor | None,
    bias: Tensor | None,  # noqa: ARG001 - the projection has it already; the backward pass gives its gradient
    longest: int,
    dropped: int,
) -> tuple[Tensor, Tensor, Tensor]:
    from bertsmith.model.attention.tiled_triton import forward

    return forward((projected.contiguous(), starts, seed), longest=longest, dropped=dropped)


_forward_operator = library.custom_op("bertsmith::tiled_attention", _forward, mutates_args=())


@_forward_operator.register_fake
def _forward_shapes(projected: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    tokens, _, heads, width = projected.shape
    mixed = projected.new_empty((tokens, heads, width))
    normalisers = projected.new_empty((tokens, heads), dtype=torch.float32)
    return mixed, normalisers, projected.new_empty((tokens, heads, words_of(others[-1])), dtype=torch.int32)


@library.custom_op("bertsmith::tiled_attention_backward", mutates_args=())
def _backward(  # noqa: PLR0913
    gradient: Tensor,
    projected: Tensor,
    starts: Tensor,
    seed: Tensor | None,
    mixed: Tensor,
    normalisers: Tensor,
    kept: Tensor,
    longest: int,
    dropped: int,
    summed: bool,
) -> tuple[Tensor, Tensor]:
    from bertsmith.model.attention.tiled_triton import backward

    operands, saved = (projected.contiguous(), starts, seed), (mixed, normalisers, kept)
    return backward(gradient.contiguous(), operands, saved, longest=longest, dropped=dropped, summed=summed)


@_backward.register_fake
def _backward_shapes(_gradient: Tensor, projected: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    sums = projected.new_empty(projected.shape[1:], dtype=torch.float32)
    return projected.new_empty(projected.shape), sums


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, bias, ctx.longest, ctx.dropped = inputs
    ctx.bias_type = None if bias is None else bias.dtype
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)  # the other outputs never get gradients


def _gradients(ctx: Any, gradient: Tensor, *_others: Tensor | None) -> tuple[Tensor | None, ...]:
    asked = ctx.needs_input_grad[3]  # the bias
    to_projected, sums = _backward(gradient, *ctx.saved_tensors, ctx.longest, ctx.dropped, asked)
    to_bias = sums.flatten().to(ctx.bias_type) if asked else None
    return to_projected, None, None, to_bias, None, None


_forward_operator.register_autograd(_gradients, setup_context=_keep)
