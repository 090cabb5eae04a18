"""Filling masks: each by itself, all of a text together by beam search, or one after another at its end.

Shapes: P masks, V vocabulary.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from unicodedata import category

from tokenizers import models
from torch import Tensor

from bertsmith.core.errors import UserError
from bertsmith.core.progress import progress_bar
from bertsmith.inference.engine import WINDOW_TEXTS, Engine
from bertsmith.inference.text_reader import TokenizedText, as_list
from bertsmith.packed import PackedBatch
from bertsmith.text.tokenizer import Encoded, Tokenizer

MASKS_AT_ONCE = 64
"""Scores of a whole vocabulary for each of them: 8 MB a core with 30,000 tokens, however many masks."""
REST_OF_WORD = 8
"""The most tokens that `extend_text` adds to end the last word: few words have more pieces."""
CLOSING = frozenset(".,;:!?%)]}")
"""What follows a word without a space."""
LIKE_A_MASK = re.compile(r"[\[<({]mask[\])}>]|_{2,}", re.IGNORECASE)
"""What people write for a mask that is not the model's own."""


@dataclass(frozen=True, slots=True)
class Candidate:
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
    """A text with masks, its tokens, and the indices of the masks among them."""

    text: str
    encoded: Encoded
    indices: list[int]


def encode_masked(
    engine: Engine, texts: Sequence[str | TokenizedText], *, truncate: bool, first: int = 0
) -> list[Masked]:
    """The tokens of texts in which the mask token is more than its characters, numbered from `first`."""
    spelled = [text.text if isinstance(text, TokenizedText) else text for text in texts]
    for number, text in enumerate(spelled, start=first):
        if not isinstance(text, str):
            what = f"is {type(text).__name__}, not a text"
            raise UserError(what, index=number, remedy="a text with masks is a str")
    mask = engine.tokenizer.mask_token
    # Only here is a special token that is written in a text taken for one: elsewhere it is its characters.
    encoded = engine.reader.encode(texts, truncate=truncate, allow_special=(mask,), first=first)
    masked = []
    for number, (text, each) in enumerate(zip(spelled, encoded, strict=True), start=first):
        indices = [index for index, token in enumerate(each.ids) if token == engine.tokenizer.mask_id]
        if not indices:
            raise _without_mask(engine, str(text), number)
        masked.append(Masked(str(text), each, indices))
    return masked


def _without_mask(engine: Engine, text: str, index: int) -> UserError:
    """What to say of a text in which no mask was found, or none that was left by the cut of a long text."""
    mask = engine.tokenizer.mask_token
    if mask_offsets(text, engine.tokenizer):
        what = f"was cut to the {engine.reader.longest} tokens that the model takes, which left no {mask}"
        return UserError(what, index=index, remedy=f"shorten what stands before the {mask}")
    # The mask of another model, or the gap that people draw on paper.
    similar = LIKE_A_MASK.search(text)
    where = f"in place of {similar[0]}" if similar and similar[0] != mask else "where a token is wanted"
    return UserError(f"has no {mask}", index=index, remedy=f"write {mask} {where}")


