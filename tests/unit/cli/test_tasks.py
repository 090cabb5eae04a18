"""`bertsmith tasks` as people use it."""

import json

from bertsmith.tasks.catalogue import TASKS
from tests.command_line import bertsmith, mistake


def test_every_task_has_a_line(capsys):
    lines = bertsmith(capsys, "tasks").out.splitlines()
    assert [line.split()[0] for line in lines[: len(TASKS)]] == [task.name for task in TASKS]
    assert any(line.startswith("custom ") for line in lines)


def test_a_task_is_shown_with_its_files_metrics_and_settings(capsys):
    told = bertsmith(capsys, "tasks", "mrpc").out
    for line in ("metrics: f1, accuracy", "train: train.tsv, ", "optim.peak_lr = 2e-05, run.epochs = 5.0"):
        assert line in told


def test_machines_get_all_of_it(capsys):
    found = json.loads(bertsmith(capsys, "tasks", "--json").out)
    assert set(found) == {task.name for task in TASKS}
    assert found["squad2"]["settings"]["answers.null_threshold"] == "tuned"


def test_a_task_that_there_is_not_is_told(capsys):
    assert "unknown task 'mrcp'; did you mean mrpc?" in mistake(capsys, "tasks", "mrcp")


def test_a_table_of_ones_own_is_no_slip_of_the_pen(capsys):
    told = mistake(capsys, "tasks", "custom")
    assert "custom is your own table" in told and "did you mean" not in told
