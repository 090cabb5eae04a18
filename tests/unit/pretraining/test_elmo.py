"""ELMo from its first step to a server: it learns, resumes, is tuned, fills, and says what it cannot do."""

import json
from pathlib import Path
from shlex import split

import pytest
import torch
import transformers

import bertsmith
from bertsmith.core.errors import UserError
from bertsmith.inference.fill_mask import encode_masked
from bertsmith.model.folder.model_folder import read_model
from bertsmith.pretraining.pretrained_model import card_header, usage_of
from bertsmith.serve.model_registry import info_of
from bertsmith.text.tokenizer import Tokenizer
from tests.command_line import mistake
from tests.tiny_runs import (
    differing,
    last_state,
    metrics_of,
    run_tiny,
    stop_at,
    tiny_recipe,
    tiny_store,
    without_pictures,
)
from tests.tokenizer_makers import gpt_bpe
from tests.toy_tasks import TOYS
from tests.tuning import SHORT, tune
from tests.unit.serve.serving import application_of, post

RUN = (
    *("model.type=elmo", "model.segments=0", "model.cell=48", "model.heads=12", "model.inner=3072"),
    *("examples.objective=two-directions", "examples.pairs=full-sentences"),
)
TEXT = "the smith [MASK] the iron"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tiny_store(tmp_path_factory.mktemp("elmo"))


@pytest.fixture(scope="module")
def run(store, tmp_path_factory) -> Path:
    """A finished run; not to be changed."""
    out = tmp_path_factory.mktemp("elmo") / "run"
    with without_pictures():
        assert run_tiny(store, out, *RUN, "optim.peak_lr=3e-2").state == "finished"
    return out


@pytest.fixture(scope="module")
def tuned(run, tmp_path_factory) -> Path:
    """A classifier; not to be changed."""
    place = tmp_path_factory.mktemp("tuned")
    return tune("sst2", run / "model", place, *SHORT).folder


# ---- learning


def test_it_learns_and_a_card_says_what_it_is(run):
    before, *_, after = metrics_of(run, "held-out")
    assert after["token_loss"] < before["token_loss"] - 1
    assert after["fixed_perplexity"] < before["fixed_perplexity"] / 3
    card = (run / "model" / "card.md").read_text(encoding="utf-8")
    assert "An elmo encoder (2 layers, width 32, two directions of 48 cells, " in card
    assert "Opens in bertsmith." in card and "no published elmo has word pieces" in card


def test_a_card_shows_what_its_tokenizer_allows(run, tmp_path):
    network, own = read_model(run / "model").network, Tokenizer.load(run / "model")
    maskless = Tokenizer.load(gpt_bpe(tmp_path))
    assert "bert.fill(" in usage_of(network, own) and "bert.extend(" in usage_of(network, maskless)
    assert card_header(network, own)["pipeline_tag"] == "fill-mask"
    assert card_header(network, maskless)["pipeline_tag"] == "feature-extraction"


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_a_run_stopped_and_resumed_ends_with_the_same_bits(algorithm, store, tmp_path):
    settings = (*RUN, f"optim.algorithm={algorithm}", "optim.layer_decay=0.5")
    with without_pictures():
        run_tiny(store, tmp_path / "whole", *settings)
        with stop_at(3):
            assert run_tiny(store, tmp_path / "run", *settings).state == "stopped"
        run_tiny(store, tmp_path / "run", *settings)
    assert not differing(last_state(tmp_path / "whole"), last_state(tmp_path / "run"))


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ((*RUN, "examples.objective=masked"), "set examples.objective to two-directions"),
        (("examples.objective=two-directions",), "set examples.objective to masked"),
        ((*RUN, "model.width=33"), "make the width even"),
        ((*RUN, "model.cell=15"), "make the cells wider"),
        ((*RUN, "model.embedding_width=8"), "set model.embedding_width to width"),
        (("model.cell=48",), "set model.type to elmo"),
    ],
)
def test_a_recipe_that_fits_no_two_directions_is_refused(settings, remedy):
    with pytest.raises(UserError, match=remedy):
        tiny_recipe(*settings)


# ---- folders


def test_a_folder_comes_back_as_it_was_and_transformers_refuses_it(run, tmp_path):
    model = read_model(run / "model")
    bertsmith.load(run / "model", device="cpu").save(tmp_path / "again")
    again = read_model(tmp_path / "again")
    assert again.network.config == model.network.config and again.notes == ()
    assert not differing(model.network.state_dict(), again.network.state_dict())
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == "elmo"
    with pytest.raises(ValueError, match="elmo"):
        transformers.AutoModel.from_pretrained(tmp_path / "again")


