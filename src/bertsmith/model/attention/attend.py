"""Attention by the fastest form that fits: a new kernel is a file and a line in `KERNELS`.

Shapes: T packed tokens, H heads, K head width.

A form takes query, key and value as `rule.reference_attention` does, or a whole `Projection`; all are tested
against that reference. The two variable-length kernels that ship with torch for CUDA, flash and efficient,
need only the few lines here. `torch.nn.attention.varlen` takes no dropout; the flash
operator below it does (from torch's CUDA generator), so the operators are called directly. They differentiate
by themselves.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bertsmith.model.attention.grouped import grouped_attention
from bertsmith.model.attention.once import attend_once, once_takes
from bertsmith.model.attention.products import product_attention, products_take
from bertsmith.model.attention.projection import Attend, Projection
from bertsmith.model.attention.rule import EVERYTHING, AttentionRule, Form
from bertsmith.model.attention.short import attend_short, short_takes, tiled_takes
from bertsmith.model.kernels.torch_internals import (
    PackedSequences,
    efficient_attention_varlen,
    flash_attention_varlen,
)
from bertsmith.packed import ALL, Layout

MAX_FLASH_HEAD_WIDTH = 256


def flash_takes(inputs: Projection, _layout: Layout, _rule: AttentionRule) -> bool:
    """True if the flash kernel can run these: half precision, Ampere or newer, a known head width."""
    half = inputs.dtype in (torch.bfloat16, torch.float16)
    return half and flash_fits(inputs.head_width, inputs.hidden_TD.device)


def flash_fits(head_width: int, device: torch.device) -> bool:
    """True if the flash kernel supports heads of this width on this GPU, in half precision."""
    fits = head_width % 8 == 0 and head_width <= MAX_FLASH_HEAD_WIDTH
    return fits and torch.cuda.get_device_capability(device) >= (8, 0)


def flash_attention(
    query_THK: Tensor, key_THK: Tensor, value_THK: Tensor, layout: Layout, rule: AttentionRule
) -> Tensor:
    """Compute flash attention over packed sequences; a window of -1 sees everything, as in ours."""
    # The kernel rejects a causal flag together with a window: a window that ends at the query is equivalent.
    after = 0 if rule.causal else rule.window
    return flash_attention_varlen(
        (query_THK, key_THK, value_THK),
        PackedSequences(layout.starts_S1, layout.longest),
        dropout=rule.dropout,
        causal=rule.causal and rule.window == EVERYTHING,
        window=(rule.window, after),
    )


def efficient_takes(inputs: Projection, _layout: Layout, rule: AttentionRule) -> bool:
    """True if the efficient kernel can run this: not double precision, no window or dropout, aligned heads.

    Its dropout over packed sequences is wrong in torch 2.11: every sequence gets the same mask, and the
    backward pass another one than the forward.
    """
    if rule.dropout or rule.window != EVERYTHING:
        return False
    single = inputs.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return single and inputs.head_width % 8 == 0


def efficient_attention(
    query_THK: Tensor, key_THK: Tensor, value_THK: Tensor, layout: Layout, rule: AttentionRule
) -> Tensor:
    """Compute memory-efficient attention over packed sequences, for fp32 and for GPUs without flash."""
    operands_1THK = (query_THK[None], key_THK[None], value_THK[None])
    packed = PackedSequences(layout.starts_S1, layout.longest)
    return efficient_attention_varlen(operands_1THK, packed, causal=rule.causal)[0]


# ---- which form computes what


class Kernel(NamedTuple):
    """One form of attention."""

    device: Literal["cpu", "cuda", "any"]
    takes: Callable[[Projection, Layout, AttentionRule], bool]
    """True if this kernel supports the inputs and the rule; `KERNELS` is ordered fastest first."""
    attend: Attend


def of_three(form: Form) -> Attend:
    """Return a form of query, key and value as one that computes these first, for all rows."""
    return lambda inputs, layout, rule: form(*inputs.apart(), layout, rule).flatten(1)[inputs.rows]


KERNELS = {
    # Training where one row of each sequence is requested: neither keys nor values are projected.
    "once": Kernel("cpu", once_takes, attend_once),
    # Half precision, sequences of up to 128 tokens: a kernel of ours that holds a head of a sequence.
    "short": Kernel("cuda", short_takes, attend_short),
    # Half precision, sequences of up to 512 tokens in one product: a kernel of ours.
    "tiled": Kernel("cuda", tiled_takes, attend_short),
    # Half precision, Ampere or newer: the variable-length kernel inside torch.
    "flash": Kernel("cuda", flash_takes, of_three(flash_attention)),
    # Single precision or an older GPU, without dropout or window.
    "efficient": Kernel("cuda", efficient_takes, of_three(efficient_attention)),
    # Training on sequences of up to 128 tokens: one pass of products instead of the fused kernel's two.
    "products": Kernel("cpu", products_take, of_three(product_attention)),
    # Everything else, also under torch.compile: sequences of similar length are one dense problem.
    "grouped": Kernel("any", lambda *_: True, of_three(grouped_attention)),
}
"""In order of preference: the first that takes its inputs computes them. The tests try each where it runs."""


def attend(inputs: Projection, layout: Layout, rule: AttentionRule) -> Tensor:
    """Return each requested row's mix of the values of its own sequence, by the fastest form that fits."""
    if rule.backwards:
        # Kernels cannot look only to the right, but to the left: reverse the row.
        query_THK, key_THK, value_THK = (each.flip(0) for each in inputs.apart())
        turned = Layout((query_THK.shape[0] - layout.starts_S1).flip(0), layout.longest)
        back_to_front = replace(inputs, vectors=(query_THK, key_THK, value_THK), rows=ALL)
        return attend(back_to_front, turned, replace(rule, backwards=False)).flip(0)[inputs.rows]
    for kernel in KERNELS.values():
        if kernel.device in ("any", inputs.hidden_TD.device.type) and kernel.takes(inputs, layout, rule):
            return kernel.attend(inputs, layout, rule)
    raise AssertionError("the last kernel supports everything")
