"""Steps of a stage: epochs, their index on disk, and stores that are too small."""

import json
from pathlib import Path

import numpy as np
import pytest

from bertsmith.examples import plan as plan_module
from bertsmith.examples.plan import StagePlan
from bertsmith.ground.errors import UserError
from bertsmith.recipe.schema import Recipe
from tests.example_stores import random_store, small_recipe, source_of


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory):
    return random_store(tmp_path_factory.mktemp("plan"))


def plan_of(store, cache: Path, split: str = "train", **sections) -> StagePlan:
    return StagePlan(source_of(store, small_recipe(**sections), split=split), cache=cache)


def test_epochs_differ_in_examples_and_in_order(store, tmp_path: Path) -> None:
    plan = plan_of(store, tmp_path)
    one, other = plan.epoch(0), plan.epoch(1)
    assert one.index.second_start.tolist() != other.index.second_start.tolist()
    assert one.order.tolist() != list(range(len(one.index)))


def test_static_masks_repeat_examples_and_keys_but_not_the_order(store, tmp_path: Path) -> None:
    plan = plan_of(store, tmp_path, masking={"masks": "static", "copies": 2})
    epochs = [plan.epoch(number) for number in range(3)]
    assert epochs[0].index.second_start.tolist() == epochs[2].index.second_start.tolist()
    assert epochs[0].index.second_start.tolist() != epochs[1].index.second_start.tolist()
    assert epochs[0].order.tolist() != epochs[2].order.tolist()
    numbers = np.arange(5)
    keys = [plan.source.keys("mask", epoch, numbers).tolist() for epoch in range(3)]
    assert keys[0] == keys[2] != keys[1]


def test_stages_of_different_lengths_have_their_own_draws(store, tmp_path: Path) -> None:
    recipe = small_recipe()
    plans = [StagePlan(source_of(store, recipe, number=stage), cache=tmp_path) for stage in (0, 1)]
    lengths = [int(plan.epoch(0).index.length.max()) for plan in plans]
    assert lengths == [32, 48]


def repeated_stages(*lengths: int, **sections) -> Recipe:
    stages = [{"share": 1 / len(lengths), "length": length, "predictions": 5} for length in lengths]
    return small_recipe(examples={"stages": stages, "held_out_share": 0.2}, **sections)


def stage_draws(store, cache: Path, recipe: Recipe, **choices) -> list[tuple[list, ...]]:
    """The examples, their order and the keys of their masks in each stage's first epoch."""
    sources = [
        source_of(store, recipe, number=stage, **choices) for stage in range(len(recipe.examples.stages))
    ]
    plans = [StagePlan(source, cache=cache) for source in sources]
    return [
        (
            plan.epoch(0).index.second_start.tolist(),
            plan.epoch(0).order.tolist(),
            plan.source.keys("mask", 0, np.arange(5)).tolist(),
        )
        for plan in plans
    ]


@pytest.mark.parametrize("lengths", [(32, 32), (32, 48, 32)])
def test_a_stage_of_an_earlier_ones_length_shows_something_else(store, tmp_path: Path, lengths) -> None:
    first, *_, last = stage_draws(store, tmp_path, repeated_stages(*lengths))
    assert all(one != other for one, other in zip(first, last, strict=True))
    alone = stage_draws(store, tmp_path, repeated_stages(32))
    assert first == alone[0]


def test_a_stage_of_an_earlier_ones_length_has_the_same_static_masks_in_another_order(
    store, tmp_path: Path
) -> None:
    recipe = repeated_stages(32, 32, masking={"masks": "static", "copies": 2})
    first, last = stage_draws(store, tmp_path, recipe)
    assert (first[0], first[2]) == (last[0], last[2])
    assert first[1] != last[1]


def test_stages_of_one_length_are_judged_on_the_same_held_out_examples(store, tmp_path: Path) -> None:
    first, last = stage_draws(store, tmp_path, repeated_stages(32, 32), split="held-out")
    assert first == last


def test_the_index_is_found_on_disk_by_the_next_run(store, tmp_path: Path) -> None:
    plan_of(store, tmp_path).step(0)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.npy")}
    plan_of(store, tmp_path).step(0)
    assert before and {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.npy")} == before


def test_other_settings_have_another_index(store, tmp_path: Path) -> None:
    changes = [{}, {"run": {"seed": 1}}, {"batch": {"sequences": 4}}, {"masking": {"masks": "static"}}]
    for sections in changes:
        plan_of(store, tmp_path, **sections).step(0)
    plan_of(store, tmp_path, split="held-out").step(0)
    assert len([folder for folder in tmp_path.iterdir()]) == len(changes) + 1


def test_a_missing_array_is_made_again(store, tmp_path: Path) -> None:
    order = plan_of(store, tmp_path).epoch(0).order.tolist()
    next(tmp_path.rglob("order.npy")).unlink()
    assert plan_of(store, tmp_path).epoch(0).order.tolist() == order


def test_a_damaged_array_is_named(store, tmp_path: Path) -> None:
    plan_of(store, tmp_path).epoch(0)
    next(tmp_path.rglob("order.npy")).write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"epoch-00000: order\.npy cannot be read .*delete it"):
        plan_of(store, tmp_path).epoch(0)


def test_a_damaged_note_is_named(store, tmp_path: Path) -> None:
    plan_of(store, tmp_path).epoch(0)
    note = next(tmp_path.rglob("epoch-00000.json"))
    note.write_text(json.dumps({"steps": "many"}))
    with pytest.raises(UserError, match=r"epoch-00000\.json: does not say how many steps"):
        plan_of(store, tmp_path).step(0)


def test_old_indexes_are_cleared_away_and_their_step_counts_stay(store, tmp_path: Path) -> None:
    plan = plan_of(store, tmp_path)
    last = plan_module.EPOCHS_KEPT + 1
    steps = [plan.steps_in(epoch) for epoch in range(last + 1)]
    kept = sorted(folder.name for folder in tmp_path.rglob("epoch-*") if folder.is_dir())
    assert kept == [f"epoch-{number:05d}" for number in range(2, last + 1)]
    fresh = plan_of(store, tmp_path)
    assert fresh.step(sum(steps[:last])).epoch == last
    assert fresh.step(0).epoch == 0


def test_a_store_too_small_for_a_step_is_refused(store, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not enough for batch\.sequences = 100000; add text"):
        plan_of(store, tmp_path, batch={"sequences": 100_000}).step(0)
    assert not list(tmp_path.rglob("*.npy"))


def test_the_held_out_epoch_ends_with_what_is_left(store, tmp_path: Path) -> None:
    plan = plan_of(store, tmp_path, split="held-out", batch={"sequences": 100_000})
    assert plan.steps_in(0) == 1
    span = plan.step(0)
    assert (span.first, span.last) == (0, len(plan.epoch(0).index))
