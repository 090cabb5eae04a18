"""Filling masks: each one independently, all of a text by beam search, or one after another at its end.

Shapes: P masks, V vocabulary.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from unicodedata import category

import torch
from tokenizers import models
from torch import Tensor

from bertsmith.core.errors import UserError
from bertsmith.core.progress import progress_bar
from bertsmith.inference.engine import WINDOW_TEXTS, Engine
from bertsmith.inference.text_reader import TokenizedText, as_list
from bertsmith.model.encoder import WordView
from bertsmith.packed import PackedBatch, pack
from bertsmith.text.tokenizer import Encoded, Tokenizer

MASKS_AT_ONCE = 64
"""Masks to score at once over the whole vocabulary: 8 MB per core with 30,000 tokens."""
REST_OF_WORD = 8
"""Maximum tokens that `extend_text` adds to end the last word: few words have more pieces."""
CLOSING = frozenset(".,;:!?%)]}")
"""Characters that follow a word without a space."""
LIKE_A_MASK = re.compile(r"[\[<({]mask[\])}>]|_{2,}", re.IGNORECASE)
"""Common spellings of a mask other than the model's own."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token for one mask and its probability."""

    token: str
    probability: float


@dataclass(frozen=True, slots=True)
class Filling:
    """A token for every mask of a text, the text with these tokens, and their joint log-probability."""

    tokens: tuple[str, ...]
    text: str
    log_probability: float


@dataclass(frozen=True, slots=True)
class Extension:
    """A token that was added at the end of a text, its probability there, and the longer text."""

    token: str
    probability: float
    text: str
    tokens: int
    """Tokens that the network read to find this one."""


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
    """Encode texts with the mask token read as a mask, not as plain text; number them from `first`."""
    if not engine.tokenizer.has_mask:
        remedy = "let it continue a text instead: bertsmith fill TEXT --extend N, in Python bert.extend"
        raise UserError("the tokenizer of this model lacks a mask token", remedy=remedy)
    spelled = [text.text if isinstance(text, TokenizedText) else text for text in texts]
    for number, text in enumerate(spelled, start=first):
        if not isinstance(text, str):
            what = f"is {type(text).__name__}, not a text"
            raise UserError(what, index=number, remedy="a text with masks is a str")
    mask = engine.tokenizer.mask_token
    # Only here are special tokens in a text special: elsewhere they are plain text.
    encoded = engine.reader.encode(texts, truncate=truncate, allow_special=(mask,), first=first)
    masked = []
    for number, (text, each) in enumerate(zip(spelled, encoded, strict=True), start=first):
        indices = [index for index, token in enumerate(each.ids) if token == engine.tokenizer.mask_id]
        if not indices:
            raise _without_mask(engine, str(text), number)
        masked.append(Masked(str(text), each, indices))
    return masked


def _without_mask(engine: Engine, text: str, index: int) -> UserError:
    """Return the error for a text without a mask, or with truncation of all its masks."""
    mask = engine.tokenizer.mask_token
    if mask_offsets(text, engine.tokenizer):
        what = f"was cut to the model's {engine.reader.longest} tokens, and the {mask} was lost"
        return UserError(what, index=index, remedy=f"shorten the text before the {mask}")
    # The mask of another model, or a gap as drawn on paper.
    similar = LIKE_A_MASK.search(text)
    where = f"in place of {similar[0]}" if similar and similar[0] != mask else "in place of a token"
    return UserError(f"lacks a {mask}", index=index, remedy=f"write {mask} {where}")


