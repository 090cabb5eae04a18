"""LoRA: adapters and head learn, the encoder stays, and a run resumes as any other."""

import json
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file

from bertsmith.core.errors import UserError
from bertsmith.finetuning.predict import predict_labelled
from bertsmith.inference.loaded_model import load
from bertsmith.model.lora import adapters_of
from bertsmith.recipe.finetuning_schema import LoraSection, Target
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.task_recipe import finetuning_recipe
from tests.tiny import tiny_network
from tests.tiny_runs import differing, metrics_of
from tests.tuning import SHORT, Notebook, set_up_run, stop_at, toy_assignment, tune, weights_of

LORA = ("head.encoder=lora", "lora.rank=4", "lora.dropout=0.1")


def test_the_targets_of_a_recipe_are_those_of_the_model():
    targets = LoraSection.model_fields["targets"]
    held = {target for each in tiny_network().encoder.linears() for target in each.targets}
    assert set(targets.default) <= held == set(get_args(Target))


def test_the_rule_is_learned_and_the_folder_predicts_as_the_run_did(model, tmp_path):
    settings = ("optim.peak_lr=2e-2", "run.epochs=3", 'lora.targets=["query","value","feed-forward"]')
    notebook = Notebook()
    result = tune("pos", model, tmp_path, *LORA, *settings, notebook=notebook)
    (metrics,) = result.metrics.values()
    assert next(iter(metrics.values())) > 0.95
    assert any("7,168 weights, while the encoder's" in note for note in notebook.notes)
    predicted = predict_labelled([result.folder], tmp_path / "data" / "pos", device="cpu")
    assert predicted.metrics() == pytest.approx(metrics, rel=1e-4, abs=1e-4)


def test_only_adapters_and_the_head_are_trained_and_have_moments(model, tmp_path):
    run = set_up_run(toy_assignment("sst2", model, tmp_path, *LORA))
    names = {id(each): name for name, each in run.model.objective.named_parameters()}
    trained = {names[id(each)] for each in run.trainer.parameters()}
    kinds = {name.rpartition("adapters.")[2] for name in trained if "encoder" in name}
    assert kinds == {f"{number}.lora_{part}" for number in (0, 2) for part in "AB"}
    assert {name for name in trained if "encoder" not in name} == {
        "scorer.network.heads.classify.output.weight",
        "scorer.network.heads.classify.output.bias",
    }


def test_an_interrupted_run_ends_as_one_that_was_not(model, tmp_path):
    settings = (*LORA, "run.epochs=0.9", "run.evaluations=3", "run.keep=best")
    straight = tune("sst2", model, tmp_path / "straight", *settings).folder
    with stop_at(3):
        assert not tune("sst2", model, tmp_path / "parts", *settings).finished
    resumed = tune("sst2", model, tmp_path / "parts", *settings).folder
    assert metrics_of(straight, "train", "held-out") == metrics_of(resumed, "train", "held-out")
    assert differing(weights_of(straight), weights_of(resumed)) == []


def test_a_fresh_pooler_is_kept_with_the_head(model, tmp_path):
    bare = tmp_path / "bare"
    bert = load(model, device="cpu")
    for head in ("pooler", "nsp"):
        del bert.model.network.heads[head]
    bert.save(bare)
    folder = tune("sst2", bare, tmp_path, *LORA, *SHORT).folder / "model"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["classifier", "pooler"]
    before = load_file(folder / "adapter_model.safetensors")["base_model.model.bert.pooler.dense.weight"]
    assert torch.equal(load(folder, device="cpu").model.network.heads["pooler"].dense.weight, before)


def test_an_adapter_is_a_start_for_full_fine_tuning_but_not_for_another_adapter(model, tmp_path):
    first = tune("sst2", model, tmp_path / "first", *LORA, *SHORT).folder
    second = tune("sst2", first, tmp_path / "second", *SHORT).folder
    assert not any(adapters_of(load(second, device="cpu").model.network))
    assert "the head classify of the folder is kept" in (second / "card.md").read_text()
    with pytest.raises(UserError, match="is an adapter, but a whole model is required; merge it first"):
        tune("sst2", first, tmp_path / "third", *LORA, *SHORT)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (("lora.rank=4",), r"lora\.rank .* head\.encoder = lora, not tuned"),
        (("head.encoder=lora", "lora.targets=[]"), r"lora\.targets"),
        (("head.encoder=lora", 'lora.targets=["dense"]'), r"lora\.targets"),
    ],
)
def test_settings_that_mean_nothing_are_rejected(settings, complaint):
    with pytest.raises(UserError, match=complaint):
        finetuning_recipe(task_named("sst2"), settings)


def test_layers_with_fresh_weights_cannot_stay_as_they_are(model, tmp_path):
    with pytest.raises(UserError, match="layers with fresh weights cannot stay frozen"):
        tune("sst2", model, tmp_path, "head.encoder=lora", "head.fresh_layers=1")
