"""Metrics as fractions in 0..1, or -1..1 for correlations; an undefined metric is 0.0, never NaN.

Errors of numbers have the numbers' own unit, and smaller is better. Every `Metric` record has its direction
(larger or smaller is better); the kinds of tasks (`tasks.kinds`) list their metrics.

Undefined are: any metric of no examples, F1 of a class neither present nor predicted, and a correlation if
either side is constant (a constant prediction has learned nothing) or not finite (a diverged model). Shapes:
M examples, C classes; classes are ids [M], or 0 or 1 for several labels per example [M, C].
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.core import measures
from bertsmith.core.errors import UserError
from bertsmith.tasks.encoded import NO_LABEL

Values = NDArray[Any]
PERCENT = 100


@dataclass(frozen=True)
class Metric(measures.Metric):
    """A metric of labels and predictions; a number has the unit of the labels."""

    compute: Callable[[Values, Values], float] | None = None
    """Computes the metric; None if a kind computes several metrics together (`Kind.evaluate`)."""

    def text(self, value: float, digits: int = 6) -> str:
        """Return a value as text for people: in percent without the sign, or with this many digits."""
        return f"{PERCENT * value:.2f}" if self.in_percent else f"{value:.{digits}g}"


POSITIVE = 1
"""The class that F1 refers to: paraphrase in MRPC, duplicate in QQP."""


def accuracy(labels: Values, predictions: Values) -> float:
    """Return the fraction of right predictions; if an example has several labels, all must be right."""
    right = labels == predictions
    return _fraction(_count(right.all(axis=1) if right.ndim == 2 else right), len(right))


def f1(labels: Values, predictions: Values) -> float:
    """Return the harmonic mean of precision and recall of class 1."""
    return float(_f1_of_columns((labels == POSITIVE)[:, None], (predictions == POSITIVE)[:, None])[0])


def macro_f1(labels: Values, predictions: Values) -> float:
    """Return the unweighted mean of each class's F1; for ids, over classes that occur or are predicted."""
    f1_C = _f1_of_columns(*_membership(labels, predictions))
    return float(f1_C.mean()) if len(f1_C) else 0.0


def micro_f1(labels: Values, predictions: Values) -> float:
    """Return F1 over all decisions of all classes together."""
    labels_MC, predictions_MC = _membership(labels, predictions)
    return _fraction(2 * _count(labels_MC & predictions_MC), _count(labels_MC) + _count(predictions_MC))


def matthews(labels: Values, predictions: Values) -> float:
    """Return the Matthews correlation; for over two classes (GLUE's diagnostic set) after Gorodkin (2004)."""
    labels_MC, predictions_MC = _membership(labels, predictions)
    examples = len(labels_MC)
    labels_C, predictions_C = labels_MC.sum(0, dtype=np.int64), predictions_MC.sum(0, dtype=np.int64)
    together = float(_count(labels_MC & predictions_MC) * examples - labels_C @ predictions_C)
    label_spread = float(examples**2 - labels_C @ labels_C)
    prediction_spread = float(examples**2 - predictions_C @ predictions_C)
    if label_spread == 0 or prediction_spread == 0:
        return 0.0
    return _within_one(together / np.sqrt(label_spread * prediction_spread))


def pearson(labels: Values, predictions: Values) -> float:
    """Return the linear correlation of labels and predictions."""
    if _undefined(labels) or _undefined(predictions):
        return 0.0
    labels_M, predictions_M = _centred(labels), _centred(predictions)
    return _within_one(
        float(labels_M @ predictions_M / (np.linalg.norm(labels_M) * np.linalg.norm(predictions_M)))
    )


def spearman(labels: Values, predictions: Values) -> float:
    """Return the rank correlation of labels and predictions: Pearson of the ranks."""
    if _undefined(labels) or _undefined(predictions):
        return 0.0
    return pearson(_ranks(labels), _ranks(predictions))


def mean_absolute_error(labels: Values, predictions: Values) -> float:
    """Return the mean absolute error of the predictions."""
    return _finite(np.abs(_errors(labels, predictions)).mean()) if len(labels) else 0.0


def root_mean_squared_error(labels: Values, predictions: Values) -> float:
    """Return the root mean squared error, which weighs large errors more heavily."""
    return _finite(np.sqrt(np.square(_errors(labels, predictions)).mean())) if len(labels) else 0.0


def _errors(labels: Values, predictions: Values) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):
        errors: NDArray[np.float64] = predictions.astype(np.float64) - labels.astype(np.float64)
    return errors


def _finite(error: np.floating[Any]) -> float:
    """Return the error or, for a diverged model, the largest float, because JSON cannot express infinity."""
    return float(error) if np.isfinite(error) else sys.float_info.max


ACCURACY = Metric("accuracy", accuracy)
F1 = Metric("f1", f1)
MACRO_F1 = Metric("macro_f1", macro_f1)
MICRO_F1 = Metric("micro_f1", micro_f1)
MATTHEWS = Metric("matthews", matthews)
PEARSON = Metric("pearson", pearson)
SPEARMAN = Metric("spearman", spearman)
MEAN_ABSOLUTE_ERROR = Metric(
    "mean_absolute_error", mean_absolute_error, larger_is_better=False, unit="number"
)
ROOT_MEAN_SQUARED_ERROR = Metric(
    "root_mean_squared_error", root_mean_squared_error, larger_is_better=False, unit="number"
)
OF_CLASSES = (ACCURACY, F1, MACRO_F1, MICRO_F1, MATTHEWS)
OF_NUMBERS = (SPEARMAN, PEARSON, MEAN_ABSOLUTE_ERROR, ROOT_MEAN_SQUARED_ERROR)


