"""A ModernBERT with every option of our own learns tasks, predicts and is served as any other model."""

import pytest
import torch

from bertsmith.core.files import read_json
from bertsmith.finetuning.predict import predict_labelled
from bertsmith.inference.loaded_model import load
from bertsmith.model.architectures.modernbert import ModernBertConfig
from bertsmith.model.folder.model_folder import Model, write_model
from bertsmith.model.network import new_network
from tests.toy_folder import toy_vocabulary, write_toy_folder
from tests.tuning import tune
from tests.unit.serve.serving import application_of, post

RUNS = {
    "pos": ("run.epochs=3",),
    "sst2": ("head.encoder=lora", "lora.rank=4", "optim.peak_lr=2e-2"),
}


@pytest.fixture(scope="module")
def own_model(tmp_path_factory):
    """A folder of the toy vocabulary."""
    folder = tmp_path_factory.mktemp("own") / "model"
    write_toy_folder(folder)
    sizes = {"width": 64, "layers": 2, "heads": 4, "inner": 128, "embedding_width": 64, "positions": 128}
    config = ModernBertConfig(
        model_type="modernbert",
        vocabulary=len(toy_vocabulary()),
        segments=0,
        **sizes,
        global_layers=(0,),
        local_attention=8,
        activation="relu2",
        gated=False,
        norm="rmsnorm",
        qk_norm=True,
        sandwich_norm=True,
    )
    write_model(folder, Model(new_network(config, {"mlm": 0}, torch.Generator().manual_seed(0))))
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_a_task_is_learned_and_its_folder_predicts_as_the_run_did(name, own_model, tmp_path):
    result = tune(name, own_model, tmp_path, *RUNS[name])
    (metrics,) = result.metrics.values()
    assert next(iter(metrics.values())) > 0.9
    predicted = predict_labelled([result.folder], tmp_path / "data" / name, device="cpu")
    assert predicted.metrics() == pytest.approx(metrics, rel=1e-4, abs=1e-4)
    bert = load(result.folder, device="cpu")
    bert.save(tmp_path / "saved")
    assert read_json(tmp_path / "saved" / "config.json", remedy="")["model_type"] == "bertsmith"
    if name == "pos":
        reply = post(application_of({"own": tmp_path / "saved"}), "/tag", {"texts": ["the boy sits"]})
    else:
        reply = post(application_of({"own": tmp_path / "saved"}), "/classify", {"texts": ["warm tea"]})
    assert reply.status_code == 200, reply.text
