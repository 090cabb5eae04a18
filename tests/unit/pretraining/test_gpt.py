"""A GPT with GPT-2's tokens: trained from scratch, resumed, saved, tuned, asked and served."""

import json

import numpy as np
import pytest
import torch
import transformers

import bertsmith
from bertsmith.core.errors import UserError
from bertsmith.finetuning.predict import predict_labelled
from bertsmith.inference.head_introspection import inspect_heads
from bertsmith.inference.introspection import inspect_attention
from bertsmith.model.folder.model_folder import read_model
from bertsmith.packed import pack
from bertsmith.recipe.load import load_recipe
from bertsmith.text.tokenizer import Tokenizer
from tests.command_line import bertsmith as command
from tests.command_line import mistake
from tests.tiny_runs import differing, last_state, metrics_of, run_tiny, stop_at, tiny_store, without_pictures
from tests.tokenizer_makers import gpt_bpe
from tests.tuning import SHORT, tune
from tests.unit.serve.serving import application_of, error_of, get, post

RUN = (
    *("model.type=gpt2", "model.segments=0", "model.activation=gelu_new", "model.norm_eps=1e-5"),
    *("examples.objective=left-to-right", "examples.pairs=full-sentences"),
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    place = tmp_path_factory.mktemp("gpt")
    return tiny_store(place, tokenizer=Tokenizer.load(gpt_bpe(place / "tokenizer")))


@pytest.fixture(scope="module")
def run(store, tmp_path_factory):
    """A finished run; not to be changed."""
    out = tmp_path_factory.mktemp("gpt") / "run"
    with without_pictures():
        assert run_tiny(store, out, *RUN, "optim.peak_lr=1e-2").state == "finished"
    return out


@pytest.fixture(scope="module")
def tuned(run, tmp_path_factory):
    """Folders of a classifier and of a tagger."""
    place = tmp_path_factory.mktemp("tuned")
    for name in ("sst2", "wnut17"):
        tune(name, run / "model", place, *SHORT)
    return {name: place / "runs" / name for name in ("sst2", "wnut17")}


def test_it_learns_the_next_word_and_is_measured_as_others_are(run):
    before, *_, after = metrics_of(run, "held-out")
    assert after["token_loss"] < before["token_loss"] - 0.3
    assert {"fixed_token_loss", "fixed_bits_per_character", "fixed_perplexity"} <= after.keys()


def test_a_run_stopped_and_resumed_ends_with_the_same_bits(store, tmp_path):
    with without_pictures():
        run_tiny(store, tmp_path / "whole", *RUN)
        with stop_at(3):
            assert run_tiny(store, tmp_path / "run", *RUN).state == "stopped"
        run_tiny(store, tmp_path / "run", *RUN)
    assert not differing(last_state(tmp_path / "whole"), last_state(tmp_path / "run"))


@pytest.mark.parametrize("name", ["sst2", "rte", "wnut17", "squad"])
def test_a_bilstm_learns_on_top_of_it_and_predicts_and_serves(name, run, tmp_path):
    settings = ("head.reader=bilstm", "features.layers=last", "features.width=8")
    folder = tune(name, run / "model", tmp_path, *SHORT, *settings).folder
    assert predict_labelled([folder], tmp_path / "data" / name, device="cpu").metrics()
    if name == "sst2":
        reply = post(application_of({"mood": folder}), "/classify", {"texts": ["the smith heats"]}).json()
        label = bertsmith.load(folder, device="cpu").classify(["the smith heats"])[0].label
        assert reply["results"][0]["label"] == label


def test_transformers_opens_what_was_trained_with_equal_scores(run):
    network, theirs = (
        read_model(run / "model").network,
        transformers.GPT2LMHeadModel.from_pretrained(run / "model"),
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "model")
    ids = tokenizer("the smith heats the iron")["input_ids"]
    assert ids == Tokenizer.load(run / "model").encode("the smith heats the iron").ids
    assert theirs.config.eos_token_id == tokenizer.eos_token_id
    with torch.no_grad():
        ours = network.scores_of_words(network(pack([ids])))
        assert (ours - theirs.eval()(torch.tensor([ids])).logits[0]).abs().max() <= 1e-5


def test_it_goes_on_with_texts_and_gives_vectors(run):
    bert = bertsmith.load(run, device="cpu")
    extensions = list(bert.extend("the smith", count=3))
    assert extensions[-1].text.startswith("the smith") and extensions[1].tokens == 1
    one, longer = bert.embed(["the smith", "the smith heats"])
    assert one.shape == (32,) and not torch.allclose(one, longer)


def test_its_heads_can_be_looked_at(run):
    bert = bertsmith.load(run, device="cpu")
    shown = inspect_attention(bert, "the smith heats")
    assert len(shown.weights) == 2 and inspect_heads(bert, "the smith heats")
    assert not shown.weights.triu(1).any()


def test_its_card_says_that_it_generates_text_and_how(run):
    card = (run / "model" / "card.md").read_text(encoding="utf-8")
    assert 'pipeline_tag: "text-generation"' in card and "bert.extend(" in card


def test_its_surface_is_measured_without_special_tokens_and_gradients(run, tmp_path, capsys):
    (tmp_path / "texts.txt").write_text("the smith heats the iron .\nthe rider buys\tthe horseshoe .\n")
    words = ("--model", run, "--input", tmp_path / "texts.txt", "--out", tmp_path / "look", "--json")
    found = json.loads(command(capsys, "look", "surface", *words).out)["surface"]["measures"]
    assert found.keys() == {"previous", "next", "itself", "punctuation", "A to B", "B to A", "entropy"}
    assert not np.any(found["next"]) and np.all(np.array(found["previous"]) > 0)


def test_its_tokens_are_shown_unmasked_by_a_server(run):
    reply = post(application_of({"plain": run}), "/look/tokens", {"first": "the smith heats", "seed": 1})
    tokens = reply.json()["tokens"]
    assert [each["id"] for each in tokens] == Tokenizer.load(run / "model").encode("the smith heats").ids
    assert {each["masking"] for each in tokens} == {""}
    assert [each["shown"] for each in tokens] == [each["text"] for each in tokens]


def test_it_has_no_mask_to_fill_and_says_what_to_do(run, capsys):
    line = mistake(capsys, "fill", "the smith [MASK]", "--model", run)
    assert "lacks a mask token; let it continue a text instead: bertsmith fill TEXT --extend N" in line


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            ("examples.objective=masked",),
            "reads left-to-right, so it cannot learn examples.objective = masked",
        ),
        (("examples.objective=right-to-left",), "cannot learn examples.objective = right-to-left"),
        (("examples.pairs=nsp",), "does not have a head for examples.pairs = nsp"),
        (("model.segments=2",), "model.segments = 2 would be lost"),
    ],
)
def test_what_it_cannot_learn_is_one_line(settings, told):
    with pytest.raises(UserError, match=told):
        load_recipe("bert-tiny", [*RUN, *settings])


