"""A tag for each word, predicted at its first piece in the window that shows most context of the word.

Shapes: M sentences, U texts (sentences or documents), W words in the order of the texts, N windows, X pieces
of all windows, P tagged words, C tags.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.arrays import ranges
from bertsmith.core.errors import UserError
from bertsmith.core.files import write_text
from bertsmith.recipe.finetuning_schema import TextSection
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.example_types import TaggedExample
from bertsmith.tasks.kinds.kind import Kind, TaskHead
from bertsmith.tasks.metrics import ACCURACY, OF_CLASSES, Metric, compute_metrics
from bertsmith.tasks.predictions import HardError, PredictedSplit, Predictions
from bertsmith.tasks.simple_models import UNTAGGED, dictionary_tags
from bertsmith.tasks.tag_spans import scheme_of, span_scores
from bertsmith.tasks.text_encoding import (
    Numbers,
    best_context,
    cut_windows,
    label_ids,
    lay_sequences,
    pieces_of,
    unbroken,
)
from bertsmith.text.tokenizer import Tokenizer, read_templates

SPAN_F1 = Metric("span_f1")
SPAN_TAG = re.compile("[BIES]-.")


class Tag(Kind[TaggedExample]):
    """The kind that chooses a tag for each word."""

    name = "tag"
    losses = "tag"
    pipeline_tag = "token-classification"
    usage = 'bert.tag(["Marie Curie was born in Warsaw."])[0]'
    head = TaskHead("tag", "tokens")
    unit = "word"
    metrics = (*OF_CLASSES, SPAN_F1, Metric("precision"), Metric("recall"))
    ability = "tag"
    taught_by = "ner (tags for your own columns)"
    min_labels = 2
    plots = ("confusion", "calibration")
    has_class_weights = True
    linear_problem = "classes"
    simple_model = "dictionary of the training set"
    own_form = "file"

    def encode_checked(
        self,
        examples: Sequence[TaggedExample],
        labels: tuple[str, ...],
        tokenizer: Tokenizer,
        text: TextSection,
    ) -> EncodedSet:
        return encode_tags(examples, labels, tokenizer, text)

    def without_tokens(self, examples: Sequence[TaggedExample], labels: tuple[str, ...]) -> EncodedSet:
        tags = [tag for example in examples for tag in example.tags or ()]
        names = [(index, word) for index, each in enumerate(examples) for word in range(len(each.words))]
        words_P2 = np.array(names, np.int64).reshape(-1, 2)
        return replace(EncodedSet.without_tokens(self.unit, label_ids(tags, labels)), words_P2=words_P2)

    def own_metrics(self, metrics: tuple[str, ...], labels: tuple[str, ...]) -> tuple[str, ...]:
        spans = all(label == UNTAGGED or SPAN_TAG.match(label) for label in labels)
        return (SPAN_F1.name, ACCURACY.name) if spans else metrics

    def evaluate(
        self, metrics: Sequence[str], labels: tuple[str, ...], split: PredictedSplit[TaggedExample]
    ) -> dict[str, float]:
        """Return the metrics of single words and, if span_f1 is named, of spans and of their types."""
        predicted_P = self.predicted_targets(split.encoded, split.predictions)
        chosen = [self.metric_named(name) for name in metrics]
        of_words = [metric for metric in chosen if metric.compute is not None] or [ACCURACY]
        # raises if the words are not tagged
        words = compute_metrics(of_words, split.encoded.targets, predicted_P)
        if SPAN_F1 not in chosen:
            return words
        right = [list(example.tags or ()) for example in split.examples]
        found = span_scores(right, predicted_tags(labels, split, predicted_P), scheme_of(right))
        spans = {SPAN_F1.name: found.f1, "precision": found.precision, "recall": found.recall}
        # Only types in the file: other types that a run predicts differ from run to run.
        types = {
            f"{SPAN_F1.name}_{name}": each.f1 for name, each in found.by_type.items() if name and each.labels
        }
        return {**spans, **words, **types}

    def judged(self, split: PredictedSplit[TaggedExample]) -> dict[str, NDArray[Any]]:
        """Return the tags of each word, with its sentence and its place in the sentence."""
        return {**super().judged(split), "words": split.encoded.words_P2}

    def simple_predictions(
        self,
        labels: tuple[str, ...],
        train: Sequence[TaggedExample],
        examples: Sequence[TaggedExample],
        encoded: EncodedSet,
    ) -> Predictions:
        tagged = dictionary_tags(train, examples, labels)
        columns = {label: column for column, label in enumerate(labels)}
        chosen_P = [columns[tagged[sentence][word]] for sentence, word in encoded.words_P2]
        return Predictions(np.eye(len(labels), dtype=np.float32)[chosen_P])

    def errors(self, labels: tuple[str, ...], split: PredictedSplit[TaggedExample]) -> Iterator[HardError]:
        """Yield the sentences with wrong tags; the confidence is that of the surest wrong tag."""
        encoded, scores_PC = split.encoded, split.predictions.scores
        predicted_P = self.predicted_targets(encoded, split.predictions)
        tagged = predicted_tags(labels, split, predicted_P)
        surest_M = np.zeros(len(split.examples))
        wrong_P = predicted_P != encoded.targets
        np.maximum.at(surest_M, encoded.words_P2[wrong_P, 0], scores_PC.max(-1)[wrong_P])
        for index in np.flatnonzero(surest_M > 0).tolist():
            example = split.examples[index]
            triples = zip(example.words, example.tags or (), tagged[index], strict=True)
            wrong = [(word, tag, predicted) for word, tag, predicted in triples if tag != predicted]
            right = " ".join(f"{word}/{tag}" for word, tag, _ in wrong)
            instead = " ".join(f"{word}/{predicted}" for word, _, predicted in wrong)
            yield HardError(example.where, example.summary, right, instead, float(surest_M[index]))

    def prediction_rows(
        self, labels: tuple[str, ...], split: PredictedSplit[TaggedExample], *, separator: str
    ) -> list[dict[str, Any]]:
        """Return a row for each sentence: its id, its words and their predicted tags."""
        tagged = predicted_tags(labels, split, self.predicted_targets(split.encoded, split.predictions))
        return [
            {"id": example.key, "words": list(example.words), "tags": tags}
            for example, tags in zip(split.examples, tagged, strict=True)
        ]

    def write_predictions(
        self, out: Path, labels: tuple[str, ...], split: PredictedSplit[TaggedExample]
    ) -> list[Path]:
        """Write each word, its tag (if known) and the predicted tag on a line, for conlleval.

        Columns are separated by spaces, or by tabs (conlleval -d '\\t') if some word contains a space.
        """
        predicted_P = self.predicted_targets(split.encoded, split.predictions)
        has_spaces = any(" " in word for example in split.examples for word in example.words)
        between, blocks = "\t" if has_spaces else " ", []
        for example, tags in zip(split.examples, predicted_tags(labels, split, predicted_P), strict=True):
            known = () if example.tags is None else (example.tags,)
            rows = zip(example.words, *known, tags, strict=True)
            blocks.append("".join(f"{between.join(cells)}\n" for cells in rows))
        write_text(out, "\n".join(blocks))
        return [out]


TAG = Tag()


def predicted_tags(
    labels: tuple[str, ...], split: PredictedSplit[TaggedExample], predicted_P: NDArray[Any]
) -> list[list[str]]:
    """Return the predicted tags of each sentence's words, in order."""
    tagged: list[list[str]] = [[] for _ in split.examples]
    words_P2 = split.encoded.words_P2
    for row in np.lexsort((words_P2[:, 1], words_P2[:, 0])):
        tagged[int(words_P2[row, 0])].append(labels[int(predicted_P[row])])
    return tagged


