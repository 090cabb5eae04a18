"""One step: gradients of all its micro-batches, and nothing at all where a gradient cannot be trusted."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bertsmith.examples.feed import Feed, StepAddress, StepBatches
from bertsmith.model.family import new_network
from bertsmith.objectives.pretraining import Counts, PretrainingObjective
from bertsmith.recipe.schema import OptimSection
from bertsmith.training.checkpoint_tensors import model_tensors, moments_of
from bertsmith.training.optimizers import build_optimizer
from bertsmith.training.parallel import ALONE, World, accumulating
from bertsmith.training.steps import (
    Caution,
    Learner,
    StepOutcome,
    StepWork,
    launch_step,
    settle,
    take_step,
)
from tests.example_stores import random_store, small_recipe
from tests.tiny import tiny_shape

HEADS = {"pooler": 0, "mlm": 0, "nsp": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(scope="module")
def store(folder: Path):
    return random_store(folder)


@pytest.fixture(scope="module")
def batches(store, folder: Path) -> StepBatches:
    """A step of 8 sequences in one micro-batch."""
    return step_of(store, folder, micro_tokens=1024)


def step_of(store, folder: Path, *, micro_tokens: int) -> StepBatches:
    feed = Feed(store, small_recipe(), micro_tokens=micro_tokens, multiple=8, cache=folder / "cache")
    return feed.build(StepAddress(0, 0))


def learner_of(
    *,
    dropout: float = 0.0,
    clip_norm: float | str = "off",
    caution: Caution | None = None,
    world: World = ALONE,
    algorithm: str = "adamw",
) -> Learner:
    shape = tiny_shape(layers=2, dropout=dropout, attention_dropout=dropout)
    network = new_network(shape, HEADS, torch.Generator().manual_seed(0))
    objective = PretrainingObjective(network.train(), "nsp")
    optimizer = build_optimizer(objective, OptimSection(algorithm=algorithm))
    return Learner(objective, optimizer, world, "fp32", clip_norm, caution or Caution("off"))


def step(learner: Learner, batches: StepBatches, *, rate: float = 1e-3, seed=(0, 0)) -> StepOutcome:
    work = StepWork(batches.micros, Counts(batches.masked, batches.pairs))
    return take_step(learner, work, learning_rate=rate, seed=seed)


def broken(batches: StepBatches) -> StepBatches:
    """A step whose loss is not a number."""
    (micro,) = batches.micros
    return replace(batches, micros=(replace(micro, masked_weights_P=micro.masked_weights_P * math.nan),))


def gradients(learner: Learner) -> list[Tensor]:
    return [parameter.grad for parameter in learner.parameters()]


def contents(learner: Learner) -> dict[str, Tensor]:
    held = model_tensors(learner.objective) | moments_of(learner.objective, learner.optimizer)
    return {name: tensor.clone() for name, tensor in held.items()}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name in after if not torch.equal(before[name], after[name])}


# ---- accumulation


def test_many_micro_batches_give_the_gradient_of_the_whole_step(store, folder, batches):
    pieces = step_of(store, folder, micro_tokens=48)
    assert len(batches.micros) == 1 and len(pieces.micros) >= 4
    whole, in_pieces = learner_of(), learner_of()
    outcomes = step(whole, batches), step(in_pieces, pieces)
    assert (outcomes[0].sums - outcomes[1].sums).abs().max() <= 1e-4
    assert outcomes[0].sums[1::2].tolist() == outcomes[1].sums[1::2].tolist()  # hits are whole numbers
    for one, other in zip(gradients(whole), gradients(in_pieces), strict=True):
        assert (one - other).abs().max() <= 1e-6


def test_gradients_are_exchanged_with_the_last_micro_batch_alone(store, folder, monkeypatch):
    pieces, seen = step_of(store, folder, micro_tokens=48), []

    def spy(module: nn.Module, *, last: bool):
        seen.append(last)
        return accumulating(module, last=last)

    monkeypatch.setattr("bertsmith.training.steps.accumulating", spy)
    step(learner_of(), pieces)
    assert seen == [False] * (len(pieces.micros) - 1) + [True] and len(seen) >= 4


def test_the_gradient_is_of_sums_over_the_counts(batches):
    learner = learner_of()
    step(learner, batches)
    found = gradients(learner)
    fresh = learner_of()
    (micro,) = batches.micros
    sums = fresh.objective(micro, torch.ones(2))[1]
    loss, _ = fresh.objective(micro, torch.tensor([1 / batches.masked, 1 / batches.pairs]))
    assert loss.item() == pytest.approx(sums[0].item() / batches.masked + sums[2].item() / batches.pairs)
    loss.backward()
    for one, other in zip(found, gradients(fresh), strict=True):
        assert torch.equal(one, other)


def test_a_loss_with_nothing_to_predict_is_left_out(batches):
    learner = learner_of()
    work = StepWork(batches.micros, Counts(batches.masked, 0.0))
    take_step(learner, work, learning_rate=1e-3, seed=(0, 0))
    head = learner.objective.network.heads["nsp"].output
    assert head.weight.grad.abs().max() == 0


def test_ranks_weigh_their_loss_by_how_many_they_are_because_gradients_are_averaged(batches):
    alone, one_of_two = learner_of(), learner_of(world=replace(ALONE, size=2))
    step(alone, batches)
    step(one_of_two, batches)
    for one, other in zip(gradients(alone), gradients(one_of_two), strict=True):
        assert torch.allclose(2 * one, other, rtol=1e-5, atol=1e-8)


# ---- the update


def test_the_learning_rate_is_that_of_the_step(batches):
    learner = learner_of()
    before = contents(learner)
    step(learner, batches, rate=0.0)
    assert not any(name.startswith("model.") for name in changed(before, contents(learner)))
    step(learner, batches, rate=1e-3)
    assert "model.network.encoder.embeddings.words.weight" in changed(before, contents(learner))


@pytest.mark.parametrize("algorithm", ["adamw", "lamb"])
def test_gradients_are_clipped_and_the_norm_told_is_the_one_before(batches, algorithm):
    learner, unclipped = (learner_of(clip_norm=limit, algorithm=algorithm) for limit in (0.25, "off"))
    outcomes = [step(each, batches) for each in (learner, unclipped)]
    norm = outcomes[0].gradient_norm
    assert norm > 0.25 and norm == outcomes[1].gradient_norm
    # Adam's first moment is a tenth of the gradient that the update took.
    for clipped, whole in zip(first_moments(learner), first_moments(unclipped), strict=True):
        assert torch.allclose(clipped, whole * (0.25 / norm), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("algorithm", ["adamw", "lamb"])
def test_a_gradient_within_the_norm_is_left_as_it_is(batches, algorithm):
    learner, unclipped = (learner_of(clip_norm=limit, algorithm=algorithm) for limit in (1e6, "off"))
    for each in (learner, unclipped):
        step(each, batches)
    assert all(map(torch.equal, first_moments(learner), first_moments(unclipped)))


def first_moments(learner: Learner) -> list[Tensor]:
    return [learner.optimizer.state[parameter]["exp_avg"] for parameter in learner.parameters()]


# ---- what is skipped


@pytest.mark.parametrize("clip_norm", [1.0, "off"])
def test_a_gradient_that_is_no_number_changes_neither_weights_nor_moments(batches, clip_norm):
    learner = learner_of(clip_norm=clip_norm)
    assert step(learner, batches).skipped == ""
    before = contents(learner)
    outcome = step(learner, broken(batches), seed=(0, 1))
    assert outcome.skipped == "not a number"
    assert not math.isfinite(outcome.gradient_norm)
    assert changed(before, contents(learner)) == set()
    assert step(learner, batches, seed=(0, 2)).skipped == ""
    assert changed(before, contents(learner))


def test_a_spike_changes_neither_weights_nor_moments(batches):
    caution = Caution(2.0)
    caution.norms.extend([0.01] * 32)
    learner = learner_of(caution=caution)
    before = contents(learner)
    assert step(learner, batches).skipped == "spike"
    assert changed(before, contents(learner)) == set()


def test_a_spike_is_more_than_so_many_times_the_median_of_what_was_used():
    caution = Caution(3.0)
    caution.norms.extend([1.0] * 20 + [2.0] * 20 + [100.0])
    assert caution.judge(6.01) == "spike"  # the median is 2
    assert caution.judge(6.0) == ""


def test_the_first_32_norms_are_never_called_a_spike():
    caution = Caution(2.0)
    assert [caution.judge(norm) for norm in [1.0] * 31 + [1e6]] == [""] * 32
    assert caution.judge(1e6) == "spike"


def test_a_spike_does_not_move_the_median_and_old_norms_are_forgotten():
    caution = Caution(2.0)
    caution.norms.extend([1.0] * 128)
    assert [caution.judge(5.0) for _ in range(200)] == ["spike"] * 200
    for _ in range(65):
        assert caution.judge(1.9) == ""
    assert caution.judge(3.7) == ""  # 65 of the last 128 are 1.9


def test_without_a_factor_nothing_is_a_spike():
    caution = Caution("off")
    assert [caution.judge(norm) for norm in [1.0] * 40 + [1e30]] == [""] * 41
    assert caution.judge(math.inf) == caution.judge(math.nan) == "not a number"


# ---- who has to wait for the norm

ON_GPU = replace(ALONE, device=torch.device("cuda"))


def test_a_gpu_with_adam_and_no_spike_factor_needs_no_watching():
    assert learner_of(world=ON_GPU).unwatched


def test_a_cpu_is_watched():
    assert not learner_of().unwatched


def test_a_spike_factor_needs_the_norm_first():
    assert not learner_of(world=ON_GPU, caution=Caution(3.0)).unwatched


def test_lamb_is_watched_for_it_would_not_leave_out_a_bad_update():
    plain = learner_of(world=ON_GPU)
    optim = OptimSection(algorithm="lamb", bias_correction=True)
    assert not replace(plain, optimizer=build_optimizer(plain.objective, optim)).unwatched


def test_a_step_begun_before_older_weights_came_tells_nothing_of_them(batches):
    learner = learner_of()
    work = StepWork(batches.micros, Counts(batches.masked, batches.pairs))
    launched = launch_step(learner, work, learning_rate=1e-3, seed=(0, 0))
    assert settle(learner, launched).skipped == ""
    learner.caution.retakes += 1
    assert settle(learner, launched).skipped == "taken back"


# ---- dropout


def sums_of(batches: StepBatches, *, seed: tuple[int, int], rank: int = 0, before: int = 0) -> list[float]:
    torch.manual_seed(before)
    torch.rand(before)
    learner = learner_of(dropout=0.3, world=replace(ALONE, rank=rank))
    return step(learner, batches, seed=seed).sums.tolist()


def test_dropout_follows_from_seed_step_and_rank_alone(batches):
    known = sums_of(batches, seed=(1, 7))
    assert sums_of(batches, seed=(1, 7), before=5) == known
    others = [
        sums_of(batches, seed=(2, 7)),
        sums_of(batches, seed=(1, 8)),
        sums_of(batches, seed=(1, 7), rank=1),
    ]
    assert len({tuple(each) for each in [known, *others]}) == 4
