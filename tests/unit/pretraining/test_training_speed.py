"""Measured and extrapolated training speed; no test depends on how long anything takes."""

from collections.abc import Iterator

import pytest

from bertsmith.pretraining import training_speed
from bertsmith.pretraining.initial_model import build_initial_model
from bertsmith.pretraining.training_speed import (
    ShapeSpeed,
    layer_weights,
    measure_speeds,
    measured_speed,
    token_flops,
    update_work,
)
from bertsmith.recipe.load import load_recipe
from bertsmith.training.distributed import ALONE
from tests.tiny_runs import tiny_recipe

KNOWN = ShapeSpeed(fixed_seconds=0.01, token_seconds=1e-5, flops=1e6, update_work=1e9)
LARGER = ("model.width=64", "model.inner=128")


def clocked(monkeypatch: pytest.MonkeyPatch, seconds: Iterator[float]) -> None:
    monkeypatch.setattr(training_speed.time, "perf_counter", lambda: next(seconds))


def test_a_step_takes_its_fixed_part_and_that_of_its_tokens():
    assert KNOWN.step_seconds(0) == 0.01
    assert KNOWN.step_seconds(4000) == pytest.approx(0.05)


def test_a_shape_that_was_not_measured_follows_from_its_operations():
    recipe = load_recipe("bert-mini")
    scaled = KNOWN.scaled_to(recipe, 1000)
    assert not scaled.measured
    assert scaled.token_seconds == pytest.approx(1e-5 * token_flops(recipe, 1000) / 1e6)
    assert scaled.fixed_seconds == pytest.approx(0.01 * scaled.update_work / 1e9)


def test_operations_are_those_that_an_objective_counts(store):
    recipe = tiny_recipe("examples.stages=[{fraction=1.0, length=32, predictions=8}]")
    trainer, _ = training_speed._trainer(recipe, store, ALONE)
    counted = trainer.objective.flops(32, 1, 8) / 32
    assert token_flops(recipe, store.vocabulary) == pytest.approx(counted)


def test_the_weights_are_those_of_the_layers(store):
    recipe = load_recipe("speedrun-small", ["model.layers=2", "model.width=64", "model.heads=1"])
    encoder = build_initial_model(recipe, store).network.encoder
    embedded = sum(each.numel() for each in encoder.embeddings.parameters())
    weights = sum(each.numel() for each in encoder.parameters()) - embedded
    assert layer_weights(recipe) == pytest.approx(weights, abs=128)
    assert update_work(recipe, 0) == layer_weights(recipe) * 64
    assert update_work(recipe, 1000) > update_work(recipe, 0)


def test_replaced_tokens_cost_the_generator_too():
    masked = load_recipe("speedrun-base", ["examples.objective=masked"])
    assert token_flops(load_recipe("speedrun-base"), 1000) > 1.1 * token_flops(masked, 1000)


def test_the_speed_is_that_of_the_fastest_steps(store, monkeypatch):
    few, many = [9.0, 2.0, 1.0, 3.0], [9.0, 5.0, 4.0, 6.0]  # the first steps do not count
    clocked(monkeypatch, iter([part for each in (*few, *many) for part in (0.0, each)]))
    recipe = tiny_recipe("examples.stages=[{fraction=1.0, length=32, predictions=8}]")
    speed = measured_speed(recipe, store, ALONE)
    assert speed.token_seconds == pytest.approx(3.0 / (12 * 32))
    assert (speed.fixed_seconds, speed.measured) == (pytest.approx(0.0), True)


def test_a_clock_that_says_nothing_gives_no_negative_time(store, monkeypatch):
    clocked(monkeypatch, iter([0.0, 1.0] * 8))
    speed = measured_speed(tiny_recipe(), store, ALONE)
    assert speed.token_seconds > 0
    assert speed.fixed_seconds > 0


def test_a_measured_step_is_one_pass_that_fits_into_memory(store, monkeypatch):
    shown = []
    before = training_speed._random_step
    monkeypatch.setattr(
        training_speed, "_random_step", lambda *given: shown.append(given[2]) or before(*given)
    )
    length = "examples.stages=[{fraction=1.0, length=32, predictions=8}]"
    measured_speed(tiny_recipe(length, "batch.micro_tokens=170"), store, ALONE)
    assert shown == [2, 5]


@pytest.mark.parametrize("objective", ["masked", "replaced"])
def test_real_steps_of_both_objectives_are_measured(store, objective):
    recipe = tiny_recipe(
        *("model.type=modernbert", "model.segments=0", "examples.pairs=full-sentences"),
        *("model.global_layers=1", f"examples.objective={objective}"),
    )
    assert measured_speed(recipe, store, ALONE).token_seconds > 0


def test_what_would_take_too_long_is_not_measured(store, monkeypatch):
    asked = []
    monkeypatch.setattr(training_speed, "measured_speed", lambda recipe, *_: asked.append(recipe) or KNOWN)
    recipes = [tiny_recipe(), tiny_recipe(*LARGER)]
    speeds = measure_speeds(recipes, store, ALONE, seconds=0.0)
    assert [each.measured for each in speeds] == [True, False]  # the smallest one always is
    measure_speeds(recipes, store, ALONE, seconds=1e9)
    assert asked == [recipes[0], *recipes]
