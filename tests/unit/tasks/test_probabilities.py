"""From scores to probabilities and predictions: scores of any size, and labels from one half on."""

import numpy as np
import pytest

from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.kinds.multilabel import MULTILABEL
from bertsmith.tasks.predictions import Predictions
from bertsmith.tasks.task_config import TaskConfig
from tests.unit.tasks.made_sets import made_set


def note(kind: str, *labels: str) -> TaskConfig:
    return TaskConfig(task="made", kind=kind, metrics=(), labels=labels)


def predicted(kind: str, encoded: EncodedSet, logits: object) -> np.ndarray:
    with np.errstate(all="raise", under="ignore"):
        config = note(kind, "a", "b", "c")
        return config.kind.predict(np.array(logits, np.float32), encoded, [], config.answers).scores


SIZES = pytest.mark.parametrize("size", [0.0, 1000.0, -1000.0])
E1, E2 = np.exp(-1.0), np.exp(-2.0)
SHARES = np.array([1, E1, E2]) / (1 + E1 + E2)


@SIZES
@pytest.mark.parametrize("kind", ["classify", "tag"])
def test_probabilities_do_not_depend_on_the_size_of_all_scores(kind, size):
    found = predicted(
        kind, made_set(kind, items=2), [[size, size - 1, size - 2], [0.0, 2 * abs(size) + 200, 0.0]]
    )
    assert found[0] == pytest.approx(SHARES, abs=1e-6)
    assert found[1] == pytest.approx([0, 1, 0], abs=1e-6)


@SIZES
def test_each_choice_has_probabilities_of_its_own(size):
    encoded = made_set("choice", items=3)
    options = np.diff(encoded.items_M1).tolist()
    assert len(set(options)) > 1
    # The scores of one item are far from those of its neighbours.
    logits = [size * (number + 1) - place for number, count in enumerate(options) for place in range(count)]
    expected = [np.exp(-np.arange(count)) / np.exp(-np.arange(count)).sum() for count in options]
    assert predicted("choice", encoded, logits) == pytest.approx(np.concatenate(expected), abs=1e-6)


def test_a_label_below_one_half_is_not_guessed():
    outcome = Predictions(np.array([[0.45, 0.55, 0.499], [0.501, 0.05, 0.95]], np.float32))
    predictions = MULTILABEL.predicted_targets(made_set("multilabel", items=2), outcome)
    assert predictions.tolist() == [[0, 1, 0], [1, 0, 1]]