def metric_in(metrics: Iterable[Metric], name: str) -> Metric:
    """Return the metric with this name."""
    known = {metric.name: metric for metric in metrics}
    if name not in known:
        raise UserError(f"unknown metric {name!r}", remedy=f"choose one of {', '.join(known)}")
    return known[name]


def compute_metrics(metrics: Iterable[Metric], labels: Values, predictions: Values) -> dict[str, float]:
    """Return the value of each metric, in order."""
    if labels.shape != predictions.shape:
        raise ValueError(f"labels {labels.shape} and predictions {predictions.shape} differ in shape")
    # Numbers below -1 are labels missing from training: they count, and are always missed.
    unlabelled = np.isnan(labels) if labels.dtype.kind == "f" else labels == NO_LABEL
    if unlabelled.any():
        raise UserError(
            "some examples lack a label to compare with", remedy="evaluate a labelled split, for example dev"
        )
    return {
        metric.name: metric.compute(labels, predictions) for metric in metrics if metric.compute is not None
    }


def _count(mask: NDArray[np.bool_]) -> int:
    return int(np.count_nonzero(mask))


def _fraction(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _membership(labels: Values, predictions: Values) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return flags [M, C] of the classes that each example has, and of the predicted classes."""
    if labels.ndim == 2:
        return labels != 0, predictions != 0
    classes_C = np.union1d(labels, predictions)
    return labels[:, None] == classes_C, predictions[:, None] == classes_C


def _f1_of_columns(labels_MC: NDArray[np.bool_], predictions_MC: NDArray[np.bool_]) -> NDArray[np.float64]:
    right_C = np.count_nonzero(labels_MC & predictions_MC, axis=0)
    named_C = np.count_nonzero(labels_MC, axis=0) + np.count_nonzero(predictions_MC, axis=0)
    f1_C: NDArray[np.float64] = 2 * right_C / np.maximum(named_C, 1)
    return f1_C


def _undefined(values: Values) -> bool:
    return len(values) == 0 or not np.isfinite(values).all() or bool((values == values[0]).all())


def _centred(values: Values) -> NDArray[np.float64]:
    """Return distances from the mean, scaled by a power of two so that no square overflows or underflows."""
    exact = values.astype(np.float64)
    _, exponent = np.frexp(np.abs(exact).max())
    scaled = np.ldexp(exact, -exponent)
    centred: NDArray[np.float64] = scaled - scaled.mean()
    return centred


def _ranks(values: Values) -> NDArray[np.float64]:
    """Return ranks in ascending order, from 1; equal values share the mean of their ranks."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return ranks


def _within_one(correlation: float) -> float:
    return float(np.clip(correlation, -1.0, 1.0))  # rounding may leave it an ulp outside


@dataclass(frozen=True, slots=True)
class ClassScores:
    """Precision, recall and F1 of one class."""

    precision: float
    """Fraction of the predictions of this class that are right."""
    recall: float
    """Fraction of the examples of this class that were predicted as such."""
    f1: float
    support: int
    """Number of examples of this class."""


def scores_of_classes(labels: Values, predictions: Values, classes: int) -> list[ClassScores]:
    """Return precision, recall and F1 of each class of the training set, by its id."""
    if labels.ndim == 2:
        truth_MC, predicted_MC = labels[:, :classes] == 1, predictions == 1
        right_C, named_C = (truth_MC & predicted_MC).sum(0), predicted_MC.sum(0)
        there_C = truth_MC.sum(0)
    else:
        known, right = labels[labels >= 0], labels[labels == predictions]
        right_C, named_C, there_C = (
            np.bincount(each, minlength=classes) for each in (right, predictions, known)
        )
    return [
        ClassScores(_fraction(hits, named), _fraction(hits, there), _fraction(2 * hits, named + there), there)
        for hits, named, there in zip(right_C.tolist(), named_C.tolist(), there_C.tolist(), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Reliability:
    """Confidence (the most likely class's probability) and accuracy in bins of equal width."""

    edges_B1: NDArray[np.float64]
    """Edges of the bins; a confidence on an edge belongs to the bin below it."""
    counts_B: NDArray[np.int64]
    confidences_B: NDArray[np.float64]
    """Mean confidences; 0.0 in empty bins."""
    accuracies_B: NDArray[np.float64]
    expected_error: float
    """Mean distance of confidence and accuracy, weighted by the examples per bin (Guo et al. 2017)."""


def reliability(
    probabilities_MC: NDArray[np.floating], labels_M: NDArray[np.int64], *, bins: int = 10
) -> Reliability:
    """Return the reliability diagram of these predictions, with its expected calibration error."""
    sure_M = probabilities_MC.max(1, initial=0.0).astype(np.float64)
    right_M = np.argmax(probabilities_MC, 1) == labels_M
    edges_B1 = np.linspace(0.0, 1.0, bins + 1)
    bins_M = np.searchsorted(edges_B1[1:-1], sure_M)
    counts_B = np.bincount(bins_M, minlength=bins)
    filled_B = np.maximum(counts_B, 1)
    confidences_B = np.bincount(bins_M, weights=sure_M, minlength=bins) / filled_B
    accuracies_B = np.bincount(bins_M, weights=right_M, minlength=bins) / filled_B
    error = float(np.abs(confidences_B - accuracies_B) @ counts_B) / max(len(labels_M), 1)
    return Reliability(edges_B1, counts_B, confidences_B, accuracies_B, error)
