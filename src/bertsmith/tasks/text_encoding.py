"""Encode texts as sequences of tokens: pieces, the shown part of long texts, and special tokens.

Texts that are too long are cut, shown at both ends, or shown in overlapping windows (`best_context` finds the
window with most context for a token).
Shapes: X pieces, N or U texts, W windows, S sequences of K texts each (1 or 2), M examples, T tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.arrays import ranges
from bertsmith.core.progress import progress_bar
from bertsmith.data.example_index import Spans
from bertsmith.recipe.finetuning_schema import TextSection
from bertsmith.tasks.encoded import NO_LABEL, EncodedSet, ScoredUnit
from bertsmith.tasks.example_types import Example
from bertsmith.text.fast_encoder import FastEncoder
from bertsmith.text.tokenizer import Template, Tokenizer, read_templates

Numbers = NDArray[np.int64]
Targets = NDArray[np.int64] | NDArray[np.float32]

FRONT_PART = 4
"""Front part: 1/4. Sun et al. 2019 (How to Fine-Tune BERT for Text Classification): 128 of 510 tokens."""
WORTH_A_TABLE = 1000
"""Minimum number of texts that make building the fast encoder worthwhile."""
TEXTS_AT_ONCE = 1 << 14
SEQUENCES_AT_ONCE = 1 << 13
"""Sequences laid out together; bounds the memory of the 64-bit intermediate arrays."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of many texts; equal texts share them."""

    ids_X: NDArray[np.int32]
    starts_N: Numbers
    lengths_N: Numbers


@dataclass(frozen=True, slots=True)
class Stretches:
    """The shown parts of each sequence's texts: for each, a stretch of pieces and a second one."""

    starts_SK2: Numbers
    lengths_SK2: Numbers


@dataclass(frozen=True, slots=True)
class Laid:
    """Whole sequences, one after the other."""

    tokens_T: NDArray[np.int32]
    segments_T: NDArray[np.uint8]
    starts_S1: Numbers


def pieces_of(texts: Sequence[str], tokenizer: Tokenizer) -> Pieces:
    """Return the pieces of texts, without special tokens; each distinct text is encoded once."""
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    distinct = list(numbers)
    if len(distinct) < WORTH_A_TABLE:
        listed = [each.ids for each in tokenizer.closed.encode_batch(distinct, add_special_tokens=False)]
        lengths_D = np.array([len(ids) for ids in listed], np.int64)
        ids_X = np.fromiter(chain.from_iterable(listed), np.int32, int(lengths_D.sum()))
    else:
        encoder, parts = FastEncoder(tokenizer), []
        with progress_bar("encoding texts", len(distinct)) as advance:
            for first in range(0, len(distinct), TEXTS_AT_ONCE):
                parts.append(encoder.encode_many(distinct[first : first + TEXTS_AT_ONCE]))
                advance(len(parts[-1].lengths))
        ids_X = np.concatenate([part.ids for part in parts]).astype(np.int32)
        lengths_D = np.concatenate([part.lengths for part in parts])
    which_N = np.array([numbers[text] for text in texts], np.int64)
    starts_D = np.cumsum(lengths_D) - lengths_D
    if not lengths_D.all() and not read_templates(tokenizer).single.specials(1):
        # Nothing is put around a text (GPT-2): one without a piece is its end, as a sequence has a token.
        starts_D = np.where(lengths_D, starts_D, len(ids_X))
        ids_X, lengths_D = np.append(ids_X, np.int32(tokenizer.sep_id)), np.maximum(lengths_D, 1)
    return Pieces(ids_X, starts_D[which_N], lengths_D[which_N])


def joined_pieces(pieces: Sequence[NDArray[np.int32]]) -> Pieces:
    """Join the pieces of texts that were encoded one by one."""
    lengths_N = np.array([len(each) for each in pieces], np.int64)
    return Pieces(np.concatenate(pieces), np.cumsum(lengths_N) - lengths_N, lengths_N)


def unbroken(starts_SK: Numbers, lengths_SK: Numbers) -> Stretches:
    """Return one stretch of each text."""
    nothing_SK = np.zeros_like(starts_SK)
    return Stretches(np.stack([starts_SK, nothing_SK], -1), np.stack([lengths_SK, nothing_SK], -1))


