"""Studies: trials, rows, intervals, the report, a study of one's own and its command."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from bertsmith.cli.study import _threads
from bertsmith.cli.study import study as verb
from bertsmith.core.errors import UserError
from bertsmith.studies.cells import Cells, Failure, Outcome, Result, Stage, Work, distinct
from bertsmith.studies.comparison import Measured, comparison
from bertsmith.studies.own_study import OwnStudy, read_study
from bertsmith.studies.scheduler import Places
from bertsmith.studies.stages import HELD_OUT, finetuning_stage, known_model, pretraining_stage
from bertsmith.studies.study import Row, Seeds, Trial, plan_of, rows_of, run_study, seconds_left
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.metrics import ACCURACY
from bertsmith.tasks.task_recipe import finetuning_recipe
from tests.tiny_runs import Listener, tiny_recipe, tiny_store
from tests.toy_tasks import TOYS
from tests.tuning import quickly as quickly
from tests.unit.studies.toy_stage import SCORE, Heard, stage
from tests.unit.studies.toy_study import ToyStudy, run_toy_study

OWN = """
question = "Do pairs help?"
seeds = 2
finetuning_seeds = 2
[stages.model]
recipe = "bert-tiny"
store = "{place}/store"
set.run = {{ device = "cpu", steps = 2 }}
[stages.sst2]
task = "sst2"
data = "{place}/sst2"
model = "model"
set = {{ "run.device" = "cpu", "run.epochs" = 0.2, "text.longest" = 32 }}
[trials.pairs]
[trials."no pairs"]
model.examples.pairs = "none"
[trials.impossible]
"model.model.heads" = 3
[grid]
"sst2.optim.peak_lr" = [1e-3, 2e-3]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    tiny_store(folder)
    TOYS["sst2"](folder / "sst2")
    return folder


def own(place: Path, text: str = OWN, **options: int) -> OwnStudy:
    (place / "own.toml").write_text(text.format(place=place), encoding="utf-8")
    return read_study(place / "own.toml", device="cpu", **options)


def row(name: str, values: dict[tuple[int, int], float], *reasons: str) -> Row:
    """A row of runs with these scores by seeds, and of failed ones."""
    runs = {
        Seeds(*seeds): Outcome(stage(), Result({"dev": {"score": value}}, "dev", SCORE, 4, 2.0))
        for seeds, value in values.items()
    }
    failed = {Seeds(90 + n, 0): Outcome(stage(), failure=Failure(why)) for n, why in enumerate(reasons)}
    return Row(Trial(name, {seeds: stage() for seeds in runs | failed}), runs | failed)


def test_a_study_reports_every_trial_also_failed_ones(tmp_path):
    heard = run_toy_study(tmp_path)
    text = (tmp_path / "study" / "toy.txt").read_text()
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "2 of 2" in lines["baseline"] and "2 of 2" in lines["again"] and "0 of 1" in lines["diverges"]
    assert "diverges (1 run): the walk left the world; take a smaller factor" in text
    assert "impossible (impossible): factor = many is not a number" in text
    assert heard.shown[-1]["progress"] == 1 and heard.most_at_once() == 2
    values = json.loads((tmp_path / "study" / "toy.json").read_text())["tables"][0]["rows"]
    assert values[2]["against_first"] == {"value": 0, "low": 0, "high": 0, "seeds": 2}
    assert values[0]["runs"] == values[2]["runs"]
    assert "| baseline |" in (tmp_path / "study" / "toy.md").read_text()
    assert "Does it matter?" in (tmp_path / "study" / "toy.html").read_text()
    shown = CliRunner().invoke(verb, ["status", str(tmp_path / "study")])
    assert shown.stdout.startswith(
        "6 runs (10 wanted, equal ones once): 4 done, 0 running, 2 failed, 0 waiting"
    )
    assert "impossible is impossible: factor" in shown.stdout and "no process" not in shown.stdout
    plan = plan_of(ToyStudy(), Cells(tmp_path / "cells"), Places())
    assert (plan["wanted"], plan["counts"]["done"], plan["seconds_left"]) == (10, 4, 0.0)


def test_differences_are_of_the_seeds_that_both_have():
    seeds = [(s, f) for s in range(5) for f in range(2)]
    first = row("first", {each: 0.5 + 0.01 * each[0] for each in seeds})
    second = row("second", {each: 0.6 + 0.01 * each[0] for each in seeds if each[0] != 3}, "diverged")
    none = row("none", {}, "diverged")
    measured = Measured.of([first, second, none], "score")
    found = measured.interval(second, first)
    assert found is not None and found.seeds == 4
    assert (found.value, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))
    alone = measured.interval(second)
    assert alone is not None and alone.low < alone.value < alone.high
    assert alone.value == pytest.approx(0.6175)
    assert measured.interval(none, first) is None


