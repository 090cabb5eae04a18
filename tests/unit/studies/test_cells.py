"""Keys of cells: what they depend on, what they leave out, and the numbers that stand for the code."""

from dataclasses import replace
from pathlib import Path

import pytest

from bertsmith.core.errors import UserError
from bertsmith.model.architectures.registry import ARCHITECTURES
from bertsmith.objectives.registry import OBJECTIVES
from bertsmith.recipe.load import leaves, load_recipe
from bertsmith.studies import cells
from bertsmith.studies.cells import COMPUTES, Cells, Data, Failure, Model, Stage, distinct
from bertsmith.studies.stages import PRETRAIN, answered
from bertsmith.tasks.kinds.registry import KINDS
from bertsmith.training.optimizers import OPTIMIZERS
from tests.tuning import quickly as quickly
from tests.unit.studies.tiny_losses import (
    PRETRAINING,
    TUNING,
    Losses,
    keys_of_presets,
    losses_of_architectures,
    losses_of_objectives,
    losses_of_tasks,
    stored,
)
from tests.unit.studies.toy_stage import stage

RAISE = "raise COMPUTES of it and run tests/unit/studies/tiny_losses.py, or undo the change"


def pretraining(*settings: str, data: str = "0") -> Stage:
    recipe = load_recipe("bert-tiny", ["run.device=cpu", *settings])
    return Stage(PRETRAIN, answered(recipe, device="cpu"), Data(Path("store"), {"store": data}))


def check_same_losses(found: Losses, group: str) -> None:
    known = stored()[group]
    for name, losses in found.items():
        assert losses == pytest.approx(known[name], rel=1e-4), f"{name} computes something else: {RAISE}"


def test_what_objectives_and_optimisers_compute_is_what_their_numbers_stand_for(tmp_path):
    check_same_losses(losses_of_objectives(tmp_path), "objectives")


def test_what_tasks_compute_is_what_their_numbers_stand_for(tmp_path):
    check_same_losses(losses_of_tasks(tmp_path), "tasks")


def test_what_architectures_compute_is_what_their_numbers_stand_for():
    check_same_losses(losses_of_architectures(), "architectures")


def test_every_part_has_stored_losses():
    covered = {part for name in PRETRAINING for part in name.split(", ")}
    missing = (OBJECTIVES.keys() | OPTIMIZERS.keys()) - covered | KINDS.keys() - TUNING.keys()
    missing |= ARCHITECTURES.keys() - stored()["architectures"].keys()
    assert not missing, "add a case to tests/unit/studies/tiny_losses.py, and run it as a module"


def test_presets_and_tasks_keep_their_keys():
    remedy = "a new key of a recipe needs its value in cells.INERT, so that cells of before stay valid"
    found = keys_of_presets()
    assert {name: found[name] for name in stored()["keys"]} == stored()["keys"], remedy


def test_a_new_key_with_its_inert_value_is_left_out(monkeypatch):
    before = pretraining().key
    monkeypatch.setitem(cells.INERT, "pretrain masking.rate", 0.15)
    assert "masking.rate" not in pretraining().facts["recipe"] and pretraining().key != before
    assert pretraining("masking.rate=0.3").facts["recipe"]["masking.rate"] == 0.3


@pytest.mark.parametrize(
    "idle",
    [
        "name=mine",
        "run.log_every_steps=7",
        "run.save_every_minutes=1",
        "run.keep_at=[3]",
        "run.loader_workers=2",
        "batch.micro_tokens=512",
        "run.tokens=5",
        "run.minutes=2",
    ],
)
def test_what_does_not_decide_the_result_is_not_in_the_key(idle):
    assert pretraining(idle).key == pretraining().key


@pytest.mark.parametrize(
    "decides",
    ["run.seed=1", "run.steps=5", "optim.peak_lr=1", "run.precision=bf16", "run.evaluation_sequences=4"],
)
def test_what_decides_the_result_is_in_the_key(decides):
    assert pretraining(decides).key != pretraining().key


def test_data_inputs_and_the_version_of_the_code_are_in_the_key(monkeypatch):
    plain = pretraining()
    others = [
        pretraining(data="1"),
        replace(plain, inputs={"model": plain}),
        replace(plain, options={"a": 1}),
    ]
    others.append(replace(plain, inputs={"model": pretraining("run.seed=1")}))
    keys = [each.key for each in (plain, *others)]
    monkeypatch.setitem(COMPUTES, "objective masked", 2)
    keys.append(pretraining().key)
    assert len(set(keys)) == len(keys) == 6


def test_every_answer_that_decides_is_given_before_the_first_step():
    run = leaves(answered(load_recipe("bert-tiny", []), device="cpu").model_dump())
    keys = ("device", "precision", "compile", "deterministic")
    assert [run[f"run.{key}"] for key in keys] == ["cpu", "fp32", "off", "on"]


def test_a_run_that_wants_a_gpu_which_the_study_has_not_is_told_before_it_begins():
    with pytest.raises(UserError, match="run.device: cuda, but no GPU is available"):
        answered(load_recipe("bert-tiny", ["run.device=cuda"]), device="cpu")


def test_stages_of_equal_memory_have_one_shape():
    assert pretraining("run.seed=1", "optim.peak_lr=1").shape == pretraining(data="1").shape
    assert pretraining("model.layers=1").shape != pretraining().shape
    assert pretraining("optim.algorithm=lamb").shape != pretraining().shape


def test_stages_from_models_of_other_sizes_have_other_shapes():
    models = [pretraining(), pretraining("run.seed=1"), pretraining("model.layers=1")]
    models += [Model(Path("m"), {"config.json": size, "weights": "0"}) for size in ("small", "large")]
    first, same, *others = [replace(stage(), inputs={"model": each}).shape for each in models]
    assert same == first and len({first, *others}) == 4


def test_equal_work_is_listed_once_with_inputs_first():
    first = stage(name="one")
    second, third = stage(seed=1, before=first), stage(seed=2, before=stage(name="other"))
    assert list(distinct([third, second]).values()) == [first, third, second]


def test_a_failure_of_an_input_is_a_failure(tmp_path):
    known, first = Cells(tmp_path), stage()
    behind = stage(before=first)
    known.begin(first, threads=1)
    assert known.outcome(behind).failure is None
    known.end(first, Failure("too far", first.name, repeats=True))
    assert known.outcome(behind).failure == Failure("too far", first.name, repeats=True)


def test_a_cell_keeps_the_threads_that_it_began_with_and_belongs_to_one_key(tmp_path):
    known, cell = Cells(tmp_path), stage()
    assert known.begin(cell, threads=2) == 2
    assert known.begin(cell, threads=8) == 2
    (known.folder(cell) / "cell.json").write_text('{"key": "another", "threads": 1}')
    with pytest.raises(UserError, match="belongs to other work .* give the study another `cells`"):
        known.begin(cell, threads=1)
