"""Attention of one row of each sequence: all that a sentence head needs from the last layer.

Shapes: T packed tokens, S sequences, N tokens of one of them, H heads, K head width, D model width.

A single query does not need projected keys: q . (W h) is (W' q) . h, so the query is multiplied with the
states, and the value of a mix is the mix of the values. Three products over all tokens become three over a
row a sequence. The bias of the keys adds the same to all scores of a query, and its softmax cancels it.
"""

import torch
from torch import Tensor
from torch.nn import functional

from bertsmith.model.attention.projection import Projection
from bertsmith.model.attention.rule import EVERYTHING, AttentionRule
from bertsmith.model.kernels.elementwise import Dropout
from bertsmith.model.kernels.torch_internals import is_plain
from bertsmith.packed import Layout

SEQUENCE_COST = 300_000
"""Fixed cost of a sequence, in weights of a square matrix that tokens skip; measured on a Neoverse N1.

Its small products run in one thread, while the skipped products would be shared by all.
"""


def once_takes(inputs: Projection, layout: Layout, rule: AttentionRule) -> bool:
    """True if, in training, one row of each sequence is requested, and this form supports it and is faster.

    In half precision its scores would be rounded, while other forms keep them in fp32; a GPU would wait for
    the launch of each small product; a layer with adapters or hooks has to be called.
    """
    # Checked first: a graph must not depend on the numbers of rows and sequences.
    rows, hidden_TD = inputs.rows, inputs.hidden_TD
    if torch.compiler.is_compiling() or isinstance(rows, slice) or len(rows) != layout.sequences:
        return False
    exact = hidden_TD.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")
    whole = not rule.causal and rule.window == EVERYTHING and inputs.rotary is None
    begins = inputs.learns and inputs.vectors is None
    if not (begins and is_plain(inputs.linear) and exact and whole and hidden_TD.device.type == "cpu"):
        return False
    cost = SEQUENCE_COST * torch.get_num_threads() * layout.sequences
    one_of_each = (layout.starts_S1[:-1] <= rows) & (rows < layout.starts_S1[1:])
    return len(rows) > 0 and hidden_TD.numel() * hidden_TD.shape[1] >= cost and bool(one_of_each.all())


def attend_once(inputs: Projection, layout: Layout, rule: AttentionRule) -> Tensor:
    """Return each requested row's mix of its sequence's values [S, J]."""
    hidden_TD, rows_S, project = inputs.hidden_TD, inputs.rows, inputs.linear
    assert is_plain(project), "`once_takes` says so"
    heads = project.out_features // (3 * inputs.head_width)
    sequences, width = layout.sequences, hidden_TD.shape[1]
    query_OD, key_OD, value_OD = project.weight.chunk(3)
    query_bias_O, _, value_bias_O = (None,) * 3 if project.bias is None else project.bias.chunk(3)
    query_SHK = functional.linear(hidden_TD[rows_S], query_OD, query_bias_O).view(sequences, heads, -1)
    query_SHK = query_SHK * query_SHK.shape[-1] ** -0.5
    towards_SHD = torch.einsum("shk,hkd->shd", query_SHK, key_OD.view(heads, -1, width))
    lengths = layout.starts_S1.diff().tolist()
    whole_HT = Dropout(rule.dropout)(hidden_TD.new_ones(heads, len(hidden_TD)))
    mixed, kept = [], []
    parts = zip(torch.split(hidden_TD, lengths), torch.split(whole_HT, lengths, 1), towards_SHD, strict=True)
    for states_ND, whole_HN, towards_HD in parts:
        kept_HN = (towards_HD @ states_ND.mT).softmax(-1) * whole_HN
        mixed.append(kept_HN @ states_ND)
        kept.append(kept_HN.sum(-1))
    mixed_SHK = torch.einsum("shd,hkd->shk", torch.stack(mixed), value_OD.view(heads, -1, width))
    if value_bias_O is not None:
        # After dropout the sum is not 1.
        mixed_SHK = mixed_SHK + torch.stack(kept)[..., None] * value_bias_O.view(heads, -1)
    return mixed_SHK.flatten(1)
