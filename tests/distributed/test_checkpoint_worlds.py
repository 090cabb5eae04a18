"""What some processes saved, any other number of them continues, to the bit."""

import errno
import os
import resource
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from bertsmith.core.errors import UserError
from bertsmith.packed import pack
from bertsmith.recipe.optim_section import OptimSection
from bertsmith.training.checkpoint import (
    TrainingState,
    latest_state,
    load_state,
    moments_of,
    save_state,
    state_tensors,
)
from bertsmith.training.distributed import ALONE, World, share_work
from bertsmith.training.optimizers import build_optimizer
from tests.tiny_training import TinyObjective, fingerprint, take_step, trained
from tests.worlds import in_turn, run_world

STATE = TrainingState(step=7, tokens=2**40 + 1, seconds=12.75, scalars={"loss": 0.1, "window": [1.5, None]})


def save(world: World, folder: Path, how: str, model_type: str = "bert") -> dict[str, str]:
    objective, optimizer = trained(world, how, model_type=model_type)
    save_state(folder, STATE, state_tensors(objective, optimizer), world)
    return fingerprint(objective, optimizer)


def load(world: World, folder: Path, how: str, model_type: str = "bert") -> dict[str, str]:
    objective, optimizer = trained(world, how, model_type=model_type, seed=1, steps=0)
    saved = latest_state(folder, world)
    assert saved.state == STATE
    load_state(saved, objective, optimizer=optimizer, world=world)
    return fingerprint(objective, optimizer)


MOVES = [
    ((2, "ddp"), (1, "ddp")),
    ((1, "ddp"), (2, "ddp")),
    ((2, "fsdp"), (1, "ddp")),
    ((1, "ddp"), (2, "fsdp")),
    ((2, "ddp"), (4, "fsdp")),  # four share out two rows of the pair head: two of them hold none
    ((4, "fsdp"), (2, "fsdp")),
]
"""By how many processes, sharing their work how, a state is written, and by which it is read."""
STARTS = (1, 2, 4, 2, 1)
"""Processes started one after the other: each start writes what it can, and reads what was written."""
Fingerprints = tuple[dict[str, str], ...]


@dataclass(frozen=True)
class Moved:
    """The states as each process had them: by who wrote them, and by who wrote and who read them."""

    saved: dict[tuple[int, str], Fingerprints]
    loaded: dict[tuple[tuple[int, str], tuple[int, str]], Fingerprints]


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Moved:
    folder, found = tmp_path_factory.mktemp("moved"), Moved({}, {})
    for size in STARTS:
        writes = [by for by in dict(MOVES) if by[0] == size and by not in found.saved]
        reads = [
            (by, to)
            for by, to in MOVES
            if to[0] == size and (by in found.saved or by in writes) and (by, to) not in found.loaded
        ]
        jobs = [(save, folder / f"{by[0]}-{by[1]}", by[1]) for by in writes]
        jobs += [(load, folder / f"{by[0]}-{by[1]}", to[1]) for by, to in reads]
        answers = [in_turn(ALONE, jobs)] if size == 1 else run_world(size, in_turn, jobs)
        by_job = list(zip(*answers, strict=True))
        found.saved.update(zip(writes, by_job[: len(writes)], strict=True))
        found.loaded.update(zip(reads, by_job[len(writes) :], strict=True))
    return found


@pytest.mark.parametrize(("written_by", "read_by"), MOVES)
def test_a_state_moves_between_worlds_to_the_bit(moved, written_by, read_by):
    saved, loaded = moved.saved[written_by], moved.loaded[written_by, read_by]
    assert [found == saved[0] for found in saved + loaded] == [True] * (written_by[0] + read_by[0])
    assert {name.split(".")[-1] for name in saved[0] if name.startswith("optimizer.")} == {
        *("step", "exp_avg", "exp_avg_sq")
    }


def test_a_block_that_layers_share_moves_too(tmp_path):
    saved = run_world(2, save, tmp_path, "fsdp", "albert")
    assert load(ALONE, tmp_path, "ddp", "albert") == saved[0]


def learn_save_and_learn_on(world: World, folder: Path, how: str, algorithm: str) -> dict[str, str]:
    objective = share_work(TinyObjective(), world, how)
    optimizer = build_optimizer(objective, OptimSection(algorithm=algorithm, peak_lr=1e-2))
    take_step(objective, optimizer, world)
    save_state(folder, STATE, state_tensors(objective, optimizer), world)
    take_step(objective, optimizer, world)
    return fingerprint(objective, optimizer)