# ---- what a loaded model can do


def test_masks_are_filled_by_both_directions(run):
    bert = bertsmith.load(run / "model", device="cpu", precision="fp32")
    found = {each.token: each.probability for each in bert.fill(TEXT, top=80)[0]}
    (masked,) = encode_masked(bert.engine, [TEXT], truncate=False)
    (index,) = masked.indices
    halves = bert.hidden_states([TEXT.replace("[MASK]", "horseshoe")])[0][-1].chunk(2, -1)
    with torch.no_grad():
        left, right = (
            bert.model.network.scores_of_words(each).log_softmax(-1)
            for each in (halves[0][index - 1], halves[1][index + 1])
        )
    expected = (left + right).softmax(-1)
    assert found["the"] == pytest.approx(expected[bert.tokenizer.id("the")].item(), rel=1e-4)
    assert sum(found.values()) == pytest.approx(1, abs=1e-4)


def test_several_masks_and_vectors_of_a_first_token_are_refused(run):
    bert = bertsmith.load(run / "model", device="cpu")
    with pytest.raises(UserError, match=r"has 2 \[MASK\]; fill one|fill one \[MASK\] at a time"):
        bert.fill("the [MASK] heats the [MASK]")
    with pytest.raises(UserError, match="sees the text in half of its state only"):
        bert.embed(["the smith"], pooling="cls")


def test_a_server_classifies_and_gives_vectors(run, tuned):
    application = application_of({"mood": tuned, "elmo": run / "model"})
    reply = post(application, "/classify", {"texts": ["the smith heats"], "model": "mood"}).json()
    assert reply["results"][0]["label"] in ("negative", "positive")
    reply = post(application, "/v1/embeddings", {"input": ["the smith heats"], "model": "elmo"}).json()
    assert len(reply["data"][0]["embedding"]) == 32
    assert info_of(bertsmith.load(tuned, device="cpu"), tuned).heads is None


def test_a_tagger_learns(run, tmp_path):
    result = tune("pos", run / "model", tmp_path, "run.epochs=2", "optim.peak_lr=2e-2")
    ((_, score), *_) = next(iter(result.metrics.values())).items()
    assert score > 0.5


@pytest.mark.parametrize("head", ["head.encoder=frozen-features", "head.reader=bilstm"])
def test_a_bilstm_over_a_learned_mix_of_its_layers_is_elmos_own_use(head, run, tmp_path):
    settings = (head, "features.combine=weighted-sum")
    result = tune("sst2", run / "model", tmp_path, *SHORT, *settings, "features.layers=all-and-embeddings")
    assert bertsmith.load(result.folder, device="cpu").classify(["the smith heats"])[0].label
    assert list(result.layer_weights) == ["embeddings", "layer 1", "layer 2", "scale"]


# ---- what it cannot do


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("look attention 'the smith' --model {model} --out {out}.html", "no attention heads"),
        ("export --model {model} --onnx {out}", "no form in ONNX"),
        ("export --model {model} --transformers {out}", "no published elmo has word pieces"),
        ("quantise --model {model} --weights-only --out {out}", "no linear layers with weights to round"),
        ("fill '{text}' --model {model} --precision int8", "int8 supports layers as in BERT"),
        (
            "distill --teacher {model} --layers 1 --store {store} --out {out}",
            "no layers that can be left out",
        ),
        ("share --model {model} --out {out}", "its type is elmo, but only a BERT"),
        ("prune --model {tuned} --data {data} --heads 0.5 --out {out}", "no heads or neurons"),
        ("prune --model {tuned} --data {data} --drop-layers 1 --out {out}", "no layers that can be left out"),
        ("finetune sst2 --data {data} --model {model} {lora} --out {out}", "no linear layers that can have"),
    ],
)
def test_what_it_lacks_is_one_line(line, what, run, tuned, store, tmp_path, capsys):
    TOYS["sst2"](tmp_path / "data")
    places = {"model": run / "model", "tuned": tuned, "store": store.folder, "data": tmp_path / "data"}
    lora = "--set text.longest=64 --set head.encoder=lora"
    words = line.format(**places, lora=lora, out=tmp_path / "out", text=TEXT)
    assert what in mistake(capsys, *split(words))
    assert not (tmp_path / "out" / "model").exists()
