"""What is evaluated when: the deciding split in between, all of them at the end, no question twice."""

import json
from collections import Counter

import pytest

from bertsmith.finetuning.assignment import Assignment
from bertsmith.finetuning.finetune import finetune
from bertsmith.inference.task_model import TaskModel
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.task_recipe import finetuning_recipe
from bertsmith.training.journal import read_metrics
from tests.toy_tasks import write_rows
from tests.tuning import QUICK, SHORT, Notebook, toy_assignment

TWICE = (*SHORT, "run.evaluations=2")


@pytest.fixture
def asked(monkeypatch):
    """How often a model is asked about a set of so many items."""
    counts, logits = Counter(), TaskModel.logits

    def counted(self, encoded):
        counts[encoded.items] += 1
        return logits(self, encoded)

    monkeypatch.setattr(TaskModel, "logits", counted)
    return counts


def with_high_school(assignment):
    """Half of the questions of the toy's middle school are those of the high school."""
    for split in ("train", "dev"):
        middle = assignment.data / f"middle-{split}.jsonl"
        lines = middle.read_text().splitlines()
        half = [json.loads(line) | {"id": f"high{number}.txt"} for number, line in enumerate(lines[::2])]
        (assignment.data / f"high-{split}.jsonl").write_text("\n".join(map(json.dumps, half)) + "\n")
    return assignment


def mnli(folder):
    """Pairs, and two development sets of different sizes."""
    for name, count in (("train", 40), ("dev_matched", 12), ("dev_mismatched", 9)):
        labels = ("contradiction", "entailment", "neutral")
        rows = [[number, "the cat", f"the dog {number}", labels[number % 3]] for number in range(count)]
        write_rows(folder / f"{name}.tsv", [["index", "sentence1", "sentence2", "gold_label"], *rows])


def test_only_the_deciding_exam_is_taken_before_the_end(model, tmp_path, asked):
    mnli(tmp_path / "mnli")
    task = task_named("mnli")
    recipe = finetuning_recipe(task, [*QUICK, "run.epochs=4", "run.evaluations=4"])
    result = finetune(Assignment(task, recipe, model, tmp_path / "mnli", tmp_path / "out"), Notebook())
    assert set(result.metrics) == {"dev", "dev-mismatched"}
    assert asked == {12: 4, 9: 1}


def time_left(line):
    """Return the predicted seconds as a multiple of those so far."""
    return line["eta_seconds"] / line["seconds"]


def test_a_run_tells_of_the_exam_that_is_left_after_its_last_step(model, tmp_path):
    notebook = Notebook()
    finetune(toy_assignment("sst2", model, tmp_path, *SHORT), notebook)
    before, last = notebook.lines[-2:]
    assert before["progress"] < 1
    # For each second so far: the last steps may be slower than the first.
    assert 0 < time_left(before) < time_left(notebook.lines[0])
    assert (last["progress"], last["eta_seconds"]) == (1, 0)
    assert last["development"].keys() == {"accuracy"}


def test_schools_of_race_are_evaluated_by_what_was_said_of_both(model, tmp_path, asked):
    assignment = with_high_school(toy_assignment("race", model, tmp_path, *TWICE))
    result = finetune(assignment, Notebook())
    assert set(result.metrics) == {"dev", "dev-middle", "dev-high"}
    assert asked == {60: 2}
    together = 40 * result.metrics["dev-middle"]["accuracy"] + 20 * result.metrics["dev-high"]["accuracy"]
    assert 60 * result.metrics["dev"]["accuracy"] == pytest.approx(together)
    assert len([line for line in read_metrics(result.folder) if line["kind"] == "held-out"]) == 2
