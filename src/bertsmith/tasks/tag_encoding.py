"""Tagged words as sequences: each word is asked about once, at its first piece, where it has most context.

Shapes: M sentences, U texts (sentences or documents), W words in the order of the texts, N windows, X pieces
of all windows, P asked words.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bertsmith.examples.pairs import ranges
from bertsmith.examples.template import read_templates
from bertsmith.ground.errors import UserError
from bertsmith.recipe.finetuning import TextSection
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.examples import TaggedExample
from bertsmith.tasks.sequences import lay_sequences, pieces_of, unbroken
from bertsmith.tasks.text_encoding import label_numbers
from bertsmith.tasks.windows import best_context, cut_windows
from bertsmith.text.tokenizer import Tokenizer

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Words:
    """All words, text after text, and their pieces in one row."""

    ids: NDArray[np.int32]
    lengths_W: Numbers
    """Pieces of each word, at least one."""
    names_W2: Numbers
    """Sentence and word."""
    text_lengths_U: Numbers
    """Pieces of each text."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """What each window shows, and which of it is asked about."""

    starts_N: Numbers
    lengths_N: Numbers
    pieces_X: Numbers
    asked_X: NDArray[np.bool_]


def encode_tags(
    examples: Sequence[TaggedExample], labels: tuple[str, ...], tokenizer: Tokenizer, text: TextSection
) -> EncodedSet:
    """Sentences or documents in windows; each window is an item."""
    tags = _tags(examples, labels)
    words = _words(examples, _texts(examples, text), tokenizer)
    template = read_templates(tokenizer).single
    shown = _shown(words, text.longest - template.specials(1), step=text.step)
    laid = lay_sequences(words.ids, unbroken(shown.starts_N[:, None], shown.lengths_N[:, None]), template)
    rows_X = ranges(laid.starts_S1[:-1] + len(template.lead), shown.lengths_N)
    names = np.repeat(words.names_W2, words.lengths_W, axis=0)
    words_P2 = names[shown.pieces_X[shown.asked_X]]
    first_tags_M = np.cumsum([0, *(len(example.words) for example in examples)])
    return EncodedSet(
        kind="tag",
        tokens_T=laid.tokens_T,
        segments_T=laid.segments_T,
        starts_N1=laid.starts_S1,
        items_M1=np.arange(len(laid.starts_S1)),
        targets=tags[first_tags_M[words_P2[:, 0]] + words_P2[:, 1]],
        rows_P=rows_X[shown.asked_X],
        words_P2=words_P2,
        passages_N2=np.empty((0, 2), np.int64),
    )


def _texts(examples: Sequence[TaggedExample], text: TextSection) -> Numbers:
    """The text that each sentence is part of: itself, or its document."""
    if text.context == "sentence":
        return np.arange(len(examples))
    numbers: dict[int, int] = {}
    return np.array([numbers.setdefault(each.document, len(numbers)) for each in examples], np.int64)


def _words(examples: Sequence[TaggedExample], texts_M: Numbers, tokenizer: Tokenizer) -> _Words:
    spelled: list[str] = []
    names: list[tuple[int, int]] = []
    texts: list[int] = []
    for sentence in np.argsort(texts_M, kind="stable").tolist():
        text = int(texts_M[sentence])
        for number, word in enumerate(examples[sentence].words):
            # A byte-level BPE knows other pieces for a word after a space; to others the space is nothing.
            begins_text = not texts or texts[-1] != text
            spelled.append(word if begins_text else f" {word}")
            names.append((sentence, number))
            texts.append(text)
    ids, lengths_W = _pieces(spelled, tokenizer)
    text_lengths_U = np.zeros(int(texts_M.max(initial=-1)) + 1, np.int64)
    np.add.at(text_lengths_U, np.array(texts, np.int64), lengths_W)
    return _Words(ids, lengths_W, np.array(names, np.int64).reshape(-1, 2), text_lengths_U)


def _pieces(spelled: Sequence[str], tokenizer: Tokenizer) -> tuple[NDArray[np.int32], Numbers]:
    """The pieces of each word in one row; a word without any, such as a control character, is unknown."""
    pieces = pieces_of(spelled, tokenizer)
    ids, starts_W, lengths_W = pieces.ids_X, pieces.starts_N, pieces.lengths_N
    is_nothing_W = lengths_W == 0
    if is_nothing_W.any():
        starts_W = np.where(is_nothing_W, len(ids), starts_W)
        lengths_W = np.maximum(lengths_W, 1)
        ids = np.append(ids, np.int32(tokenizer.unknown_id))
    return ids[ranges(starts_W, lengths_W)], lengths_W


def _shown(words: _Words, room: int, *, step: int) -> _Shown:
    """Windows over the texts, without those that no word has its most context in."""
    lengths_U = words.text_lengths_U
    # At least half overlap, whatever the step: else the words at the borders would have no context.
    windows = cut_windows(lengths_U, np.full_like(lengths_U, room), step=min(step, -(-room // 2)))
    begins_U = np.cumsum(lengths_U) - lengths_U
    starts_N, lengths_N = begins_U[windows.texts_W] + windows.firsts_W, windows.lengths_W
    pieces_X = ranges(starts_N, lengths_N)
    begins_word = np.zeros(len(words.ids), np.bool_)
    begins_word[np.cumsum(words.lengths_W) - words.lengths_W] = True
    asked_X = best_context(windows, lengths_U) & begins_word[pieces_X]
    window_X = np.repeat(np.arange(len(lengths_N)), lengths_N)
    is_used_N = np.bincount(window_X[asked_X], minlength=len(lengths_N)) > 0
    is_used_X = is_used_N[window_X]
    return _Shown(starts_N[is_used_N], lengths_N[is_used_N], pieces_X[is_used_X], asked_X[is_used_X])


def _tags(examples: Sequence[TaggedExample], labels: tuple[str, ...]) -> Numbers:
    """The number of each word's tag, sentence after sentence; negative as `label_numbers` says."""
    tags: list[str | None] = []
    for example in examples:
        given = example.tags or (None,) * len(example.words)
        if len(given) != len(example.words):
            what = f"has {len(example.words)} words but {len(given)} tags"
            raise UserError(what, where=example.where, remedy="give a tag for each word")
        tags += given
    return label_numbers(tags, labels)
