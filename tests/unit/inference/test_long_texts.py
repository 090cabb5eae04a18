"""Texts longer than a batch: their windows come in several batches, and mean what they mean in one."""

import numpy as np
import pytest

from bertsmith.inference.engine import BATCH_TOKENS
from bertsmith.recipe.finetuning_schema import TextSection
from bertsmith.tasks.task_config import TaskConfig
from tests.untrained_heads import numbered_labels, untrained

WINDOWS = TextSection(longest=32, step=16, long_texts="windows")
LONG = "the cat sits under the warm sun and the dog runs in the cold snow " * 20
TEXTS = ["a cat", LONG, "the warm sun", f"{LONG} {LONG}"]
KINDS = {
    "classify": TaskConfig(task="sst2", kind="classify", metrics=(), labels=("a", "b", "c"), text=WINDOWS),
    "regress": TaskConfig(task="stsb", kind="regress", metrics=(), text=WINDOWS),
}


@pytest.fixture(scope="module", params=KINDS)
def windowed(request, tmp_path_factory):
    config, folder = KINDS[request.param], tmp_path_factory.mktemp("windowed") / "model"
    named = numbered_labels(*config.labels) if config.labels else {}
    return untrained(folder, {"classify": config.outputs}, note=config, **named)


def numbers_of(bert, texts):
    if "score" in bert.abilities:
        return np.array(bert.score(texts))
    return np.array([list(each.probabilities.values()) for each in bert.classify(texts)])


def test_windows_in_several_batches_give_what_they_give_in_one(windowed, monkeypatch):
    together = numbers_of(windowed, TEXTS)
    monkeypatch.setitem(BATCH_TOKENS, "cpu", 100)  # three windows
    apart = numbers_of(windowed, TEXTS)
    assert np.allclose(together, apart, atol=1e-5) and np.ptp(together, axis=0).max() > 1e-3
    alone = [numbers_of(windowed, [text])[0] for text in TEXTS]
    assert np.allclose(alone, apart, atol=1e-5)


def test_a_long_text_takes_a_step_for_each_batch(windowed, monkeypatch):
    monkeypatch.setitem(BATCH_TOKENS, "cpu", 100)
    scores = "score" in windowed.abilities
    predictor = windowed.predictor("score" if scores else "classify")
    predict = predictor.score_in_steps if scores else predictor.classify_in_steps
    remaining = list(predict([LONG]))
    assert len(remaining) > 4 and remaining == sorted(remaining, reverse=True) and remaining[-1] == 0
