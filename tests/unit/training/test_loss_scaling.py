"""fp16's loss scale: it changes no step, steps aside where it is too large, and is saved with the run."""

from dataclasses import replace

import pytest
import torch

from bertsmith.core.errors import UserError
from bertsmith.data.collate import Multiples
from bertsmith.data.data_loader import PretrainingDataset, StepIndex
from bertsmith.model.network import new_network
from bertsmith.objectives.masked_language_modelling import MaskedLanguageModelling
from bertsmith.pretraining.hardware import fit_machine
from bertsmith.recipe.optim_section import OptimSection
from bertsmith.training.checkpoint import (
    TrainingState,
    latest_state,
    load_checkpoint,
    model_tensors,
    save_checkpoint,
)
from bertsmith.training.distributed import ALONE
from bertsmith.training.optimizers import build_optimizer
from bertsmith.training.trainer import (
    GradientGuard,
    Progress,
    StepInput,
    Trainer,
    launch_step,
    loss_scaler,
    take_step,
)
from tests.example_stores import random_store, small_recipe, with_fields
from tests.tiny import tiny_encoder_config, tiny_network
from tests.tiny_runs import tiny_recipe


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    dataset = PretrainingDataset(
        random_store(folder),
        small_recipe(),
        micro_tokens=48,
        multiples=Multiples(8, 8),
        cache=folder / "cache",
    )
    batches = dataset[StepIndex(0, 0)]
    assert len(batches.micros) > 1  # gradients of several are summed up before they are unscaled
    return StepInput(batches.micros, (batches.counts["masked"], batches.counts["pairs"]), 1e-3, Progress(0))


def trainer_of(scale: float | None, *, precision: str = "fp32", clip_norm: float | str = 0.5) -> Trainer:
    config = tiny_encoder_config(layers=2, dropout=0.0, attention_dropout=0.0)
    network = new_network(config, {"pooler": 0, "mlm": 0, "nsp": 2}, torch.Generator().manual_seed(0))
    objective = MaskedLanguageModelling(network.train(), "nsp")
    optimizer = build_optimizer(objective, OptimSection())
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    return Trainer(objective, optimizer, ALONE, precision, clip_norm, GradientGuard("off"), scaler=scaler)


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model_tensors(trainer.objective).items()}


@pytest.mark.parametrize("clip_norm", ["off", 0.5])
def test_a_scale_that_is_a_power_of_two_changes_nothing_in_a_step(step, clip_norm):
    plain, scaled = trainer_of(None, clip_norm=clip_norm), trainer_of(2.0**10, clip_norm=clip_norm)
    one, other = take_step(plain, step), take_step(scaled, step)
    assert other.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-6)
    assert torch.equal(one.sums, other.sums)
    for name, tensor in weights_of(scaled).items():
        assert torch.allclose(tensor, weights_of(plain)[name], atol=1e-6), name


def test_an_overflow_is_skipped_halves_the_scale_and_is_no_sign_of_a_broken_run(step):
    trainer = trainer_of(2.0**127)
    before = weights_of(trainer)
    report = take_step(trainer, step)
    assert report.skipped == "overflow"
    assert trainer.scaler.get_scale() == 2.0**126
    assert (report.progress.skipped, report.progress.skipped_in_a_row) == (1, 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(trainer).items())


def test_what_is_not_a_number_without_a_scale_is_called_so(step):
    trainer = trainer_of(1.0)
    broken = [
        with_fields(micro, masked_weights_P=micro["masked_weights_P"] * torch.nan) for micro in step.micros
    ]
    report = take_step(trainer, replace(step, micros=broken))
    assert (report.skipped, report.progress.skipped_in_a_row) == ("not a number", 1)


def test_the_scale_grows_again_after_steps_without_an_overflow(step):
    trainer = trainer_of(8.0)
    scales = []
    for _ in range(4):
        launch_step(trainer, step)
        scales.append(trainer.scaler.get_scale())
    assert scales == [8.0, 8.0, 16.0, 16.0]


def test_half_precision_learns_what_single_precision_does(step):
    plain, half = trainer_of(None), trainer_of(2.0**10, precision="fp16")
    for _ in range(3):
        one, other = take_step(plain, step), take_step(half, step)
    assert not other.skipped
    assert other.sums[0].item() == pytest.approx(one.sums[0].item(), rel=5e-3)


def test_a_checkpoint_holds_the_scale_and_when_it_will_grow(step, tmp_path):
    trainer = trainer_of(2.0**127)
    for _ in range(4):
        launch_step(trainer, step)
    expected = trainer.scaler.state_dict()
    save_checkpoint(tmp_path, TrainingState.at(Progress(4)), trainer, keep_last=1)
    resumed = trainer_of(2.0**16)
    load_checkpoint(latest_state(tmp_path), resumed)
    assert resumed.scaler.state_dict() == expected != trainer_of(2.0**16).scaler.state_dict()


def test_only_fp16_has_a_scale():
    cpu = torch.device("cpu")
    assert loss_scaler(cpu, "fp32") is None and loss_scaler(cpu, "bf16") is None
    assert loss_scaler(cpu, "fp16").is_enabled()


def test_fp16_on_a_cpu_is_rejected_with_what_to_take():
    with pytest.raises(UserError, match=r"run\.precision: fp16 is for a GPU; set it to auto, fp32 or bf16"):
        fit_machine(tiny_recipe("run.precision=fp16"), tiny_network(), ALONE)
