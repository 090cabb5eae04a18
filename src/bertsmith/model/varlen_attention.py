"""The two variable-length attention kernels that ship with torch for CUDA: flash and efficient.

`torch.nn.attention.varlen` takes no dropout; the flash operator below it does (from torch's CUDA generator),
so the operators are called directly. They differentiate by themselves.
"""

import torch
from torch import Tensor

from bertsmith.model.attention_rule import EVERYTHING, AttentionRule
from bertsmith.packed import Layout

WIDEST_FLASH_HEAD = 256


def flash_takes(query_THK: Tensor) -> bool:
    """Whether the flash kernel can run this query: half precision, Ampere or newer, a head width it knows."""
    half = query_THK.dtype in (torch.bfloat16, torch.float16)
    return half and flash_fits(query_THK.shape[-1], query_THK.device)


def flash_fits(head_width: int, device: torch.device) -> bool:
    """Whether the flash kernel takes heads of this width on this GPU, in half precision."""
    fits = head_width % 8 == 0 and head_width <= WIDEST_FLASH_HEAD
    return fits and torch.cuda.get_device_capability(device) >= (8, 0)


def flash_attention(
    query_THK: Tensor, key_THK: Tensor, value_THK: Tensor, layout: Layout, rule: AttentionRule
) -> Tensor:
    """Flash attention over packed sequences; a window of -1 sees everything, as in ours."""
    # The kernel refuses a causal flag together with a window: a window that ends at the query says the same.
    after = 0 if rule.causal else rule.window
    mixed_THK: Tensor = torch.ops.aten._flash_attention_forward(
        *(query_THK, key_THK, value_THK, layout.starts_S1, layout.starts_S1, layout.longest, layout.longest),
        *(rule.dropout, rule.causal and rule.window == EVERYTHING, False),
        window_size_left=rule.window,
        window_size_right=after,
    )[0]
    return mixed_THK


def efficient_takes(query_THK: Tensor, rule: AttentionRule) -> bool:
    """Whether the efficient kernel can run this: not double precision, no window, no dropout, aligned heads.

    Its dropout over packed sequences is wrong in torch 2.11: every sequence gets the same mask, and the
    backward pass another one than the forward.
    """
    single = query_THK.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return single and rule.window == EVERYTHING and not rule.dropout and query_THK.shape[-1] % 8 == 0


def efficient_attention(
    query_THK: Tensor, key_THK: Tensor, value_THK: Tensor, layout: Layout, rule: AttentionRule
) -> Tensor:
    """Memory-efficient attention over packed sequences, for fp32 and for GPUs without flash."""
    starts, longest = layout.starts_S1, layout.longest
    mixed_1THK = torch.ops.aten._efficient_attention_forward(
        *(query_THK[None], key_THK[None], value_THK[None], None, starts, starts, longest, longest),
        *(0.0, int(rule.causal), True),
    )[0]
    mixed_THK: Tensor = mixed_1THK[0]
    return mixed_THK