def load_and_learn_on(world: World, folder: Path, how: str, algorithm: str) -> dict[str, str]:
    objective = share_work(TinyObjective(seed=1), world, how)
    optimizer = build_optimizer(objective, OptimSection(algorithm=algorithm, peak_lr=1e-2))
    load_state(latest_state(folder, world), objective, optimizer=optimizer, world=world)
    take_step(objective, optimizer, world)
    return fingerprint(objective, optimizer)


CONTINUED = [("ddp", "adamw"), ("fsdp", "adamw"), ("fsdp", "lamb"), ("fsdp", "muon")]


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[Fingerprints]]:
    """What the processes of an uninterrupted run end with, and those that were started to continue it."""
    folder = tmp_path_factory.mktemp("continued")
    places = [(folder / f"{how}-{algorithm}", how, algorithm) for how, algorithm in CONTINUED]
    starts = [
        run_world(2, in_turn, [(learn, *place) for place in places])
        for learn in (learn_save_and_learn_on, load_and_learn_on)
    ]
    return {
        case: [tuple(of_rank[number] for of_rank in start) for start in starts]
        for number, case in enumerate(CONTINUED)
    }


@pytest.mark.parametrize(("how", "algorithm"), CONTINUED)
def test_a_continued_run_takes_the_same_next_step_to_the_bit(continued, how, algorithm):
    straight, resumed = continued[how, algorithm]
    assert len(straight) == 2 and resumed == straight


def look_then_save(world: World, folder: Path) -> tuple[bool, dict[str, str]]:
    objective, optimizer = trained(world, "fsdp")
    before = fingerprint(objective, optimizer)
    with torch.no_grad():
        objective(pack([[2, 5, 3]]))
    found = moments_of(objective, optimizer)
    save_state(folder, STATE, state_tensors(objective, optimizer), world)
    return len(found) == sum(name.startswith("optimizer.") for name in before), before


def test_a_state_saved_right_after_an_evaluation_is_whole(tmp_path):
    answers = run_world(2, look_then_save, tmp_path)
    assert [found for found, _ in answers] == [True, True]
    assert load(ALONE, tmp_path, "ddp") == answers[0][1]


def find(world: World, folder: Path) -> tuple[int, int]:
    found = latest_state(folder, world)
    return found.state.step, found.world_size


def test_the_main_process_decides_for_all_which_state_is_the_latest(tmp_path):
    objective, optimizer = trained(ALONE, "ddp")
    for step in (1, 2):
        state = TrainingState(step, tokens=0, seconds=0.0)
        save_state(tmp_path, state, state_tensors(objective, optimizer), ALONE)
    (tmp_path / "step-00000002" / "state.json").write_text("{}")
    assert run_world(2, find, tmp_path) == [(1, 1), (1, 1)]


def save_on_machines_that_share_nothing(world: World, folder: Path) -> tuple[str, list[str]]:
    objective, optimizer = trained(world, "ddp")
    own = folder / f"machine-{world.rank}"
    try:
        save_state(own, STATE, state_tensors(objective, optimizer), world)
    except UserError as error:
        return error.line(), sorted(path.name for path in own.iterdir())
    return "", []


def test_machines_that_do_not_share_the_folder_are_reported_at_the_first_save(tmp_path):
    for line, left in run_world(2, save_on_machines_that_share_nothing, tmp_path):
        assert "machine-0: shard-00002.safetensors, which another process wrote, cannot be seen" in line
        assert left == []


def save_where_one_process_cannot_write(world: World, folder: Path) -> tuple[str, list[str]]:
    objective, optimizer = trained(world, "ddp")
    save_state(folder, STATE, state_tensors(objective, optimizer), world)
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        later = TrainingState(step=8, tokens=0, seconds=0.0)
        save_state(folder, later, state_tensors(objective, optimizer), world)
    except UserError as error:
        world.barrier()
        return error.line(), sorted(path.name for path in folder.iterdir())
    return "", []


def test_a_disk_that_fails_in_one_process_is_the_same_clear_error_in_all(tmp_path):
    answers = run_world(2, save_where_one_process_cannot_write, tmp_path)
    assert answers[0] == answers[1]
    line, left = answers[0]
    assert f"step-00000008: cannot be written ({os.strerror(errno.EFBIG)}); it needs " in line
    assert "the state of step 7 stays" in line
    assert left == ["step-00000007"]
