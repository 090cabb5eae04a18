"""Choosing one of several classes for a text or a pair. Shapes: M texts, C classes."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.example_types import TextExample
from bertsmith.tasks.kinds.text_kind import TextKind, best_label_threshold
from bertsmith.tasks.label_rules import LabelRule, word
from bertsmith.tasks.metrics import OF_CLASSES, Metric
from bertsmith.tasks.predictions import HardError, PredictedSplit, Predictions
from bertsmith.tasks.simple_models import tfidf_probabilities
from bertsmith.tasks.text_encoding import Targets, label_ids


class Classify(TextKind):
    """The kind that chooses one of several classes."""

    name = "classify"
    losses = "class"
    pipeline_tag = "text-classification"
    usage = "bert.classify([{text}])[0].label"
    metrics = OF_CLASSES
    custom_metrics = ("accuracy", "macro_f1")
    min_labels = 2
    problem_type = "single_label_classification"
    plots = ("confusion", "calibration")
    has_class_weights = True
    linear_problem = "classes"
    simple_model = "TF-IDF + logistic regression"

    def label_rule(self, separator: str) -> LabelRule:
        return word

    def targets(self, examples: Sequence[TextExample], labels: tuple[str, ...]) -> Targets:
        return label_ids((example.label for example in examples), labels)

    def predicted_targets(self, encoded: EncodedSet, predictions: Predictions) -> NDArray[Any]:
        if not predictions.thresholds:
            return super().predicted_targets(encoded, predictions)
        return (predictions.scores[:, 1] >= predictions.thresholds[0]).astype(np.int64)

    def simple_predictions(
        self,
        labels: tuple[str, ...],
        train: Sequence[TextExample],
        examples: Sequence[TextExample],
        encoded: EncodedSet,
    ) -> Predictions:
        return Predictions(tfidf_probabilities(train, examples, labels))

    def threshold_count(self, labels: tuple[str, ...]) -> int:
        return 1 if len(labels) == 2 else 0

    def tuned_thresholds(
        self, metric: Metric, labels: tuple[str, ...], split: PredictedSplit[TextExample]
    ) -> tuple[float, ...]:
        return (best_label_threshold(metric, split.encoded.targets, split.predictions.scores[:, 1]),)

    def labels_of(self, labels: tuple[str, ...], target: Any) -> tuple[str, ...]:
        return (labels[int(target)],)

    def written(self, labels: tuple[str, ...], target: Any, *, separator: str) -> str | float:
        return labels[int(target)]

    def errors(self, labels: tuple[str, ...], split: PredictedSplit[TextExample]) -> Iterator[HardError]:
        predicted_M = self.predicted_targets(split.encoded, split.predictions)
        for index, example in enumerate(split.examples):
            chosen = int(predicted_M[index])
            if split.encoded.targets[index] != chosen:
                confidence = float(split.predictions.scores[index, chosen])
                right = str(example.label)
                yield HardError(example.where, example.summary, right, labels[chosen], confidence)


CLASSIFY = Classify()
