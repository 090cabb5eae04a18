"""What decides the weights: seeds, class weights, which weights are kept, what is left out."""

from dataclasses import replace
from pathlib import Path

import pytest

from bertsmith.finetuning.job import finetune
from bertsmith.finetuning.material import read_material
from bertsmith.finetuning.setup import set_up
from bertsmith.ground.errors import UserError
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.custom import CustomSpec, custom_task
from bertsmith.training.journal import read_metrics
from tests.tiny_runs import differing
from tests.toy_tasks import write_rows
from tests.tuning import SHORT, Notebook, toy_assignment, tune, weights_of


def test_the_same_seed_gives_the_same_bits_and_another_does_not(model, tmp_path):
    settings = {"one": 0, "same": 0, "other": 1}
    runs = {
        name: weights_of(tune("sst2", model, tmp_path / name, *SHORT, f"run.seed={seed}").folder)
        for name, seed in settings.items()
    }
    assert differing(runs["one"], runs["same"]) == []
    assert len(differing(runs["one"], runs["other"])) > len(runs["one"]) // 2


def balanced_run(model, tmp_path, *settings):
    """A run on a training set with three cold sentences for each warm one."""
    assignment = toy_assignment("sst2", model, tmp_path, *settings)
    rows = [["sentence", "label"], *([f"the cat {n}", int(n % 4 == 0)] for n in range(40))]
    write_rows(assignment.data / "train.tsv", rows)
    return set_up(assignment, read_material(assignment.task, assignment.data, skip_bad=False))


def test_balanced_classes_weigh_the_same_in_sum(model, tmp_path):
    run = balanced_run(model, tmp_path, "head.class_weights=balanced", "run.examples=40")
    (micro,) = run.batches.step(0).micros
    sums = [float(micro.weights[micro.targets == label].sum()) for label in (0, 1)]
    assert sums == pytest.approx([20, 20])
    assert run.batches.step(0).count == pytest.approx(40)


def test_equal_weights_are_the_default(model, tmp_path):
    run = balanced_run(model, tmp_path, "run.examples=40")
    (micro,) = run.batches.step(0).micros
    assert set(micro.weights.tolist()) == {1.0}


def test_balance_means_nothing_to_numbers(model, tmp_path):
    with pytest.raises(UserError, match='"balanced" means nothing for a task of the kind regress'):
        tune("stsb", model, tmp_path, "head.class_weights=balanced")


SPOILS = ("run.epochs=1", "run.evaluations=5", "optim.peak_lr=0.5", "optim.clip_norm=off")


def test_the_last_weights_are_kept_unless_the_best_are_wanted(model, tmp_path):
    last = tune("sst2", model, tmp_path / "last", *SPOILS)
    best = tune("sst2", model, tmp_path / "best", *SPOILS, "run.keep=best")
    exams = [line["accuracy"] for line in read_metrics(last.folder) if line["kind"] == "held-out"]
    assert last.measures["dev"]["accuracy"] == exams[-1] < max(exams)
    assert best.measures["dev"]["accuracy"] == max(exams)
    step = 2 * (1 + exams.index(max(exams)))
    assert f"the weights of step {step} did best and were kept" in (best.folder / "card.md").read_text()
    # The curve tells of each exam once, and of nothing that was only looked at again.
    assert exams == [line["accuracy"] for line in read_metrics(best.folder) if line["kind"] == "held-out"]


@pytest.mark.parametrize(
    ("task", "setting", "remedy"),
    [
        ("sst2", "run.keep=best", "--set run.keep=last"),
        ("squad2", "answers.null_threshold=tuned", "--set answers.null_threshold=0.0"),
    ],
)
def test_a_choice_by_the_development_set_needs_one(model, tmp_path, task, setting, remedy):
    assignment = toy_assignment(task, model, tmp_path, setting)
    for file in assignment.data.glob("dev*"):
        file.unlink()
    with pytest.raises(UserError, match=f"needs a development set, and there is none; .*{remedy}"):
        finetune(assignment, Notebook())


def test_without_a_development_set_there_are_no_measures(model, tmp_path):
    assignment = toy_assignment("sst2", model, tmp_path, *SHORT)
    (assignment.data / "dev.tsv").unlink()
    assert finetune(assignment, Notebook()).measures == {}


@pytest.fixture
def spoiled(model, tmp_path):
    """A run whose training file has two bad lines."""
    assignment = toy_assignment("sst2", model, tmp_path, *SHORT)
    with (assignment.data / "train.tsv").open("a") as file:
        file.write("the cat\tlukewarm\nno label here\n")
    return assignment


def test_a_bad_line_stops_the_run_with_its_place(spoiled):
    with pytest.raises(UserError, match=r"train\.tsv:162: has the unknown label 'lukewarm'.*--skip-bad"):
        finetune(spoiled, Notebook())


def test_bad_lines_that_are_skipped_are_counted(spoiled):
    notebook = Notebook()
    result = finetune(replace(spoiled, skip_bad=True), notebook)
    assert result.examples == 160
    assert f"2 bad lines were skipped, the first at {spoiled.data / 'train.tsv'}:162" in notebook.notes


@pytest.fixture
def surprising(tmp_path):
    """A folder whose development set has a label that training has not, in its second line."""
    (tmp_path / "train.csv").write_text("text,label\n" + "".join(f"the cat {n},{n % 2}\n" for n in range(40)))
    (tmp_path / "dev.csv").write_text("text,label\na cat,7\na dog,1\n")
    return tmp_path


def test_a_label_that_training_has_not_stops_the_run(surprising, model):
    plain = toy_assignment("sst2", model, surprising, *SHORT)
    own = replace(plain, task=custom_task(CustomSpec("text", "label", dev_share=0)), data=surprising)
    with pytest.raises(UserError, match=r"dev\.csv:2: unknown label '7'; known are 0, 1"):
        finetune(own, Notebook())


def test_a_label_that_training_has_not_can_be_skipped(surprising):
    task = custom_task(CustomSpec("text", "label", dev_share=0))
    found = read_material(task, surprising, skip_bad=True)
    assert [example.texts for example in found.splits["dev"]] == ["a dog"]
    assert [line.where for line in found.skipped] == [f"{surprising / 'dev.csv'}:2"]


def test_a_task_without_training_data_says_what_to_do():
    with pytest.raises(UserError, match="has no training data of its own; fine-tune on mnli"):
        read_material(task_named("diagnostic"), Path(), skip_bad=False)


def test_a_single_training_file_is_not_its_own_exam(model, tmp_path):
    assignment = toy_assignment("sst2", model, tmp_path)
    found = read_material(assignment.task, assignment.data / "train.tsv", skip_bad=False)
    assert set(found.splits) == {"train"}