def mask_offsets(text: str, tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Return the offsets of the masks of a text, without a space that some tokenizers include."""
    encoded = tokenizer.encode(text, allow_special=(tokenizer.mask_token,))
    return mask_offsets_in(text, encoded, tokenizer)


def mask_offsets_in(text: str, encoded: Encoded, tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Return the offsets of the masks like `mask_offsets`, for a text that is already tokenized."""
    spans = []
    for token, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
        if token == tokenizer.mask_id:
            written = text[start:end]
            spans.append((end - len(written.lstrip()), start + len(written.rstrip())))
    return spans


def check_one_mask(engine: Engine, masked: Masked, offsets: Iterable[int], index: int | None = None) -> None:
    """Reject several masks if a word is predicted from a row at one of these offsets.

    Such a model was trained without masks, and reads them as words.
    """
    beside = {view.offset for view in engine.network.encoder.word_views()}.intersection(offsets)
    if beside and len(masked.indices) > 1:
        mask = engine.tokenizer.mask_token
        what = f"has {len(masked.indices)} {mask}, but this model was trained without masks"
        raise UserError(what, index=index, remedy=f"fill one {mask} at a time")


def fill_each_mask(
    engine: Engine, texts: Iterable[str | TokenizedText], *, top: int, truncate: bool
) -> list[list[list[Candidate]]]:
    """Return the most probable tokens for each mask of each text, while the other masks stay masked.

    A model that was trained from left to right sees only the text before the mask.
    """
    check_count("top", top)

    def candidates(batch: PackedBatch) -> list[list[list[Candidate]]]:
        """Return the candidates for the masks of each sequence."""
        is_mask_T = batch.tokens_T == engine.tokenizer.mask_id
        hidden_TD = engine.network(batch)
        of_masks = [
            best_candidates(engine, row_V, top)
            for rows_P in torch.split(is_mask_T.nonzero().flatten(), MASKS_AT_ONCE)
            for row_V in word_log_probabilities(engine, hidden_TD, rows_P)
        ]
        # The masks of all sequences are in one row; a sequence's begin at the count of all earlier ones.
        before = [0, *is_mask_T.cumsum(0).tolist()]
        return [of_masks[before[start] : before[end]] for start, end in batch.layout.bounds()]

    several = as_list(texts)
    found: list[list[list[Candidate]]] = []
    with progress_bar("filling masks", len(several)) as advance:
        for first in range(0, len(several), WINDOW_TEXTS):
            some = several[first : first + WINDOW_TEXTS]
            masked = encode_masked(engine, some, truncate=truncate, first=first)
            for number, each in enumerate(masked, start=first):
                check_one_mask(engine, each, (-1, 1), number)
            found += engine.predict_encoded([each.encoded for each in masked], candidates, advance)
    return found


def extend_text(engine: Engine, text: str, count: int) -> Iterator[Extension]:
    """Yield the text with one more token each time: the most probable one, without special ones and loops.

    After `count` tokens, up to `REST_OF_WORD` more complete the last word, while the best one continues it.

    A model that looks to the left keeps its states and reads a new token alone. In other models every token
    attends to all others: a new one changes all states, so the whole text is read again, before a mask.
    """
    check_count("count", count)
    views = engine.network.encoder.word_views()
    if all(view.offset > 0 for view in views):
        what = "this model was trained from right to left and cannot predict the next token"
        raise UserError(what, remedy="use one that was trained from left to right, or with masks")
    ahead = next((view for view in views if view.offset < 0), None)
    before, after = _split_at_end(engine, text, count, at_a_mask=ahead is None)
    guess = _BeforeMask(engine, after) if ahead is None else _FromLeft(engine, ahead)
    own = len(before)
    room = engine.network.config.positions - len(before) - len(after)
    for number in range(min(count + REST_OF_WORD, room)):
        scores_V, read = guess.next_of(before)
        scores_V[[*engine.tokenizer.special_ids, *_closing_a_loop(before)]] = float("-inf")
        ((token, score),) = _best(engine, scores_V, 1)
        if number >= count and not _continues_word(engine, token):
            return
        before.append(token)
        longer = _with_tokens(engine, text, before[own:])
        yield Extension(engine.tokenizer.token(token), math.exp(score), longer, read)


class _FromLeft:
    """Predicts the next token from the last one's state; the tokens before it are read once, if possible."""

    def __init__(self, engine: Engine, view: WordView) -> None:
        self.engine, self.view = engine, view
        self.stream, self.read = engine.network.encoder.stream(), 0

    def next_of(self, ids: Sequence[int]) -> tuple[Tensor, int]:
        """Return the log-probabilities [V] of the token after these, and how many were read for them."""
        batch = pack([ids[self.read :]])
        batch = replace(batch, positions_T=batch.positions_T + self.read).to(self.engine.device)
        if self.stream is not None:
            self.read = len(ids)
        with torch.no_grad():
            hidden_TD = (self.stream or self.engine.network)(batch)
            scores_1V = self.engine.network.scores_of_words(self.view.of(hidden_TD[-1:]))
        log_probabilities_V = scores_of_tokens(self.engine, scores_1V)[0].log_softmax(-1).cpu()
        return log_probabilities_V, len(batch.tokens_T)


class _BeforeMask:
    """Predicts a mask after the text, in front of the tokens that let the sentence seem to continue."""

    def __init__(self, engine: Engine, after: Sequence[int]) -> None:
        self.engine, self.after = engine, after

    def next_of(self, before: Sequence[int]) -> tuple[Tensor, int]:
        """Return the log-probabilities [V] of the token after these, and how many were read for them."""
        engine, ids = self.engine, [*before, self.engine.tokenizer.mask_id, *self.after]
        size = len(ids)
        encoded = Encoded(ids, [0] * size, [(0, 0)] * size, [0] * size, [None] * size)

        def at_the_mask(batch: PackedBatch) -> list[Tensor]:
            mask_1 = torch.tensor([len(before)], device=engine.device)
            return [word_log_probabilities(engine, engine.network(batch), mask_1)[0]]

        (scores_V,) = engine.predict_encoded([encoded], at_the_mask)
        return scores_V, size


def _split_at_end(engine: Engine, text: str, count: int, *, at_a_mask: bool) -> tuple[list[int], list[int]]:
    """Return the tokens before and after the new ones."""
    tokenizer, limit = engine.tokenizer, engine.network.config.positions
    if isinstance(text, str) and tokenizer.has_mask and tokenizer.mask_token in text:
        what = f"the text already has a {tokenizer.mask_token}"
        raise UserError(what, remedy="fill it first, or remove it")
    (encoded,) = engine.reader.encode([text], truncate=False)
    end = 1 + max(row for row, sequence in enumerate(encoded.sequence) if sequence == 0)
    after: list[int] = []
    if at_a_mask:
        # Before the end of a text every model predicts a full stop. With one more mask and the stop after
        # the new token, the sentence seems to continue.
        stop = tokenizer.encode(".")
        rest = [stop.ids[row] for row, own in enumerate(stop.sequence) if own == 0]
        after = [tokenizer.mask_id, *rest, *encoded.ids[end:]]
    if (needed := end + count + len(after)) > limit:
        what = f"the longer text would have {needed} tokens, but the model takes {limit}"
        raise UserError(what, remedy="shorten the text or add fewer")
    return encoded.ids[:end], after


def _closing_a_loop(ids: Sequence[int]) -> set[int]:
    """Return the tokens that repeat the last one, or complete a repeated triple (Paulus et al. 2017)."""
    pairs = zip(ids, ids[1:], ids[2:], strict=False)
    return {ids[-1], *(third for first, second, third in pairs if [first, second] == list(ids[-2:]))}


def _continues_word(engine: Engine, number: int) -> bool:
    """Return True if a token continues the word, or the bytes of the character, before it."""
    model, token = engine.tokenizer.closed.model, engine.tokenizer.token(number)
    if isinstance(model, models.WordPiece):
        return token.startswith("##")
    # Pieces of other kinds begin a word with a space; a byte that is not a character decodes to U+FFFD.
    first = (engine.tokenizer.decode([number]) if isinstance(model, models.BPE) else token)[:1] or " "
    return category(first)[0] in "LMN" or first == "\N{REPLACEMENT CHARACTER}"


def _with_tokens(engine: Engine, text: str, numbers: Sequence[int]) -> str:
    """Return the text with more tokens at its end."""
    model = engine.tokenizer.closed.model
    if isinstance(model, models.BPE):  # byte-level: a character may take several tokens
        return text + engine.tokenizer.decode(numbers)
    for number in numbers:
        # Pieces of other kinds show whether they begin a word.
        begins = isinstance(model, models.WordPiece) and engine.tokenizer.token(number) not in CLOSING
        text = _put_in(engine, (f"{text} " if begins else text, number, ""))
    return text


def fill_jointly(engine: Engine, masked: Masked, top: int, beam: int) -> list[Filling]:
    """Return the most probable fillings of all masks, by beam search from left to right."""
    check_count("top", top)
    check_count("beam", beam)
    if beam < top:
        raise UserError(f"a beam of {beam} cannot return {top} fillings", remedy="make beam at least top")
    # Masks are filled from the left: the model would see the remaining masks.
    check_one_mask(engine, masked, (1,))
    partials = [_Partial(masked.encoded)]
    for index in masked.indices:
        partials = _extend(engine, partials, index, beam)
    fillings = []
    for each in partials[:top]:
        text = masked.text
        # From the last mask to the first, so that the offsets of earlier ones remain valid.
        for index, number in reversed(list(zip(masked.indices, each.chosen, strict=True))):
            start, end = masked.encoded.offsets[index]
            text = _put_in(engine, (text[:start], number, text[end:]))
        tokens = tuple(engine.tokenizer.token(number) for number in each.chosen)
        fillings.append(Filling(tokens, text, each.log_probability))
    return fillings


def _extend(engine: Engine, partials: Sequence[_Partial], index: int, beam: int) -> list[_Partial]:
    """Extend every partial filling by each likely token at the next mask; return the best."""

    def at_the_mask(batch: PackedBatch) -> list[Tensor]:
        rows_P = batch.layout.starts_S1[:-1] + index
        return list(word_log_probabilities(engine, engine.network(batch), rows_P))

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
    """Reject a value that is not a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name} is {value!r}", remedy="give a whole number from 1 on")


def word_log_probabilities(engine: Engine, hidden_TD: Tensor, rows_P: Tensor) -> Tensor:
    """Return the log-probability of every token for the words at these rows [P, V]."""
    return scores_of_tokens(engine, engine.network.word_scores(hidden_TD, rows_P)).log_softmax(-1).cpu()


def scores_of_tokens(engine: Engine, scores_PV: Tensor) -> Tensor:
    """Return scores of words in fp32, -inf for rows of the vocabulary without a token."""
    scores_PV = scores_PV.float()
    # Rows without a token (padding of the matrix, gaps in the ids) have meaningless scores.
    scores_PV[:, engine.tokenizer.vocabulary_size :] = float("-inf")
    scores_PV[:, list(engine.tokenizer.gaps)] = float("-inf")
    return scores_PV


def best_candidates(engine: Engine, log_probabilities_V: Tensor, wanted: int) -> list[Candidate]:
    """Return the most probable tokens with their probabilities."""
    best = _best(engine, log_probabilities_V, wanted)
    return [Candidate(engine.tokenizer.token(token), math.exp(score)) for token, score in best]


def _best(engine: Engine, log_probabilities_V: Tensor, wanted: int) -> list[tuple[int, float]]:
    """Return the most probable tokens with their log-probabilities, as far as there are enough tokens."""
    tokens = engine.tokenizer.vocabulary_size - len(engine.tokenizer.gaps)
    best = log_probabilities_V.topk(min(wanted, tokens))
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def _put_in(engine: Engine, parts: tuple[str, int, str]) -> str:
    """Return the text with a token in place of a mask, joined as the tokenizer's kind joins pieces."""
    before, number, after = parts
    token = engine.tokenizer.token(number)
    if token.startswith("##"):  # WordPiece: the rest of the word before it
        return before.rstrip() + token.removeprefix("##") + after
    begins_word = token.startswith("\N{LOWER ONE EIGHTH BLOCK}")  # unigram
    # Byte-level BPE spells bytes and is decoded; special tokens decode to nothing and are written as they
    # are.
    piece = f" {token[1:]}" if begins_word else engine.tokenizer.decode([number]) or token
    opens = not before or before[-1].isspace()
    return before + (piece.lstrip() if opens else piece) + after
