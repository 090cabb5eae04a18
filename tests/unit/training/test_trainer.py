"""One step: gradients of all its micro-batches, and nothing at all where a gradient cannot be trusted."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bertsmith.data.collate import Multiples
from bertsmith.data.data_loader import PretrainingDataset, StepBatches, StepIndex
from bertsmith.model.kernels import torch_internals
from bertsmith.model.network import new_network
from bertsmith.objectives.masked_language_modelling import MaskedLanguageModelling
from bertsmith.recipe.optim_section import OptimSection
from bertsmith.training.checkpoint import model_tensors, moments_of
from bertsmith.training.distributed import ALONE, World, accumulating
from bertsmith.training.optimizers import build_optimizer
from bertsmith.training.trainer import (
    GradientGuard,
    Progress,
    StepInput,
    StepReport,
    Trainer,
    finish_step,
    launch_step,
    take_step,
)
from tests.example_stores import random_store, small_recipe, with_fields
from tests.tiny import tiny_encoder_config

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
    dataset = PretrainingDataset(
        store, small_recipe(), micro_tokens=micro_tokens, multiples=Multiples(8, 8), cache=folder / "cache"
    )
    return dataset[StepIndex(0, 0)]


def trainer_of(
    *,
    dropout: float = 0.0,
    clip_norm: float | str = "off",
    guard: GradientGuard | None = None,
    world: World = ALONE,
    algorithm: str = "adamw",
) -> Trainer:
    config = tiny_encoder_config(layers=2, dropout=dropout, attention_dropout=dropout)
    network = new_network(config, HEADS, torch.Generator().manual_seed(0))
    objective = MaskedLanguageModelling(network.train(), "nsp")
    optimizer = build_optimizer(objective, OptimSection(algorithm=algorithm))
    return Trainer(objective, optimizer, world, "fp32", clip_norm, guard or GradientGuard("off"))


def step(trainer: Trainer, batches: StepBatches, *, rate: float = 1e-3, seed=(0, 0)) -> StepReport:
    return take_step(replace(trainer, seed=seed[0]), step_input(batches, rate=rate, step=seed[1]))


def step_input(batches: StepBatches, *, rate: float = 1e-3, step: int = 0) -> StepInput:
    return StepInput(
        batches.micros, (batches.counts["masked"], batches.counts["pairs"]), rate, Progress(step)
    )


def broken(batches: StepBatches) -> StepBatches:
    """A step whose loss is not a number."""
    (micro,) = batches.micros
    return replace(
        batches, micros=(with_fields(micro, masked_weights_P=micro["masked_weights_P"] * math.nan),)
    )


def gradients(trainer: Trainer) -> list[Tensor]:
    return [parameter.grad for parameter in trainer.parameters()]


def contents(trainer: Trainer) -> dict[str, Tensor]:
    held = model_tensors(trainer.objective) | moments_of(trainer.objective, trainer.optimizer)
    return {name: tensor.clone() for name, tensor in held.items()}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name in after if not torch.equal(before[name], after[name])}


# ---- accumulation


def test_many_micro_batches_give_the_gradient_of_the_whole_step(store, folder, batches):
    pieces = step_of(store, folder, micro_tokens=48)
    assert len(batches.micros) == 1 and len(pieces.micros) >= 4
    whole, in_pieces = trainer_of(), trainer_of()
    outcomes = step(whole, batches), step(in_pieces, pieces)
    assert (outcomes[0].sums - outcomes[1].sums).abs().max() <= 1e-4
    assert outcomes[0].sums[2:].tolist() == outcomes[1].sums[2:].tolist()  # hits are whole numbers
    for one, other in zip(gradients(whole), gradients(in_pieces), strict=True):
        assert (one - other).abs().max() <= 1e-6


def test_gradients_are_exchanged_with_the_last_micro_batch_alone(store, folder, monkeypatch):
    pieces, seen = step_of(store, folder, micro_tokens=48), []

    def spy(module: nn.Module, *, last: bool):
        seen.append(last)
        return accumulating(module, last=last)

    monkeypatch.setattr("bertsmith.training.trainer.accumulating", spy)
    step(trainer_of(), pieces)
    assert seen == [False] * (len(pieces.micros) - 1) + [True] and len(seen) >= 4


def test_the_gradient_is_of_sums_over_the_counts(batches):
    trainer = trainer_of()
    step(trainer, batches)
    found = gradients(trainer)
    fresh = trainer_of()
    (micro,) = batches.micros
    sums = fresh.objective(micro, torch.ones(2))[1]
    masked, pairs = batches.counts["masked"], batches.counts["pairs"]
    loss, _ = fresh.objective(micro, torch.tensor([1 / masked, 1 / pairs]))
    assert loss.item() == pytest.approx(sums[0].item() / masked + sums[1].item() / pairs)
    loss.backward()
    for one, other in zip(found, gradients(fresh), strict=True):
        # A step may multiply by another library.
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-8)


def test_a_loss_with_nothing_to_predict_is_skipped(batches):
    trainer = trainer_of()
    take_step(trainer, StepInput(batches.micros, (batches.counts["masked"], 0.0), 1e-3))
    head = trainer.objective.network.heads["nsp"].output
    assert head.weight.grad.abs().max() == 0


def test_ranks_weigh_their_loss_by_how_many_they_are_because_gradients_are_averaged(batches):
    alone, one_of_two = trainer_of(), trainer_of(world=replace(ALONE, size=2))
    step(alone, batches)
    step(one_of_two, batches)
    for one, other in zip(gradients(alone), gradients(one_of_two), strict=True):
        assert torch.allclose(2 * one, other, rtol=1e-5, atol=1e-8)


def test_on_arm_both_passes_of_a_step_in_fp32_multiply_by_blas(batches, monkeypatch):
    monkeypatch.setattr(torch_internals, "ON_ARM", True)
    before, seen, trainer = torch_internals.onednn_is_enabled(), [], trainer_of()
    trainer.objective.register_forward_hook(lambda *_: seen.append(torch_internals.onednn_is_enabled()))
    trainer.parameters()[0].register_hook(lambda _: seen.append(torch_internals.onednn_is_enabled()))
    torch_internals.enable_onednn(True)
    try:
        step(trainer, batches)
        assert seen == [False, False] and torch_internals.onednn_is_enabled()
    finally:
        torch_internals.enable_onednn(before)


# ---- the update


def test_the_learning_rate_is_that_of_the_step(batches):
    trainer = trainer_of()
    before = contents(trainer)
    step(trainer, batches, rate=0.0)
    assert not any(name.startswith("model.") for name in changed(before, contents(trainer)))
    step(trainer, batches, rate=1e-3)
    assert "model.network.encoder.embeddings.words.weight" in changed(before, contents(trainer))


@pytest.mark.parametrize("algorithm", ["adamw", "lamb"])
def test_gradients_are_clipped_and_the_norm_reported_is_the_one_before(batches, algorithm):
    trainer, unclipped = (trainer_of(clip_norm=limit, algorithm=algorithm) for limit in (0.25, "off"))
    outcomes = [step(each, batches) for each in (trainer, unclipped)]
    norm = outcomes[0].gradient_norm
    assert norm > 0.25 and norm == outcomes[1].gradient_norm
    # Adam's first moment is a tenth of the gradient that the update took.
    for clipped, whole in zip(first_moments(trainer), first_moments(unclipped), strict=True):
        assert torch.allclose(clipped, whole * (0.25 / norm), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("algorithm", ["adamw", "lamb"])
def test_a_gradient_within_the_norm_is_left_as_it_is(batches, algorithm):
    trainer, unclipped = (trainer_of(clip_norm=limit, algorithm=algorithm) for limit in (1e6, "off"))
    for each in (trainer, unclipped):
        step(each, batches)
    assert all(map(torch.equal, first_moments(trainer), first_moments(unclipped)))


def first_moments(trainer: Trainer) -> list[Tensor]:
    return [trainer.optimizer.state[parameter]["exp_avg"] for parameter in trainer.parameters()]


# ---- what is skipped


@pytest.mark.parametrize(("clip_norm", "algorithm"), [(1.0, "adamw"), ("off", "adamw"), (1.0, "muon")])
def test_a_gradient_that_is_no_number_changes_neither_weights_nor_moments(batches, clip_norm, algorithm):
    trainer = trainer_of(clip_norm=clip_norm, algorithm=algorithm)
    assert step(trainer, batches).skipped == ""
    before = contents(trainer)
    outcome = step(trainer, broken(batches), seed=(0, 1))
    assert outcome.skipped == "not a number"
    assert not math.isfinite(outcome.gradient_norm)
    assert changed(before, contents(trainer)) == set()
    assert step(trainer, batches, seed=(0, 2)).skipped == ""
    assert changed(before, contents(trainer))


def test_a_spike_changes_neither_weights_nor_moments(batches):
    guard = GradientGuard(2.0)
    guard.norms.extend([0.01] * 32)
    trainer = trainer_of(guard=guard)
    before = contents(trainer)
    assert step(trainer, batches).skipped == "spike"
    assert changed(before, contents(trainer)) == set()


def test_a_spike_is_more_than_so_many_times_the_median_of_what_was_used():
    guard = GradientGuard(3.0)
    guard.norms.extend([1.0] * 20 + [2.0] * 20 + [100.0])
    assert guard.check(6.01) == "spike"  # the median is 2
    assert guard.check(6.0) == ""


def test_the_first_32_norms_are_never_called_a_spike():
    guard = GradientGuard(2.0)
    assert [guard.check(norm) for norm in [1.0] * 31 + [1e6]] == [""] * 32
    assert guard.check(1e6) == "spike"


def test_a_spike_does_not_move_the_median_and_old_norms_are_forgotten():
    guard = GradientGuard(2.0)
    guard.norms.extend([1.0] * 128)
    assert [guard.check(5.0) for _ in range(200)] == ["spike"] * 200
    for _ in range(65):
        assert guard.check(1.9) == ""
    assert guard.check(3.7) == ""  # 65 of the last 128 are 1.9


def test_without_a_factor_nothing_is_a_spike():
    guard = GradientGuard("off")
    assert [guard.check(norm) for norm in [1.0] * 40 + [1e30]] == [""] * 41
    assert guard.check(math.inf) == guard.check(math.nan) == "not a number"


# ---- who has to wait for the norm

ON_GPU = replace(ALONE, device=torch.device("cuda"))


def test_a_gpu_with_adam_and_no_spike_factor_needs_no_watching():
    assert trainer_of(world=ON_GPU).runs_ahead


def test_a_cpu_is_watched():
    assert not trainer_of().runs_ahead


def test_a_spike_factor_needs_the_norm_first():
    assert not trainer_of(world=ON_GPU, guard=GradientGuard(3.0)).runs_ahead


def test_muon_needs_no_watching_either():
    assert trainer_of(world=ON_GPU, algorithm="muon").runs_ahead


def test_lamb_is_watched_for_it_would_not_leave_out_a_bad_update():
    plain = trainer_of(world=ON_GPU)
    optim = OptimSection(algorithm="lamb", bias_correction=True)
    assert not replace(plain, optimizer=build_optimizer(plain.objective, optim)).runs_ahead


def test_a_step_begun_before_older_weights_came_tells_nothing_of_them(batches):
    trainer = trainer_of()
    launched = launch_step(trainer, step_input(batches))
    assert finish_step(trainer, launched).skipped == ""
    trainer.guard.rollbacks += 1
    assert finish_step(trainer, launched).skipped == "taken back"


# ---- dropout


def sums_of(batches: StepBatches, *, seed: tuple[int, int], rank: int = 0, before: int = 0) -> list[float]:
    torch.manual_seed(before)
    torch.rand(before)
    trainer = trainer_of(dropout=0.3, world=replace(ALONE, rank=rank))
    return step(trainer, batches, seed=seed).sums.tolist()


def test_dropout_follows_from_seed_step_and_rank_alone(batches):
    known = sums_of(batches, seed=(1, 7))
    assert sums_of(batches, seed=(1, 7), before=5) == known
    others = [
        sums_of(batches, seed=(2, 7)),
        sums_of(batches, seed=(1, 8)),
        sums_of(batches, seed=(1, 7), rank=1),
    ]
    assert len({tuple(each) for each in [known, *others]}) == 4
