"""Filling masks: each by itself, all of a text together by beam search, or one after another at its end.

Shapes: P masks, V vocabulary.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tokenizers import models
from torch import Tensor

from bertsmith.ground.errors import UserError
from bertsmith.ground.progress import progress_bar
from bertsmith.inference.engine import WINDOW_TEXTS, Engine, listed
from bertsmith.packed import PackedBatch
from bertsmith.text.tokenizer import Encoded, Tokenizer

MASKS_AT_ONCE = 64
"""Scores of a whole vocabulary for each of them: 8 MB a core with 30,000 tokens, however many masks."""
CLOSING = frozenset(".,;:!?%)]}")
"""What follows a word without a space."""
LIKE_A_MASK = re.compile(r"[\[<({]mask[\])}>]|_{2,}", re.IGNORECASE)
"""What people write for a mask that is not the model's own."""


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
class Extension:
    """A token that was put at the end of a text, its probability there, and the text with it."""

    token: str
    probability: float
    text: str
    tokens: int
    """How many tokens the network read to find this one."""


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


def encode_masked(engine: Engine, texts: Sequence[str], *, truncate: bool, first: int = 0) -> list[Masked]:
    """The tokens of texts in which the mask token is more than its characters, numbered from `first`."""
    for number, text in enumerate(texts, start=first):
        if not isinstance(text, str):
            what = f"is {type(text).__name__}, not a text"
            raise UserError(what, where=f"text {number}", remedy="a text with masks is a str")
    mask = engine.tokenizer.mask_token
    # The one door through which a special token written in a text is taken for one.
    encoded = engine.reader.encode(texts, truncate=truncate, allow_special=(mask,), first=first)
    for number, each in enumerate(encoded, start=first):
        if engine.tokenizer.mask_id not in each.ids:
            raise _without_mask(engine, texts[number - first], where=f"text {number}")
    return [Masked(text, each, _places(engine, each)) for text, each in zip(texts, encoded, strict=True)]


def _without_mask(engine: Engine, text: str, *, where: str) -> UserError:
    """What to say of a text in which no mask was found, or none that was left by the cut of a long text."""
    mask = engine.tokenizer.mask_token
    if mask_places(text, engine.tokenizer):
        what = f"was cut to the {engine.reader.longest} tokens that the model takes, which left no {mask}"
        return UserError(what, where=where, remedy=f"shorten what stands before the {mask}")
    place = _meant_for_a_mask(text, mask)
    remedy = f"write {mask} {f'in place of {place}' if place else 'where a token is wanted'}"
    return UserError(f"has no {mask}", where=where, remedy=remedy)


def _meant_for_a_mask(text: str, mask: str) -> str:
    """What looks like a mask of another model or of paper; nothing where nothing does."""
    found = LIKE_A_MASK.search(text)
    return found[0] if found and found[0] != mask else ""


