"""Many runs as one: seeds, grids, what they come to, and that nothing is done twice."""

import json
from dataclasses import replace

import pytest

from bertsmith.cli.finetune import show_many
from bertsmith.core.errors import Diverged, UserError
from bertsmith.finetuning.finetune import FinetuningResult
from bertsmith.finetuning.predict import predict_labelled
from bertsmith.inference.model_path import model_folder
from bertsmith.studies.scheduler import Stopped
from bertsmith.studies.sweep import (
    GRID,
    RATES,
    best_of,
    over_folds,
    over_grid,
    over_search,
    over_seeds,
    run_trials,
    spread_of,
    spreads_of,
    with_values,
)
from bertsmith.tasks.custom import CustomSpec, custom_task
from bertsmith.tasks.table_format import TableFormat
from bertsmith.tasks.task import read_split
from tests.tuning import SHORT, Notebook, stop_at, toy_assignment

TINY_GRID = {"run.examples": (16, 32), "optim.peak_lr": (1e-3,)}


@pytest.fixture
def assignment(model, tmp_path):
    return toy_assignment("sst2", model, tmp_path, *SHORT)


def test_seeds_have_folders_and_recipes_of_their_own(assignment):
    cells = over_seeds(assignment, 3)
    assert [cell.name for cell in cells] == ["seed-0", "seed-1", "seed-2"]
    assert [cell.assignment.recipe.run.seed for cell in cells] == [0, 1, 2]
    assert [cell.assignment.out for cell in cells] == [assignment.out / cell.name for cell in cells]


def test_values_that_contradict_the_recipe_are_a_user_error(assignment):
    with pytest.raises(UserError, match="optim.decay_from applies only to optim.schedule = wsd"):
        with_values(assignment.recipe, {"optim.decay_from": 0.7})


def test_no_study_is_kept_beside_a_single_run(assignment):
    assignment.out.mkdir(parents=True)
    (assignment.out / "assignment.json").write_text("{}")
    with pytest.raises(UserError, match="contains a single run") as error:
        run_trials(over_seeds(assignment, 2), Notebook())
    assert error.value.where == str(assignment.out) and not (assignment.out / "seed-0").exists()


def test_seeds_begin_with_the_recipes_own(model, tmp_path):
    cells = over_seeds(toy_assignment("sst2", model, tmp_path, "run.seed=7"), 2)
    assert [cell.assignment.recipe.run.seed for cell in cells] == [7, 8]
    assert [cell.name for cell in cells] == ["seed-7", "seed-8"]


def test_folds_are_resumed_and_each_example_is_developed_on_once(model, tmp_path):
    table = tmp_path / "my.csv"
    table.write_text("text,label\n" + "".join(f"the sun {n},{'ab'[n % 2]}\n" for n in range(30)))
    plain = toy_assignment("sst2", model, tmp_path, "run.epochs=2")
    own = replace(plain, task=custom_task(CustomSpec("text", "label")), data=table)
    trials = over_folds(own, 3)
    with stop_at(6), pytest.raises(Stopped, match="fold-1"):
        run_trials(trials, Notebook())
    results = run_trials(trials, Notebook())
    assert [result.folder.name for result in results] == ["fold-0", "fold-1", "fold-2"]
    parts = [read_split(trial.assignment.task, table, "dev", skip_bad=False).examples for trial in trials]
    assert sorted(int(each.key) for part in parts for each in part) == list(range(30))
    spread = json.loads((own.out / "spread.json").read_text())["spreads"]["dev"]["accuracy"]
    assert spread["runs"] == 3


def test_a_wish_in_the_last_step_of_a_run_stops_the_study_behind_it(assignment):
    trials = over_seeds(assignment, 2)
    with stop_at(4), pytest.raises(Stopped, match="seed-0"):  # the last of its five steps
        run_trials(trials, Notebook())
    assert (assignment.out / "seed-0" / "result.json").exists()
    assert not (assignment.out / "seed-1").exists()
    with stop_at(4):  # the last run has nothing behind it
        assert len(run_trials(trials, Notebook())) == 2


