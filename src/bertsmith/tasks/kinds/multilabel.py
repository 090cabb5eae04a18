"""Any number of classes for a text or a pair. Shapes: M texts, C classes."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.tasks.encoded import NO_LABEL, EncodedSet
from bertsmith.tasks.example_types import TextExample
from bertsmith.tasks.kinds.text_kind import USUAL_THRESHOLD, TextKind, best_label_threshold
from bertsmith.tasks.label_rules import LabelRule, several
from bertsmith.tasks.metrics import ACCURACY, F1, MACRO_F1, MICRO_F1, Metric
from bertsmith.tasks.predictions import (
    HardError,
    Numbers,
    PredictedSplit,
    Predictions,
    mean_surprise,
    sigmoid,
)
from bertsmith.tasks.text_encoding import Targets


class MultiLabel(TextKind):
    """The kind that chooses any number of classes, each independently."""

    name = "multilabel"
    losses = "multilabel"
    pipeline_tag = "text-classification"
    usage = "bert.classify([{text}])[0].labels"
    metrics = (ACCURACY, MACRO_F1, MICRO_F1)
    custom_metrics = ("micro_f1",)
    unlabelled_cells = ()  # an empty cell means no labels; only a missing column means unknown
    min_labels = 1
    problem_type = "multi_label_classification"
    many_labels = True
    linear_problem = "labels"

    def label_rule(self, separator: str) -> LabelRule:
        return several(separator)

    def targets(self, examples: Sequence[TextExample], labels: tuple[str, ...]) -> Targets:
        """Return a row for each example; labels missing from training get separate columns at the end."""
        chosen = [_label_set(example.label) for example in examples]
        known = dict.fromkeys(labels) | dict.fromkeys(label for each in chosen for label in each)
        columns = {label: column for column, label in enumerate(known)}
        targets_MC = np.zeros((len(examples), len(columns)), np.int64)
        for row, example in enumerate(examples):
            targets_MC[row, [columns[label] for label in chosen[row]]] = 1
            if example.label is None:
                targets_MC[row] = NO_LABEL
        return targets_MC

    def activation(self, logits: Numbers) -> Numbers:
        return sigmoid(logits)

    def predicted_targets(self, encoded: EncodedSet, predictions: Predictions) -> NDArray[Any]:
        thresholds = predictions.thresholds or USUAL_THRESHOLD
        return (predictions.scores >= np.asarray(thresholds, np.float32)).astype(np.int64)

    def threshold_count(self, labels: tuple[str, ...]) -> int:
        return len(labels)

    def tuned_thresholds(
        self, metric: Metric, labels: tuple[str, ...], split: PredictedSplit[TextExample]
    ) -> tuple[float, ...]:
        """Tune a threshold for each label by its F1."""
        targets_MC, scores_MC = split.encoded.targets, split.predictions.scores
        columns = range(len(labels))
        return tuple(best_label_threshold(F1, targets_MC[:, each], scores_MC[:, each]) for each in columns)

    def constant_predictions(
        self, labels: tuple[str, ...], known: NDArray[Any], encoded: EncodedSet
    ) -> Predictions:
        """Predict the labels of at least half of the examples, or otherwise the most frequent label."""
        fractions_C = (known[:, : len(labels)] == 1).mean(0)
        scores_C = fractions_C >= min(0.5, fractions_C.max())
        return Predictions(np.tile(scores_C.astype(np.float32), (len(encoded.targets), 1)))

    def mean_loss(self, encoded: EncodedSet, predictions: Predictions) -> float:
        scores_MC = predictions.scores
        targets_MC = encoded.targets[:, : scores_MC.shape[1]]
        return mean_surprise(np.where(targets_MC == 1, scores_MC, 1 - scores_MC)[targets_MC >= 0])

    def labels_of(self, labels: tuple[str, ...], target: Any) -> tuple[str, ...]:
        return tuple(label for label, hit in zip(labels, target, strict=True) if hit)

    def written(self, labels: tuple[str, ...], target: Any, *, separator: str) -> str | float:
        return separator.join(self.labels_of(labels, target))

    def errors(self, labels: tuple[str, ...], split: PredictedSplit[TextExample]) -> Iterator[HardError]:
        predicted_MC = self.predicted_targets(split.encoded, split.predictions)
        # The columns after the model's labels belong to labels that are missing from training.
        known_MC, unknown_MC = np.split(split.encoded.targets, [len(labels)], axis=1)
        wrong_M = (known_MC != predicted_MC).any(1) | unknown_MC.any(1)
        for index in np.flatnonzero(wrong_M).tolist():
            example = split.examples[index]
            confidence = float(np.abs(split.predictions.scores[index] - known_MC[index]).max())
            right = (
                (", ".join(example.label) or "none")
                if isinstance(example.label, tuple)
                else str(example.label)
            )
            predicted = ", ".join(self.labels_of(labels, predicted_MC[index])) or "none"
            yield HardError(example.where, example.summary, right, predicted, confidence)


def _label_set(label: object) -> tuple[str, ...]:
    if isinstance(label, tuple):
        return label
    return () if label is None else (str(label),)


MULTILABEL = MultiLabel()
