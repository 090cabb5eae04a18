"""Examples have the published statistics, and a changed constant does not go unnoticed."""

import numpy as np
import pytest

from bertsmith.data import masking
from tests.published_checks import CHECKS, SIGMAS, Sample, make_store, published


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory, full: bool) -> Sample:
    """Few examples in the quick tier, over a hundred thousand in the full one."""
    folder = tmp_path_factory.mktemp("statistics")
    return Sample(make_store(folder), folder / "cache", examples=120_000 if full else 10_000)


@pytest.mark.parametrize("name", CHECKS)
def test_examples_are_as_published(name: str, sample: Sample) -> None:
    assert CHECKS[name](published(), sample) < SIGMAS


# Each published constant a tenth off, and the check that must notice.
NUDGES = {
    "rate 0.15": ("predictions in each sequence", {"masking": {"rate": 0.165}}),
    "as_mask 0.8": ("80/10/10", {"masking": {"as_mask": 0.72}}),
    "as_random 0.1": ("80/10/10", {"masking": {"as_random": 0.11}}),
    "negative_probability 0.5": ("share of random pairs", {"examples": {"negative_probability": 0.55}}),
    "short_probability 0.1": ("short targets", {"examples": {"short_probability": 0.11}}),
    "most predictions": (
        "predictions in each sequence",
        {"examples": {"stages": [{"fraction": 1.0, "length": 64, "predictions": 9}]}},
    ),
}


@pytest.mark.parametrize("constant", NUDGES)
def test_a_constant_a_tenth_off_is_noticed(constant: str, sample: Sample) -> None:
    check, sections = NUDGES[constant]
    assert CHECKS[check](published(**sections), sample) > SIGMAS


def test_other_ngram_weights_are_noticed(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    def flatter(longest: int) -> np.ndarray:
        weights = np.arange(1, longest + 1) ** -0.9
        return weights / weights.sum()

    monkeypatch.setattr(masking, "run_weights", flatter)
    assert CHECKS["n-grams"](published(), sample) > SIGMAS
