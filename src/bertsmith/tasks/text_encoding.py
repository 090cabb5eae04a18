"""Texts, pairs and choices as sequences; what is too long is cut, shown at both ends, or shown in windows.

Shapes: M examples, K texts of each (1 or 2), S sequences, C classes.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bertsmith.examples.template import Template, read_templates
from bertsmith.ground.errors import UserError
from bertsmith.recipe.finetuning import TextSection
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.examples import ChoiceExample, Kind, TextExample
from bertsmith.tasks.labels import NO_LABEL
from bertsmith.tasks.sequences import Laid, Stretches, lay_sequences, pieces_of, unbroken
from bertsmith.tasks.windows import cut_windows
from bertsmith.text.tokenizer import Tokenizer

Numbers = NDArray[np.int64]
Targets = NDArray[np.int64] | NDArray[np.float32]
TextKind = Literal["classify", "multilabel", "regress"]

HEAD_SHARE = 4
"""Sun et al. 2019 (How to Fine-Tune BERT for Text Classification): of 510 tokens 128 from the front."""


def encode_texts(
    kind: TextKind,
    examples: Sequence[TextExample],
    labels: tuple[str, ...],
    tokenizer: Tokenizer,
    text: TextSection,
) -> EncodedSet:
    """Texts or pairs with their classes or numbers; each example is an item."""
    targets = _TARGETS[kind](examples, labels)
    pairs = [_as_tuple(example.texts) for example in examples]
    _refuse_mixed(examples, pairs)
    laid, sequences_M = _lay_texts(pairs, tokenizer, text)
    return text_set(kind, laid, targets, sequences_M)


def encode_choices(examples: Sequence[ChoiceExample], tokenizer: Tokenizer, text: TextSection) -> EncodedSet:
    """A sequence for each option; all options of an example are one item."""
    if text.long_texts == "windows":
        remedy = "set text.long_texts to truncate or head-tail"
        raise UserError("options of a choice cannot be shown in windows", remedy=remedy)
    targets_M = np.array([_right_option(example) for example in examples], np.int64)
    pairs = [option for example in examples for option in example.options]
    laid, _ = _lay_texts(pairs, tokenizer, text)
    options_M = np.array([len(example.options) for example in examples], np.int64)
    return text_set("choice", laid, targets_M, options_M)


def text_set(kind: Kind, laid: Laid, targets: Targets, sequences_M: Numbers) -> EncodedSet:
    """Sequences of which each item has so many, where nothing is asked about single tokens."""
    return EncodedSet(
        kind=kind,
        tokens_T=laid.tokens_T,
        segments_T=laid.segments_T,
        starts_N1=laid.starts_S1,
        items_M1=np.concatenate([np.zeros(1, np.int64), np.cumsum(sequences_M)]),
        targets=targets,
        rows_P=np.empty(0, np.int64),
        words_P2=np.empty((0, 2), np.int64),
        passages_N2=np.empty((0, 2), np.int64),
    )


# --- which pieces are shown ---


def _lay_texts(
    texts: Sequence[tuple[str, ...]], tokenizer: Tokenizer, text: TextSection
) -> tuple[Laid, Numbers]:
    """The sequences of texts or pairs, and how many each of them has."""
    count = len(texts[0]) if texts else 1
    pieces = pieces_of([part for parts in texts for part in parts], tokenizer)
    starts_MK, lengths_MK = pieces.starts_N.reshape(-1, count), pieces.lengths_N.reshape(-1, count)
    template = _template(tokenizer, count)
    room = text.longest - template.specials(count)
    sequences_M = np.ones(len(texts), np.int64)
    if text.long_texts == "windows":
        stretches, sequences_M = windowed(starts_MK, lengths_MK, room, step=text.step)
    elif text.long_texts == "head-tail":
        stretches = both_ends(starts_MK, lengths_MK, room)
    else:
        stretches = unbroken(starts_MK, kept_lengths(lengths_MK, room))
    return lay_sequences(pieces.ids_X, stretches, template), sequences_M


def kept_lengths(lengths_MK: Numbers, room: int) -> Numbers:
    """How many pieces of each text fit, by the rule of `truncate_longest_first`."""
    if lengths_MK.shape[1] == 1:
        return np.minimum(lengths_MK, room)
    first_M, second_M = lengths_MK.T
    kept_first_M = np.minimum(first_M, np.maximum(room - second_M, (room + 1) // 2))
    return np.stack([kept_first_M, np.minimum(second_M, room - kept_first_M)], axis=1)


def both_ends(starts_MK: Numbers, lengths_MK: Numbers, room: int) -> Stretches:
    """Of what fits of a text that is too long, a quarter from its front and the rest from its end."""
    kept_MK = kept_lengths(lengths_MK, room)
    front_MK = np.where(kept_MK < lengths_MK, -(-kept_MK // HEAD_SHARE), lengths_MK)
    back_MK = kept_MK - front_MK
    starts_MK2 = np.stack([starts_MK, starts_MK + lengths_MK - back_MK], axis=-1)
    return Stretches(starts_MK2, np.stack([front_MK, back_MK], axis=-1))


def windowed(starts_MK: Numbers, lengths_MK: Numbers, room: int, *, step: int) -> tuple[Stretches, Numbers]:
    """Windows of each text, or of the longer text of a pair, the shorter being shown in each of them."""
    count = lengths_MK.shape[1]
    examples_M = np.arange(len(lengths_MK))
    long_M = count - 1 - lengths_MK[:, ::-1].argmax(axis=1)  # on a tie the second
    kept_MK = np.minimum(lengths_MK, room // 2)  # a shorter text that is long, too, leaves half of the room
    kept_MK[examples_M, long_M] = 0
    windows = cut_windows(lengths_MK[examples_M, long_M], room - kept_MK.sum(axis=1), step=step)
    starts_SK, lengths_SK = starts_MK[windows.texts_W], kept_MK[windows.texts_W]
    sequences_S, long_S = np.arange(len(windows.texts_W)), long_M[windows.texts_W]
    starts_SK[sequences_S, long_S] += windows.firsts_W
    lengths_SK[sequences_S, long_S] = windows.lengths_W
    return unbroken(starts_SK, lengths_SK), np.bincount(windows.texts_W, minlength=len(lengths_MK))


def _template(tokenizer: Tokenizer, texts: int) -> Template:
    templates = read_templates(tokenizer)
    return templates.single if texts == 1 else templates.pair


def _as_tuple(texts: str | tuple[str, str]) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else texts


def _refuse_mixed(examples: Sequence[TextExample], texts: Sequence[tuple[str, ...]]) -> None:
    for example, parts in zip(examples, texts, strict=True):
        if len(parts) != len(texts[0]):
            what = f"has {len(parts)} texts where the first example has {len(texts[0])}"
            raise UserError(what, where=example.where, remedy="give one text everywhere, or two everywhere")


# --- what is to be said about them ---


def label_numbers(given: Iterable[object], labels: Sequence[str]) -> Numbers:
    """The number of each given label: -1 for None, and -2, -3, ... for those that are none of the labels.

    Nobody can guess a negative number, so a label that training does not have is always judged as missed.
    """
    numbers: dict[str | None, int] = {None: NO_LABEL, **{label: place for place, label in enumerate(labels)}}
    spelled = (None if label is None else str(label) for label in given)
    return np.array(
        [numbers.setdefault(label, len(labels) + NO_LABEL - len(numbers)) for label in spelled], np.int64
    )


def _classes(examples: Sequence[TextExample], labels: tuple[str, ...]) -> Targets:
    return label_numbers((example.label for example in examples), labels)


def _class_sets(examples: Sequence[TextExample], labels: tuple[str, ...]) -> Targets:
    """A row for each example; labels that training does not have get columns of their own at the end."""
    chosen = [_as_labels(example.label) for example in examples]
    known = dict.fromkeys(labels) | dict.fromkeys(label for each in chosen for label in each)
    columns = {label: column for column, label in enumerate(known)}
    targets_MC = np.zeros((len(examples), len(columns)), np.int64)
    for row, example in enumerate(examples):
        targets_MC[row, [columns[label] for label in chosen[row]]] = 1
        if example.label is None:
            targets_MC[row] = NO_LABEL
    return targets_MC


def _as_labels(label: object) -> tuple[str, ...]:
    if isinstance(label, tuple):
        return label
    return () if label is None else (str(label),)


def _numbers(examples: Sequence[TextExample], _labels: tuple[str, ...]) -> Targets:
    return np.array([_number(example) for example in examples], np.float32)


def _number(example: TextExample) -> float:
    if example.label is None:
        return float("nan")
    try:
        return float(example.label)  # type: ignore[arg-type]  # a tuple is a TypeError like any other
    except (TypeError, ValueError) as error:
        what = f"{example.label!r} is no number"
        raise UserError(what, where=example.where, remedy="write it as 2.5") from error


def _right_option(example: ChoiceExample) -> int:
    if example.label is None:
        return -1
    if not 0 <= example.label < len(example.options):
        what = f"option {example.label} is right, but there are {len(example.options)}"
        raise UserError(what, where=example.where, remedy="options are numbered from 0")
    return example.label


_TARGETS = {"classify": _classes, "multilabel": _class_sets, "regress": _numbers}
