"""A trial of a search that does worse than half of the others is ended early; nothing depends on when."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bertsmith.cli.finetune import show_many
from bertsmith.finetuning.finetune import FinetuningResult
from bertsmith.studies.scheduler import Stopped
from bertsmith.studies.sweep import (
    MEDIAN_STOPPING_NOTE,
    MedianStopping,
    best_of,
    over_grid,
    over_search,
    over_seeds,
    run_trials,
)
from bertsmith.tasks.kinds.registry import metric_named
from bertsmith.training.early_stopping import EarlyEnd
from bertsmith.training.journal import METRICS_FILE
from tests.tuning import Notebook, stop_at, toy_assignment

ACCURACY, ERROR = metric_named("accuracy"), metric_named("mean_absolute_error")
CURVES = [[0.2, 0.6, 0.9], [0.4, 0.8, 0.9], [0.6, 0.6, 0.6]]  # means 0.2, 0.4, 0.6; then 0.4, 0.6, 0.6


@pytest.mark.parametrize(
    ("values", "median"),
    [
        ([0.39], 0.4),
        ([0.4], None),  # only what is strictly worse
        ([0.4, 0.5], 0.6),
        ([0.7, 0.1], None),  # its best so far counts
        ([0.0, 0.0, 0.0, 0.0], None),  # no other has had so many evaluations
    ],
)
def test_a_trial_ends_where_its_best_is_worse_than_the_median_of_means(values, median):
    end = MedianStopping(ACCURACY, CURVES)(values)
    assert (end and (end.evaluation, end.best, end.median)) == (
        None if median is None else (len(values), max(values), pytest.approx(median))
    )


def test_of_errors_the_smaller_is_better():
    rule = MedianStopping(ERROR, CURVES)
    assert rule([0.41]).best == 0.41 and rule([0.39]) is None


def test_two_trials_are_too_few_to_judge_another():
    assert MedianStopping(ACCURACY, CURVES[:2])([0.0]) is None


@pytest.fixture
def trials(model, tmp_path):
    """Four trials of a search, the first three of which are finished and did as well as can be."""
    settings = ("run.limit=32", "run.evaluations=2")
    found = over_search(toy_assignment("sst2", model, tmp_path, *settings), 4)
    for result in run_trials(found[:3], Notebook()):
        journal = result.folder / METRICS_FILE
        lines = [json.loads(line) for line in journal.read_text().splitlines()]
        better = [line | {"accuracy": 1.0} if line["kind"] == "held-out" else line for line in lines]
        journal.write_text("".join(json.dumps(line) + "\n" for line in better))
    return found


def test_a_bad_trial_is_ended_and_the_table_says_so(trials, capsys):
    notebook = Notebook()
    results = run_trials(trials, notebook)
    *complete, bad = results
    assert [result.early_end for result in complete] == [None] * 3
    assert (bad.early_end.evaluation, bad.early_end.median) == (1, 1.0)
    assert bad.early_end.best < 1
    told = [
        note for note in notebook.notes if "the run ends early: its best accuracy until evaluation 1" in note
    ]
    assert len(told) == 1 and MEDIAN_STOPPING_NOTE in notebook.notes
    study = trials[0].assignment.out.parent
    spread = json.loads((study / "spread.json").read_text())
    assert spread["ended_early"] == {
        "trial-3": {"step": bad.steps, "evaluation": 1, "best": bad.early_end.best, "median": 1.0}
    }
    assert spread["best"] != "trial-3" and spread["spreads"]["dev"]["accuracy"]["runs"] == 3
    show_many({trial.name: result for trial, result in zip(trials, results, strict=True)}, as_json=False)
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("trial-")]
    assert [f"ended early after {bad.steps} steps (evaluation 1)" in line for line in shown] == [
        *[False] * 3,
        True,
    ]
    assert run_trials(trials, Notebook()) == results  # looked up, and not run again


def test_a_trial_that_was_ended_early_is_not_the_best_however_well_it_did():
    complete = FinetuningResult(
        Path("a"), True, {"dev": {"accuracy": 0.8}}, seconds=1.0, steps=8, examples=32
    )
    ended = replace(complete, metrics={"dev": {"accuracy": 0.9}}, early_end=EarlyEnd(1, 0.9, 1.0))
    assert best_of({"trial-0": complete, "trial-1": ended}) == "trial-0"


def test_a_trial_that_was_interrupted_ends_where_it_would_have(trials):
    with stop_at(0), pytest.raises(Stopped, match="trial-3"):
        run_trials(trials, Notebook())
    bad = run_trials(trials, Notebook())[-1]
    assert (bad.steps, bad.early_end.evaluation) == (4, 1)  # of eight steps and two evaluations


def test_seeds_run_to_their_end(model, tmp_path):
    assignment = toy_assignment("sst2", model, tmp_path)
    assert not any(trial.may_end_early for trial in [*over_seeds(assignment, 4), *over_grid(assignment)])
    assert all(trial.may_end_early for trial in over_search(assignment, 4))