# ---- from sentences to windows of tokens


@dataclass(frozen=True, slots=True)
class _Words:
    """All words, text after text, and their pieces in one row."""

    ids: NDArray[np.int32]
    lengths_W: Numbers
    """Number of pieces in each word, at least one."""
    names_W2: Numbers
    """Sentence and word number of each word."""
    text_lengths_U: Numbers
    """Number of pieces in each text."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """The pieces in each window, with flags of the pieces to tag."""

    starts_N: Numbers
    lengths_N: Numbers
    pieces_X: Numbers
    asked_X: NDArray[np.bool_]


def encode_tags(
    examples: Sequence[TaggedExample], labels: tuple[str, ...], tokenizer: Tokenizer, text: TextSection
) -> EncodedSet:
    """Encode sentences or documents in windows; each window is an item."""
    tags: list[str | None] = []
    for example in examples:
        given = example.tags or (None,) * len(example.words)
        if len(given) != len(example.words):
            what = f"has {len(example.words)} words but {len(given)} tags"
            raise UserError(what, where=example.where, remedy="give a tag for each word")
        tags += given
    words = _words(examples, tokenizer, text)
    template = read_templates(tokenizer).single
    shown = _shown(words, text.longest - template.specials(1), step=text.step)
    laid = lay_sequences(words.ids, unbroken(shown.starts_N[:, None], shown.lengths_N[:, None]), template)
    rows_X = ranges(laid.starts_S1[:-1] + len(template.lead), shown.lengths_N)
    names = np.repeat(words.names_W2, words.lengths_W, axis=0)
    words_P2 = names[shown.pieces_X[shown.asked_X]]
    # Tags are in the order of the examples, words in the order of the texts: words_P2 maps between them.
    first_tags_M = np.cumsum([0, *(len(example.words) for example in examples)])
    return EncodedSet(
        unit="word",
        tokens_T=laid.tokens_T,
        segments_T=laid.segments_T,
        starts_N1=laid.starts_S1,
        items_M1=np.arange(len(laid.starts_S1)),
        targets=label_ids(tags, labels)[first_tags_M[words_P2[:, 0]] + words_P2[:, 1]],
        rows_P=rows_X[shown.asked_X],
        words_P2=words_P2,
        passages_N2=np.empty((0, 2), np.int64),
    )


def _words(examples: Sequence[TaggedExample], tokenizer: Tokenizer, text: TextSection) -> _Words:
    """Return words in the order of the texts: a text is a sentence, or a document with all its sentences."""
    texts_M = np.arange(len(examples))
    if text.context == "document":
        numbers: dict[int, int] = {}
        texts_M = np.array([numbers.setdefault(each.document, len(numbers)) for each in examples], np.int64)
    spelled: list[str] = []
    names: list[tuple[int, int]] = []
    texts: list[int] = []
    for sentence in np.argsort(texts_M, kind="stable").tolist():
        for number, word in enumerate(examples[sentence].words):
            # Byte-level BPE has other pieces for a word after a space; other tokenizers ignore the space.
            begins_text = not texts or texts[-1] != texts_M[sentence]
            spelled.append(word if begins_text else f" {word}")
            names.append((sentence, number))
            texts.append(int(texts_M[sentence]))
    pieces = pieces_of(spelled, tokenizer)
    ids, starts_W, lengths_W = pieces.ids_X, pieces.starts_N, pieces.lengths_N
    # A word without any piece, such as a control character, becomes unknown: each word needs a row.
    is_nothing_W = lengths_W == 0
    if is_nothing_W.any():
        starts_W = np.where(is_nothing_W, len(ids), starts_W)
        lengths_W = np.maximum(lengths_W, 1)
        ids = np.append(ids, np.int32(tokenizer.unknown_id))
    ids = ids[ranges(starts_W, lengths_W)]  # until here, equal words shared their pieces
    text_lengths_U = np.zeros(int(texts_M.max(initial=-1)) + 1, np.int64)
    np.add.at(text_lengths_U, np.array(texts, np.int64), lengths_W)
    return _Words(ids, lengths_W, np.array(names, np.int64).reshape(-1, 2), text_lengths_U)


def _shown(words: _Words, room: int, *, step: int) -> _Shown:
    """Cut windows over the texts, without windows in which every word has more context elsewhere."""
    lengths_U = words.text_lengths_U
    # At least half overlap, whatever the step: otherwise words at the borders would lack context.
    windows = cut_windows(lengths_U, np.full_like(lengths_U, room), step=min(step, -(-room // 2)))
    begins_U = np.cumsum(lengths_U) - lengths_U
    starts_N, lengths_N = begins_U[windows.texts_W] + windows.firsts_W, windows.lengths_W
    pieces_X = ranges(starts_N, lengths_N)
    begins_word = np.zeros(len(words.ids), np.bool_)
    begins_word[np.cumsum(words.lengths_W) - words.lengths_W] = True
    # A word is tagged once, at its first piece (Devlin et al. 2018, 5.3), in the window with most context.
    asked_X = best_context(windows, lengths_U) & begins_word[pieces_X]
    window_X = np.repeat(np.arange(len(lengths_N)), lengths_N)
    is_used_N = np.bincount(window_X[asked_X], minlength=len(lengths_N)) > 0
    is_used_X = is_used_N[window_X]
    return _Shown(starts_N[is_used_N], lengths_N[is_used_N], pieces_X[is_used_X], asked_X[is_used_X])
