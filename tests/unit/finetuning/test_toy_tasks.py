"""Every kind of task from its files to a model folder that predicts the same again."""

import pytest

from bertsmith.finetuning.using import ask
from tests.toy_tasks import TOYS
from tests.tuning import tune

LONGER_OR_SHORTER = {
    **{name: ("run.epochs=3",) for name in ("pos", "squad", "swag", "race")},
    "stsb": ("run.epochs=16",),
}


@pytest.mark.parametrize("name", TOYS)
def test_a_toy_rule_is_learned_and_the_folder_says_the_same_again(name, model, tmp_path):
    result = tune(name, model, tmp_path, *LONGER_OR_SHORTER.get(name, ()))
    measures = next(iter(result.measures.values()))
    assert next(iter(measures.values())) > 0.95
    said = ask([result.folder], tmp_path / "data" / name, split="dev", device="cpu")
    assert said.measures() == pytest.approx(measures, abs=1e-6)
