"""New words in a trained network: each starts as the mean of the pieces it was written with before."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from bertsmith.model.heads import MaskedLanguageHead
from bertsmith.model.network import Network
from bertsmith.text.added_words import new_words
from bertsmith.text.tokenizer import Tokenizer


def grow_for_words(network: Network, before: Tokenizer, after: Tokenizer, words: Sequence[str]) -> str:
    """Give each new word the mean of its former pieces' embeddings; a note of what was done."""
    fresh = new_words(before, words)
    if after.vocabulary_size > network.shape.vocabulary:
        _grow(network, after.vocabulary_size)
    table_VE = network.encoder.embeddings.words.weight
    bias_V = _decoder_bias(network)
    with torch.no_grad():
        for word in fresh:
            pieces = [number for number in before.encode(word).ids if number not in before.special_ids]
            rows = torch.tensor(pieces or [before.unknown_id])
            table_VE[after.id(word)] = table_VE[rows].mean(0)
            if bias_V is not None:
                bias_V[after.id(word)] = bias_V[rows].mean()
    behind = after.vocabulary_size - before.vocabulary_size
    return (
        f"{len(fresh)} words added, {len(fresh) - behind} of them in [unused] slots, {behind} behind the end"
    )


def _grow(network: Network, entries: int) -> None:
    words = network.encoder.embeddings.words
    longer = nn.Embedding(entries, words.embedding_dim)
    longer.to(words.weight)
    with torch.no_grad():
        longer.weight.zero_()
        longer.weight[: words.num_embeddings] = words.weight
    network.encoder.embeddings.words = longer
    bias_V = _decoder_bias(network)
    if bias_V is not None:
        longer_bias = bias_V.new_zeros(entries)
        longer_bias[: bias_V.shape[0]] = bias_V.detach()
        network.heads["mlm"].bias = nn.Parameter(longer_bias)
    network.shape = replace(network.shape, vocabulary=entries)


def _decoder_bias(network: Network) -> nn.Parameter | None:
    if "mlm" not in network.heads:
        return None
    head = network.heads["mlm"]
    assert isinstance(head, MaskedLanguageHead)
    return head.bias