def test_folds_are_read_in_the_format_of_the_table(model, tmp_path):
    table = tmp_path / "my.txt"
    table.write_text("".join(f"the sun {n}#{'ab'[n % 2]}\n" for n in range(30)), encoding="utf-16")
    form = TableFormat("#", "utf-16", ("text", "label"))
    plain = toy_assignment("sst2", model, tmp_path)
    own = replace(plain, task=custom_task(CustomSpec("text", "label"), form), data=table)
    parts = [read_split(each.assignment.task, table, "dev", skip_bad=False) for each in over_folds(own, 3)]
    assert sorted(int(each.key) for part in parts for each in part.examples) == list(range(30))


def test_the_papers_grid_has_eighteen_runs(assignment):
    cells = over_grid(assignment)
    found = {
        (
            cell.assignment.recipe.run.examples,
            cell.assignment.recipe.optim.peak_lr,
            cell.assignment.recipe.run.epochs,
        )
        for cell in cells
    }
    assert found == {
        (size, rate, epochs) for size in (16, 32) for rate in (5e-5, 3e-5, 2e-5) for epochs in (2, 3, 4)
    }
    assert len({cell.assignment.out for cell in cells}) == len(cells) == 18
    assert list(GRID) == ["run.examples", "optim.peak_lr", "run.epochs"]


def test_the_papers_rates_for_glue_are_four(assignment):
    rates = [trial.assignment.recipe.optim.peak_lr for trial in over_grid(assignment, RATES)]
    assert rates == [5e-5, 4e-5, 3e-5, 2e-5]


def test_a_search_draws_other_settings_each_time_and_the_same_ones_again(assignment):
    trials = over_search(assignment, 20)
    assert trials == over_search(assignment, 20) and trials[:5] == over_search(assignment, 5)
    recipes = [trial.assignment.recipe for trial in trials]
    rates = [recipe.optim.peak_lr for recipe in recipes]
    assert len(set(rates)) == 20 and 1e-5 <= min(rates) < 2e-5 < 5e-5 < max(rates) <= 1e-4
    assert {recipe.run.examples for recipe in recipes} == {16, 32}
    assert {recipe.run.epochs for recipe in recipes} == {2, 3, 4}
    assert {trial.assignment.out.name for trial in trials} == {f"trial-{n}" for n in range(20)}


def test_a_grid_runs_each_combination_and_leaves_the_rest_of_the_recipe(assignment):
    cells = over_grid(assignment, TINY_GRID)
    assert [cell.name for cell in cells] == ["examples-16_peak_lr-0.001", "examples-32_peak_lr-0.001"]
    results = run_trials(cells, Notebook())
    assert [result.steps for result in results] == [5, 3]
    assert {cell.assignment.recipe.text.longest for cell in cells} == {64}


def test_cells_that_are_finished_are_not_done_again(assignment):
    with stop_at(6), pytest.raises(Stopped, match="seed-1"):
        run_trials(over_seeds(assignment, 2), Notebook())
    done = assignment.out / "seed-0" / "result.json"
    before = done.stat().st_mtime_ns
    notebook = Notebook()
    results = run_trials(over_seeds(assignment, 2), notebook)
    assert [result.finished for result in results] == [True, True]
    assert done.stat().st_mtime_ns == before
    assert "resumes from step 2" in notebook.notes
    assert [note for note in notebook.notes if note.startswith("[")] == ["[1/2] seed-0", "[2/2] seed-1"]


