"""The heads of a model on one text: the kind of each, the attention of one, and its computation step by step.

Attention grows with the square of the text, times heads, times layers: only one layer is kept at once.

Shapes: N tokens, L layers, H heads, K head width, C cells of a small map, R tokens that are read most.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from bertsmith.core.errors import UserError
from bertsmith.inference.loaded_model import Bert
from bertsmith.inference.text_reader import TextInput
from bertsmith.model.attention.projection import Vectors
from bertsmith.model.attention.rule import AttentionRule, attention_probabilities
from bertsmith.model.attention.watched import AttentionHeads, shown
from bertsmith.model.encoder_config import need
from bertsmith.model.transformer.transformer_config import TransformerConfig, with_heads
from bertsmith.packed import ALL, PackedBatch, pack
from bertsmith.text.tokenizer import Encoded

HeadKind = Literal["previous", "next", "itself", "first", "separator", "broad", "mixed"]

MAP_CELLS = 24
"""Maximum cells of a small map, each way; a longer text is pooled."""
CLEAR_SHARE = 0.4
"""Minimum fraction of its attention at one place for a head to be named after that place."""
BROAD_ENTROPY = 0.75
"""Minimum fraction of the largest possible entropy for an otherwise unnamed head to be called broad."""
MIN_DISTANCE = 2
"""Minimum distance, in tokens, between two that are worth showing: heads that read a neighbour are common."""
MOST_READ = 6
"""Number of tokens with keys and values to show."""
PRONOUN_LIST = "it he she they him her them his its their hers theirs himself herself itself"
FUNCTION_WORD_LIST = (
    "a an the and or but of to in on at by for from with as that this these those because so if than then "
    "not no did does do is are was were be been am has have had will would can could may might must too very "
    "i you we who which what when where how there here"
)
PRONOUNS = frozenset(PRONOUN_LIST.split())
FUNCTION_WORDS = PRONOUNS | frozenset(FUNCTION_WORD_LIST.split())
"""English words with little meaning by themselves: a head that reads one is seldom a good example."""
CONTINUES = "##"
"""Prefix of a piece that continues a word."""
MARKS = "##\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}\N{LOWER ONE EIGHTH BLOCK}"
"""Prefixes of pieces that show where words begin."""


@dataclass(frozen=True, slots=True)
class HeadSummary:
    """Kind of a head on a text: the place with most of its attention, and the fraction there."""

    kind: HeadKind
    share: float


@dataclass(frozen=True, slots=True)
class Moment:
    """An example for a view to begin with: a head, and a token that reads a distant other one."""

    layer: int
    head: int
    token: int
    target: int
    weight: float


@dataclass(frozen=True, slots=True)
class HeadsOverview:
    """All heads of a model on one text."""

    tokens: tuple[str, ...]
    special: tuple[bool, ...]
    """True for each token that the template added."""
    summaries: tuple[tuple[HeadSummary, ...], ...]
    """Summaries by layer and head."""
    maps: Tensor
    """[L, H, C, C]: the weights of each head, or the largest of the weights in a cell."""
    moment: Moment | None


@dataclass(frozen=True, slots=True)
class HeadSteps:
    """The computation of one token's attention in one head, with the numbers of every step."""

    query: Tensor
    """[K]"""
    scores: Tensor
    """[N]: the product of the query with each key, over the square root of the head's width."""
    weights: Tensor
    """[N]: the softmax of the scores."""
    most_read: tuple[int, ...]
    """Indices of the R tokens with the largest weights."""
    keys: Tensor
    """[R, K]"""
    values: Tensor
    """[R, K]"""
    output: Tensor
    """[K]: the sum of all values, each times its weight."""


