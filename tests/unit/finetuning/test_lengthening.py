"""A finished run that is given more epochs goes on where it ended."""

import re
import shutil
from dataclasses import replace

import pytest

from bertsmith.core.errors import UserError
from bertsmith.finetuning.finetune import finetune
from bertsmith.recipe.finetuning_schema import FinetuningOptimSection
from bertsmith.tasks.custom import CustomSpec, custom_task
from bertsmith.tasks.task_recipe import finetuning_recipe
from bertsmith.training.optimizers import learning_rate
from tests.tiny_runs import differing, metrics_of
from tests.tuning import QUICK, Notebook, stop_at, toy_assignment, tune, weights_of

KEPT = ("run.keep_state=true", "run.evaluations=3")
SHORTER, LONGER = (*KEPT, "run.epochs=0.5"), (*KEPT, "run.epochs=0.9")  # 5 and 9 steps
STEADY = ("optim.schedule=constant", "optim.warmup_fraction=0")
"""Then the rates do not depend on the length: a lengthened run is a run of the whole length."""


def lengthened(name, model, place, *settings, notebook=None):
    assert tune(name, model, place, *SHORTER, *settings).finished
    return tune(name, model, place, *LONGER, *settings, notebook=notebook)


def test_weights_moments_and_data_go_on_where_the_run_ended_and_ended_again(model, tmp_path):
    notebook, longest = Notebook(), (*LONGER, *STEADY, "run.epochs=1.2")
    assert lengthened("sst2", model, tmp_path / "ours", *STEADY, notebook=notebook).steps == 9
    assert "resumes from step 5" in notebook.notes
    ours = tune("sst2", model, tmp_path / "ours", *longest)
    straight = tune("sst2", model, tmp_path / "straight", *longest)
    assert differing(weights_of(ours.folder), weights_of(straight.folder)) == []
    assert (ours.finished, ours.steps, ours.metrics) == (True, 12, straight.metrics)


def test_numbers_that_are_learned_on_a_scale_go_on_too(model, tmp_path):
    table = tmp_path / "my.tsv"
    words = ("snow", "rain", "warm", "hot")
    table.write_text("text\tscore\n" + "".join(f"the {words[n % 4]} {n}\t{9 * (n % 4)}\n" for n in range(90)))
    task = custom_task(CustomSpec("text", "score", kind="regress"))

    def run(place, *settings):
        plain = toy_assignment("sst2", model, tmp_path / place)
        recipe = finetuning_recipe(task, [*QUICK, *STEADY, *settings, "run.keep=best"])
        return finetune(replace(plain, task=task, recipe=recipe, data=table), Notebook())

    run("ours", *SHORTER)
    ours, straight = run("ours", *LONGER), run("straight", *LONGER)
    assert differing(weights_of(ours.folder), weights_of(straight.folder)) == []


def test_the_rates_become_those_of_the_new_length_and_the_run_says_so(model, tmp_path):
    notebook = Notebook()
    run = lengthened("sst2", model, tmp_path, notebook=notebook).folder
    optim = FinetuningOptimSection(peak_lr=2e-3, warmup_fraction=0.0)  # a tenth of nine steps is no step
    expected = [learning_rate(step / 5, optim) for step in range(5)]
    expected += [learning_rate(step / 9, optim) for step in range(5, 9)]
    assert [line["learning_rate"] for line in metrics_of(run, "train")] == pytest.approx(expected)
    (note,) = [note for note in notebook.notes if "is lengthened" in note]
    assert "which ended after step 5, is lengthened to 0.9 epochs (9 steps)" in note
    assert note.endswith("run of the new length (linear), from 0.000889 to 0.000222")
    assert note in (run / "card.md").read_text()


def card_but_for_minutes(run):
    """Return the card of a run without the one number that the clock decides."""
    card, count = re.subn(r" \d+\.\d minutes, seed 0\.", " seed 0.", (run / "card.md").read_text())
    assert count == 1
    return card


def test_an_interrupted_lengthening_is_an_uninterrupted_one(model, tmp_path):
    settings = ("run.keep=best",)
    whole = lengthened("sst2", model, tmp_path / "whole", *settings)
    tune("sst2", model, tmp_path / "parts", *SHORTER, *settings)
    with stop_at(1):
        stopped = tune("sst2", model, tmp_path / "parts", *LONGER, *settings)
    assert (stopped.finished, stopped.steps) == (False, 7)
    parts = tune("sst2", model, tmp_path / "parts", *LONGER, *settings)
    assert differing(weights_of(parts.folder), weights_of(whole.folder)) == []
    kinds = ("train", "held-out")
    assert metrics_of(parts.folder, *kinds) == metrics_of(whole.folder, *kinds)
    assert card_but_for_minutes(parts.folder) == card_but_for_minutes(whole.folder)


