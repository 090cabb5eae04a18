"""Every kind of task from its files to a model folder that predicts the same again."""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from bertsmith.finetuning.predict import Reading, predict_labelled
from tests.toy_tasks import TOYS
from tests.tuning import tune

EPOCHS = {"sst2": 6, "cola": 6, "rte": 6, "wnut17": 5, "squad2": 4}
FEW_EPOCHS = 3
MANY_STEPS = ("run.epochs=12", "run.examples=8")
"""Eight levels of warmth take longer than two classes."""


@pytest.fixture(scope="module")
def pupil(model, tmp_path_factory):
    """The toy model with larger weights in its layers: it soon leaves the plateau that a fresh one is on."""
    folder = shutil.copytree(model, tmp_path_factory.mktemp("pupil") / "toy")
    weights = load_file(folder / "model.safetensors")
    larger = {name: 5 * weights[name] for name in weights if ".layer." in name and weights[name].ndim == 2}
    save_file(weights | larger, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", TOYS)
def test_a_toy_rule_is_learned_and_the_folder_says_the_same_again(name, pupil, tmp_path, full):
    for seed in range(3 if full else 1):
        place = tmp_path / str(seed)
        length = MANY_STEPS if name == "stsb" else (f"run.epochs={EPOCHS.get(name, FEW_EPOCHS)}",)
        result = tune(name, pupil, place, *length, f"run.seed={seed}")
        metrics = next(iter(result.metrics.values()))
        assert next(iter(metrics.values())) > 0.95
        predicted = predict_labelled(
            [result.folder], place / "data" / name, reading=Reading(split="dev"), device="cpu"
        )
        assert predicted.metrics() == pytest.approx(metrics, abs=1e-4)
