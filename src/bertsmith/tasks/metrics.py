"""Measures as fractions in 0..1, or -1..1 for correlations; what is undefined is 0.0, never NaN.

Errors of numbers are in the numbers' own unit (see `number_errors`).

Undefined are: any measure of no examples, F1 of a class that is neither there nor guessed, and a correlation
where either side is constant (who always says the same has learned nothing) or not finite (who diverged).
Shapes: M examples, C classes; classes come as ids [M], several labels of one example as 0 or 1 [M, C].
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.ground.errors import UserError
from bertsmith.tasks.labels import NO_LABEL
from bertsmith.tasks.number_errors import mean_absolute_error, root_mean_squared_error

Values = NDArray[Any]
Metric = Callable[[Values, Values], float]

POSITIVE = 1
"""The class that F1 is about: the paraphrase of MRPC, the duplicate of QQP."""


def accuracy(golds: Values, guesses: Values) -> float:
    """The share of right guesses; of several labels, all must be right."""
    right = golds == guesses
    return _share(_count(right.all(axis=1) if right.ndim == 2 else right), len(right))


def f1(golds: Values, guesses: Values) -> float:
    """The harmonic mean of precision and recall of class 1."""
    return float(_f1_of_columns((golds == POSITIVE)[:, None], (guesses == POSITIVE)[:, None])[0])


def macro_f1(golds: Values, guesses: Values) -> float:
    """The plain mean of each class's F1; of ids, over those that are there or guessed."""
    f1_C = _f1_of_columns(*_membership(golds, guesses))
    return float(f1_C.mean()) if len(f1_C) else 0.0


def micro_f1(golds: Values, guesses: Values) -> float:
    """F1 over all decisions of all classes together."""
    golds_MC, guesses_MC = _membership(golds, guesses)
    return _share(2 * _count(golds_MC & guesses_MC), _count(golds_MC) + _count(guesses_MC))


def matthews(golds: Values, guesses: Values) -> float:
    """Matthews correlation; of more than two classes (as in GLUE's diagnostic set) after Gorodkin (2004)."""
    golds_MC, guesses_MC = _membership(golds, guesses)
    examples = len(golds_MC)
    golds_C, guesses_C = golds_MC.sum(0, dtype=np.int64), guesses_MC.sum(0, dtype=np.int64)
    together = float(_count(golds_MC & guesses_MC) * examples - golds_C @ guesses_C)
    gold_spread = float(examples**2 - golds_C @ golds_C)
    guess_spread = float(examples**2 - guesses_C @ guesses_C)
    if gold_spread == 0 or guess_spread == 0:
        return 0.0
    return _within_one(together / np.sqrt(gold_spread * guess_spread))


def pearson(golds: Values, guesses: Values) -> float:
    """How well a straight line maps golds to guesses."""
    if _undefined(golds) or _undefined(guesses):
        return 0.0
    golds_M, guesses_M = _centred(golds), _centred(guesses)
    return _within_one(float(golds_M @ guesses_M / (np.linalg.norm(golds_M) * np.linalg.norm(guesses_M))))


def spearman(golds: Values, guesses: Values) -> float:
    """How well golds and guesses agree in their order: Pearson of the ranks."""
    if _undefined(golds) or _undefined(guesses):
        return 0.0
    return pearson(_ranks(golds), _ranks(guesses))


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "accuracy": accuracy,
        "f1": f1,
        "macro_f1": macro_f1,
        "micro_f1": micro_f1,
        "matthews": matthews,
        "pearson": pearson,
        "spearman": spearman,
        "mean_absolute_error": mean_absolute_error,
        "root_mean_squared_error": root_mean_squared_error,
    }
)


def scores_of(names: Iterable[str], golds: Values, guesses: Values) -> dict[str, float]:
    """The named measures, in the order of the names."""
    if golds.shape != guesses.shape:
        raise ValueError(f"golds {golds.shape} and guesses {guesses.shape} differ in shape")
    if _lacks_labels(golds):
        raise UserError(
            "some examples have no label to compare with", remedy="evaluate a labelled split, like dev"
        )
    return {name: _metric_named(name)(golds, guesses) for name in names}


def _metric_named(name: str) -> Metric:
    if name not in METRICS:
        raise UserError(f"there is no measure {name!r}", remedy=f"take one of {', '.join(METRICS)}")
    return METRICS[name]


def _lacks_labels(golds: Values) -> bool:
    # Numbers below -1 are labels that training does not have: they are judged, and always missed.
    unlabelled = np.isnan(golds) if golds.dtype.kind == "f" else golds == NO_LABEL
    return bool(unlabelled.any())


def _count(mask: NDArray[np.bool_]) -> int:
    return int(np.count_nonzero(mask))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _membership(golds: Values, guesses: Values) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether each example is, and is said to be, of each class [M, C]."""
    if golds.ndim == 2:
        return golds != 0, guesses != 0
    classes_C = np.union1d(golds, guesses)
    return golds[:, None] == classes_C, guesses[:, None] == classes_C


def _f1_of_columns(golds_MC: NDArray[np.bool_], guesses_MC: NDArray[np.bool_]) -> NDArray[np.float64]:
    right_C = np.count_nonzero(golds_MC & guesses_MC, axis=0)
    said_C = np.count_nonzero(golds_MC, axis=0) + np.count_nonzero(guesses_MC, axis=0)
    f1_C: NDArray[np.float64] = 2 * right_C / np.maximum(said_C, 1)
    return f1_C


def _undefined(values: Values) -> bool:
    return len(values) == 0 or not np.isfinite(values).all() or bool((values == values[0]).all())


def _centred(values: Values) -> NDArray[np.float64]:
    """Distances from the mean, scaled by a power of two so that no square overflows or vanishes."""
    exact = values.astype(np.float64)
    _, exponent = np.frexp(np.abs(exact).max())
    scaled = np.ldexp(exact, -exponent)
    centred: NDArray[np.float64] = scaled - scaled.mean()
    return centred


def _ranks(values: Values) -> NDArray[np.float64]:
    """Places in rising order, from 1; equal values share the mean of their places."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return ranks


def _within_one(correlation: float) -> float:
    return float(np.clip(correlation, -1.0, 1.0))  # rounding may leave it an ulp outside
