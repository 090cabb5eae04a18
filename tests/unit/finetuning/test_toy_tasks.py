"""Every kind of task from its files to a model folder that predicts the same again."""

import pytest

from bertsmith.finetuning.predict import Reading, predict_labelled
from tests.toy_tasks import TOYS
from tests.tuning import tune

# A random encoder leaves some of these plateaus late: fewer epochs would be enough for some seeds only.
EPOCHS = {"sst2": 10, "cola": 10, "rte": 10, "stsb": 24, "wnut17": 5, "squad2": 5}
FEW_EPOCHS = 3


@pytest.mark.parametrize("name", TOYS)
def test_a_toy_rule_is_learned_and_the_folder_says_the_same_again(name, model, tmp_path, full):
    for seed in range(3 if full else 1):
        place = tmp_path / str(seed)
        settings = f"run.epochs={EPOCHS.get(name, FEW_EPOCHS)}", f"run.seed={seed}"
        result = tune(name, model, place, *settings)
        metrics = next(iter(result.metrics.values()))
        assert next(iter(metrics.values())) > 0.95
        predicted = predict_labelled(
            [result.folder], place / "data" / name, reading=Reading(split="dev"), device="cpu"
        )
        assert predicted.metrics() == pytest.approx(metrics, abs=1e-4)
