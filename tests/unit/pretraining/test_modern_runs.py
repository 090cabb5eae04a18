"""Runs of a ModernBERT from scratch, with every option over it, from raw text to answers."""

import pytest
import torch

import bertsmith
from bertsmith.core.files import read_json, write_json
from bertsmith.model.folder.model_folder import read_model
from bertsmith.pretraining.initial_model import model_section_of
from bertsmith.pretraining.pretrain import pretrain
from bertsmith.recipe.load import load_recipe
from tests.tiny_runs import TINY, Listener, metrics_of, without_pictures

RUN = (*TINY, "run.steps=6", "run.budget=steps", "batch.by=sequences", "model.local_attention=8")
OWN = (
    *("model.gated=false", "model.norm=rmsnorm", "model.qk_norm=true", "model.sandwich_norm=true"),
    "model.activation=relu2",
)


def run(store, out, *settings, listener=None):
    recipe = load_recipe("modernbert-base", [*RUN, "optim.peak_lr=3e-3", *settings])
    return pretrain(recipe, store=store.folder, out=out, callback=listener or Listener())


@pytest.mark.parametrize("settings", [(), OWN], ids=["published", "own"])
def test_a_run_learns_words_and_pairs_and_says_who_opens_the_result(settings, store, tmp_path):
    listener = Listener()
    result = run(store, tmp_path / "run", "examples.pairs=nsp", *settings, listener=listener)
    assert (result.state, result.steps) == ("finished", 6)
    before, *_, after = metrics_of(tmp_path / "run", "held-out")
    assert after["token_loss"] < before["token_loss"] - 0.1 and "pair_loss" in after
    alone = [note for note in listener.notes if note.startswith("only bertsmith opens the result")]
    card = (tmp_path / "run" / "model" / "card.md").read_text(encoding="utf-8")
    if settings:
        names = "model.gated, model.norm, model.qk_norm, model.sandwich_norm"
        assert alone == [f"only bertsmith opens the result: no published modernbert has {names} as set here"]
        assert "Opens in bertsmith." in card and alone[0] in card
    else:
        assert not alone and "Opens in bertsmith and in transformers." in card


@pytest.fixture(scope="module")
def own_model(store, tmp_path_factory):
    """The folder of a model with every option of our own, with word and pair heads."""
    out = tmp_path_factory.mktemp("own") / "run"
    with without_pictures():
        run(store, out, "examples.pairs=nsp", "run.steps=2", *OWN)
    return out / "model"


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_its_words_and_pairs_are_answered(precision, own_model):
    bert = bertsmith.load(own_model, device="cpu", precision=precision)
    plain = read_model(own_model).network
    assert len(bert.fill("the smith [MASK] the iron", top=3)[0]) == 3
    pair = bert.next_sentence("the smith heats the iron .", "the king buys bread .")
    assert 0 < pair.probability < 1
    assert bert.embed(["the smith"]).shape == (1, plain.config.width)


def test_a_run_continues_from_it_with_the_settings_of_its_folder(own_model, store, tmp_path):
    result = run(store, tmp_path / "run", f"start.model={own_model}", "examples.pairs=nsp", "run.steps=1")
    assert result.state == "finished"
    written = load_recipe(tmp_path / "run" / "recipe.toml").model
    assert (written.type, written.gated, written.norm) == ("modernbert", False, "rmsnorm")
    assert (written.qk_norm, written.sandwich_norm, written.activation) == (True, True, "relu2")
    assert written == model_section_of(read_model(own_model).network.config)


def test_pairs_are_learned_where_the_mean_of_all_rows_stands_for_a_text(own_model, store, tmp_path):
    network = read_model(own_model).network
    bertsmith.load(own_model, device="cpu").save(tmp_path / "mean")
    config = read_json(tmp_path / "mean" / "config.json", remedy="")
    write_json(tmp_path / "mean" / "config.json", config | {"classifier_pooling": "average"})
    assert read_model(tmp_path / "mean").network.config.sentence == "mean" != network.config.sentence
    result = run(store, tmp_path / "run", f"start.model={tmp_path / 'mean'}", "examples.pairs=nsp")
    assert result.state == "finished"
    weights = read_model(tmp_path / "run" / "model").network.heads["nsp"].output.weight
    assert not torch.equal(weights, network.heads["nsp"].output.weight)
