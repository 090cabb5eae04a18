"""Filling masks: each by itself, or all of a text together by beam search."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bertsmith.ground.errors import UserError
from bertsmith.inference.engine import Engine
from bertsmith.packed import PackedBatch
from bertsmith.text.tokenizer import Encoded


@dataclass(frozen=True, slots=True)
class Guess:
    """A token for one mask and its probability."""

    token: str
    probability: float


@dataclass(frozen=True, slots=True)
class Filling:
    """A token for every mask of a text, the text with them in place, and their joint log-probability."""

    tokens: tuple[str, ...]
    text: str
    log_probability: float


@dataclass(frozen=True, slots=True)
class _Partial:
    encoded: Encoded
    chosen: tuple[int, ...] = ()
    log_probability: float = 0.0


@dataclass(frozen=True, slots=True)
class Masked:
    """A text with masks, and the places of the masks."""

    encoded: Encoded
    places: list[int]


def encode_masked(engine: Engine, text: str, *, truncate: bool) -> Masked:
    """The tokens of a text in which the mask token is more than its characters."""
    mask = engine.tokenizer.mask_token
    # The one door through which a special token written in a text is taken for one.
    (encoded,) = engine.encode([text], truncate=truncate, allow_special=(mask,))
    places = [place for place, token in enumerate(encoded.ids) if token == engine.tokenizer.mask_id]
    if not places:
        raise UserError(f"the text has no {mask}", remedy=f"write {mask} where a token is wanted")
    return Masked(encoded, places)


def fill_each_mask(engine: Engine, masked: Masked, top: int) -> list[list[Guess]]:
    """The most probable tokens for each mask, the others staying masked."""
    _refuse_no_guess(top)
    rows = torch.tensor(masked.places, device=engine.device)
    (scores_MV,) = engine.answer_encoded(
        [masked.encoded], lambda batch: [_word_log_probabilities(engine, batch, rows)]
    )
    return [_guesses(engine, row_V, top) for row_V in scores_MV]


def fill_jointly(engine: Engine, masked: Masked, top: int, beam: int) -> list[Filling]:
    """The most probable fillings of all masks, from left to right, keeping `beam` of them at each mask."""
    _refuse_no_guess(top)
    if beam < top:
        raise UserError(f"a beam of {beam} cannot give {top} fillings", remedy="make beam at least top")
    partials = [_Partial(masked.encoded)]
    for place in masked.places:
        partials = _extend(engine, partials, place, beam)
    return [_filling(engine, each) for each in partials[:top]]


def _extend(engine: Engine, partials: Sequence[_Partial], place: int, beam: int) -> list[_Partial]:
    """Every partial filling with each likely token at the next mask; the best of all."""

    def at_the_mask(batch: PackedBatch) -> list[Tensor]:
        rows = batch.layout.starts_S1[:-1] + place
        return list(_word_log_probabilities(engine, batch, rows))

    rows = engine.answer_encoded([each.encoded for each in partials], at_the_mask)
    grown = []
    for partial, row_V in zip(partials, rows, strict=True):
        best = row_V.topk(min(beam, len(row_V)))
        for score, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            ids = list(partial.encoded.ids)
            ids[place] = token
            encoded = replace(partial.encoded, ids=ids)
            grown.append(_Partial(encoded, (*partial.chosen, token), partial.log_probability + score))
    return sorted(grown, key=lambda each: -each.log_probability)[:beam]


def _refuse_no_guess(top: int) -> None:
    if top < 1:
        raise UserError(f"top is {top}", remedy="ask for at least one guess")


def _word_log_probabilities(engine: Engine, batch: PackedBatch, rows_P: Tensor) -> Tensor:
    scores_PV = engine.network.word_scores(engine.network(batch), rows_P).float()
    # Embedding rows beyond the tokenizer only round the matrix up; they stand for nothing.
    scores_PV[:, engine.tokenizer.vocabulary_size :] = float("-inf")
    return scores_PV.log_softmax(-1).cpu()


def _guesses(engine: Engine, log_probabilities_V: Tensor, top: int) -> list[Guess]:
    best = log_probabilities_V.exp().topk(min(top, len(log_probabilities_V)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [Guess(engine.tokenizer.token(number), probability) for number, probability in pairs]


def _filling(engine: Engine, partial: _Partial) -> Filling:
    tokens = tuple(engine.tokenizer.token(number) for number in partial.chosen)
    return Filling(tokens, engine.tokenizer.decode(partial.encoded.ids), partial.log_probability)
