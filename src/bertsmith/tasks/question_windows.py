"""Questions and their passages as windows: the procedure of run_squad.py.

Shapes: Q questions, N windows, T tokens, X passage tokens of all windows.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.arrays import ranges
from bertsmith.core.errors import UserError
from bertsmith.core.progress import progress_bar
from bertsmith.recipe.finetuning_schema import TextSection
from bertsmith.tasks import text_encoding
from bertsmith.tasks.encoded import NO_LABEL, EncodedSet, QuestionWindows
from bertsmith.tasks.example_types import Question
from bertsmith.text.tokenizer import Tokenizer, read_templates

Numbers = NDArray[np.int64]
Mask = NDArray[np.bool_]

NOWHERE = -1
"""Placeholder for a missing offset in a passage."""
PASSAGES_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Passages:
    """The distinct passages of questions."""

    which_Q: Numbers
    """Index of each question's passage."""
    ids_X: NDArray[np.int32]
    offsets_X2: Numbers
    """First and past-the-last code point of each piece in its passage."""
    starts_D: Numbers
    """First piece of each passage."""
    lengths_D: Numbers
    begins_D: Numbers
    """Start of each passage if the characters of all are laid end to end with one in between."""


def read_passages(texts: Sequence[str], tokenizer: Tokenizer) -> Passages:
    """Return the passage of each question; each distinct passage is encoded once."""
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    distinct = list(numbers)
    ids, offsets = [], []
    with progress_bar("encoding passages", len(distinct)) as advance:
        for first in range(0, len(distinct), PASSAGES_AT_ONCE):
            some = distinct[first : first + PASSAGES_AT_ONCE]
            # Call the library directly: Tokenizer.encode_many returns much more than is needed here.
            for encoding in tokenizer.closed.encode_batch(some, add_special_tokens=False):
                ids.append(np.array(encoding.ids, np.int32))
                offsets.append(np.array(encoding.offsets, np.int64).reshape(-1, 2))
            advance(len(some))
    which_Q = np.array([numbers[text] for text in texts], np.int64)
    return replace(tokenized_passages(distinct, ids, offsets), which_Q=which_Q)


def tokenized_passages(
    texts: Sequence[str], ids: Sequence[NDArray[np.int32]], offsets: Sequence[Numbers]
) -> Passages:
    """Return `Passages` from known tokens, treating each passage as distinct."""
    lengths_D = np.array([len(each) for each in ids], np.int64)
    # All passages as one text, so that offsets are tidied and searched at once. The line end between two
    # passages keeps a mark or a space from being assigned to the next passage.
    begins_D1 = np.cumsum([0, *(len(text) + 1 for text in texts)])
    characters_C = np.frombuffer("".join(f"{text}\n" for text in texts).encode("utf-32-le"), "<u4")
    begins_X = np.repeat(begins_D1[:-1], lengths_D)[:, None]
    raw_X2 = np.concatenate([np.empty((0, 2), np.int64), *offsets])
    offsets_X2 = _tidied(raw_X2 + begins_X, characters_C) - begins_X
    ids_X = np.concatenate([np.empty(0, np.int32), *ids])
    starts_D = np.cumsum(lengths_D) - lengths_D
    return Passages(np.arange(len(texts)), ids_X, offsets_X2, starts_D, lengths_D, begins_D1[:-1])


def answer_pieces(questions: Sequence[Question], passages: Passages) -> Numbers:
    """Return first and last piece of each question's first answer, from its passage's start; or NOWHERE."""
    answers_Q2 = np.full((len(questions), 2), NOWHERE, np.int64)
    for row, question in enumerate(questions):
        if question.answers:
            answer = question.answers[0]  # run_squad.py trains on the first answer only
            answers_Q2[row] = answer.start, answer.start + len(answer.text)
    edges_Q2 = answers_Q2 + passages.begins_D[passages.which_Q][:, None]
    starts_X, ends_X = (passages.offsets_X2 + np.repeat(passages.begins_D, passages.lengths_D)[:, None]).T
    # Some normalisations exchange neighbouring marks, but the binary search needs sorted offsets.
    rising_ends_X = np.maximum.accumulate(ends_X)
    rising_starts_X = np.minimum.accumulate(starts_X[::-1])[::-1]
    # The first piece that ends after the answer's start, and the last that starts before its end: an answer
    # that begins or ends inside a piece gets the whole piece.
    first_Q = np.searchsorted(rising_ends_X, edges_Q2[:, 0], side="right")
    last_Q = np.searchsorted(rising_starts_X, edges_Q2[:, 1], side="left") - 1
    pieces_Q2 = np.stack([first_Q, last_Q], axis=1) - passages.starts_D[passages.which_Q][:, None]
    pieces_Q2[(answers_Q2[:, 0] == NOWHERE) | (last_Q < first_Q)] = NOWHERE
    return pieces_Q2


# --- from the library's offsets to the offsets that a reader would mark ---


