"""Single weights of a toy set to zero: gradually, or after a training with each way to train again."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from bertsmith.core.errors import UserError
from bertsmith.finetuning.predict import predict_labelled
from bertsmith.inference.loaded_model import load
from bertsmith.shrink.sharing import SharedShape, shared_model
from bertsmith.studies import magnitude_pruning
from bertsmith.studies.cells import Cells
from bertsmith.studies.magnitude_pruning import Sparsities
from bertsmith.studies.pruning import PruningJob, task_to_train
from bertsmith.studies.scheduler import Stopped
from bertsmith.training.journal import read_metrics
from bertsmith.training.magnitude import published_masks, sparsity_of
from tests.command_line import bertsmith, mistake
from tests.tiny_runs import differing
from tests.toy_tasks import TOYS
from tests.tuning import QUICK, Notebook, stop_at, weights_of

SETTINGS = (*QUICK, "run.epochs=1")  # 10 steps


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return TOYS["sst2"](tmp_path_factory.mktemp("toys") / "sst2")


def request_of(model, data, out, *settings, sparsities, rewind=None, **asked):
    how = f"sparse.gradual={sparsities[0]}" if rewind is None else f"sparse.early_at={rewind}"
    task, recipe = task_to_train(model, "sst2", [*SETTINGS, how, *settings], options=[])
    return PruningJob(task, model, data, out, recipe), Sparsities(sparsities, **asked)


def prune_by_magnitude(request, notebook):
    return magnitude_pruning.prune_by_magnitude(*request, notebook)


def prune_to_one(request):
    (result,) = prune_by_magnitude(request, Notebook())
    return result


ASKED = {"sparsities": (0.6,), "rewind": 0.2, "retraining": ("weights", "rate", "finetune")}


@pytest.fixture(scope="module")
def straight(model, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("straight") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *_, **__: None)
        return prune_to_one(request_of(model, data, out, **ASKED))


@pytest.fixture(scope="module")
def runs(straight, model, data):
    """The folders of all trainings, and of the zeros before them."""
    stages = magnitude_pruning.stages_of(*request_of(model, data, straight.folder, **ASKED), 0.6)
    return {name: Cells(straight.folder / "work").folder(each) / "run" for name, each in stages.items()}


def test_every_method_is_as_sparse_as_asked_and_the_best_is_kept(straight, data):
    assert [report.name for report in straight.reports] == ["dense", "weights-1", "rate-1", "finetune-1"]
    dense, *sparse = straight.reports
    assert dense.sparsity == 0
    assert all(report.sparsity == pytest.approx(0.6, abs=1e-3) for report in sparse)
    best = max(report.metrics["dev"]["accuracy"] for report in sparse)
    (kept,) = [report for report in sparse if report.name == straight.kept]
    assert kept.metrics["dev"]["accuracy"] == best
    assert predict_labelled([straight.folder], data).metrics() == kept.metrics["dev"]
    network = load(straight.folder, device="cpu").model.network
    assert sparsity_of(network) == pytest.approx(0.6, abs=1e-3)
    masks = load_file(straight.folder / "mask.safetensors")
    assert masks.keys() == published_masks(network).keys()
    assert all(torch.equal(mask, published_masks(network)[name]) for name, mask in masks.items())


def test_all_methods_have_the_mask_of_the_trained_weights_and_begin_where_they_should(runs):
    trained, early = weights_of(runs["dense"]), load_file(runs["dense"] / "early.safetensors")
    name = "encoder.layer.0.intermediate.dense.weight"
    full, ours = f"bert.{name}", "encoder.blocks.0.feed_forward.expand.weight"
    initial = {
        method: weights_of(runs[f"{method}-1: zeros"])[full] for method in ("weights", "rate", "finetune")
    }
    mask = initial["rate"] != 0
    assert trained[full][mask].abs().min() > trained[full][~mask].abs().max()
    assert torch.equal(initial["rate"], trained[full] * mask)
    assert torch.equal(initial["finetune"], initial["rate"])
    assert torch.equal(initial["weights"], early[ours] * mask)
    assert not torch.equal(early[ours], trained[full])


def test_the_schedule_goes_on_from_the_rewinding_step(runs):
    def rates(name):
        lines = read_metrics(runs[name])
        return {line["step"]: line["learning_rate"] for line in lines if line["kind"] == "train"}

    dense, weights, rate, finetune = map(rates, ("dense", "weights-1", "rate-1", "finetune-1"))
    assert (min(dense), max(dense)) == (1, 10)
    assert weights == rate == {step: value for step, value in dense.items() if step > 2}
    assert finetune == {step: pytest.approx(2e-4) for step in weights}


def test_a_job_that_was_stopped_ends_as_one_that_was_not(straight, model, data, tmp_path):
    request = request_of(model, data, tmp_path / "out", **ASKED)
    for step, place in ((2, "dense"), (6, "dense"), (7, "weights-1"), (6, "rate-1")):
        with stop_at(step), pytest.raises(Stopped, match=place):
            prune_to_one(request)
    ended = prune_to_one(request)
    assert (ended.reports, ended.kept) == (straight.reports, straight.kept)
    assert differing(weights_of(ended.folder), weights_of(straight.folder)) == []
    assert not (ended.folder / "work").exists()


def test_several_sparsities_share_one_training_and_end_as_each_alone(model, data, tmp_path):
    def asked(name, *sparsities):
        return request_of(model, data, tmp_path / name, "run.epochs=0.4", rewind=0.25, sparsities=sparsities)

    both = asked("both", 0.3, 0.6)
    for place in ("dense", "weights-1", "weights-1"):
        with stop_at(2), pytest.raises(Stopped, match=place):
            prune_by_magnitude(both, Notebook())
    assert (tmp_path / "both" / "0.3" / "result.json").is_file()  # so the last stop was in the second
    notebook = Notebook()
    low, high = prune_by_magnitude(both, notebook)
    assert [each.folder for each in (low, high)] == [tmp_path / "both" / name for name in ("0.3", "0.6")]
    assert "weights-1" in notebook.notes and "dense" not in notebook.notes
    alone = prune_to_one(asked("one", 0.6))
    assert (high.reports, low.reports[0]) == (alone.reports, alone.reports[0])
    for name in ("mask.safetensors", "model/model.safetensors"):
        assert (high.folder / name).read_bytes() == (alone.folder / name).read_bytes()
    assert not list(tmp_path.rglob("work"))
    assert prune_by_magnitude(both, Notebook()) == [low, high]


def test_sparsities_that_are_nearly_the_same_have_folders_of_their_own(tmp_path):
    places = Sparsities((0.5, 0.9, 0.9000001)).places(tmp_path)
    assert [place.name for place in places.values()] == ["0.5", "0.9", "0.9000001"]


def test_gradually_more_weights_go_in_one_run_that_may_be_stopped(model, data, tmp_path):
    whole = prune_to_one(request_of(model, data, tmp_path / "one", sparsities=(0.8,)))
    (report,) = whole.reports
    assert (report.name, report.sparsity) == ("gradual", pytest.approx(0.8, abs=1e-3))
    request = request_of(model, data, tmp_path / "two", sparsities=(0.8,))
    with stop_at(4), pytest.raises(Stopped):
        prune_to_one(request)
    assert prune_to_one(request).reports == whole.reports
    assert differing(weights_of(tmp_path / "two"), weights_of(tmp_path / "one")) == []


def test_a_finished_job_is_none_on_another_model_or_other_examples(model, data, tmp_path):
    shutil.copytree(model, tmp_path / "model")
    shutil.copytree(data, tmp_path / "data")
    places = (tmp_path / "model", tmp_path / "data", tmp_path / "out")
    request = request_of(*places, "run.epochs=0.2", sparsities=(0.6,))
    ended = prune_to_one(request)
    for name, line, told in (
        ("model/vocab.txt", "zebra", r"vocab\.txt of the model has changed since"),
        ("data/train.tsv", "my sunny cat\t1", "train of the examples has changed since"),
    ):
        before = (tmp_path / name).read_text()
        others = before.rstrip("\n").rpartition("\n")[0]
        (tmp_path / name).write_text(f"{others}\n{line}\n")
        with pytest.raises(UserError, match=told):
            prune_to_one(request)
        (tmp_path / name).write_text(before)
    assert prune_to_one(request) == ended


def test_rounds_go_by_the_cubic_schedule(model, data, tmp_path):
    asked = {"sparsities": (0.8,), "rewind": 0.5, "rounds": 2}
    result = prune_to_one(request_of(model, data, tmp_path / "out", "run.epochs=0.4", **asked))
    assert [report.sparsity for report in result.reports] == pytest.approx([0, 0.7, 0.8], abs=1e-3)


def test_training_at_a_constant_rate_follows_any_schedule(model, data, tmp_path):
    settings = ("optim.schedule=wsd", "optim.decay_from=0.7")
    job, _ = request_of(model, data, tmp_path / "out", *settings, sparsities=(0.6,), rewind=0.2)
    schedules = {
        method: magnitude_pruning.recipe_of(job.recipe, method).optim.schedule
        for method in magnitude_pruning.RETRAINING
    }
    assert schedules == {"weights": "wsd", "rate": "wsd", "finetune": "constant"}


def test_the_command_prints_each_training(model, data, tmp_path, capsys):
    words = ["prune", "--model", model, "--task", "sst2", "--data", data, "--method", "magnitude"]
    words += ["--sparsity", 0.5, "--epochs", 0.2, "--out", tmp_path / "out"]
    told = bertsmith(capsys, *words)
    assert told.code == 0, told
    assert "gradual: 50.0% zeros; dev accuracy" in told.out
    assert json.loads(bertsmith(capsys, *words, "--json").out)["kept"] == "gradual"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--method", "magnitude"), "add --sparsity"),
        (("--method", "magnitude", "--sparsity", "1.5"), "--sparsity: 1.5 of the weights cannot be zero"),
        (
            ("--method", "magnitude", "--sparsity", "0.5,most", "--rewind", "0.1"),
            "'0.5,most' is not a fraction",
        ),
        (("--method", "magnitude", "--sparsity", "0.5,1", "--rewind", "0.1"), "1 of the weights cannot"),
        (("--method", "magnitude", "--sparsity", "0.5,0.7"), "give one, or add --rewind"),
        (
            ("--method", "magnitude", "--sparsity", "0.5", "--retrain", "rate"),
            "--retrain: weights are removed in a",
        ),
        (
            ("--method", "magnitude", "--sparsity", "0.5", "--rounds", "2"),
            "--rounds: weights are removed in a",
        ),
        (("--retrain", "rate", "--heads", "0.4"), "add --method magnitude"),
        (("--method", "magnitude", "--sparsity", "0.5", "--rewind", "1"), "--rewind: sparse.early_at = 1.0"),
        (("--method", "magnitude", "--sparsity", "0.5", "--heads", "0.5"), "heads, neurons and layers by"),
        (("--method", "magnitude", "--sparsity", "0.5", "--widths", "free"), "heads, neurons and layers by"),
        (("--method", "magnitude", "--sparsity", "0.5", "--examples", "9"), "heads, neurons and layers by"),
        (
            ("--method", "magnitude", "--sparsity", "0.5", "--rewind", "0", "--retrain", "most"),
            "'most' is not a choice",
        ),
        (("--method", "magnitude", "--sparsity", "0.5", "--epochs", "0"), "--epochs"),
        (("--method", "magnitude", "--sparsity", "0.5", "--set", "run.keep=best"), "run.keep"),
        (("--method", "magnitude", "--sparsity", "0.5", "--set", "run.minutes=1"), "run.minutes"),
        (
            ("--method", "magnitude", "--sparsity", "0.5", "--set", "head.encoder=lora"),
            "= tuned, not lora",
        ),
        (
            ("--method", "magnitude", "--sparsity", "0.5", "--rewind", "0", "--set", "sparse.gradual=0.3"),
            "--set: sparse.gradual=0.3 is not set directly: the options decide; use --sparsity and --rewind",
        ),
        (("--sparsity", "0.5"), "add --method magnitude"),
        (("--method", "movement"), "'movement' is not one of 'importance', 'magnitude'"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(model, data, tmp_path, capsys, words, told):
    out = tmp_path / "out"
    common = ("--model", model, "--task", "sst2", "--data", data, "--out", out)
    assert told in mistake(capsys, "prune", *common, *words)
    assert not out.exists()


@pytest.mark.parametrize("part", ["attention", "ffn"])
def test_a_model_whose_layers_share_a_part_is_refused_before_it_is_trained(
    model, data, tmp_path, capsys, part
):
    shared_model(load(model, device="cpu"), SharedShape(part)).save(tmp_path / "shared")
    words = [
        "prune",
        "--model",
        tmp_path / "shared",
        "--task",
        "sst2",
        "--data",
        data,
        "--out",
        tmp_path / "out",
    ]
    words += ["--method", "magnitude", "--sparsity", 0.5, "--rewind", 0.1, "--epochs", 0.2]
    assert "some layers share a part of their weights" in mistake(capsys, *words)
    assert not (tmp_path / "out").exists()


def test_a_model_that_was_not_finetuned_needs_a_task(model):
    with pytest.raises(UserError, match="the task is missing"):
        task_to_train(model, "", [], options=[])
