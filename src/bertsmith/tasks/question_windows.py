"""Questions and their passages as windows: the procedure of run_squad.py.

Shapes: Q questions, N windows, T tokens, X passage tokens of all windows.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bertsmith.examples.pairs import ranges
from bertsmith.examples.template import Template, read_templates
from bertsmith.ground.errors import UserError
from bertsmith.recipe.finetuning import TextSection
from bertsmith.tasks.encoded import EncodedSet, QuestionWindows
from bertsmith.tasks.examples import Question
from bertsmith.tasks.passages import NOWHERE, Passages, answer_pieces, read_passages
from bertsmith.tasks.sequences import Laid, Pieces, lay_sequences, pieces_of, unbroken
from bertsmith.tasks.windows import Windows, best_context, cut_windows
from bertsmith.text.tokenizer import Tokenizer

Numbers = NDArray[np.int64]


def encode_questions(questions: Sequence[Question], tokenizer: Tokenizer, text: TextSection) -> EncodedSet:
    """Windows of a question and its passage; each window is an item."""
    template = read_templates(tokenizer).pair
    passages = read_passages([question.passage for question in questions], tokenizer)
    asked = _asked(questions, tokenizer, text)
    rooms_Q = text.longest - template.specials(2) - asked.lengths_N
    _refuse_without_room(questions, rooms_Q)
    windows = cut_windows(passages.lengths_D[passages.which_Q], rooms_Q, step=text.step)
    laid = _laid(asked, passages, windows, template)
    before_N = len(template.lead) + asked.lengths_N[windows.texts_W] + len(template.between)
    return EncodedSet(
        kind="span",
        tokens_T=laid.tokens_T,
        segments_T=laid.segments_T,
        starts_N1=laid.starts_S1,
        items_M1=np.arange(len(laid.starts_S1)),
        targets=_targets(questions, answer_pieces(questions, passages), windows, before_N),
        rows_P=np.empty(0, np.int64),
        words_P2=np.empty((0, 2), np.int64),
        passages_N2=np.stack([before_N, before_N + windows.lengths_W], axis=1),
        windows=_way_back(passages, windows, ranges(laid.starts_S1[:-1] + before_N, windows.lengths_W), laid),
    )


def _asked(questions: Sequence[Question], tokenizer: Tokenizer, text: TextSection) -> Pieces:
    pieces = pieces_of([question.question for question in questions], tokenizer)
    return Pieces(pieces.ids_X, pieces.starts_N, np.minimum(pieces.lengths_N, text.longest_question))


def _refuse_without_room(questions: Sequence[Question], rooms_Q: Numbers) -> None:
    if (rooms_Q < 1).any():
        where = questions[int(rooms_Q.argmin())].where
        remedy = "raise text.longest, or lower text.longest_question"
        raise UserError("the question leaves no room for its passage", where=where, remedy=remedy)


def _shown(passages: Passages, windows: Windows) -> Numbers:
    """The first piece of each window."""
    return passages.starts_D[passages.which_Q[windows.texts_W]] + windows.firsts_W


def _laid(asked: Pieces, passages: Passages, windows: Windows, template: Template) -> Laid:
    starts_N2 = [asked.starts_N[windows.texts_W], len(asked.ids_X) + _shown(passages, windows)]
    lengths_N2 = [asked.lengths_N[windows.texts_W], windows.lengths_W]
    stretches = unbroken(np.stack(starts_N2, axis=1), np.stack(lengths_N2, axis=1))
    return lay_sequences(np.concatenate([asked.ids_X, passages.ids_X]), stretches, template)


def _targets(
    questions: Sequence[Question], answers_Q2: Numbers, windows: Windows, before_N: Numbers
) -> Numbers:
    """The rows of the answer in each window that holds all of it; the first row twice in others."""
    answers_N2 = answers_Q2[windows.texts_W]
    inside_N2 = answers_N2 - windows.firsts_W[:, None]
    has_answer_N = (
        (answers_N2[:, 0] != NOWHERE) & (inside_N2[:, 0] >= 0) & (inside_N2[:, 1] < windows.lengths_W)
    )
    targets_N2 = np.where(has_answer_N[:, None], before_N[:, None] + inside_N2, 0)
    is_known_Q = np.array([bool(question.answers) or question.labelled for question in questions], np.bool_)
    targets_N2[~is_known_Q[windows.texts_W]] = -1
    return targets_N2


def _way_back(passages: Passages, windows: Windows, rows_X: Numbers, laid: Laid) -> QuestionWindows:
    offsets_T2 = np.full((len(laid.tokens_T), 2), NOWHERE, np.int32)
    offsets_T2[rows_X] = passages.offsets_X2[ranges(_shown(passages, windows), windows.lengths_W)]
    best_T = np.zeros(len(laid.tokens_T), np.bool_)
    best_T[rows_X] = best_context(windows, passages.lengths_D[passages.which_Q])
    return QuestionWindows(windows.texts_W, offsets_T2, best_T)