def _tidied(offsets_X2: Numbers, characters_C: NDArray[np.uint32]) -> Numbers:
    """Trim white space from the edges of pieces, and add marks after them that the tokenizer dropped.

    ModernBERT's "Ġword" begins at the space, and an uncased BERT drops the U+0301 after the e of a café.
    """
    distinct, which_C = np.unique(characters_C, return_inverse=True)
    characters = [chr(number) for number in distinct.tolist()]
    is_space_C = np.array([each.isspace() for each in characters], np.bool_)[which_C]
    is_mark_C = np.array([unicodedata.category(each)[0] == "M" for each in characters], np.bool_)[which_C]
    starts_X, ends_X = offsets_X2.T
    starts_X = np.minimum(_next_without(is_space_C)[starts_X], ends_X)
    ends_X = np.maximum(_last_without(is_space_C)[ends_X], starts_X)
    # Marks belong to the piece before them, but only up to the start of the next piece.
    next_starts_X = np.append(starts_X[1:], len(characters_C))
    with_marks_X = np.minimum(_next_without(is_mark_C)[ends_X], next_starts_X)
    return np.stack([starts_X, np.maximum(ends_X, with_marks_X)], axis=1)


def _next_without(mask_C: Mask) -> Numbers:
    """Return for each offset, including the end, the first one from there on that is not in the mask."""
    offsets = np.where(np.append(mask_C, False), len(mask_C), np.arange(len(mask_C) + 1))
    return np.minimum.accumulate(offsets[::-1])[::-1]


def _last_without(mask_C: Mask) -> Numbers:
    """Return for each offset, including the end, the one after the last earlier character not in the mask."""
    behind = np.where(mask_C, 0, np.arange(1, len(mask_C) + 1))
    return np.maximum.accumulate(np.concatenate([np.zeros(1, np.int64), behind]))


# --- from questions and passages to windows ---


def encode_questions(questions: Sequence[Question], tokenizer: Tokenizer, text: TextSection) -> EncodedSet:
    """Encode windows of a question and its passage; each window is an item."""
    template = read_templates(tokenizer).pair
    texts, known = [question.passage for question in questions], [each.tokens for each in questions]
    if tokens := [each for each in known if each is not None]:  # known for all questions or for none
        passages = tokenized_passages(
            texts, [each.passage_X for each in tokens], [each.offsets_X2 for each in tokens]
        )
        asked = text_encoding.joined_pieces([each.question for each in tokens])
    else:
        passages = read_passages(texts, tokenizer)
        asked = text_encoding.pieces_of([question.question for question in questions], tokenizer)
    asked = replace(asked, lengths_N=np.minimum(asked.lengths_N, text.longest_question))
    rooms_Q = text.longest - template.specials(2) - asked.lengths_N
    if (rooms_Q < 1).any():
        index = int(rooms_Q.argmin())
        raise UserError(
            "the question leaves no room for its passage",
            where=questions[index].where,
            field="question",
            index=index,
            remedy="raise text.longest, or lower text.longest_question",
        )
    # Every window is a pair: the whole question, and a stretch of the passage.
    lengths_Q = passages.lengths_D[passages.which_Q]
    windows = text_encoding.cut_windows(lengths_Q, rooms_Q, step=text.step)
    firsts_N = passages.starts_D[passages.which_Q[windows.texts_W]] + windows.firsts_W
    starts_N2 = [asked.starts_N[windows.texts_W], len(asked.ids_X) + firsts_N]
    lengths_N2 = [asked.lengths_N[windows.texts_W], windows.lengths_W]
    stretches = text_encoding.unbroken(np.stack(starts_N2, axis=1), np.stack(lengths_N2, axis=1))
    laid = text_encoding.lay_sequences(np.concatenate([asked.ids_X, passages.ids_X]), stretches, template)
    # The map from the rows of the passages back to their characters.
    before_N = len(template.lead) + asked.lengths_N[windows.texts_W] + len(template.between)
    rows_X = ranges(laid.starts_S1[:-1] + before_N, windows.lengths_W)
    offsets_T2 = np.full((len(laid.tokens_T), 2), NOWHERE, np.int32)
    offsets_T2[rows_X] = passages.offsets_X2[ranges(firsts_N, windows.lengths_W)]
    best_T = np.zeros(len(laid.tokens_T), np.bool_)
    best_T[rows_X] = text_encoding.best_context(windows, lengths_Q)
    return EncodedSet(
        unit="token",
        tokens_T=laid.tokens_T,
        segments_T=laid.segments_T,
        starts_N1=laid.starts_S1,
        items_M1=np.arange(len(laid.starts_S1)),
        targets=_targets(questions, answer_pieces(questions, passages), windows, before_N),
        rows_P=np.empty(0, np.int64),
        words_P2=np.empty((0, 2), np.int64),
        passages_N2=np.stack([before_N, before_N + windows.lengths_W], axis=1),
        windows=QuestionWindows(windows.texts_W, offsets_T2, best_T),
    )


def _targets(
    questions: Sequence[Question], answers_Q2: Numbers, windows: text_encoding.Windows, before_N: Numbers
) -> Numbers:
    """Return the rows of the answer in each window that has all of it; row 0 twice in other windows."""
    answers_N2 = answers_Q2[windows.texts_W]
    inside_N2 = answers_N2 - windows.firsts_W[:, None]
    has_answer_N = (
        (answers_N2[:, 0] != NOWHERE) & (inside_N2[:, 0] >= 0) & (inside_N2[:, 1] < windows.lengths_W)
    )
    # As in run_squad.py, a window that cuts the answer is labelled "no answer": row 0, [CLS], twice.
    targets_N2 = np.where(has_answer_N[:, None], before_N[:, None] + inside_N2, 0)
    is_known_Q = np.array([bool(question.answers) or question.labelled for question in questions], np.bool_)
    targets_N2[~is_known_Q[windows.texts_W]] = NO_LABEL
    return targets_N2
