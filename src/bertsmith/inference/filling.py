"""Filling masks: each by itself, or all of a text together by beam search."""

import math
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
    """A text with masks, its tokens, and the places of the masks among them."""

    text: str
    encoded: Encoded
    places: list[int]


def encode_masked(engine: Engine, text: str, *, truncate: bool) -> Masked:
    """The tokens of a text in which the mask token is more than its characters."""
    if not isinstance(text, str):
        what = f"one text with masks is expected, not {type(text).__name__}"
        raise UserError(what, remedy="call fill once for each text")
    mask = engine.tokenizer.mask_token
    # The one door through which a special token written in a text is taken for one.
    (encoded,) = engine.encode([text], truncate=truncate, allow_special=(mask,))
    places = [place for place, token in enumerate(encoded.ids) if token == engine.tokenizer.mask_id]
    if not places:
        raise UserError(f"the text has no {mask}", remedy=f"write {mask} where a token is wanted")
    return Masked(text, encoded, places)


def fill_each_mask(engine: Engine, masked: Masked, top: int) -> list[list[Guess]]:
    """The most probable tokens for each mask, the others staying masked."""
    refuse_unless_count("top", top)
    rows = torch.tensor(masked.places, device=engine.device)
    (scores_MV,) = engine.answer_encoded(
        [masked.encoded], lambda batch: [_word_log_probabilities(engine, batch, rows)]
    )
    return [_guesses(engine, row_V, top) for row_V in scores_MV]


def fill_jointly(engine: Engine, masked: Masked, top: int, beam: int) -> list[Filling]:
    """The most probable fillings of all masks, from left to right, keeping `beam` of them at each mask."""
    refuse_unless_count("top", top)
    refuse_unless_count("beam", beam)
    if beam < top:
        raise UserError(f"a beam of {beam} cannot give {top} fillings", remedy="make beam at least top")
    partials = [_Partial(masked.encoded)]
    for place in masked.places:
        partials = _extend(engine, partials, place, beam)
    return [_filling(engine, masked, each) for each in partials[:top]]


def _extend(engine: Engine, partials: Sequence[_Partial], place: int, beam: int) -> list[_Partial]:
    """Every partial filling with each likely token at the next mask; the best of all."""

    def at_the_mask(batch: PackedBatch) -> list[Tensor]:
        rows = batch.layout.starts_S1[:-1] + place
        return list(_word_log_probabilities(engine, batch, rows))

    rows = engine.answer_encoded([each.encoded for each in partials], at_the_mask)
    grown = []
    for partial, row_V in zip(partials, rows, strict=True):
        for token, score in _best(engine, row_V, beam):
            ids = list(partial.encoded.ids)
            ids[place] = token
            encoded = replace(partial.encoded, ids=ids)
            grown.append(_Partial(encoded, (*partial.chosen, token), partial.log_probability + score))
    return sorted(grown, key=lambda each: -each.log_probability)[:beam]


def refuse_unless_count(name: str, value: object) -> None:
    """Stop at what is no whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name} is {value!r}", remedy="a whole number from 1 on is expected")


def _word_log_probabilities(engine: Engine, batch: PackedBatch, rows_P: Tensor) -> Tensor:
    scores_PV = engine.network.word_scores(engine.network(batch), rows_P).float()
    # Rows that no token has (the matrix is rounded up, ids have gaps) stand for nothing.
    scores_PV[:, engine.tokenizer.vocabulary_size :] = float("-inf")
    scores_PV[:, list(engine.tokenizer.gaps)] = float("-inf")
    return scores_PV.log_softmax(-1).cpu()


def _best(engine: Engine, log_probabilities_V: Tensor, wanted: int) -> list[tuple[int, float]]:
    """The most probable tokens with their log-probabilities, no more than there are tokens."""
    tokens = engine.tokenizer.vocabulary_size - len(engine.tokenizer.gaps)
    best = log_probabilities_V.topk(min(wanted, tokens))
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def _guesses(engine: Engine, log_probabilities_V: Tensor, top: int) -> list[Guess]:
    best = _best(engine, log_probabilities_V, top)
    return [Guess(engine.tokenizer.token(number), math.exp(score)) for number, score in best]


def _filling(engine: Engine, masked: Masked, partial: _Partial) -> Filling:
    text = masked.text
    for place, number in reversed(list(zip(masked.places, partial.chosen, strict=True))):
        start, end = masked.encoded.offsets[place]
        text = _put_in(engine, (text[:start], number, text[end:]))
    tokens = tuple(engine.tokenizer.token(number) for number in partial.chosen)
    return Filling(tokens, text, partial.log_probability)


def _put_in(engine: Engine, parts: tuple[str, int, str]) -> str:
    """The text with a token in place of a mask, joined as the tokenizer's kind joins pieces."""
    before, number, after = parts
    token = engine.tokenizer.token(number)
    if token.startswith("##"):  # WordPiece: the rest of the word before it
        return before.rstrip() + token.removeprefix("##") + after
    begins_word = token.startswith("\N{LOWER ONE EIGHTH BLOCK}")  # unigram
    # Byte-level BPE spells bytes and is decoded; special tokens decode to nothing and stand for themselves.
    piece = f" {token[1:]}" if begins_word else engine.tokenizer.decode([number]) or token
    opens = not before or before[-1].isspace()
    return before + (piece.lstrip() if opens else piece) + after
