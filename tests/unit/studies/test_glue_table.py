"""Every GLUE task of a folder in one table, through kills."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from bertsmith.core.errors import UserError
from bertsmith.finetuning.finetune import FinetuningResult
from bertsmith.studies.glue_table import (
    GlueRequest,
    GlueRow,
    GlueTable,
    _means,
    glue,
    plain_table,
    table_text,
    tasks_in,
)
from bertsmith.studies.sweep import spreads_of
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.glue_leaderboard import glue_averages
from tests.toy_tasks import rte, sst2, write_rows
from tests.tuning import QUICK, SHORT, Notebook

PROGRAM = (
    "import sys; sys.modules |= {'torch.utils.tensorboard': None, 'matplotlib.figure': None}\n"
    "from bertsmith.cli.app import app; app()"
)


@pytest.fixture
def request_of_two(model, tmp_path):
    """SST-2 and RTE in their folders, to be run for a few steps."""
    sst2(tmp_path / "glue" / "SST-2")
    rte(tmp_path / "glue" / "RTE")
    return GlueRequest(model, tmp_path / "glue", tmp_path / "out", settings=(*QUICK, *SHORT))


def test_every_task_found_is_one_row(request_of_two):
    table = glue(replace(request_of_two, seeds=2), Notebook())
    assert [row.task.title for row in table.rows] == ["SST-2", "RTE"]
    assert [row.spreads["dev"]["accuracy"].runs for row in table.rows] == [2, 2]
    assert "CoLA" in table.missing and "SST-2" not in table.missing
    written = (request_of_two.out / "table.md").read_text()
    assert written == table_text(table)
    assert json.loads((request_of_two.out / "table.json").read_text()) == plain_table(table)


def test_the_table_for_machines_has_the_spread(request_of_two):
    glue(replace(request_of_two, seeds=2), Notebook())
    table = json.loads((request_of_two.out / "table.json").read_text())
    spread = table["tasks"]["sst2"]["dev"]["accuracy"]
    assert set(spread) == {"mean", "median", "deviation", "least", "most", "runs"}
    assert spread["least"] <= spread["mean"] <= spread["most"]


def test_a_table_has_the_constant_answer_and_the_papers_beside_ours(request_of_two):
    table = glue(request_of_two, Notebook())
    text = table_text(table)
    row = table.rows[0]
    accuracy, constant = row.spreads["dev"]["accuracy"].mean, row.baselines["dev"]["accuracy"]
    ours = f"{100 * accuracy:.1f}"
    assert f"| SST-2 | dev | accuracy | {ours} | {ours} | – | {100 * constant:.1f} | 1 |" in text
    assert f"| SST-2 | dev | accuracy | {ours} | 97.8 | 94.9 | 93.5 | 91.3 | 90.4 |" in text


def test_only_the_tasks_that_are_asked_for_are_run(request_of_two):
    table = glue(replace(request_of_two, tasks=("RTE",)), Notebook())
    assert "CoLA" in table.missing and "SST-2" not in table.missing  # there, but not asked for
    assert [row.task.name for row in table.rows] == ["rte"]
    with pytest.raises(UserError, match="lacks training data of cola; add them, or remove them"):
        glue(replace(request_of_two, tasks=("cola", "rte")), Notebook())


@pytest.mark.parametrize(("changes", "runs"), [({"lr_grid": True}, 4), ({"search": 2}, 2)])
def test_of_settings_that_are_tried_the_best_on_dev_counts(request_of_two, changes, runs):
    request = replace(request_of_two, tasks=("sst2",), **changes)
    if "search" in changes:  # the search has epochs of its own
        request = replace(request, settings=(*QUICK, "run.limit=20"))
    (row,) = glue(request, Notebook()).rows
    spread = json.loads((request.out / "sst2" / "spread.json").read_text())
    assert len(spread["runs"]) == runs
    assert row.best == f"sst2 {spread['best']}"
    best = max(metrics["dev"]["accuracy"] for metrics in spread["runs"].values())
    assert (row.spreads["dev"]["accuracy"].mean, row.spreads["dev"]["accuracy"].runs) == (best, 1)


def test_a_bad_line_in_the_last_task_is_met_before_the_first_one_is_trained_on(request_of_two):
    with (request_of_two.data / "RTE" / "dev.tsv").open("a") as file:
        file.write("9\tthe cat\tthe dog\tperhaps\n")
    with pytest.raises(UserError, match=r"RTE/dev\.tsv:42: has the unknown label 'perhaps'.*`skip_bad=True`"):
        glue(request_of_two, Notebook())
    assert not request_of_two.out.exists()


def test_skipping_bad_lines_resumes_with_what_was_finished_without(request_of_two):
    (request_of_two.data / "RTE").rename(request_of_two.data / "later")
    glue(request_of_two, Notebook())
    (request_of_two.data / "later").rename(request_of_two.data / "RTE")
    with (request_of_two.data / "RTE" / "dev.tsv").open("a") as file:
        file.write("9\tthe cat\tthe dog\tperhaps\n")
    notebook = Notebook()
    table = glue(replace(request_of_two, skip_bad=True), notebook)
    assert [row.task.name for row in table.rows] == ["sst2", "rte"]
    assert (
        f"{request_of_two.out / 'sst2' / 'seed-0'} is already finished: there is nothing to do"
        in notebook.notes
    )


def kill_in_the_second_task(request):
    """Run it by the command line, and kill it without warning in the first steps of its second task."""
    settings = [part for line in request.settings for part in ("--set", line)]
    places = ["--model", request.model, "--data", request.data, "--out", request.out]
    words = [sys.executable, "-c", PROGRAM, "glue", *map(str, places), *settings, "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        second = False
        for line in child.stdout:
            second = second or "[2/2]" in line
            if second and "progress" in line:
                os.kill(child.pid, signal.SIGKILL)
                break
    assert child.returncode == -signal.SIGKILL


def test_a_study_that_was_killed_resumes_with_what_is_not_done(request_of_two):
    request = replace(request_of_two, settings=(*QUICK, "run.epochs=3"))
    write_rows(request.data / "SST-2" / "train.tsv", [["sentence", "label"], ["the sun", 1], ["a snow", 0]])
    kill_in_the_second_task(request)
    first, second = (request.out / name / "seed-0" for name in ("sst2", "rte"))
    before = {file: file.stat().st_mtime_ns for file in first.rglob("*")}
    assert not (second / "result.json").exists()
    table = glue(request, Notebook())
    assert {file: file.stat().st_mtime_ns for file in first.rglob("*")} == before
    assert (second / "result.json").exists()
    metrics = json.loads((first / "result.json").read_text())["metrics"]
    assert table.rows[0].spreads["dev"]["accuracy"].mean == metrics["dev"]["accuracy"]


def test_a_folder_without_tasks_is_rejected(tmp_path, model):
    with pytest.raises(
        UserError, match="does not contain a GLUE task with training data; give the folder with some"
    ):
        glue(GlueRequest(model, tmp_path, tmp_path / "out"), Notebook())


def test_tasks_are_found_by_their_training_files(tmp_path):
    sst2(tmp_path / "sst2")
    (tmp_path / "RTE").mkdir()
    (tmp_path / "CoLA").mkdir()
    (tmp_path / "CoLA" / "dev.tsv").write_text("toy\t1\t\ta cat\n")
    assert [(task.name, place.name) for task, place in tasks_in(tmp_path)] == [("sst2", "sst2")]


METRICS = {
    "cola": {"matthews": 0.6},
    "sst2": {"accuracy": 0.9},
    "mrpc": {"f1": 0.9, "accuracy": 0.8},
    "stsb": {"spearman": 0.8, "pearson": 0.9},
    "qqp": {"f1": 0.8, "accuracy": 0.9},
    "mnli": {"accuracy": 0.8},
    "qnli": {"accuracy": 0.9},
    "rte": {"accuracy": 0.7},
}


def table_of(tmp_path, *names):
    rows = []
    for name in names:
        metrics = {"dev": METRICS[name]}
        if name == "mnli":
            metrics["dev-mismatched"] = {"accuracy": 0.82}
        results = [FinetuningResult(tmp_path, True, metrics, 60.0, 5, 1234)]
        rows.append(GlueRow(task_named(name), results[0].examples, results[0].seconds, spreads_of(results)))
    missing = tuple(task_named(name).title for name in METRICS if name not in names)
    return GlueTable(tuple(rows), tuple(glue_averages(_means(rows))), missing)


def test_the_table_has_a_line_for_each_metric_and_every_average_it_can_give(tmp_path):
    text = table_text(table_of(tmp_path, *METRICS))
    assert "| MRPC | dev | f1 | 90.0 | 90.0 | – | – | 1 | 1,234 | 60 |" in text
    assert "| MNLI | dev-mismatched | accuracy | 82.0 |" in text
    nine = (0.8 + 0.82 + 0.9 + 0.9 + 0.7 + 0.8 + 0.9 + 0.6 + 0.8) / 9
    assert f"| BERT, table 1 | {100 * nine:.1f} | 9 columns" in text
    assert "| DistilBERT | – |" in text and "; missing: wnli |" in text
    assert "Without training data" not in text


def test_the_table_says_what_is_missing(tmp_path):
    text = table_text(table_of(tmp_path, "sst2", "rte"))
    assert "| BERT, table 1 | – |" in text
    assert "missing: mnli, mnli-mismatched, qnli, qqp, mrpc, cola, stsb |" in text
    assert text.endswith("Without training data here: CoLA, MRPC, STS-B, QQP, MNLI, QNLI.\n")
