"""A model with a vocabulary trimmed to a user's texts: the same results for them, with a smaller table.

Shapes: V words before, N words after, E embedding width.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bertsmith.core.errors import UserError
from bertsmith.inference.loaded_model import Bert
from bertsmith.model.folder.model_folder import Model
from bertsmith.model.folder.quantised_folder import is_quantised
from bertsmith.model.heads import MaskedLanguageHead
from bertsmith.model.network import Network
from bertsmith.text.trim_vocabulary import TrimmedVocabulary


def with_vocabulary(bert: Bert, trimmed: TrimmedVocabulary) -> Bert:
    """Return the model with a tokenizer that has only some of its pieces."""
    if is_quantised(bert.model.network):
        remedy = "trim the model that it was made from, and quantise again"
        raise UserError("the model is quantised, so its weights are fixed", remedy=remedy)
    network = trimmed_network(bert.model.network, trimmed.kept)
    new = {number: index for index, number in enumerate(trimmed.kept)}
    extras = {key: _renumbered(key, value, new) for key, value in bert.model.extras.items()}
    model: Model = replace(bert.model, network=network, extras=extras)
    return Bert(model, trimmed.tokenizer, device="cpu", finetuned=bert.finetuned)


def _renumbered(key: str, value: Any, new: dict[int, int]) -> Any:
    """Return config.json's value for a key, for example sep_token_id; None for a removed id."""
    return new.get(value) if key.endswith("_token_id") and isinstance(value, int) else value


def trimmed_network(network: Network, kept: Sequence[int]) -> Network:
    """Return a copy of a network with only the words of these ids, in this order."""
    smaller, rows_N = deepcopy(network), torch.tensor(kept)
    words = smaller.encoder.words
    table = nn.Embedding(len(kept), words.embedding_dim, device="meta")
    table.weight = _rows_of(words.weight, rows_N)
    smaller.encoder.put_words(table)
    if "mlm" in smaller.heads:
        head = smaller.heads["mlm"]
        assert isinstance(head, MaskedLanguageHead), "no other predicts words"
        for name, weights in list(head.named_parameters(recurse=False)):
            setattr(head, name, _rows_of(weights, rows_N))
    ends: dict[str, Any] = {
        key: kept.index(old) if old in kept else None
        for key in ("begin_id", "end_id")
        if (old := getattr(network.config, key, None)) is not None
    }
    smaller.config = replace(network.config, vocabulary=len(kept), pad_id=_new_pad_id(network, kept), **ends)
    return smaller


def _new_pad_id(network: Network, kept: Sequence[int]) -> int:
    pad_id = network.config.pad_id
    new = kept.index(pad_id) if pad_id in kept else 0  # packed texts are not padded
    if network.config.positions_from_pad_id and new != pad_id:
        what = "positions are counted from the padding id on, which would change"
        raise UserError(what, remedy="use a vocabulary that begins with its special tokens")
    return new


def _rows_of(weights: Tensor, rows_N: Tensor) -> nn.Parameter:
    return nn.Parameter(weights.detach()[rows_N.to(weights.device)].clone())