def test_a_run_without_its_partners_is_left_out_of_the_interval():
    half = row("half", {(0, 0): 0.1, (0, 1): 0.3, (1, 0): 0.9})
    found = Measured.of([half], "score").interval(half)
    assert found is not None and found.value == pytest.approx(0.2)  # of the two runs of seed 0
    assert found.seeds == 2 and found.low < found.high  # drawn as independent runs


def test_mean_and_interval_are_of_the_same_runs_and_the_others_are_told():
    half = row("half", {(0, 0): 0.1, (0, 1): 0.3, (1, 0): 0.9})
    text = comparison("toy", "Title", [half]).tables[0].text()
    assert " 20.00 " in text and "43.33" not in text
    assert "half: 1 run left out, because their pre-training seeds lack other runs" in text
    assert "one model: intervals are over fine-tuning seeds only (half)" in text


def judged(folder: Path, name: str, right: list[int], *, target: int = 1, **arrays: np.ndarray) -> Row:
    """A row of a run for each number of right predictions of 40, with the file of its predictions."""
    outcomes = {}
    for seed, count in enumerate(right):
        file, targets_M = folder / f"{name}-{seed}.npz", np.full(40, target)
        np.savez(
            file, **(arrays or {"targets": targets_M, "predicted": np.where(np.arange(40) < count, 1, 0)})
        )
        result = Result({"dev": {"accuracy": count / 40, "f1": 0.5}}, "dev", ACCURACY, 4, 2.0)
        outcomes[Seeds(seed, 0)] = Outcome(stage(), result, predictions=file)
    return Row(Trial(name, {seeds: stage() for seeds in outcomes}), outcomes)


def test_examples_are_drawn_where_the_predictions_of_all_runs_are_kept(tmp_path):
    rows = [judged(tmp_path, "one", [20, 20]), judged(tmp_path, "two", [30, 30])]
    measured = Measured.of(rows, "accuracy")
    found = measured.interval(rows[1], rows[0])
    assert measured.has_examples and found is not None
    assert found.value == 0.25 and found.low < 0.25 < found.high  # the seeds alone do not differ
    assert "over seeds and examples" in comparison("toy", "Title", rows).tables[0].text()
    single = comparison("toy", "Title", [judged(tmp_path, "alone", [20])]).tables[0].text()
    assert "one seed: the interval covers only the examples" in single
    bare = {seeds: replace(each, predictions=None) for seeds, each in rows[1].outcomes.items()}
    for other in (judged(tmp_path, "other", [30], target=0), Row(rows[1].trial, bare)):
        assert not Measured.of([rows[0], other], "accuracy").has_examples
    tags = {"targets": np.ones(3), "predicted": np.ones(3), "words": np.ones((3, 2))}
    assert not Measured.of([judged(tmp_path, "tags", [20], **tags)], "accuracy").has_examples
    answers = judged(tmp_path, "answers", [20], f1=np.array([0.0, 0.5, 1.0]))
    found = Measured.of([answers], "f1").interval(answers)
    assert found is not None and found.value == 0.5 and found.low < found.high


def test_few_seeds_and_mixed_cells_are_told():
    made = Result({"dev": {"score": 0.5}}, "dev", SCORE, 4, 2.0, {"torch": "1", "threads": 2})
    other = Result({"dev": {"score": 0.5}}, "dev", SCORE, 4, 2.0, {"torch": "2", "threads": 2})
    rows = [
        Row(Trial("one", {Seeds(0, 0): stage()}), {Seeds(0, 0): Outcome(stage(), each)})
        for each in (made, other)
    ]
    notes = "\n".join(comparison("toy", "Title", rows).tables[0].notes)
    assert (
        "there is no interval for one seed" in notes
        and "different torch (1, 2)" in notes
        and "threads" not in notes
    )
    two = [row(name, {(0, 0): 0.5, (1, 0): 0.6}) for name in ("one", "two")]
    assert "2 seeds: the interval is too narrow" in comparison("toy", "Title", two).tables[0].text()


def test_the_time_left_follows_from_cells_that_are_done():
    done = Outcome(stage(steps=10), Result({}, "", SCORE, 10, 5.0))
    left = [stage(steps=40, seed=1), stage(steps=20, seed=2)]
    assert seconds_left(left, {}, [], at_once=2) is None
    assert seconds_left(left, {}, [done], at_once=1) == 30
    assert seconds_left(left, {left[0].key: 0.5}, [done], at_once=2) == 10


