"""What decides the weights: seeds, class weights, which weights are kept, what is left out."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bertsmith.core.errors import UserError
from bertsmith.finetuning.finetune import finetune
from bertsmith.finetuning.splits import read_splits
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.custom import CustomSpec, custom_task
from bertsmith.training.journal import read_metrics
from tests.tiny_runs import differing
from tests.toy_tasks import write_rows
from tests.tuning import SHORT, Notebook, set_up_run, toy_assignment, tune, weights_of


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
    return set_up_run(assignment)


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
    with pytest.raises(UserError, match='"balanced" does not apply to tasks of the kind regress'):
        tune("stsb", model, tmp_path, "head.class_weights=balanced")


def contrary(model, place, *settings):
    """A run whose development set contradicts the training set: it does best before it has learned."""
    assignment = toy_assignment("sst2", model, place, "run.evaluations=10", *settings)
    header, *rows = (assignment.data / "dev.tsv").read_text().splitlines()
    rows = [row[:-1] + {"0": "1", "1": "0"}[row[-1]] for row in rows]
    (assignment.data / "dev.tsv").write_text("\n".join([header, *rows]) + "\n")
    return finetune(assignment, Notebook())


def test_the_last_weights_are_kept_unless_the_best_are_wanted(model, tmp_path):
    last = contrary(model, tmp_path / "last")
    best = contrary(model, tmp_path / "best", "run.keep=best")
    evaluations = [line["accuracy"] for line in read_metrics(last.folder) if line["kind"] == "held-out"]
    assert last.metrics["dev"]["accuracy"] == evaluations[-1] < max(evaluations)
    assert best.metrics["dev"]["accuracy"] == max(evaluations)
    lines = [line for line in read_metrics(last.folder) if line["kind"] == "held-out"]
    step = max(lines, key=lambda line: (line["accuracy"], -line["loss"]))["step"]
    assert f"the weights of step {step} did best and were kept" in (best.folder / "card.md").read_text()
    # The curve tells of each evaluation once, and of nothing that was only looked at again.
    assert evaluations == [
        line["accuracy"] for line in read_metrics(best.folder) if line["kind"] == "held-out"
    ]


@pytest.mark.parametrize(
    ("task", "setting", "remedy"),
    [
        ("sst2", "run.keep=best", "run.keep=last"),
        ("squad2", "answers.null_threshold=tuned", "answers.null_threshold=0.0"),
    ],
)
def test_a_choice_by_the_development_set_needs_one(model, tmp_path, task, setting, remedy):
    assignment = toy_assignment(task, model, tmp_path, setting)
    for file in assignment.data.glob("dev*"):
        file.unlink()
    with pytest.raises(UserError, match=f"needs a development set, which is missing; .*{remedy}"):
        finetune(assignment, Notebook())


def test_without_a_development_set_there_are_no_metrics(model, tmp_path):
    assignment = toy_assignment("sst2", model, tmp_path, *SHORT)
    (assignment.data / "dev.tsv").unlink()
    assert finetune(assignment, Notebook()).metrics == {}


@pytest.fixture
def spoiled(model, tmp_path):
    """A run whose training file has two bad lines."""
    assignment = toy_assignment("sst2", model, tmp_path, *SHORT)
    with (assignment.data / "train.tsv").open("a") as file:
        file.write("the cat\tlukewarm\nno label here\n")
    return assignment


def test_a_bad_line_stops_the_run_with_its_place(spoiled):
    with pytest.raises(UserError, match=r"train\.tsv:162: has the unknown label 'lukewarm'.*`skip_bad=True`"):
        finetune(spoiled, Notebook())


def test_bad_lines_that_are_skipped_are_counted(spoiled):
    notebook = Notebook()
    result = finetune(replace(spoiled, skip_bad=True), notebook)
    assert result.examples == 160
    assert f"skipped 2 bad lines, the first at {spoiled.data / 'train.tsv'}:162" in notebook.notes


@pytest.fixture
def surprising(tmp_path):
    """A folder whose development set has a label that does not occur in training, in its second line."""
    (tmp_path / "train.csv").write_text("text,label\n" + "".join(f"the cat {n},{n % 2}\n" for n in range(40)))
    (tmp_path / "dev.csv").write_text("text,label\na cat,7\na dog,1\n")
    return tmp_path


def test_a_label_that_training_has_not_counts_as_wrong_and_is_reported(surprising, model, caplog):
    plain = toy_assignment("sst2", model, surprising, *SHORT)
    own = replace(plain, task=custom_task(CustomSpec("text", "label", dev_fraction=0)), data=surprising)
    result = finetune(own, Notebook())
    assert result.metrics["dev"]["accuracy"] <= 1 / 2
    (told,) = [line for line in caplog.messages if "do not occur in training" in line]
    assert told.startswith("dev: 1 examples have labels that do not occur in training and count as wrong")
    assert told.endswith(f"the first is '7' ({surprising / 'dev.csv'}:2)")
    errors = (result.folder / "errors-dev.md").read_text()
    assert re.search(r"\| 7 \| [01] \| a cat \|", errors)


def test_a_tag_that_training_has_not_counts_as_wrong(model, tmp_path):
    assignment = toy_assignment("pos", model, tmp_path, "run.epochs=3")
    task, dev = task_named("xpos"), assignment.data / "en_toy-ud-dev.conllu"
    lines = dev.read_text().splitlines()
    words = [number for number, line in enumerate(lines) if line.startswith("1\t")]
    for number in words:
        cells = lines[number].split("\t")
        lines[number] = "\t".join([*cells[:4], "NEW", *cells[5:]])
    dev.write_text("\n".join(lines) + "\n")
    result = finetune(replace(assignment, task=task), Notebook())
    total = sum(line[:1].isdigit() for line in lines)
    assert 0.5 < result.metrics["dev"]["accuracy"] <= 1 - len(words) / total


def test_of_several_labels_one_that_training_has_not_is_an_error(model, tmp_path):
    rows = [f"the {word} {n},{word}" for n in range(20) for word in ("sun", "snow")]
    (tmp_path / "train.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    (tmp_path / "dev.csv").write_text("text,label\nthe sun,sun\nthe moon,moon\n")
    plain = toy_assignment("sst2", model, tmp_path, *SHORT)
    own = replace(
        plain, task=custom_task(CustomSpec("text", "label", kind="multilabel", dev_fraction=0)), data=tmp_path
    )
    result = finetune(own, Notebook())
    assert result.metrics["dev"]["micro_f1"] < 1
    assert "| moon |" in (result.folder / "errors-dev.md").read_text()


def test_a_label_that_training_has_not_can_be_skipped(surprising):
    task = custom_task(CustomSpec("text", "label", dev_fraction=0))
    found = read_splits(task, surprising, skip_bad=True)
    assert [example.texts for example in found.splits["dev"]] == ["a dog"]
    assert [line.where for line in found.skipped] == [f"{surprising / 'dev.csv'}:2"]


def test_a_task_without_training_data_says_what_to_do():
    with pytest.raises(UserError, match="does not have training data; fine-tune on mnli"):
        read_splits(task_named("diagnostic"), Path(), skip_bad=False)


def test_a_single_training_file_is_not_its_own_exam(model, tmp_path):
    assignment = toy_assignment("sst2", model, tmp_path)
    found = read_splits(assignment.task, assignment.data / "train.tsv", skip_bad=False)
    assert set(found.splits) == {"train"}


def test_a_tiny_table_is_learned_from_without_an_exam(tmp_path):
    file = tmp_path / "my.csv"
    file.write_text("text,label\n" + "".join(f"the cat {n},{n % 2}\n" for n in range(5)))
    found = read_splits(custom_task(CustomSpec("text", "label")), file, skip_bad=False)
    assert {name: len(examples) for name, examples in found.splits.items()} == {"train": 5}


def test_a_table_that_is_not_parted_is_not_its_own_exam(tmp_path):
    file = tmp_path / "my.csv"
    file.write_text("text,label\n" + "".join(f"the cat {n},{n % 2}\n" for n in range(50)))
    found = read_splits(custom_task(CustomSpec("text", "label", dev_fraction=0)), file, skip_bad=False)
    assert {name: len(examples) for name, examples in found.splits.items()} == {"train": 50}