def lay_sequences(ids_X: NDArray[np.int32], stretches: Stretches, template: Template) -> Laid:
    """Return the sequences with their special tokens and segments."""
    from bertsmith.data.collate import lay_out  # torch, which `inspect`, `tasks` and `recipe` do without

    tokens, segments = [np.empty(0, np.int32)], [np.empty(0, np.uint8)]
    starts = [np.zeros(1, np.int64)]
    for first in range(0, len(stretches.starts_SK2), SEQUENCES_AT_ONCE):
        chosen = slice(first, first + SEQUENCES_AT_ONCE)
        starts_SK2, lengths_SK2 = stretches.starts_SK2[chosen], stretches.lengths_SK2[chosen]
        texts_X = ids_X[ranges(starts_SK2.ravel(), lengths_SK2.ravel())]
        lengths_SK = lengths_SK2.sum(-1)
        sequences, texts = lengths_SK.shape
        # The pieces are already gathered, so only the lengths of spans are used, not their starts.
        spans = Spans(np.full(sequences, texts), np.zeros(lengths_SK.size, np.int64), lengths_SK.ravel())
        rows = lay_out(texts_X.astype(np.int64), spans, template)
        tokens.append(rows.tokens_T.astype(np.int32))
        segments.append(rows.segments_T.astype(np.uint8))
        starts.append(starts[-1][-1] + rows.starts_S1[1:])
    return Laid(np.concatenate(tokens), np.concatenate(segments), np.concatenate(starts))


LENGTH_WEIGHT = 100
"""run_squad.py scores a token's context as min(left, right) + 0.01 * length; here in whole hundredths."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Stretches of texts, in the order of the texts and from their beginnings to their ends."""

    texts_W: Numbers
    firsts_W: Numbers
    """First token of each window, counted from the beginning of its text."""
    lengths_W: Numbers


