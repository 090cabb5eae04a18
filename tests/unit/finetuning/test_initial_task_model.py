"""What a run begins with: the folder's own head where it fits, a fresh one where it does not."""

import json

import pytest
import torch

from bertsmith.core.errors import UserError
from bertsmith.finetuning.initial_task_model import load_initial_task_model
from bertsmith.finetuning.predict import predict_labelled
from bertsmith.inference.loaded_model import load, load_task_model
from bertsmith.recipe.finetuning_schema import HeadSection, TextSection
from bertsmith.tasks.task_config import TaskConfig
from tests.tiny_runs import differing
from tests.tuning import SHORT, Notebook, tune, weights_of

OWN = "the head classify of the folder is kept"
FRESH = "the head classify starts from fresh weights"


def config(**changes):
    settings = {
        "task": "sst2",
        "kind": "classify",
        "metrics": ("accuracy",),
        "labels": ("negative", "positive"),
    }
    return TaskConfig(**{**settings, "text": TextSection(longest=64), **changes})


def head(**settings):
    return HeadSection(**settings)


@pytest.fixture(scope="module")
def tuned(model, tmp_path_factory):
    return tune("sst2", model, tmp_path_factory.mktemp("tuned"), *SHORT).folder / "model"


def test_a_folder_without_the_head_gets_a_fresh_one_and_says_so(model):
    found = load_initial_task_model(model, config(), seed=0)
    assert set(found.network.heads) == {"pooler", "classify"}
    assert found.fresh == ("classify",)
    assert found.notes == (FRESH,)


def test_the_head_of_the_folder_resumes_where_outputs_and_labels_agree(tuned):
    found = load_initial_task_model(tuned, config(), seed=1)
    assert (found.fresh, found.notes) == ((), (OWN,))
    theirs = load(tuned, device="cpu").model.network.state_dict()
    assert differing(dict(theirs), dict(found.network.state_dict())) == []


@pytest.mark.parametrize("labels", [("positive", "negative"), ("negative", "neutral", "positive")])
def test_other_labels_get_a_fresh_head(tuned, labels):
    found = load_initial_task_model(tuned, config(labels=labels), seed=0)
    assert found.notes == (FRESH,)
    assert found.network.heads["classify"].output.out_features == len(labels)


def test_a_second_task_resumes_with_the_head_of_the_first(model, tmp_path):
    first = tune("squad", model, tmp_path / "one", *SHORT).folder / "model"
    notebook = Notebook()
    tune("squad2", first, tmp_path / "two", *SHORT, notebook=notebook)
    assert "the head span of the folder is kept" in notebook.notes


def test_another_seed_draws_another_head(model):
    one, same, other = (
        load_initial_task_model(model, config(), seed=seed).network.heads["classify"] for seed in (0, 0, 1)
    )
    assert torch.equal(one.output.weight, same.output.weight)
    assert not torch.equal(one.output.weight, other.output.weight)


def test_a_raw_head_reads_the_last_state_and_drops_the_pooler(model):
    found = load_initial_task_model(model, config(head=head(cls="raw")), seed=0)
    assert set(found.network.heads) == {"classify"}
    assert found.network.heads["classify"].reads == "sentence"


def test_a_raw_head_is_saved_and_asked_again_the_same(model, tmp_path):
    result = tune("sst2", model, tmp_path, "run.epochs=5", "head.cls=raw")
    assert result.metrics["dev"]["accuracy"] > 0.95
    assert not [name for name in weights_of(result.folder) if "pooler" in name]
    predicted = predict_labelled([result.folder], tmp_path / "data" / "sst2", device="cpu")
    assert predicted.metrics() == pytest.approx(result.metrics["dev"], abs=1e-4)
    scorer = load_task_model(result.folder, device="cpu").objective.scorer
    assert set(scorer.network.heads) == {"classify"}


def test_a_raw_run_resumes_raw_without_a_word_of_the_pooler(model, tmp_path):
    first = tune("sst2", model, tmp_path, *SHORT, "head.cls=raw").folder / "model"
    assert load_initial_task_model(first, config(head=head(cls="raw")), seed=0).notes == (OWN,)
    assert load_initial_task_model(first, config(), seed=0).notes == (
        OWN,
        "the head pooler starts from fresh weights",
    )


def test_raw_means_nothing_to_a_head_that_reads_tokens(model):
    with pytest.raises(UserError, match="head.cls: the tag head of bert reads raw states already"):
        load_initial_task_model(model, config(kind="tag", head=head(cls="raw")), seed=0)


def test_texts_longer_than_the_positions_are_rejected(model):
    with pytest.raises(UserError, match="takes 128 tokens, and text.longest = 129; --set text.longest=128"):
        load_initial_task_model(model, config(text=TextSection(longest=129)), seed=0)


def test_fresh_layers_are_the_last_ones_and_others_stay(model):
    found = load_initial_task_model(model, config(head=head(fresh_layers=1)), seed=0)
    assert "the last 1 layers start from fresh weights" in found.notes
    before = load(model, device="cpu").model.network.encoder.state_dict()
    changed = differing(dict(before), dict(found.network.encoder.state_dict()))
    assert changed
    assert all(name.startswith("blocks.1.") for name in changed)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"fresh_layers": 3}, "head.fresh_layers: the model has 2 layers of its own, not 3"),
        ({"fresh_layers": 1, "encoder": "frozen-linear"}, "layers with fresh weights cannot stay frozen"),
    ],
)
def test_fresh_layers_that_cannot_be_are_rejected(model, settings, complaint):
    with pytest.raises(UserError, match=complaint):
        load_initial_task_model(model, config(head=head(**settings)), seed=0)


def test_a_model_folder_that_is_not_there_leaves_no_run_behind(tmp_path):
    with pytest.raises(UserError, match="there is no such folder"):
        tune("sst2", tmp_path / "nowhere", tmp_path)
    assert not (tmp_path / "runs" / "sst2").exists()


def test_dropout_follows_the_folder(model, tmp_path):
    folder = tmp_path / "model"
    load(model, device="cpu").save(folder)
    written = json.loads((folder / "config.json").read_text())
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps({**written, **rates, "classifier_dropout": 0.25}))
    network = load_initial_task_model(folder, config(), seed=0).network
    assert network.heads["classify"].dropout.p == 0.25
    assert {part.dropout.p for part in network.encoder.blocks} == {0.0}
