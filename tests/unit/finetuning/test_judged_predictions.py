"""The predictions that a run keeps give its metrics again, of all examples or of some."""

import numpy as np
import pytest

from tests.tuning import SHORT, tune


def kept(result, split="dev"):
    with np.load(result.folder / f"predictions-{split}.npz", allow_pickle=False) as arrays:
        return dict(arrays)


def test_classes_give_the_accuracy(model, tmp_path):
    result = tune("sst2", model, tmp_path, *SHORT)
    found = kept(result)
    assert found.keys() == {"predicted", "targets"}
    assert (found["predicted"] == found["targets"]).mean() == result.metrics["dev"]["accuracy"]


def test_numbers_give_the_correlation(model, tmp_path):
    result = tune("stsb", model, tmp_path, *SHORT)
    found = kept(result)
    correlation = np.corrcoef(found["predicted"], found["targets"])[0, 1]
    assert correlation == pytest.approx(result.metrics["dev"]["pearson"], abs=1e-6)


def test_tags_tell_the_sentence_of_each_word(model, tmp_path):
    result = tune("wnut17", model, tmp_path, *SHORT)
    found = kept(result)
    assert (found["predicted"] == found["targets"]).mean() == result.metrics["dev"]["accuracy"]
    assert found["words"].shape == (len(found["targets"]), 2) and (np.diff(found["words"][:, 0]) >= 0).all()


def test_questions_have_their_exact_match_and_f1(model, tmp_path):
    result = tune("squad2", model, tmp_path, "run.epochs=0.2")
    means = {name: values.mean() for name, values in kept(result).items()}
    assert means == pytest.approx({name: result.metrics["dev"][name] for name in ("exact", "f1")})
