"""Frozen features on disk: the same run as with the encoder at every step, and folders of before."""

from collections import namedtuple

import pytest
from safetensors.torch import load_file

from bertsmith.core.errors import UserError
from bertsmith.finetuning import feature_cache, finetuning_setup
from bertsmith.model.transformer.transformer import Transformer
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.task_recipe import finetuning_recipe
from tests.tuning import SHORT, toy_assignment, tune

FROZEN = (*SHORT, "head.encoder=frozen-features")
LAST4 = (*FROZEN, "features.layers=last4", "features.combine=concat", "features.width=32")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "bertsmith" / "features"


@pytest.fixture
def runs_of_the_encoder(monkeypatch):
    """How often the layers of an encoder are asked for."""
    seen, plain = [], Transformer.hidden_states
    monkeypatch.setattr(Transformer, "hidden_states", lambda *given: seen.append(1) or plain(*given))
    return seen


def learned(result):
    return load_file(result.folder / "model" / "mix.safetensors")


def close(one, other):
    assert one.keys() == other.keys()
    return all((one[name] - other[name]).abs().max() < 1e-5 for name in one)


@pytest.mark.parametrize("task", ["pos", "rte"])
def test_a_run_on_cached_features_is_one_with_the_encoder_at_every_step(
    task, model, tmp_path, cache, monkeypatch
):
    settings = FROZEN if task == "rte" else LAST4
    cached = tune(task, model, tmp_path / "cached", *settings)
    files = sorted(file.name for file in cache.rglob("*.npy"))
    assert files and all(name.startswith("layer-") for name in files)
    monkeypatch.setattr(finetuning_setup, "cached_states", lambda *_: ())
    plain = tune(task, model, tmp_path / "plain", *settings)
    assert close(learned(cached), learned(plain))
    for split, metrics in plain.metrics.items():
        assert cached.metrics[split] == pytest.approx(metrics, abs=1e-6)


def test_the_encoder_runs_once_for_all_seeds_and_choices_of_layers(
    model, tmp_path, cache, runs_of_the_encoder
):
    tune("pos", model, tmp_path / "all", *FROZEN, "features.layers=all-and-embeddings", "features.width=8")
    assert len(runs_of_the_encoder) > 0
    runs_of_the_encoder.clear()
    tune("pos", model, tmp_path / "last", *LAST4, "run.seed=1")
    assert runs_of_the_encoder == []


def test_damaged_features_are_made_anew(model, tmp_path, cache, caplog):
    first = tune("pos", model, tmp_path / "first", *LAST4)
    for name, damage in (("cut", lambda content: content[:90]), ("reversed", lambda content: content[::-1])):
        for file in cache.rglob("*.npy"):
            header, values = file.read_bytes()[:128], file.read_bytes()[128:]
            file.write_bytes(header + damage(values))
        caplog.clear()
        again = tune("pos", model, tmp_path / name, *LAST4)
        assert "it is rebuilt" in caplog.text
        assert close(learned(first), learned(again))


def test_without_room_on_the_disk_the_encoder_runs_at_every_step(
    model, tmp_path, cache, monkeypatch, caplog, runs_of_the_encoder
):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(feature_cache.shutil, "disk_usage", lambda _: usage(10, 9, 1))
    result = tune("pos", model, tmp_path, *LAST4)
    assert result.finished and "the encoder runs at every step" in caplog.text
    assert len(runs_of_the_encoder) >= result.steps and not list(cache.rglob("*.npy"))


def test_learned_weights_are_shown(model, tmp_path, cache):
    result = tune("pos", model, tmp_path, *FROZEN, "features.layers=all")
    assert list(result.layer_weights) == ["layer 1", "layer 2", "scale"]
    assert result.layer_weights["layer 1"] + result.layer_weights["layer 2"] == pytest.approx(1.0)
    card = (result.folder / "card.md").read_text()
    assert f"Learned weights of the layers: layer 1 {result.layer_weights['layer 1']:.3f}, layer 2" in card


def test_ner_has_the_published_features_and_is_still_tuned():
    recipe = finetuning_recipe(task_named("ner"))
    features = recipe.features
    assert (features.layers, features.combine, features.width) == ("last4", "concat", 768)
    assert recipe.head.encoder == "tuned"


def test_features_that_nothing_reads_are_rejected(model, tmp_path):
    with pytest.raises(
        UserError, match=r"tuned does not read features, so features\.layers.*frozen-features"
    ):
        toy_assignment("sst2", model, tmp_path, "features.layers=last")