def cut_windows(lengths_U: Numbers, rooms_U: Numbers, *, step: int) -> Windows:
    """Cut windows of at most `rooms_U` tokens that begin every `step` tokens until the end; at least one."""
    steps_U = np.minimum(step, rooms_U)  # a larger step would skip tokens
    counts_U = 1 + np.maximum(0, -(-(lengths_U - rooms_U) // steps_U))
    texts_W = np.repeat(np.arange(len(lengths_U)), counts_U)
    firsts_W = ranges(np.zeros_like(counts_U), counts_U) * steps_U[texts_W]
    return Windows(texts_W, firsts_W, np.minimum(rooms_U[texts_W], lengths_U[texts_W] - firsts_W))


def best_context(windows: Windows, lengths_U: Numbers) -> NDArray[np.bool_]:
    """Return True for each token of a window that has its most context there; the first wins a tie."""
    lengths_X = np.repeat(windows.lengths_W, windows.lengths_W)
    left_X = ranges(np.zeros_like(windows.lengths_W), windows.lengths_W)
    scores_X = LENGTH_WEIGHT * np.minimum(left_X, lengths_X - 1 - left_X) + lengths_X
    # A token has the same number in all windows: its index in all texts laid end to end.
    begins_U = np.cumsum(lengths_U) - lengths_U
    tokens_X = ranges(begins_U[windows.texts_W] + windows.firsts_W, windows.lengths_W)
    most = np.zeros(int(lengths_U.sum()), np.int64)
    np.maximum.at(most, tokens_X, scores_X)
    # Several windows may have the maximum; windows are in order, so the smallest row is in the first of them.
    rivals = np.flatnonzero(scores_X == most[tokens_X])
    winner = np.full(len(most), len(tokens_X))
    np.minimum.at(winner, tokens_X[rivals], rivals)
    best_X = np.zeros(len(tokens_X), np.bool_)
    best_X[winner] = True  # every token of a text is in some window
    return best_X


def text_set(unit: ScoredUnit, laid: Laid, targets: Targets, sequences_M: Numbers) -> EncodedSet:
    """Return a set of items with these numbers of sequences, for kinds without targets for single tokens."""
    return EncodedSet(
        unit=unit,
        tokens_T=laid.tokens_T,
        segments_T=laid.segments_T,
        starts_N1=laid.starts_S1,
        items_M1=np.concatenate([np.zeros(1, np.int64), np.cumsum(sequences_M)]),
        targets=targets,
        rows_P=np.empty(0, np.int64),
        words_P2=np.empty((0, 2), np.int64),
        passages_N2=np.empty((0, 2), np.int64),
    )


# --- the shown pieces ---


def lay_texts(
    texts: Sequence[tuple[str, ...]], tokenizer: Tokenizer, text: TextSection
) -> tuple[Laid, Numbers]:
    """Return the sequences of texts or pairs, and the number of sequences of each."""
    pieces = pieces_of([part for parts in texts for part in parts], tokenizer)
    return lay_pieces(pieces, len(texts[0]) if texts else 1, tokenizer, text)


def lay_pieces(pieces: Pieces, count: int, tokenizer: Tokenizer, text: TextSection) -> tuple[Laid, Numbers]:
    """Return sequences of `count` texts each, and the number of sequences of each example."""
    starts_MK, lengths_MK = pieces.starts_N.reshape(-1, count), pieces.lengths_N.reshape(-1, count)
    templates = read_templates(tokenizer)
    template = templates.single if count == 1 else templates.pair
    room = text.longest - template.specials(count)
    sequences_M = np.ones(len(starts_MK), np.int64)
    if text.long_texts == "windows":
        stretches, sequences_M = windowed(starts_MK, lengths_MK, room, step=text.step)
    elif text.long_texts == "head-tail":
        stretches = both_ends(starts_MK, lengths_MK, room)
    else:
        stretches = unbroken(starts_MK, kept_lengths(lengths_MK, room))
    return lay_sequences(pieces.ids_X, stretches, template), sequences_M


def kept_lengths(lengths_MK: Numbers, room: int) -> Numbers:
    """Return the number of pieces kept of each text, by the rule of `truncate_longest_first`."""
    if lengths_MK.shape[1] == 1:
        return np.minimum(lengths_MK, room)
    first_M, second_M = lengths_MK.T
    # Removing one piece after the other from the longer text ends with two equal halves, or with the whole
    # shorter text; an odd room leaves the first text one piece more.
    kept_first_M = np.minimum(first_M, np.maximum(room - second_M, (room + 1) // 2))
    return np.stack([kept_first_M, np.minimum(second_M, room - kept_first_M)], axis=1)


def both_ends(starts_MK: Numbers, lengths_MK: Numbers, room: int) -> Stretches:
    """Show a quarter of the room from the front of each text that is too long, and the rest from its end."""
    kept_MK = kept_lengths(lengths_MK, room)
    front_MK = np.where(kept_MK < lengths_MK, -(-kept_MK // FRONT_PART), lengths_MK)
    back_MK = kept_MK - front_MK
    starts_MK2 = np.stack([starts_MK, starts_MK + lengths_MK - back_MK], axis=-1)
    return Stretches(starts_MK2, np.stack([front_MK, back_MK], axis=-1))


def windowed(starts_MK: Numbers, lengths_MK: Numbers, room: int, *, step: int) -> tuple[Stretches, Numbers]:
    """Return windows of each text, or of the longer text of a pair, each with the shorter text."""
    count = lengths_MK.shape[1]
    examples_M = np.arange(len(lengths_MK))
    long_M = count - 1 - lengths_MK[:, ::-1].argmax(axis=1)  # on a tie the second
    kept_MK = np.minimum(lengths_MK, room // 2)  # a shorter text that is also long leaves half of the room
    kept_MK[examples_M, long_M] = 0
    windows = cut_windows(lengths_MK[examples_M, long_M], room - kept_MK.sum(axis=1), step=step)
    # Every sequence shows the kept part of its shorter text, and one window of the longer.
    starts_SK, lengths_SK = starts_MK[windows.texts_W], kept_MK[windows.texts_W]
    sequences_S, long_S = np.arange(len(windows.texts_W)), long_M[windows.texts_W]
    starts_SK[sequences_S, long_S] += windows.firsts_W
    lengths_SK[sequences_S, long_S] = windows.lengths_W
    return unbroken(starts_SK, lengths_SK), np.bincount(windows.texts_W, minlength=len(lengths_MK))


def label_ids(given: Iterable[object], labels: Sequence[str]) -> Numbers:
    """Return the id of each given label: -1 for None, and -2, -3, ... for those not in `labels`.

    A negative id is never predicted, so a label that is missing from training always counts as missed.
    """
    numbers: dict[str | None, int] = {None: NO_LABEL, **{label: id for id, label in enumerate(labels)}}
    spelled = (None if label is None else str(label) for label in given)
    return np.array(
        [numbers.setdefault(label, len(labels) + NO_LABEL - len(numbers)) for label in spelled], np.int64
    )


MAX_TEXTS_CHECKED = 1000
"""Maximum full sequences to check for cuts; the others are assumed to be similar."""


def cut_fraction(
    examples: Sequence[Example], encoded: EncodedSet, tokenizer: Tokenizer, text: TextSection
) -> float:
    """Return the fraction of examples that were cut; 0 if windows show everything."""
    if text.long_texts == "windows" or not examples[0].sequences:
        return 0.0
    # Only a full sequence may have been cut; encode its texts again to find out.
    full_N = np.diff(encoded.starts_N1) >= text.longest
    full = np.flatnonzero(np.logical_or.reduceat(full_N, encoded.items_M1[:-1]))
    looked_at = full[:: -(-len(full) // MAX_TEXTS_CHECKED) or 1]
    if not len(looked_at):
        return 0.0
    templates = read_templates(tokenizer)
    cut = 0
    for index in looked_at:
        sequences = examples[index].sequences
        count = len(sequences[0])
        template = templates.single if count == 1 else templates.pair
        pieces = pieces_of([part for parts in sequences for part in parts], tokenizer)
        longest = int(pieces.lengths_N.reshape(-1, count).sum(axis=1).max())
        cut += template.specials(count) + longest > text.longest
    return cut / len(looked_at) * len(full) / len(examples)
