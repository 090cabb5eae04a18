"""Both meanings of a frozen encoder: nothing in it changes, and what stands on it learns."""

import pytest
from safetensors.torch import load_file

from bertsmith.finetuning.using import ask
from bertsmith.ground.errors import UserError
from bertsmith.inference.bert import load
from tests.tiny_runs import differing
from tests.tuning import SHORT, tune

LEARNS = {
    "frozen-linear": ("pos", "optim.peak_lr=3e-2", "run.epochs=8"),
    "frozen-mix": ("sst2", "optim.peak_lr=5e-3", "run.epochs=8"),
}


@pytest.mark.parametrize("encoder", LEARNS)
def test_the_rule_is_learned_on_an_encoder_that_stays_as_it_was(encoder, model, tmp_path):
    name, *settings = LEARNS[encoder]
    result = tune(name, model, tmp_path, *settings, f"head.encoder={encoder}")
    (measures,) = result.measures.values()
    assert next(iter(measures.values())) > 0.95
    before, after = (load(folder, device="cpu").model.network for folder in (model, result.folder / "model"))
    assert differing(dict(before.encoder.state_dict()), dict(after.encoder.state_dict())) == []
    said = ask([result.folder], tmp_path / "data" / name, device="cpu")
    assert said.measures() == pytest.approx(measures)


def test_a_pooler_that_was_trained_stays_under_a_linear_head(model, tmp_path):
    result = tune("sst2", model, tmp_path, *SHORT, "head.encoder=frozen-linear")
    before, after = (load(folder, device="cpu").model.network for folder in (model, result.folder / "model"))
    theirs, ours = (dict(network.heads["pooler"].state_dict()) for network in (before, after))
    assert differing(theirs, ours) == []


def test_what_a_mix_has_learned_stands_in_a_file_of_its_own(model, tmp_path):
    folder = tune("rte", model, tmp_path, *SHORT, "head.encoder=frozen-mix").folder / "model"
    names = set(load_file(folder / "mix.safetensors"))
    assert {"mix.weights_L", "mix.gamma", "output.weight", "reader.compare.weight"} <= names
    assert not [name for name in names if name.startswith("network.")]
    (folder / "mix.safetensors").unlink()
    with pytest.raises(UserError, match=r"mix\.safetensors"):
        ask([folder], tmp_path / "data" / "rte", device="cpu")
