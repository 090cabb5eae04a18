"""Every kind of task from its files to a model folder that predicts the same again."""

import pytest

from bertsmith.finetuning.using import ask
from tests.toy_folder import write_toy_folder
from tests.toy_tasks import TOYS
from tests.tuning import tune

LONGER_OR_SHORTER = {"stsb": ("run.epochs=16",), "swag": ("run.epochs=4",), "race": ("run.epochs=3",)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "toy"
    write_toy_folder(folder)
    return folder


@pytest.mark.parametrize("name", TOYS)
def test_a_toy_rule_is_learned_and_the_folder_says_the_same_again(name, model, tmp_path):
    result = tune(name, model, tmp_path, *LONGER_OR_SHORTER.get(name, ()))
    measures = next(iter(result.measures.values()))
    assert next(iter(measures.values())) > 0.95
    said = ask([result.folder], tmp_path / "data" / name, split="dev", device="cpu")
    assert said.measures() == pytest.approx(measures, abs=1e-6)
