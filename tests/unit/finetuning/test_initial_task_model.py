"""What a run begins with: the folder's own head where it fits, a fresh one where it does not."""

import json

import pytest
import torch

from bertsmith.core.errors import UserError
from bertsmith.finetuning.initial_task_model import load_initial_task_model
from bertsmith.finetuning.predict import predict_labelled
from bertsmith.inference.embedded_models import default_model
from bertsmith.inference.loaded_model import load, load_task_model
from bertsmith.model.folder.model_folder import Model, read_model, write_model
from bertsmith.model.kernels.elementwise import Dropout
from bertsmith.model.network import add_fresh_head, new_network, take_transform
from bertsmith.packed import pack
from bertsmith.recipe.finetuning_schema import HeadSection, TextSection
from bertsmith.recipe.model_section import ModelSection
from bertsmith.tasks.task_config import TaskConfig
from tests.tiny import tiny_encoder_config
from tests.tiny_runs import differing
from tests.toy_folder import toy_vocabulary
from tests.tuning import SHORT, Notebook, set_up_run, toy_assignment, tune, weights_of

OWN = "the head classify of the folder is kept"
VOCABULARY = len(toy_vocabulary())
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
    with pytest.raises(UserError, match="takes 128 tokens, but text.longest = 129; use `text.longest=128`"):
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
        ({"fresh_layers": 3}, "head.fresh_layers: the model has 2 separate layers, not 3"),
        ({"fresh_layers": 1, "encoder": "frozen-linear"}, "layers with fresh weights cannot stay frozen"),
    ],
)
def test_fresh_layers_that_cannot_be_are_rejected(model, settings, complaint):
    with pytest.raises(UserError, match=complaint):
        load_initial_task_model(model, config(head=head(**settings)), seed=0)


def test_a_model_folder_that_is_not_there_leaves_no_run_behind(tmp_path):
    with pytest.raises(UserError, match="this folder does not exist"):
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


def write_folder(folder, encoder_config, like):
    """A folder of a new model, with the tokenizer of another."""
    network = new_network(encoder_config, {"mlm": 0}, torch.Generator().manual_seed(0))
    write_model(folder, Model(network))
    load(like, device="cpu").tokenizer.save(folder)


def rates_of(network):
    """Dropout rates of the layers, of attention, and before the output layer."""
    layers = {part.p for part in network.encoder.modules() if isinstance(part, Dropout)}
    attention = {block.attention.training_rule.dropout for block in network.encoder.blocks}
    return layers, attention, network.heads["classify"].dropout.p


def test_a_model_pretrained_without_dropout_is_finetuned_without_it_unless_asked_to(model, tmp_path):
    section = ModelSection(layers=2, width=32, heads=2, inner=64, dropout=0, attention_dropout=0)
    write_folder(tmp_path, section.encoder_config(VOCABULARY), model)
    assert rates_of(load_initial_task_model(tmp_path, config(), seed=0).network) == ({0.0}, {0.0}, 0.0)
    asked = {"dropout": 0.2, "attention_dropout": 0.3, "head_dropout": 0.4}
    found = load_initial_task_model(tmp_path, config(), seed=0, dropouts=asked)
    assert rates_of(found.network) == ({0.2}, {0.3}, 0.4)
    assert found.notes[0] == "run.dropout = 0.2; the model has 0"
    before = load(tmp_path, device="cpu").model.network.encoder.state_dict()
    assert differing(dict(before), dict(found.network.encoder.state_dict())) == []


@pytest.mark.parametrize("model_type", ["modernbert", "distilbert", "albert", "deberta-v2"])
def test_every_architecture_takes_other_dropouts(model, tmp_path, model_type):
    write_folder(tmp_path, tiny_encoder_config(model_type, vocabulary=VOCABULARY), model)
    asked = {"dropout": 0.5, "attention_dropout": 0.5, "head_dropout": 0.5}
    network = load_initial_task_model(tmp_path, config(), seed=0, dropouts=asked).network
    assert rates_of(network) == ({0.5}, {0.5}, 0.5)


def test_a_run_drops_out_as_its_recipe_says(model, tmp_path):
    run = set_up_run(toy_assignment("sst2", model, tmp_path, "run.dropout=0", "run.attention_dropout=0"))
    assert rates_of(run.trainer.objective.scorer.network) == ({0.0}, {0.0}, 0.1)


@pytest.mark.parametrize(("settings", "rate"), [((), 0.1), (("run.head_dropout=0.5",), 0.5)])
def test_what_a_bilstm_reads_and_writes_is_dropped_as_by_a_head(model, tmp_path, settings, rate):
    asked = ("head.encoder=frozen-features", "features.width=4", *settings)
    scorer = set_up_run(toy_assignment("sst2", model, tmp_path, *asked)).trainer.objective.scorer
    assert scorer.dropout.p == rate and scorer.reader.bilstm.lstm.dropout == rate


@pytest.mark.parametrize("cls", ["pooled", "raw"])
def test_a_head_on_the_mean_of_all_tokens_is_saved_and_asked_again_the_same(model, tmp_path, cls):
    notebook = Notebook()
    settings = (*SHORT, "head.pooling=mean", f"head.cls={cls}", "run.device=cpu")
    folder = tune("sst2", model, tmp_path, *settings, notebook=notebook).folder / "model"
    assert any("other tools would read the first" in note for note in notebook.notes)
    texts = ["the cat sits on the mat", "snow"]
    bert = load(folder, device="cpu")
    network = read_model(folder).network.eval()
    encodings = [bert.tokenizer.encode(text).ids for text in texts]
    with torch.no_grad():
        means_SD = torch.stack([network(pack([ids])).mean(0) for ids in encodings])
        if cls == "pooled":
            means_SD = network.heads["pooler"](means_SD)
        expected = network.heads["classify"](means_SD).softmax(-1)
    found = [classified.probabilities for classified in bert.classify(texts)]
    for given, wanted in zip(found, expected.tolist(), strict=True):
        assert list(given.values()) == pytest.approx(wanted, abs=1e-5)


def test_modernbert_says_in_its_config_that_the_mean_is_read(model, tmp_path):
    write_folder(tmp_path, tiny_encoder_config("modernbert", vocabulary=VOCABULARY), model)
    found = load_initial_task_model(tmp_path, config(head=head(pooling="mean")), seed=0)
    assert (found.network.config.sentence, found.network.encoder.sentence) == ("mean", "mean")
    assert found.notes == (FRESH,)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"kind": "tag", "head": head(pooling="mean")}, "head.pooling: a tag task reads every token"),
        (
            {"head": head(pooling="mean", encoder="frozen-features")},
            "head.pooling: a BiLSTM on frozen layers reads a sequence in its own way",
        ),
    ],
)
def test_pooling_that_nothing_would_read_is_rejected(model, changes, complaint):
    with pytest.raises(UserError, match=complaint):
        load_initial_task_model(model, config(**changes), seed=0)


def test_a_modern_classifier_can_take_the_transform_of_its_masked_language_head():
    network = load(default_model(), device="cpu").model.network
    trained = {name: each.clone() for name, each in network.heads["mlm"].transform.state_dict().items()}
    add_fresh_head(network, "classify", 2, torch.Generator().manual_seed(0))
    take_transform(network, "classify")
    assert differing(trained, dict(network.heads["classify"].transform.state_dict())) == []