def mask_offsets(text: str, tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Where the masks of a text stand, without the space that some tokenizers count to them."""
    encoded = tokenizer.encode(text, allow_special=(tokenizer.mask_token,))
    return mask_offsets_in(text, encoded, tokenizer)


def mask_offsets_in(text: str, encoded: Encoded, tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """As `mask_offsets`, of a text whose tokens are known."""
    spans = []
    for token, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
        if token == tokenizer.mask_id:
            written = text[start:end]
            spans.append((end - len(written.lstrip()), start + len(written.rstrip())))
    return spans


PREDICTING_ROWS = {"both": 0, "left-to-right": -1, "right-to-left": 1}
"""Where the row that predicts a mask stands, seen from it: who sees one side predicts a neighbour."""


def predicting_row(engine: Engine) -> int:
    """How far from a mask the row stands that predicts it."""
    return PREDICTING_ROWS[engine.network.config.direction]


def check_one_mask(engine: Engine, masked: Masked, index: int | None = None) -> None:
    """Stop at several masks for a model of one side, which never saw one: it would read it as a word."""
    if len(masked.indices) > 1:
        mask, direction = engine.tokenizer.mask_token, engine.network.config.direction
        what = f"has {len(masked.indices)} {mask}, and this model was trained {direction}"
        raise UserError(what, index=index, remedy=f"fill one {mask} at a time")


def fill_each_mask(
    engine: Engine, texts: Iterable[str | TokenizedText], *, top: int, truncate: bool
) -> list[list[list[Candidate]]]:
    """For each text and each of its masks the most probable tokens, the other masks staying masked.

    A model that was trained from left to right sees what stands before the mask, and no more.
    """
    check_count("top", top)
    aside = predicting_row(engine)

    def candidates(batch: PackedBatch) -> list[list[list[Candidate]]]:
        """The candidates for the masks of each sequence."""
        is_mask_T = batch.tokens_T == engine.tokenizer.mask_id
        masks_PD = engine.network(batch)[is_mask_T.nonzero().flatten() + aside]
        of_masks = [
            best_candidates(engine, row_V, top)
            for some_PD in masks_PD.split(MASKS_AT_ONCE)
            for row_V in word_log_probabilities(engine, some_PD)
        ]
        # The masks of all sequences stand in one row: those of a sequence begin where so many came before.
        before = [0, *is_mask_T.cumsum(0).tolist()]
        return [of_masks[before[start] : before[end]] for start, end in batch.layout.bounds()]

    several = as_list(texts)
    found: list[list[list[Candidate]]] = []
    with progress_bar("filling masks", len(several)) as advance:
        for first in range(0, len(several), WINDOW_TEXTS):
            some = several[first : first + WINDOW_TEXTS]
            masked = encode_masked(engine, some, truncate=truncate, first=first)
            for number, each in enumerate(masked if aside else (), start=first):
                check_one_mask(engine, each, number)
            found += engine.predict_encoded([each.encoded for each in masked], candidates, advance)
    return found


def extend_text(engine: Engine, text: str, count: int) -> Iterator[Extension]:
    """The text with one token more each time: the most probable one, without special ones and loops.

    After `count` tokens, up to `REST_OF_WORD` more complete the last word, while the best one continues it.

    Nothing is kept from one token to the next. Each layer of an encoder lets every token look at all others,
    so that a new one changes the states of all before it, and the whole text is read again.
    """
    check_count("count", count)
    if engine.network.config.direction == "right-to-left":
        what = "this model was trained from right to left and cannot say what comes next"
        raise UserError(what, remedy="take one that was trained from left to right, or with masks")
    aside = predicting_row(engine)
    before, after = _split_at_end(engine, text, count)
    own = len(before)

    def at_the_mask(batch: PackedBatch) -> list[Tensor]:
        mask_1D = engine.network(batch)[len(before) + aside : len(before) + aside + 1]
        return [word_log_probabilities(engine, mask_1D)[0]]

    room = engine.network.config.positions - len(before) - len(after)
    for number in range(min(count + REST_OF_WORD, room)):
        ids = [*before, engine.tokenizer.mask_id, *after]
        size = len(ids)
        encoded = Encoded(ids, [0] * size, [(0, 0)] * size, [0] * size, [None] * size)
        (scores_V,) = engine.predict_encoded([encoded], at_the_mask)
        scores_V[[*engine.tokenizer.special_ids, *_closing_a_loop(before)]] = float("-inf")
        ((token, score),) = _best(engine, scores_V, 1)
        if number >= count and not _continues_word(engine, token):
            return
        before.append(token)
        longer = _with_tokens(engine, text, before[own:])
        yield Extension(engine.tokenizer.token(token), math.exp(score), longer, size)


def _split_at_end(engine: Engine, text: str, count: int) -> tuple[list[int], list[int]]:
    """The tokens that stand before and behind the new ones."""
    mask, limit = engine.tokenizer.mask_token, engine.network.config.positions
    if isinstance(text, str) and mask in text:
        raise UserError(f"the text has a {mask} already", remedy="fill it first, or leave it out")
    (encoded,), stop = engine.reader.encode([text], truncate=False), engine.tokenizer.encode(".")
    # Before the end of a text every model predicts a full stop: one more mask and the stop behind the new
    # token make the sentence seem to continue.
    rest = [engine.tokenizer.mask_id, *(stop.ids[row] for row, own in enumerate(stop.sequence) if own == 0)]
    end = 1 + max(row for row, sequence in enumerate(encoded.sequence) if sequence == 0)
    if (needed := len(encoded) + count + len(rest)) > limit:
        what = f"the longer text would have {needed} tokens but the model takes {limit}"
        raise UserError(what, remedy="shorten the text or add fewer")
    return encoded.ids[:end], [*rest, *encoded.ids[end:]]


def _closing_a_loop(ids: Sequence[int]) -> set[int]:
    """The tokens that would repeat the last one, or make three in a row appear twice (Paulus et al. 2017)."""
    pairs = zip(ids, ids[1:], ids[2:], strict=False)
    return {ids[-1], *(third for first, second, third in pairs if [first, second] == list(ids[-2:]))}


def _continues_word(engine: Engine, number: int) -> bool:
    """True if a token goes on with the word, or with the bytes of the character, before it."""
    model, token = engine.tokenizer.closed.model, engine.tokenizer.token(number)
    if isinstance(model, models.WordPiece):
        return token.startswith("##")
    # Pieces of other kinds begin a word with a space, and a byte that is no character decodes to U+FFFD.
    first = (engine.tokenizer.decode([number]) if isinstance(model, models.BPE) else token)[:1] or " "
    return category(first)[0] in "LMN" or first == "\N{REPLACEMENT CHARACTER}"


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
    check_count("top", top)
    check_count("beam", beam)
    if beam < top:
        raise UserError(f"a beam of {beam} cannot give {top} fillings", remedy="make beam at least top")
    if (
        engine.network.config.direction == "right-to-left"
    ):  # masks are filled from the left: it would see them
        check_one_mask(engine, masked)
    partials = [_Partial(masked.encoded)]
    for index in masked.indices:
        partials = _extend(engine, partials, index, beam)
    fillings = []
    for each in partials[:top]:
        text = masked.text
        # From the last mask to the first: the offsets of those before it still hold.
        for index, number in reversed(list(zip(masked.indices, each.chosen, strict=True))):
            start, end = masked.encoded.offsets[index]
            text = _put_in(engine, (text[:start], number, text[end:]))
        tokens = tuple(engine.tokenizer.token(number) for number in each.chosen)
        fillings.append(Filling(tokens, text, each.log_probability))
    return fillings


def _extend(engine: Engine, partials: Sequence[_Partial], index: int, beam: int) -> list[_Partial]:
    """Every partial filling with each likely token at the next mask; the best of all."""

    def at_the_mask(batch: PackedBatch) -> list[Tensor]:
        rows = batch.layout.starts_S1[:-1] + index + predicting_row(engine)
        return list(word_log_probabilities(engine, engine.network(batch)[rows]))

    rows = engine.predict_encoded([each.encoded for each in partials], at_the_mask)
    grown = []
    for partial, row_V in zip(partials, rows, strict=True):
        for token, score in _best(engine, row_V, beam):
            ids = list(partial.encoded.ids)
            ids[index] = token
            encoded = replace(partial.encoded, ids=ids)
            grown.append(_Partial(encoded, (*partial.chosen, token), partial.log_probability + score))
    return sorted(grown, key=lambda each: -each.log_probability)[:beam]


def check_count(name: str, value: object) -> None:
    """Stop at what is no whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name} is {value!r}", remedy="a whole number from 1 on is expected")


def word_log_probabilities(engine: Engine, masks_PD: Tensor) -> Tensor:
    """What the head makes of the states at masks: the log-probability of every token [P, V]."""
    scores_PV = engine.network.scores_of_words(masks_PD).float()
    # Rows that no token has (the matrix is rounded up, ids have gaps) stand for nothing.
    scores_PV[:, engine.tokenizer.vocabulary_size :] = float("-inf")
    scores_PV[:, list(engine.tokenizer.gaps)] = float("-inf")
    return scores_PV.log_softmax(-1).cpu()


def best_candidates(engine: Engine, log_probabilities_V: Tensor, wanted: int) -> list[Candidate]:
    """The most probable tokens with their probabilities."""
    best = _best(engine, log_probabilities_V, wanted)
    return [Candidate(engine.tokenizer.token(token), math.exp(score)) for token, score in best]


def _best(engine: Engine, log_probabilities_V: Tensor, wanted: int) -> list[tuple[int, float]]:
    """The most probable tokens with their log-probabilities, no more than there are tokens."""
    tokens = engine.tokenizer.vocabulary_size - len(engine.tokenizer.gaps)
    best = log_probabilities_V.topk(min(wanted, tokens))
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


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