def mask_places(text: str, tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Where the masks of a text stand, without the space that some tokenizers count to them."""
    encoded = tokenizer.encode(text, allow_special=(tokenizer.mask_token,))
    offsets = zip(encoded.ids, encoded.offsets, strict=True)
    spans = (span for token, span in offsets if token == tokenizer.mask_id)
    return [_without_spaces(text, *span) for span in spans]


def _without_spaces(text: str, start: int, end: int) -> tuple[int, int]:
    before = len(text[start:end]) - len(text[start:end].lstrip())
    return start + before, start + len(text[start:end].rstrip())


def _places(engine: Engine, encoded: Encoded) -> list[int]:
    return [place for place, token in enumerate(encoded.ids) if token == engine.tokenizer.mask_id]


def fill_each_mask(
    engine: Engine, texts: Iterable[str], *, top: int, truncate: bool
) -> list[list[list[Guess]]]:
    """For each text and each of its masks the most probable tokens, the other masks staying masked."""
    refuse_unless_count("top", top)
    several = listed(texts)
    found: list[list[list[Guess]]] = []

    def guesses(batch: PackedBatch) -> list[list[list[Guess]]]:
        return _guesses_in_batch(engine, batch, top)

    with progress_bar("filling masks", len(several)) as advance:
        for first in range(0, len(several), WINDOW_TEXTS):
            some = several[first : first + WINDOW_TEXTS]
            masked = encode_masked(engine, some, truncate=truncate, first=first)
            found += engine.answer_encoded([each.encoded for each in masked], guesses, advance)
    return found


def _guesses_in_batch(engine: Engine, batch: PackedBatch, top: int) -> list[list[list[Guess]]]:
    """The guesses for the masks of each sequence."""
    is_mask_T = batch.tokens_T == engine.tokenizer.mask_id
    rows_P = is_mask_T.nonzero().flatten()
    masks_PD = engine.network(batch)[rows_P]
    found = [
        _guesses(engine, row_V, top)
        for some_PD in masks_PD.split(MASKS_AT_ONCE)
        for row_V in _word_log_probabilities(engine, some_PD)
    ]
    before = [0, *is_mask_T.cumsum(0).tolist()]
    return [found[before[start] : before[end]] for start, end in batch.layout.bounds()]


def extend_text(engine: Engine, text: str, count: int) -> Iterator[Extension]:
    """The text with one token more each time: the most probable one, without special ones and loops.

    Nothing is kept from one token to the next. Each layer of an encoder lets every token look at all others,
    so that a new one changes the states of all before it, and the whole text is read again.
    """
    refuse_unless_count("count", count)
    before, after = _opened(engine, text, count)
    own = len(before)
    for _ in range(count):
        ids = [*before, engine.tokenizer.mask_id, *after]
        scores_V = _scores_at(engine, ids, len(before))
        scores_V[[*engine.tokenizer.special_ids, *_closing_a_loop(before)]] = float("-inf")
        ((token, score),) = _best(engine, scores_V, 1)
        before.append(token)
        longer = _with_tokens(engine, text, before[own:])
        yield Extension(engine.tokenizer.token(token), math.exp(score), longer, len(ids))


def _opened(engine: Engine, text: str, count: int) -> tuple[list[int], list[int]]:
    """What stands before and behind the places of the new tokens."""
    mask, limit = engine.tokenizer.mask_token, engine.network.shape.positions
    if isinstance(text, str) and mask in text:
        raise UserError(f"the text has a {mask} already", remedy="fill it first, or leave it out")
    (encoded,), stop = engine.reader.encode([text], truncate=False), engine.tokenizer.encode(".")
    # Before the end of a text stands a full stop, says every model: let the sentence seem to go on.
    goes_on = [
        engine.tokenizer.mask_id,
        *(stop.ids[row] for row, own in enumerate(stop.sequence) if own == 0),
    ]
    end = 1 + max(row for row, sequence in enumerate(encoded.sequence) if sequence == 0)
    if (needed := len(encoded) + count + len(goes_on)) > limit:
        what = f"the longer text would have {needed} tokens but the model takes {limit}"
        raise UserError(what, remedy="shorten the text or add fewer")
    return encoded.ids[:end], [*goes_on, *encoded.ids[end:]]


def _scores_at(engine: Engine, ids: list[int], place: int) -> Tensor:
    """The log-probabilities of all tokens at one place of a text."""
    encoded = Encoded(ids, [0] * len(ids), [(0, 0)] * len(ids), [0] * len(ids))

    def at_the_mask(batch: PackedBatch) -> list[Tensor]:
        return [_word_log_probabilities(engine, engine.network(batch)[place : place + 1])[0]]

    (scores_V,) = engine.answer_encoded([encoded], at_the_mask)
    return scores_V


def _closing_a_loop(ids: Sequence[int]) -> set[int]:
    """The tokens that would repeat the last one, or make three in a row appear twice (Paulus et al. 2017)."""
    pairs = zip(ids, ids[1:], ids[2:], strict=False)
    return {ids[-1], *(third for first, second, third in pairs if [first, second] == list(ids[-2:]))}


def _with_tokens(engine: Engine, text: str, numbers: Sequence[int]) -> str:
    """The text with more tokens at its end."""
    model = engine.tokenizer.closed.model
    if isinstance(model, models.BPE):  # of bytes: it may take several tokens to spell one character
        return text + engine.tokenizer.decode(numbers)
    for number in numbers:
        # A piece of another kind says itself whether it begins a word.
        begins = isinstance(model, models.WordPiece) and engine.tokenizer.token(number) not in CLOSING
        text = _put_in(engine, (f"{text} " if begins else text, number, ""))
    return text


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
        return list(_word_log_probabilities(engine, engine.network(batch)[rows]))

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


def _word_log_probabilities(engine: Engine, masks_PD: Tensor) -> Tensor:
    scores_PV = engine.network.scores_of_words(masks_PD).float()
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
