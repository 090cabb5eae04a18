"""Fine-tuning on a GPU: whole steps are recorded and played back."""

import math
from statistics import mean

import pytest
import torch

from bertsmith.finetuning.finetuning_setup import Run
from bertsmith.training.trainer import Progress, StepInput, Trainer, take_step
from tests.toy_tasks import TOYS
from tests.tuning import quickly, set_up_run, toy_assignment, toy_model, tune

__all__ = ["quickly", "toy_model"]

pytestmark = pytest.mark.gpu

ON_GPU = ("run.device=cuda", "run.precision=bf16")
EPOCHS = {"stsb": 16}
"""Where ten are not enough for every seed."""


def run_of(name, model, place, *settings) -> Run:
    assignment = toy_assignment(name, model, place, *ON_GPU, *settings)
    return set_up_run(assignment)


def losses_of(run: Run, trainer: Trainer, *, steps: int) -> list[float]:
    losses = []
    for number in range(steps):
        items = run.batches.step(number)
        outcome = take_step(trainer, StepInput(items.micros, (items.count,), 1e-3, Progress(number)))
        losses.append(float(outcome.sums[0]) / items.count)
    return losses


@pytest.mark.parametrize("compiling", ["on", "off"])
@pytest.mark.parametrize("name", sorted(TOYS))
def test_every_toy_task_learns_its_rule_from_recorded_steps(name, model, tmp_path, compiling):
    settings = f"run.epochs={EPOCHS.get(name, 10)}", f"run.compile={compiling}"
    result = tune(name, model, tmp_path, *ON_GPU, *settings)
    assert result.metrics["dev"][toy_assignment(name, model, tmp_path).task.metrics[0]] > 0.9


@pytest.mark.parametrize(
    "setting", ["optim.algorithm=adamw", "optim.algorithm=muon", "head.encoder=lora", "run.compile=off"]
)
def test_recorded_steps_teach_what_ordinary_ones_do(model, tmp_path, setting):
    recorded, ordinary = (run_of("sst2", model, tmp_path, setting) for _ in range(2))
    trainer = ordinary.trainer
    plain = Trainer(trainer.objective, trainer.optimizer, trainer.world, "bf16", 1.0, trainer.guard)
    assert recorded.trainer.graphs is not None
    ours, theirs = losses_of(recorded, recorded.trainer, steps=60), losses_of(ordinary, plain, steps=60)
    assert recorded.trainer.graphs._recordings
    # The same seed drops the same values in both; atomic additions in the tables' gradients may differ, and
    # what they change grows from step to step.
    assert ours[:30] == pytest.approx(theirs[:30], abs=0.02)
    assert mean(ours[-5:]) < mean(ours[:5])


def test_a_recorded_step_needs_no_memory_that_others_give_back(model, tmp_path):
    losses = []
    for given_back in (False, True):
        run = run_of("sst2", model, tmp_path)
        losses_of(run, run.trainer, steps=20)
        assert run.trainer.graphs._recordings
        if given_back:  # as torch.compile does it when it records CUDA graphs
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            taken = torch.full((2**28,), math.nan, device="cuda")
        losses.append(losses_of(run, run.trainer, steps=20))
    assert taken.isnan().all()
    assert losses[1] == pytest.approx(losses[0], abs=0.02)


def test_an_epoch_needs_few_recordings(model, tmp_path):
    run = run_of("sst2", model, tmp_path)
    losses_of(run, run.trainer, steps=2 * run.batches.steps_per_epoch)
    assert 1 <= len(run.trainer.graphs._recordings) <= 4


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_a_recorded_step_whose_gradient_is_no_number_changes_nothing(model, tmp_path, algorithm):
    run = run_of("sst2", model, tmp_path, f"optim.algorithm={algorithm}")
    losses_of(run, run.trainer, steps=20)
    kept = {name: each.clone() for name, each in run.trainer.objective.named_parameters()}
    broken = next(run.trainer.objective.parameters())
    with torch.no_grad():
        broken.fill_(math.nan)
    items = run.batches.step(1)
    outcome = take_step(run.trainer, StepInput(items.micros, (items.count,), 1e-3, Progress(1)))
    assert outcome.skipped == "not a number"
    for name, each in run.trainer.objective.named_parameters():
        assert each is broken or torch.equal(each, kept[name])