def inspect_heads(bert: Bert, text: TextInput) -> HeadsOverview:
    """Return the kind of every head on a text or pair, and a clear example to begin with."""
    check_heads_are_whole(bert)
    encoded, batch = _one_sequence(bert, text)
    tokens = tuple(bert.tokenizer.token(number) for number in encoded.ids)
    special = tuple(sequence < 0 for sequence in encoded.sequence)
    telling = _telling_pairs(tokens, special)
    summaries: list[tuple[HeadSummary, ...]] = []
    maps: list[Tensor] = []
    moments: list[Moment] = []

    def record(weights_HNN: Tensor) -> None:
        layer = len(summaries)
        summaries.append(_summaries(weights_HNN, special))
        maps.append(functional.adaptive_max_pool2d(weights_HNN[None], min(len(tokens), MAP_CELLS))[0])
        if telling.any():
            moments.append(_best_moment(weights_HNN, telling, layer))

    _each_layer(bert, batch, record)
    moment = max(moments, key=lambda each: each.weight, default=None)
    return HeadsOverview(tokens, special, tuple(summaries), torch.stack(maps), moment)


def inspect_head(bert: Bert, text: TextInput, layer: int, head: int | None) -> Tensor:
    """Return the attention weights [N, N] of one head on a text, or their mean over a layer's heads."""
    check_head(bert, layer, head)
    found: list[Tensor] = []
    reached = 0

    def record(weights_HNN: Tensor) -> None:
        nonlocal reached
        if reached == layer:
            found.append(weights_HNN.mean(0) if head is None else weights_HNN[head])
        reached += 1

    _each_layer(bert, _one_sequence(bert, text)[1], record)
    return found[0]


def inspect_head_steps(bert: Bert, text: TextInput, layer: int, head: int, token: int) -> HeadSteps:
    """Return query, keys, scores, weights, values and their sum, for one token in one head."""
    check_head(bert, layer, head)
    encoded, batch = _one_sequence(bert, text)
    if not 0 <= token < len(encoded):
        raise UserError(f"token {token} does not exist", remedy=f"choose one from 0 to {len(encoded) - 1}")
    if not _config(bert).plain_attention:
        what = "this model's scores are not a product of one query and one key: they add relative positions"
        raise UserError(what, remedy="use a BERT for this view")
    found: list[Tensor] = []

    def see(number: int, vectors: Vectors, rule: AttentionRule) -> None:
        if number == layer:
            weights_HNN = attention_probabilities(*vectors[:2], rule)
            found.extend(each[:, head].float().cpu() for each in vectors)
            found.append(weights_HNN[head, token].float().cpu())

    with torch.no_grad():
        _heads(bert).last_states(batch, shown(see), ALL)
    query_NK, key_NK, value_NK, weights_N = found
    scores_N = key_NK @ query_NK[token] / query_NK.shape[-1] ** 0.5
    most = weights_N.topk(min(MOST_READ, len(weights_N))).indices
    output_K = weights_N @ value_NK
    return HeadSteps(
        query_NK[token], scores_N, weights_N, tuple(most.tolist()), key_NK[most], value_NK[most], output_K
    )


def check_head(bert: Bert, layer: int, head: int | None) -> None:
    """Reject a layer or head that the model does not have."""
    order = _heads(bert).order
    _check_number("layer", layer, len(order))
    _check_number("head", head or 0, _config(bert).heads_in(order[layer]))


def _check_number(name: str, number: int, count: int) -> None:
    if not 0 <= number < count:
        raise UserError(f"{name} {number} does not exist", remedy=f"choose one from 0 to {count - 1}")


def check_heads_are_whole(bert: Bert) -> None:
    """Reject a model with pruned heads, which do not fit into a table of layers and heads."""
    if _config(bert).layer_heads:
        what = "heads of this model were pruned, but this view requires all of them"
        raise UserError(what, remedy="use the model that it was pruned from")


# ---- one layer after another


def _config(bert: Bert) -> TransformerConfig:
    return with_heads(bert.engine.network.config)


def _heads(bert: Bert) -> AttentionHeads:
    return need(bert.engine.network.encoder.heads, "attention heads")