IDLE = ("optim.peak_lr=1e-30", "run.keep=best", *STEADY)
"""Weights that do not change are not better a second time."""


def test_best_weights_of_before_stay_where_none_are_better(model, tmp_path):
    run = lengthened("sst2", model, tmp_path, *IDLE).folder
    assert [line["step"] for line in metrics_of(run, "held-out")] == [2, 3, 5, 6, 9]
    assert "the weights of step 2 did best and were kept" in (run / "card.md").read_text()


def test_a_run_that_ran_out_of_patience_waits_anew(model, tmp_path):
    settings = (*IDLE, "run.patience=2", "run.evaluations=4")
    early = tune("sst2", model, tmp_path, *SHORTER, *settings)
    assert early.steps == 4
    assert [line["step"] for line in metrics_of(early.folder, "held-out")] == [1, 2, 4]
    longer = tune("sst2", model, tmp_path, *LONGER, *settings)
    assert longer.steps == 9  # after step 7 it has waited for one evaluation, not for three
    assert [line["step"] for line in metrics_of(longer.folder, "held-out")] == [1, 2, 4, 7, 9]


def test_a_process_killed_before_its_result_ends_as_it_would_have(model, tmp_path):
    done = tune("sst2", model, tmp_path, *SHORTER, "run.keep=best")
    weights, lines = weights_of(done.folder), metrics_of(done.folder, "train", "held-out")
    (done.folder / "result.json").unlink()
    again = tune("sst2", model, tmp_path, *SHORTER, "run.keep=best")
    assert (again.steps, again.metrics) == (done.steps, done.metrics)
    assert differing(weights_of(again.folder), weights) == []
    assert metrics_of(again.folder, "train", "held-out") == lines
    (done.folder / "result.json").unlink()  # killed as it began to lengthen the run
    assert tune("sst2", model, tmp_path, *LONGER, "run.keep=best").steps == 9


def refusal(model, place, *settings):
    with pytest.raises(UserError) as caught:
        tune("sst2", model, place, *settings)
    return str(caught.value)


def test_without_its_last_state_a_run_stays_as_it_is_and_the_message_says_what_to_do(model, tmp_path):
    folder = tune("sst2", model, tmp_path, *SHORTER).folder
    (shard,) = folder.glob("checkpoints/step-*/*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"its last state is damaged; continue from its model: `model={folder}`" in refusal(
        model, tmp_path, *LONGER
    )
    assert (folder / "result.json").is_file()
    shutil.rmtree(folder / "checkpoints")
    line = refusal(model, tmp_path, *LONGER)
    assert line.endswith(f"start from its model: `model={folder}` `out=NEW` `run.epochs=MORE`")
    assert tune("sst2", model, tmp_path, *SHORTER).finished


def test_a_run_that_minutes_may_end_cannot_be_lengthened(model, tmp_path):
    tune("sst2", model, tmp_path, *SHORTER, "run.minutes=60")
    line = refusal(model, tmp_path, *LONGER, "run.minutes=60")
    assert "a finished run without run.minutes can be lengthened" in line


def test_a_run_that_is_not_finished_cannot_be_lengthened_and_none_can_be_shortened(model, tmp_path):
    with stop_at(1):
        tune("sst2", model, tmp_path, *SHORTER)
    assert refusal(model, tmp_path, *LONGER).endswith("a run can be lengthened when it is finished")
    tune("sst2", model, tmp_path, *SHORTER)
    assert "contains another run: run.epochs: 0.5 there, 0.3 now" in refusal(
        model, tmp_path, *KEPT, "run.epochs=0.3"
    )


def test_a_state_that_is_not_wanted_goes(model, tmp_path):
    folder = tune("sst2", model, tmp_path, *SHORTER, "run.keep=best").folder
    assert list(folder.glob("checkpoints/step-*")) and list(folder.glob("best-*"))
    assert tune("sst2", model, tmp_path, *SHORTER, "run.keep=best", "run.keep_state=false").finished
    assert not list(folder.glob("checkpoints")) and not list(folder.glob("best-*"))
