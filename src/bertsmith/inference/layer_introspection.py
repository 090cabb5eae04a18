"""From layer to layer: the vectors of texts and tokens, and the guesses for a mask after each.

Layer 0 is a token's own vector, before position and context; the last is what the model's heads read.

Shapes: N tokens, L layers, M vectors, T texts, D width, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from bertsmith.core.errors import UserError
from bertsmith.inference import fill_mask
from bertsmith.inference.engine import Engine
from bertsmith.inference.loaded_model import Bert
from bertsmith.inference.text_reader import TextInput, TokenizedText, as_list
from bertsmith.model.encoder_config import need
from bertsmith.packed import pack
from bertsmith.text.tokenizer import Encoded


@dataclass(frozen=True, slots=True)
class Cosines:
    """Cosines of every two vectors, as they are and without the mean of all tokens."""

    plain: Tensor
    """[M, M]"""
    centred: Tensor
    """[M, M], without the mean: the vectors of one layer share a large part, which carries no information."""


@dataclass(frozen=True, slots=True)
class LayerGuesses:
    """Guesses after one layer; `final` is the probability here of the last layer's best guess."""

    guesses: tuple[fill_mask.Candidate, ...]
    final: float


@dataclass(frozen=True, slots=True)
class MaskLayers:
    """The guesses for one mask, layer by layer."""

    start: int
    end: int
    layers: tuple[LayerGuesses, ...]


@dataclass(frozen=True, slots=True)
class EmbeddingPart:
    """A vector that is added up for the first layer, or the sum."""

    name: str
    values: Tensor
    """[D]"""


def layer_cosines(
    bert: Bert, encoded: Sequence[Encoded], groups: Sequence[Sequence[list[int]]]
) -> tuple[list[Tensor], list[Cosines]]:
    """Return, after each layer, the mean vectors [M, D] of groups of tokens, and their cosines."""
    by_text, sums, count = [], [torch.zeros(())], 0
    for each, rows in zip(encoded, groups, strict=True):
        states = _layer_states(bert, each)  # one text at a time: all layers of many take a lot of memory
        by_text.append([[state_ND[some].mean(0) for some in rows] for state_ND in states])
        before = sums if count else [torch.zeros(())] * len(states)
        sums = [before_D + state_ND.sum(0) for before_D, state_ND in zip(before, states, strict=True)]
        count += len(each)
    vectors = [torch.stack([one for some in layer for one in some]) for layer in zip(*by_text, strict=True)]
    cosines = [_cosines(some_MD, sum_D / count) for some_MD, sum_D in zip(vectors, sums, strict=True)]
    return vectors, cosines


def _layer_states(bert: Bert, encoded: Encoded) -> list[Tensor]:
    """Return the vectors of a text's tokens [N, D]: their own, then those after each layer."""
    encoder = bert.engine.network.encoder
    batch = pack([encoded.ids], [encoded.segments]).to(bert.engine.device)
    with torch.no_grad():
        _, *after = encoder.hidden_states(batch)
        own = encoder.words(batch.tokens_T)
    return [each.double().cpu() for each in (own, *after)]


def _cosines(vectors_MD: Tensor, mean_D: Tensor) -> Cosines:
    def each_with_each(some_MD: Tensor) -> Tensor:
        unit_MD = functional.normalize(some_MD, dim=-1)  # cosine_similarity would hold M x M x D numbers
        return (unit_MD @ unit_MD.T).float()

    return Cosines(each_with_each(vectors_MD), each_with_each(vectors_MD - mean_D))


def inspect_similarity(bert: Bert, texts: Iterable[str | TokenizedText]) -> list[Cosines]:
    """Return the cosines of the texts' mean vectors after each layer."""
    encoded = bert.reader.encode(as_list(texts), truncate=False)
    whole = [[list(range(len(each)))] for each in encoded]
    return layer_cosines(bert, encoded, whole)[1]


def inspect_guesses(bert: Bert, text: str | TokenizedText, top: int) -> list[MaskLayers]:
    """Return, for each mask of a text, the masked-language head's guesses from every layer."""
    engine = bert.engine
    (masked,) = fill_mask.encode_masked(engine, [text], truncate=False)
    rows_P = torch.tensor(masked.indices, device=engine.device)
    batch = pack([masked.encoded.ids], [masked.encoded.segments]).to(engine.device)
    encoder = engine.network.encoder
    with torch.no_grad():
        *states, last_ND = encoder.hidden_states(batch)
        # In a pre-norm encoder, what a head reads was normalised once more at the end.
        after = [*(encoder.after(state_ND) for state_ND in states), last_ND]
        scores = [fill_mask.word_log_probabilities(engine, state_ND, rows_P) for state_ND in after]
    spans = fill_mask.mask_offsets_in(masked.text, masked.encoded, bert.tokenizer)
    return [
        MaskLayers(start, end, _guesses_of(engine, [layer_PV[mask] for layer_PV in scores], top))
        for mask, (start, end) in enumerate(spans)
    ]


def _guesses_of(engine: Engine, layers_V: Sequence[Tensor], top: int) -> tuple[LayerGuesses, ...]:
    best = int(layers_V[-1].argmax())
    return tuple(
        LayerGuesses(tuple(fill_mask.best_candidates(engine, each_V, top)), float(each_V[best].exp()))
        for each_V in layers_V
    )


def inspect_embedding(bert: Bert, text: TextInput, token: int) -> list[EmbeddingPart]:
    """Return the vectors that are added up for one token, their sum, and the normalised sum."""
    (encoded,) = bert.reader.encode([text], truncate=False)
    if not 0 <= token < len(encoded):
        raise UserError(f"token {token} does not exist", remedy=f"choose one from 0 to {len(encoded) - 1}")
    embeddings = need(bert.engine.network.encoder.input, "vectors that are added up for a token")
    batch = pack([encoded.ids], [encoded.segments]).to(bert.engine.device)
    with torch.no_grad():
        every = embeddings.parts(batch).items()
        parts = {name: each if each.dim() == 1 else each[token] for name, each in every}
        parts["sum"] = torch.stack(list(parts.values())).sum(0)
        parts["normalised"] = embeddings.norm(parts["sum"])
    return [EmbeddingPart(name, values.float().cpu()) for name, values in parts.items()]