def test_a_run_that_fails_is_a_row_with_its_reason_and_ends_no_other(assignment, capsys):
    trials = over_grid(assignment, {"optim.peak_lr": (1e35, 1e-3)})
    failed, good = run_trials(trials, Notebook())
    assert "the run diverged" in failed.failure and good.metrics["dev"]
    written = json.loads((assignment.out / "spread.json").read_text())
    assert (written["best"], written["failed"]) == ("peak_lr-0.001", {"peak_lr-1e+35": failed.failure})
    assert written["spreads"]["dev"]["accuracy"]["runs"] == 1
    show_many({trial.name: each for trial, each in zip(trials, (failed, good), strict=True)}, as_json=False)
    assert capsys.readouterr().out.startswith(f"peak_lr-1e+35: failed: {failed.failure}\n")
    notebook = Notebook()
    with pytest.raises(UserError, match="^all runs failed") as error:
        run_trials(trials[:1], notebook)
    assert isinstance(error.value.__cause__, Diverged)
    (told,) = [note for note in notebook.notes if note.startswith("peak_lr-1e+35 failed: ")]
    assert "lower `optim.peak_lr`" in told  # the command line writes --lr
    assert "lower optim.peak_lr" in failed.failure


def test_the_spread_is_written_beside_the_runs(assignment):
    results = run_trials(over_seeds(assignment, 2), Notebook())
    written = json.loads((assignment.out / "spread.json").read_text())
    assert written["runs"] == {f"seed-{number}": result.metrics for number, result in enumerate(results)}
    assert written["best"] in written["runs"]
    accuracies = [result.metrics["dev"]["accuracy"] for result in results]
    spread = written["spreads"]["dev"]["accuracy"]
    assert (spread["least"], spread["most"], spread["runs"]) == (min(accuracies), max(accuracies), 2)
    assert spread["mean"] == pytest.approx(sum(accuracies) / 2)


def test_the_best_run_stands_for_the_folder_of_all(assignment):
    run_trials(over_seeds(assignment, 2), Notebook())
    best = assignment.out / json.loads((assignment.out / "spread.json").read_text())["best"]
    assert model_folder(assignment.out) == best / "model"
    found, own = (predict_labelled([each], assignment.data, device="cpu") for each in (assignment.out, best))
    assert found.metrics() == own.metrics()
    (assignment.out / "spread.json").unlink()
    with pytest.raises(
        UserError, match="contains 2 runs, without a record of the best one; give one .*seed-0, "
    ):
        model_folder(assignment.out)


def test_a_cell_with_another_run_in_it_is_rejected_before_the_first_one_runs(assignment):
    cells = over_seeds(assignment, 2)
    other = over_seeds(
        toy_assignment("sst2", assignment.model, assignment.out.parents[1], "run.epochs=0.1"), 2
    )
    run_trials(other[1:], Notebook())
    with pytest.raises(UserError, match="seed-1: contains another run: run.epochs"):
        run_trials(cells, Notebook())
    assert not cells[0].assignment.out.exists()


def test_a_spread_is_that_of_the_sample():
    found = spread_of([0.5, 0.7, 0.9, 0.9])
    assert (found.mean, found.median) == pytest.approx((0.75, 0.8))
    assert found.deviation == pytest.approx((0.11 / 3) ** 0.5)
    assert (found.least, found.most, found.runs) == (0.5, 0.9, 4)
    assert spread_of([0.5]).deviation is None


def result(place, **metrics):
    return FinetuningResult(place, True, metrics, 1.0, 5, 160)


def test_metrics_spread_by_split(tmp_path):
    runs = [result(tmp_path, dev={"f1": value, "accuracy": 1.0}, other={"f1": 0.5}) for value in (0.2, 0.4)]
    found = spreads_of(runs)
    assert found["dev"]["f1"].mean == pytest.approx(0.3)
    assert found["other"]["f1"].deviation == 0


def test_the_best_run_is_that_with_the_best_deciding_metric(tmp_path):
    runs = {
        name: result(tmp_path, dev={"f1": f1, "accuracy": 1 - f1}) for name, f1 in (("a", 0.2), ("b", 0.4))
    }
    assert best_of(runs) == "b"
    assert best_of({"a": result(tmp_path)}) == ""


def test_of_errors_of_numbers_the_best_run_has_the_least(tmp_path):
    errors = {"a": 3.0, "b": 2.0, "c": 4.0}
    runs = {name: result(tmp_path, dev={"mean_absolute_error": each}) for name, each in errors.items()}
    assert best_of(runs) == "b"
