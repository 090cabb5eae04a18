"""Pruning a fine-tuned toy: what goes, what is left, and a job that was stopped ends as one that was not."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from bertsmith.core.errors import UserError
from bertsmith.core.files import write_json
from bertsmith.finetuning.predict import predict_labelled
from bertsmith.finetuning.splits import read_splits
from bertsmith.inference.loaded_model import load
from bertsmith.inference.task_model import task_model_of
from bertsmith.inference.unit_importance import task_importance
from bertsmith.model.architectures.modernbert import ModernBertConfig
from bertsmith.model.folder.model_folder import Model, write_model
from bertsmith.model.network import new_network
from bertsmith.studies import pruning
from bertsmith.studies.pruning import PruningJob, Removal, pruning_recipe, task_of_model
from bertsmith.studies.scheduler import Stopped
from tests.command_line import bertsmith, mistake
from tests.tiny_runs import differing
from tests.toy_folder import toy_vocabulary, write_toy_folder
from tests.tuning import SHORT, Notebook, shared_lesson, stop_at, tune, weights_of

__all__ = ["shared_lesson"]
TRAINING = ("run.epochs=0.4", "run.examples=16", "optim.peak_lr=1e-3", "run.evaluations=1")


@pytest.fixture(scope="module")
def learned(lesson):
    return lesson("sst2")


@pytest.fixture(scope="module")
def data(learned):
    return learned.parent.parent / "data" / "sst2"


def request_of(model, data, out, removal, *, trains=True):
    task, config = task_of_model(model, "")
    recipe = pruning_recipe(task, config, TRAINING, options=[])
    return PruningJob(task, model, data, out, recipe), replace(removal, trains=trains)


def prune(request, notebook):
    return pruning.prune(*request, notebook)


REMOVAL = Removal(heads=0.5, neurons=0.5, rounds=2, examples=50)


@pytest.fixture(scope="module")
def straight(learned, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("straight") / "pruned"
    return prune(request_of(learned, data, out, REMOVAL), Notebook())


def test_the_rounds_take_their_part_and_the_model_still_knows_its_task(straight, learned, data):
    given, first, last = straight.rounds
    assert (sum(given.heads), sum(first.heads), sum(last.heads)) == (8, 6, 4)
    assert (given.neurons, first.neurons, last.neurons) == ((256, 256), (192, 192), (128, 128))
    assert [len(heads) for heads in straight.kept_heads] == list(last.heads)
    assert last.parameters < first.parameters < given.parameters
    assert not given.tuned and {*last.tuned} == {*last.pruned} == {"dev"}
    network = load(straight.folder, device="cpu").model.network
    assert sum(each.numel() for each in network.parameters()) == last.parameters
    found = predict_labelled([straight.folder], data).metrics()
    assert found == last.metrics["dev"]
    assert found["accuracy"] > 0.9
    assert not (straight.folder / "work").exists()


def test_a_view_of_all_heads_stops_at_a_pruned_model(capsys, straight, tmp_path):
    words = ("look", "attention", "the warm dog", "--model", str(straight.folder))
    said = mistake(capsys, *words, "--out", str(tmp_path / "view.html"))
    assert "pruned" in said and not list(tmp_path.iterdir())


def test_a_job_that_was_stopped_ends_as_one_that_was_not(straight, learned, data, tmp_path):
    request = request_of(learned, data, tmp_path / "pruned", REMOVAL)
    with stop_at(2), pytest.raises(Stopped, match="round 1"):
        prune(request, Notebook())
    assert not (tmp_path / "pruned" / "result.json").exists()
    with stop_at(1), pytest.raises(Stopped, match="round 1"):  # its last step: nothing of round 2 is begun
        prune(request, Notebook())
    assert len(list((tmp_path / "pruned" / "work").glob("cut-*"))) == 2  # as given, and round 1
    with stop_at(2), pytest.raises(Stopped, match="round 2"):
        prune(request, Notebook())
    ended = prune(request, Notebook())
    assert ended.rounds == straight.rounds
    assert ended.kept_heads == straight.kept_heads
    assert differing(weights_of(ended.folder), weights_of(straight.folder)) == []
    again = Notebook()
    assert prune(request, again).rounds == straight.rounds
    assert again.notes == []


def test_a_job_killed_while_it_cuts_begins_that_round_anew(learned, data, tmp_path, monkeypatch):
    request = request_of(learned, data, tmp_path / "pruned", Removal(heads=0.25, rounds=1), trains=False)
    with monkeypatch.context() as patch:
        patch.setattr("bertsmith.studies.pruning.write_finetuned", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prune(request, Notebook())
    assert not list((tmp_path / "pruned" / "work").glob("*/run/model"))
    assert sum(prune(request, Notebook()).rounds[-1].heads) == 6


@pytest.mark.parametrize("name", ["facts", "result"])
def test_a_job_killed_before_a_file_of_facts_goes_on(name, learned, data, tmp_path, monkeypatch):
    request = request_of(learned, data, tmp_path / "pruned", Removal(heads=0.25, rounds=1), trains=False)

    def killed(path, values):
        assert not str(path).endswith(f"{name}.json"), "killed here"
        write_json(path, values)

    with monkeypatch.context() as patch:
        patch.setattr("bertsmith.studies.pruning.write_json", killed)
        with pytest.raises(AssertionError, match="killed here"):
            prune(request, Notebook())
    assert sum(prune(request, Notebook()).rounds[-1].heads) == 6
    assert load(request[0].out, device="cpu").model.network.config.layer_heads


def test_the_least_important_heads_go_first(learned, data, tmp_path):
    removal = Removal(heads=0.5, rounds=1, examples=10**6)
    result = prune(request_of(learned, data, tmp_path / "pruned", removal, trains=False), Notebook())
    bert = load(learned, device="cpu")
    model = task_model_of(bert.model.network, bert.finetuned, bert.engine)
    train = read_splits(task_of_model(learned, "sst2")[0], data, skip_bad=False).splits["train"]
    scores = task_importance(model, model.encode(train)).normalised().heads
    best = {(layer, int(scores[layer].argmax())) for layer in range(2)}
    others = {(layer, head) for layer in range(2) for head in range(4)} - best
    best |= set(sorted(others, key=lambda each: -float(scores[each[0]][each[1]]))[:2])
    assert {(layer, head) for layer, heads in enumerate(result.kept_heads) for head in heads} == best
    assert result.rounds[-1].neurons == (256, 256) and not result.rounds[-1].tuned


def test_dropped_layers_go_before_heads(learned, data, tmp_path):
    removal = Removal(heads=0.5, layers=(1,), rounds=1)
    result = prune(request_of(learned, data, tmp_path / "pruned", removal, trains=False), Notebook())
    assert result.rounds[-1].heads == (2,)
    network = load(result.folder, device="cpu").model.network
    assert (network.config.layers, network.config.layer_heads) == (1, (2,))
    assert torch.isfinite(network.encoder.blocks[0].attention.project.weight).all()


def test_another_job_in_the_folder_is_not_resumed(straight, learned, data):
    other = request_of(learned, data, straight.folder, Removal(heads=0.25))
    with pytest.raises(UserError, match=r"contains another run: removal\.heads: 0\.5 there, 0\.25 now"):
        prune(other, Notebook())


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ("learned/model/model.safetensors", "model.safetensors of the model has changed since"),
        ("data/train.tsv", "train of the examples has changed since"),
    ],
)
def test_a_job_does_not_go_on_with_another_model_or_other_examples(
    learned, data, tmp_path, capsys, monkeypatch, changed, told
):
    shutil.copytree(learned / "model", tmp_path / "learned" / "model")
    shutil.copytree(data, tmp_path / "data")
    places = (tmp_path / "learned", tmp_path / "data", tmp_path / "pruned")
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("bertsmith.studies.stages.finetune", lambda *_: 1 / 0)
        prune(request_of(*places, Removal(heads=0.25, rounds=1)), Notebook())
    change(tmp_path / changed)
    words = [f"--set={each}" for each in TRAINING]
    words += ["--heads", 0.25, "--rounds", 1, "--out", places[2]]
    assert told in mistake(capsys, "prune", "--model", places[0], "--data", places[1], *words)


def change(file):
    """Other weights, or one more example."""
    if file.suffix == ".safetensors":
        save_file({name: tensor + 0.1 for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    else:
        file.write_text(file.read_text() + "my cat sits under the sun\t1\n")


def test_a_model_without_a_task_is_not_pruned(model):
    with pytest.raises(UserError, match="was not fine-tuned"):
        task_of_model(model, "")


def test_the_command_prints_each_round(learned, data, tmp_path, capsys):
    words = ["--model", learned, "--data", data, "--rounds", 1, "--epochs", 0]
    cut = ["prune", *words, "--task", "sst2", "--heads", 0.25, "--out", tmp_path / "cut"]
    told = bertsmith(capsys, *cut)
    assert told.code == 0, told
    assert "round 1: 6 heads, 512 neurons" in told.out
    facts = json.loads(bertsmith(capsys, *cut, "--json").out)
    assert sum(facts["rounds"][1]["heads"]) == 6
    assert facts["rounds"][1]["pruned"]["dev"]["accuracy"] >= 0.5


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--heads", "0.9"), "--heads: 0.9 would leave 1 of 8 heads for 2 layers"),
        ((), "nothing to remove"),
        (("--heads", "0.1", "--task", "mrpc"), "was fine-tuned for sst2, not for mrpc"),
        (("--drop-layers", "2"), "layer 2"),
        (("--drop-layers", "last"), "'last' is not a layer"),
        (("--ffn", "0.1", "--widths", "any"), "'any' is not one of 'equal', 'free'"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(learned, data, tmp_path, capsys, words, told):
    out = tmp_path / "out"
    assert told in mistake(capsys, "prune", "--model", learned, "--data", data, "--out", out, *words)
    assert not out.exists()


def test_adapters_over_a_modernbert_are_merged_and_pruned(data, tmp_path):
    """Fused query, key and value, gates, windows, and widths that differ."""
    folder = tmp_path / "model"
    write_toy_folder(folder)
    sizes = {"width": 64, "layers": 2, "heads": 4, "inner": 96, "embedding_width": 64, "positions": 128}
    vocabulary = len(toy_vocabulary())
    config = ModernBertConfig(
        model_type="modernbert",
        vocabulary=vocabulary,
        segments=0,
        **sizes,
        global_layers=(0,),
        local_attention=8,
    )
    write_model(folder, Model(new_network(config, {}, torch.Generator().manual_seed(0))))
    adapted = tune("sst2", folder, tmp_path, *SHORT, "head.encoder=lora", "lora.rank=4").folder
    removal = Removal(heads=0.5, neurons=0.5, widths="free", rounds=1, examples=50)
    result = prune(request_of(adapted, data, tmp_path / "pruned", removal), Notebook())
    pruned = load(result.folder, device="cpu")
    assert isinstance(pruned.model.network.config, ModernBertConfig)
    assert sum(pruned.model.network.config.layer_heads) == 4
    assert sum(result.rounds[-1].neurons) == 96
    assert predict_labelled([result.folder], data).metrics() == result.rounds[-1].tuned["dev"]
    assert not (result.folder / "model" / "adapter_config.json").exists()