MASKED = "lacks a mask_token; set examples.objective to left-to-right, or use a vocabulary with a mask"
BESIDE = "distill.teacher: .* predicts words elsewhere; use models that were trained with masks"


@pytest.mark.parametrize(("objective", "told"), [("masked", MASKED), ("distilled", BESIDE)])
def test_objectives_with_masks_are_refused_with_a_remedy_that_works(objective, told, store, run, tmp_path):
    teacher = (f"distill.teacher={run / 'model'}",) if objective == "distilled" else ()
    asked = (f"examples.objective={objective}", "examples.pairs=full-sentences", *teacher)
    with without_pictures(), pytest.raises(UserError, match=told):
        run_tiny(store, tmp_path / "run", *asked)


def test_a_tuned_one_classifies_by_the_row_that_sees_all_of_a_text(tuned):
    bert = bertsmith.load(tuned["sst2"], device="cpu")
    assert bert.model.network.encoder.sentence == "last"
    first, other = bert.classify(["the sun is warm", "the sun is cold"])
    assert first.label in ("negative", "positive") and first.probability != other.probability
    theirs = transformers.GPT2ForSequenceClassification.from_pretrained(tuned["sst2"] / "model").eval()
    ids = bert.tokenizer.encode("the sun is warm").ids
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].softmax(-1).max()
    assert first.probability == pytest.approx(float(expected), abs=1e-5)


def test_its_classifier_without_biases_can_be_solved(run, tmp_path):
    tune("sst2", run / "model", tmp_path, *SHORT, "head.weights=solved", "head.encoder=frozen-linear")
    solved = read_model(tmp_path / "runs" / "sst2" / "model").network.heads["classify"]
    assert solved.state_dict().keys() == {"output.weight"} and solved.output.weight.abs().max() > 0.1


def test_numbers_of_ones_own_are_refused_where_no_bias_holds_their_mean(run, tmp_path, capsys):
    rows = [f"the smith finds {number} nails,{number}.5" for number in range(40)]
    (tmp_path / "table.csv").write_text("\n".join(["text,stars", *rows]) + "\n")
    words = ("--data", tmp_path / "table.csv", "--text", "text", "--label", "stars", "--kind", "regress")
    line = mistake(capsys, "finetune", "custom", *words, "--model", run, "--out", tmp_path / "out")
    assert "and this head lacks the bias for it; use a model of another family than GPT-2" in line


def test_a_tuned_one_tags_the_words_of_a_text(tuned):
    bert = bertsmith.load(tuned["wnut17"], device="cpu")
    text = "the boy walks in london"
    (words,) = bert.tag([text])
    assert [each.word for each in words] == text.split()
    assert [text[each.start : each.end] for each in words] == text.split()


def test_it_is_served(run, tuned):
    application = application_of({"plain": run, "mood": tuned["sst2"]})
    plain, mood = get(application, "/models").json()["models"]
    assert (plain["mask"], mood["labels"]) == (None, ["negative", "positive"])
    assert bertsmith.load(run, device="cpu").abilities == ("extend", "embed", "look")
    assert plain["abilities"] == ["embed", "look"]
    texts = ["the smith", "the sun"]
    vectors = post(application, "/v1/embeddings", {"model": "plain", "input": texts}).json()["data"]
    expected = bertsmith.load(run, device="cpu").embed(texts, pooling="mean")
    for each, vector in zip(vectors, expected, strict=True):
        torch.testing.assert_close(torch.tensor(each["embedding"]), vector, rtol=0, atol=1e-5)
    reply = post(application, "/classify", {"model": "mood", "texts": ["the sun is warm"]}).json()
    label = reply["results"][0]["label"]
    assert label == bertsmith.load(tuned["sst2"], device="cpu").classify(["the sun is warm"])[0].label
    refused = post(application, "/fill", {"model": "plain", "text": "the [MASK]"})
    assert refused.status_code == 422 and "the model plain" in error_of(refused)


def test_a_command_tells_how_many_tokens_it_read(run, capsys):
    told = json.loads(command(capsys, "fill", "the smith", "--extend", "3", "--model", run, "--json").out)
    assert [each["tokens_read"] for each in told["added"][:3]][1:] == [1, 1]
