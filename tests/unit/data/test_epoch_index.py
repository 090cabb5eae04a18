"""Steps of a stage: epochs, their index on disk, and stores that are too small."""

import json
from pathlib import Path

import numpy as np
import pytest

from bertsmith.core.errors import UserError
from bertsmith.data import epoch_index as plan_module
from bertsmith.data.epoch_index import StageIndex
from bertsmith.recipe.schema import Recipe
from tests.example_stores import random_store, small_recipe, source_of


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory):
    return random_store(tmp_path_factory.mktemp("index"))


def index_of(store, cache: Path, split: str = "train", **sections) -> StageIndex:
    return StageIndex(source_of(store, small_recipe(**sections), split=split), cache=cache)


def test_indexes_of_earlier_versions_are_found_again(store, tmp_path: Path, monkeypatch) -> None:
    # The name was written when the keys of the recipe were called negative_share and so on, for a store whose
    # tokenizer was saved with fewer settings than today.
    monkeypatch.setattr(store, "hash", "47078e371701746e62d9c74f4975390b36124deafb4c0c2630f66c41b9eec678")
    index_of(store, tmp_path).epoch(0)
    assert [folder.name for folder in tmp_path.iterdir()] == ["train-32-740c2495d19a"]


def test_runs_that_only_train_otherwise_share_an_index(store, tmp_path: Path) -> None:
    for weight in (1.0, 0.1):
        index_of(store, tmp_path, examples={"pair_weight": weight}).epoch(0)
    assert len(list(tmp_path.iterdir())) == 1


def test_epochs_differ_in_examples_and_in_order(store, tmp_path: Path) -> None:
    index = index_of(store, tmp_path)
    one, other = index.epoch(0), index.epoch(1)
    assert one.examples.second_start.tolist() != other.examples.second_start.tolist()
    assert one.order.tolist() != list(range(len(one.examples)))


def test_static_masks_repeat_examples_and_keys_but_not_the_order(store, tmp_path: Path) -> None:
    index = index_of(store, tmp_path, masking={"masks": "static", "copies": 2})
    epochs = [index.epoch(number) for number in range(3)]
    assert epochs[0].examples.second_start.tolist() == epochs[2].examples.second_start.tolist()
    assert epochs[0].examples.second_start.tolist() != epochs[1].examples.second_start.tolist()
    assert epochs[0].order.tolist() != epochs[2].order.tolist()
    numbers = np.arange(5)
    keys = [index.source.keys("mask", epoch, numbers).tolist() for epoch in range(3)]
    assert keys[0] == keys[2] != keys[1]


def test_stages_of_different_lengths_have_their_own_draws(store, tmp_path: Path) -> None:
    recipe = small_recipe()
    indexes = [StageIndex(source_of(store, recipe, number=stage), cache=tmp_path) for stage in (0, 1)]
    lengths = [int(index.epoch(0).examples.length.max()) for index in indexes]
    assert lengths == [32, 48]


def repeated_stages(*lengths: int, **sections) -> Recipe:
    stages = [{"fraction": 1 / len(lengths), "length": length, "predictions": 5} for length in lengths]
    return small_recipe(examples={"stages": stages, "held_out_fraction": 0.2}, **sections)


def stage_draws(store, cache: Path, recipe: Recipe, **choices) -> list[tuple[list, ...]]:
    """The examples, their order and the keys of their masks in each stage's first epoch."""
    sources = [
        source_of(store, recipe, number=stage, **choices) for stage in range(len(recipe.examples.stages))
    ]
    indexes = [StageIndex(source, cache=cache) for source in sources]
    return [
        (
            index.epoch(0).examples.second_start.tolist(),
            index.epoch(0).order.tolist(),
            index.source.keys("mask", 0, np.arange(5)).tolist(),
        )
        for index in indexes
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


def test_stages_of_one_length_are_evaluated_on_the_same_held_out_examples(store, tmp_path: Path) -> None:
    first, last = stage_draws(store, tmp_path, repeated_stages(32, 32), split="held-out")
    assert first == last


def test_the_index_is_found_on_disk_by_the_next_run(store, tmp_path: Path) -> None:
    index_of(store, tmp_path).examples(0)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.npy")}
    index_of(store, tmp_path).examples(0)
    assert before and {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.npy")} == before


def test_other_settings_have_another_index(store, tmp_path: Path) -> None:
    changes = [{}, {"run": {"seed": 1}}, {"batch": {"sequences": 4}}, {"masking": {"masks": "static"}}]
    for sections in changes:
        index_of(store, tmp_path, **sections).examples(0)
    index_of(store, tmp_path, split="held-out").examples(0)
    assert len([folder for folder in tmp_path.iterdir()]) == len(changes) + 1


def test_a_missing_array_is_made_again(store, tmp_path: Path) -> None:
    order = index_of(store, tmp_path).epoch(0).order.tolist()
    next(tmp_path.rglob("order.npy")).unlink()
    assert index_of(store, tmp_path).epoch(0).order.tolist() == order


def test_a_damaged_array_is_named(store, tmp_path: Path) -> None:
    index_of(store, tmp_path).epoch(0)
    next(tmp_path.rglob("order.npy")).write_bytes(b"nonsense")
    note = next(tmp_path.rglob("epoch-00000.json"))
    note.write_text(
        json.dumps({"steps": json.loads(note.read_text())["steps"]})
    )  # as older versions wrote it
    with pytest.raises(UserError, match=r"epoch-00000/order\.npy: is not a whole \.npy file .*delete it"):
        index_of(store, tmp_path).epoch(0)


def test_a_flipped_bit_in_an_array_is_found(store, tmp_path: Path) -> None:
    index_of(store, tmp_path).epoch(0)
    (file,) = tmp_path.rglob("order.npy")
    damaged = bytearray(file.read_bytes())
    damaged[-8] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(UserError, match="order.npy is damaged: its checksum differs; delete it"):
        index_of(store, tmp_path).epoch(0)


def test_a_damaged_note_is_named(store, tmp_path: Path) -> None:
    index_of(store, tmp_path).epoch(0)
    note = next(tmp_path.rglob("epoch-00000.json"))
    note.write_text(json.dumps({"steps": "many"}))
    with pytest.raises(UserError, match=r"epoch-00000\.json: does not contain the number of steps"):
        index_of(store, tmp_path).examples(0)


def test_old_indexes_are_cleared_away_and_their_step_counts_stay(store, tmp_path: Path) -> None:
    index = index_of(store, tmp_path)
    last = plan_module.EPOCHS_KEPT + 1
    steps = [index.steps_in(epoch) for epoch in range(last + 1)]
    kept = sorted(folder.name for folder in tmp_path.rglob("epoch-*") if folder.is_dir())
    assert kept == [f"epoch-{number:05d}" for number in range(2, last + 1)]
    fresh = index_of(store, tmp_path)
    assert fresh.examples(sum(steps[:last])).epoch == last
    assert fresh.examples(0).epoch == 0


def test_a_store_too_small_for_a_step_is_rejected(store, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not enough for batch\.sequences = 100000; add text"):
        index_of(store, tmp_path, batch={"sequences": 100_000}).examples(0)
    assert not list(tmp_path.rglob("*.npy"))


def test_the_held_out_epoch_ends_with_what_is_left(store, tmp_path: Path) -> None:
    index = index_of(store, tmp_path, split="held-out", batch={"sequences": 100_000})
    assert index.steps_in(0) == 1
    assert index.examples(0).numbers.tolist() == index.epoch(0).order.tolist()
    assert len(index.epoch(0).order) == len(index.epoch(0).examples)
