"""How far off numbers are, in their own unit: these measures are no fractions, and less is better."""

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[Any]

IN_OWN_UNIT = frozenset(
    {"mean_absolute_error", "root_mean_squared_error", "best_f1_threshold", "best_exact_threshold"}
)
"""What is told beside measures and not in percent."""
PERCENT = 100


def mean_absolute_error(golds: Values, guesses: Values) -> float:
    """How far off a guess is on average."""
    return _finite(np.abs(_errors(golds, guesses)).mean()) if len(golds) else 0.0


def root_mean_squared_error(golds: Values, guesses: Values) -> float:
    """The same, large errors counting for more."""
    return _finite(np.sqrt(np.square(_errors(golds, guesses)).mean())) if len(golds) else 0.0


def measure_text(name: str, value: float) -> str:
    """A measure as people read it: in percent, or in the unit of the numbers."""
    return f"{value:.6g}" if name in IN_OWN_UNIT else f"{PERCENT * value:.2f}"


def _errors(golds: Values, guesses: Values) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):
        errors: NDArray[np.float64] = guesses.astype(np.float64) - golds.astype(np.float64)
    return errors


def _finite(error: np.floating[Any]) -> float:
    """The error; of a model that has diverged, the largest number, since JSON knows no infinity."""
    return float(error) if np.isfinite(error) else sys.float_info.max