def test_a_study_of_ones_own_crosses_trials_and_grid_over_two_kinds_of_seeds(place):
    trials = own(place).trials()
    names = [
        f"{name}, peak_lr={rate}" for name in ("pairs", "no pairs", "impossible") for rate in (0.001, 0.002)
    ]
    assert [each.name for each in trials] == names
    assert [bool(each.impossible) for each in trials] == [False] * 4 + [True] * 2
    assert "model.heads = 3 does not divide" in trials[-1].impossible.reason
    tuned = trials[3].stages[Seeds(1, 0)]
    model = tuned.inputs["model"]
    assert isinstance(model, Stage) and model.facts["recipe"]["examples.pairs"] == "none"
    assert (tuned.recipe.run.seed, model.recipe.run.seed, tuned.recipe.optim.peak_lr) == (0, 1, 2e-3)
    every = distinct(stage for each in trials for stage in each.stages.values())
    assert len(every) == 2 * 2 + 2 * 2 * 2 * 2  # the models are shared by the rates
    assert len(own(place, seeds=1).trials()[0].stages) == 2


def test_a_trial_can_begin_with_another_model_or_data(place):
    text = OWN.replace("[trials.impossible]\n", '[trials.fresh]\n"sst2.model" = "bertsmith-small"\n')
    text = text.replace('"model.model.heads" = 3\n', "").partition("[grid]")[0]
    last = own(place, text).trials()[-1].stages[Seeds(1, 1)]
    assert "model.safetensors" in last.facts["inputs"]["model"]


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ('"sst2.optim', '"sst3.optim', "'sst3.optim.peak_lr' names none of the stages"),
        ("[1e-3, 2e-3]", "1e-3", "grid.sst2.optim.peak_lr is not a list of values"),
        (
            'task = "sst2"',
            'task = "sst2"\nrecipe = "bert-tiny"',
            "either recipe and store, or task, data and model",
        ),
        ('store = "{place}/store"', 'store = "s"\nmodel = "sst2"', "does not come before it"),
        ("seeds = 2\nf", "seed = 2\nf", r"\.toml: unknown key seed"),
        ('"sst2.optim.peak_lr" = [1e-3', '"model.run.seed" = [7', "model.run.seed directly; give seeds"),
        ('model.examples.pairs = "none"', '"model.start.model" = "a"', "model.start.model .* as model of"),
        ('"run.epochs" = 0.2', '"distill.teachers" = ["a"]', "sst2.distill.teachers .* as teachers of"),
    ],
)
def test_an_invalid_file_is_told_in_a_line(place, before, after, what):
    with pytest.raises(UserError, match=what):
        own(place, OWN.replace(before, after, 1))


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ('"model.model" = "model"', "begins with model, which does not come before it"),
        ('"model.recipe" = 3', "recipe = 3 is invalid; it should be text"),
        ('"sst2.teachers" = "bertsmith-small"', "teachers = .* it should be a list"),
    ],
)
def test_a_trial_that_breaks_a_stage_is_impossible(place, changed, what):
    *_, broken = own(place, OWN.replace('"model.model.heads" = 3', changed)).trials()
    assert broken.impossible is not None and re.search(what, broken.impossible.reason)


def test_a_model_or_teacher_that_a_recipe_names_becomes_an_input(place):
    task, inputs = task_named("sst2"), {"model": known_model("bertsmith-small")}
    recipes = [finetuning_recipe(task, each) for each in ([], ['distill.teachers=["bertsmith-small"]'])]
    plain, taught = (
        finetuning_stage(each, task, place / "sst2", device="cpu", inputs=inputs) for each in recipes
    )
    assert taught.key != plain.key and "teacher" in taught.inputs
    models = [tiny_recipe(), tiny_recipe("start.model=bertsmith-small")]
    fresh, continued = (pretraining_stage(each, place / "store", device="cpu") for each in models)
    assert continued.key != fresh.key and "model" in continued.inputs
    with pytest.raises(UserError, match="/no/such/model"):
        pretraining_stage(tiny_recipe("start.model=/no/such/model"), place / "store", device="cpu")


def test_equal_runs_of_a_trial_count_once(place):
    text = OWN.replace("[trials.impossible]\n", '[trials.fresh]\n"sst2.model" = "bertsmith-small"\n')
    trials = own(place, text.replace('"model.model.heads" = 3\n', "").partition("[grid]")[0]).trials()
    outcomes = {stage.key: Outcome(stage) for each in trials for stage in each.stages.values()}
    rows = rows_of(trials, outcomes)
    assert [len(each.outcomes) for each in rows] == [4, 4, 2]


