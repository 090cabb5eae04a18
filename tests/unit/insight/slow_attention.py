"""Attention as transformers gives it, one text at a time: what every fast study is checked against."""

import torch


def eager_maps(eager, encoded):
    """[L, H, N, N] as nested loops want it."""
    with torch.no_grad():
        found = eager.bert(
            torch.tensor([encoded.ids]),
            token_type_ids=torch.tensor([encoded.segments]),
            output_attentions=True,
        )
    return torch.cat(found.attentions).double().numpy()
