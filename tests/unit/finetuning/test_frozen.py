"""Frozen encoders, in which nothing changes, and BiLSTMs over frozen encoders and over those that learn."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bertsmith.core.errors import UserError
from bertsmith.finetuning.predict import predict_labelled
from bertsmith.inference.finetuned_folder import FinetunedTask, write_finetuned
from bertsmith.inference.loaded_model import load
from bertsmith.interchange.onnx_export import export_onnx
from bertsmith.shrink.transformers_export import export_transformers
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.task_recipe import finetuning_recipe
from tests.tiny_runs import differing
from tests.tuning import SHORT, tune

LEARNS = {
    "frozen-linear": ("pos", "optim.peak_lr=3e-2", "run.epochs=8"),
    "frozen-features": ("sst2", "optim.peak_lr=5e-3", "run.epochs=8"),
}


@pytest.mark.parametrize("encoder", LEARNS)
def test_the_rule_is_learned_on_an_encoder_that_stays_as_it_was(encoder, model, tmp_path):
    name, *settings = LEARNS[encoder]
    result = tune(name, model, tmp_path, *settings, f"head.encoder={encoder}")
    (metrics,) = result.metrics.values()
    assert next(iter(metrics.values())) > 0.95
    before, after = (load(folder, device="cpu").model.network for folder in (model, result.folder / "model"))
    assert differing(dict(before.encoder.state_dict()), dict(after.encoder.state_dict())) == []
    predicted = predict_labelled([result.folder], tmp_path / "data" / name, device="cpu")
    assert predicted.metrics() == pytest.approx(metrics, rel=1e-4, abs=1e-4)


def test_a_pooler_that_was_trained_stays_under_a_linear_head(model, tmp_path):
    result = tune("sst2", model, tmp_path, *SHORT, "head.encoder=frozen-linear")
    before, after = (load(folder, device="cpu").model.network for folder in (model, result.folder / "model"))
    theirs, ours = (dict(network.heads["pooler"].state_dict()) for network in (before, after))
    assert differing(theirs, ours) == []


def test_what_a_mix_has_learned_stands_in_a_file_of_its_own(model, tmp_path):
    folder = tune("rte", model, tmp_path, *SHORT, "head.encoder=frozen-features").folder / "model"
    names = set(load_file(folder / "mix.safetensors"))
    assert {"mix.weights_L", "mix.gamma", "output.weight", "reader.compare.weight"} <= names
    assert not [name for name in names if name.startswith("network.")]
    (folder / "mix.safetensors").unlink()
    with pytest.raises(UserError, match=r"mix\.safetensors"):
        predict_labelled([folder], tmp_path / "data" / "rte", device="cpu")


@pytest.fixture
def mixed(model, tmp_path):
    """A finished model with a mix, and its weights."""
    folder = tune("sst2", model, tmp_path, *SHORT, "head.encoder=frozen-features").folder / "model"
    return folder, load_file(folder / "mix.safetensors")


def lacking(mix):
    return {name: tensor for name, tensor in mix.items() if name != "reader.bilstm.lstm.weight_hh_l0"}


def widened(mix):
    return mix | {"output.bias": torch.zeros(5)}


def stuffed(mix):
    return mix | {"output.scale": torch.ones(2)}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lacking, r"reader\.bilstm\.lstm\.weight_hh_l0 is missing, not \[256, 64\]"),
        (widened, r"output\.bias is \[5\], not \[2\]"),
        (stuffed, r"output\.scale is \[2\], not missing"),
    ],
)
def test_a_mix_that_is_not_whole_is_rejected(mixed, tmp_path, change, complaint):
    folder, mix = mixed
    save_file(change(mix), folder / "mix.safetensors")
    with pytest.raises(UserError, match=rf"mix\.safetensors: does not fit task\.json: {complaint}"):
        predict_labelled([folder], tmp_path / "data" / "sst2", device="cpu")


def test_a_mix_that_cannot_be_written_is_an_error_of_the_system(mixed):
    folder, mix = mixed
    tuned = FinetunedTask(load(folder, device="cpu").finetuned.config, mix)
    (folder / "mix.safetensors").unlink()
    (folder / "mix.safetensors").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        write_finetuned(folder, tuned)


def test_a_mix_is_an_encoder_without_a_head_to_other_tools(model, tmp_path):
    folder = tune("sst2", model, tmp_path, *SHORT, "head.encoder=frozen-features").folder / "model"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["BertModel"]
    assert not [name for name in load_file(folder / "model.safetensors") if "classifier" in name]
    assert "problem_type" not in config
    _, told = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    _, told = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True
    )
    assert told["missing_keys"] == {"classifier.weight", "classifier.bias"}
    assert "other tools see an encoder without a head" in (folder / "card.md").read_text()


def test_a_mix_is_asked_from_python_and_is_a_start_for_another_run(model, tmp_path):
    first = tune("sst2", model, tmp_path / "first", *SHORT, "head.encoder=frozen-features").folder
    predicted = predict_labelled([first], tmp_path / "first" / "data" / "sst2", device="cpu")
    found = load(first, device="cpu").classify([predicted.examples[0].texts])
    assert list(found[0].probabilities.values()) == pytest.approx(
        predicted.predictions.scores[0].tolist(), abs=1e-5
    )
    card = (tune("sst2", first, tmp_path / "second", *SHORT).folder / "card.md").read_text()
    assert "the head classify starts from fresh weights" in card


TUNED = ("head.reader=bilstm", "optim.head_lr_factor=5")


@pytest.mark.parametrize(("name", "epochs"), [("sst2", 4), ("rte", 0.5), ("pos", 0.5), ("squad", 0.5)])
def test_a_bilstm_learns_with_the_encoder_and_predicts_again_what_it_did(name, epochs, model, tmp_path):
    result = tune(name, model, tmp_path, *TUNED, f"run.epochs={epochs}")
    (metrics,) = result.metrics.values()
    assert next(iter(metrics.values())) > 0.9 or epochs < 1
    before, after = (load(folder, device="cpu").model.network for folder in (model, result.folder / "model"))
    assert not after.heads and differing(dict(before.encoder.state_dict()), dict(after.encoder.state_dict()))
    predicted = predict_labelled([result.folder], tmp_path / "data" / name, device="cpu")
    assert predicted.metrics() == pytest.approx(metrics, rel=1e-4, abs=1e-4)
    assert "encoder tuned under a BiLSTM" in (result.folder / "card.md").read_text()


def test_a_bilstm_learns_at_the_rate_of_fresh_weights_unless_told():
    task = task_named("sst2")
    given = finetuning_recipe(task, ["head.reader=bilstm", "optim.peak_lr=2e-5"]).optim
    assert given.head_lr_factor * given.peak_lr == pytest.approx(1e-3)
    told = finetuning_recipe(task, ["head.reader=bilstm", "optim.head_lr_factor=2"]).optim
    assert told.head_lr_factor == 2


def test_a_tuned_bilstm_does_not_leave_bertsmith(model, tmp_path):
    folder = tune("sst2", model, tmp_path, *SHORT, *TUNED).folder
    for export in (export_onnx, export_transformers):
        with pytest.raises(
            UserError, match="has a BiLSTM over the encoder's layers, which published formats cannot"
        ):
            export(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (["head.encoder=lora"], r"head.reader applies only to head.encoder = tuned, not lora"),
        (["head.cls=raw"], r"head.cls applies only to head.reader = linear, not bilstm"),
        (["sparse.gradual=0.5"], r"sparse.gradual applies only to head.reader = linear, not bilstm"),
    ],
)
def test_settings_that_do_not_go_with_a_bilstm_are_rejected(settings, complaint):
    with pytest.raises(UserError, match=complaint):
        finetuning_recipe(task_named("sst2"), ["head.reader=bilstm", *settings])


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("head.cls=raw", "head.cls: a BiLSTM on frozen layers reads raw states already; keep it at pooled"),
        ("head.fresh_layers=1", "layers with fresh weights cannot stay frozen"),
    ],
)
def test_settings_that_mean_nothing_to_a_mix_are_rejected(model, tmp_path, setting, complaint):
    with pytest.raises(UserError, match=complaint):
        tune("sst2", model, tmp_path, "head.encoder=frozen-features", setting)