def test_a_study_without_a_possible_trial_or_with_timed_neighbours_does_not_begin(tmp_path, place):
    text = OWN.replace('"model.model.heads" = 3', "").replace("heads", "")
    broken = own(place, text.replace("device", "divice", 1))
    for study, places, what in (
        (broken, Places(), "none of the trials can run: .*unknown key run.divice"),
        (
            own(place, OWN.replace("steps = 2", 'budget = "minutes"')),
            Places(together=2),
            "together: a budget",
        ),
    ):
        with pytest.raises(UserError, match=what):
            run_study(study, tmp_path / "out", Cells(tmp_path), places, Heard())
    assert not (tmp_path / "out").exists()


def test_the_command_takes_the_cpu_where_it_is_told_to_though_there_is_a_gpu(place, tmp_path, monkeypatch):
    own(place, OWN.replace('device = "cpu", ', "").replace('"run.device" = "cpu", ', ""))
    words = ["run", str(place / "own.toml"), "--out", str(place / "out"), "--dry-run", "--json"]
    plain = CliRunner().invoke(verb, [*words, "--devices", "cpu"], catch_exceptions=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with_gpu = CliRunner().invoke(verb, [*words, "--devices", "cpu"], catch_exceptions=False)
    assert json.loads(with_gpu.stdout)["cells"] == json.loads(plain.stdout)["cells"]


@pytest.mark.parametrize("given", ["0,", "0,0", "0,cpu"])
def test_an_odd_list_of_devices_is_told_in_a_line(place, given):
    with pytest.raises(UserError, match="devices: .* is not a list of GPUs; write GPUs by number"):
        CliRunner().invoke(
            verb, ["run", str(place / "own.toml"), "--out", "o", "--devices", given], catch_exceptions=False
        )


@pytest.mark.parametrize(("given", "threads"), [("", 2), ("4,2", 4), ("3", 3), ("0", 2)])
def test_threads_follow_from_the_environment_or_the_cores(monkeypatch, given, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert _threads(2) == threads


def test_a_study_knows_its_folders_from_any_other(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study = own(place, OWN.partition("[trials.pairs]")[0])
    for each in distinct(last for trial in study.trials() for last in trial.stages.values()).values():
        Cells(tmp_path / "cells").end(each, Result({"dev": {"score": 0.5}}, "dev", SCORE, 4, 2.0))
    words = ["run", str(place / "own.toml"), "--out", "lab", "--devices", "cpu"]
    shown = CliRunner().invoke(verb, words, catch_exceptions=False)
    assert f"report: {tmp_path}/lab/own.txt" in shown.stdout


def test_a_dry_run_tells_what_would_be_done(place):
    own(place)
    words = ["run", str(place / "own.toml"), "--out", str(place / "out"), "--dry-run"]
    shown = CliRunner().invoke(verb, words, catch_exceptions=False)
    assert "20 runs (32 wanted, equal ones once): 0 done, 0 running, 0 failed, 20 waiting" in shown.stdout
    assert "impossible, peak_lr=0.001 is impossible: " in shown.stdout
    assert "model.heads = 3 does not divide model.width" in shown.stdout
    assert not (place / "out").exists()


def test_stages_pretrain_and_finetune_from_each_other(place, tmp_path):
    model = pretraining_stage(
        tiny_recipe("run.steps=2", "run.save_every_steps=1"), place / "store", device="cpu"
    )
    task = task_named("sst2")
    recipe = finetuning_recipe(task, ["run.device=cpu", "run.epochs=0.2", "text.longest=32"])
    tuned = finetuning_stage(recipe, task, place / "sst2", device="cpu", inputs={"model": model})
    first = model.kind.run(Work(model, tmp_path / "model", {}, Listener()))
    second = tuned.kind.run(Work(tuned, tmp_path / "sst2", {"model": tmp_path / "model"}, Listener()))
    assert first is not None and second is not None
    assert first.steps == 2 and first.metrics[HELD_OUT][first.metric.name] > 0
    assert (second.split, second.metric.name, second.steps) == ("dev", "accuracy", 1)
    assert not (tmp_path / "model" / "checkpoints").exists()
    assert Result.of_json(json.loads(json.dumps(second.to_json()))).metrics == second.metrics
    # The predictions that it kept have the metric that it reports.
    outcome = Outcome(tuned, second, predictions=tmp_path / "sst2" / "predictions-dev.npz")
    tuned_row = Row(Trial("tuned", {Seeds(0, 0): tuned}), {Seeds(0, 0): outcome})
    found = Measured.of([tuned_row], "accuracy").interval(tuned_row)
    assert found is not None and found.low < found.value < found.high
    assert found.value == pytest.approx(second.metrics["dev"]["accuracy"])