def _one_sequence(bert: Bert, text: TextInput) -> tuple[Encoded, PackedBatch]:
    (encoded,) = bert.reader.encode([text], truncate=False)
    return encoded, pack([encoded.ids], [encoded.segments]).to(bert.engine.device)


def _each_layer(bert: Bert, batch: PackedBatch, record: Callable[[Tensor], None]) -> None:
    """Call `record` with the weights [H, N, N] of each layer."""

    def watch(_layer: int, _numbers: list[int], weights_1HNN: Tensor) -> Tensor:
        record(weights_1HNN[0].float().cpu())
        return weights_1HNN

    with torch.no_grad():
        _heads(bert).watch(batch, watch)


# ---- the kinds of heads


def _summaries(weights_HNN: Tensor, special: tuple[bool, ...]) -> tuple[HeadSummary, ...]:
    """Return the kind of each head, by the attention of the text's own tokens."""
    of_text = [row for row, is_special in enumerate(special) if not is_special] or list(range(len(special)))
    rows_HRN = weights_HNN[:, of_text]
    entropy_H = -(rows_HRN.clamp(min=1e-12).log() * rows_HRN).sum(-1).mean(-1)
    evenness_H = entropy_H / math.log(max(2, len(special)))
    shares = {
        kind: (rows_HRN * place_NN[of_text]).sum(-1).mean(-1).tolist()
        for kind, place_NN in _places(special).items()
    }
    found = []
    for head, evenness in enumerate(evenness_H.tolist()):
        kind = max(shares, key=lambda each: shares[each][head])
        share = shares[kind][head]
        if share < CLEAR_SHARE:
            kind = "broad" if evenness >= BROAD_ENTROPY else "mixed"
        found.append(HeadSummary(kind, share))
    return tuple(found)


def _places(special: tuple[bool, ...]) -> dict[HeadKind, Tensor]:
    """Return a mask [N, N] for each kind that is named after a place: 1 at that place of each token."""
    count = len(special)
    special_N = torch.tensor(special)
    is_first_N = torch.arange(count) == 0
    return {
        "previous": torch.eye(count).roll(-1, 1).tril(),
        "next": torch.eye(count).roll(1, 1).triu(),
        "itself": torch.eye(count),
        "first": (special_N & is_first_N).float().expand(count, -1),
        "separator": (special_N & ~is_first_N).float().expand(count, -1),
    }


# ---- an example to begin with


def _telling_pairs(tokens: tuple[str, ...], special: tuple[bool, ...]) -> Tensor:
    """Return the pairs [N, N] worth showing: a pronoun and an earlier word, or else two content words."""
    words = [
        "" if is_special else token.lstrip(MARKS).lower()
        for token, is_special in zip(tokens, special, strict=True)
    ]
    is_word_N = torch.tensor([word.isalpha() and word not in FUNCTION_WORDS for word in words])
    is_whole_N = torch.tensor([not token.startswith(CONTINUES) for token in tokens])
    is_pronoun_N = torch.tensor([word in PRONOUNS for word in words])
    index_N = torch.arange(len(tokens))
    distance_NN = index_N[:, None] - index_N[None, :]
    target_N = is_word_N & is_whole_N
    if is_pronoun_N.any():
        return is_pronoun_N[:, None] & target_N & (distance_NN >= MIN_DISTANCE)
    return is_word_N[:, None] & target_N & (distance_NN.abs() >= MIN_DISTANCE)


def _best_moment(weights_HNN: Tensor, telling_NN: Tensor, layer: int) -> Moment:
    telling_HNN = weights_HNN.masked_fill(~telling_NN, -1.0)
    count = telling_HNN.shape[-1]
    best = int(telling_HNN.argmax())
    head, rest = divmod(best, count * count)
    token, target = divmod(rest, count)
    return Moment(layer, head, token, target, float(weights_HNN[head, token, target]))
