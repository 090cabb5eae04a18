"""A third job on the machinery of training: a student learns a teacher's soft answers (Hinton et al. 2015).

What such a job has of its own is its objective, its data and the loop in `distill`. The run folder with its
lock, checkpoints, the journal, stopping and resuming come from the room.
"""

import os
import signal

import pytest
import torch
from torch import nn
from torch.nn import functional

from bertsmith.core.files import read_json, write_json
from bertsmith.model.tensor_files import write_safetensors
from bertsmith.training.callbacks import StopRequested
from bertsmith.training.checkpoint import TrainingState, latest_state, load_checkpoint, save_checkpoint
from bertsmith.training.distributed import ALONE
from bertsmith.training.journal import RunJournal, read_metrics
from bertsmith.training.run_folder import RunFolder
from bertsmith.training.trainer import (
    Cadence,
    Clock,
    Due,
    Progress,
    StepInput,
    Trainer,
    training_steps,
)

STEPS, SAVE_EVERY, EVALUATE_EVERY, BATCH = 12, 4, 3, 8


class Distillation(nn.Module):
    """The divergence of a student with dropout from a frozen teacher, summed over a micro-batch."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.teacher = nn.Linear(6, 4).requires_grad_(False)
            self.student = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.2), nn.Linear(5, 4))

    def forward(self, inputs_BI, loss_scales):
        wanted_BC = self.teacher(inputs_BI).softmax(-1)
        found_BC = self.student(inputs_BI).log_softmax(-1)
        total = functional.kl_div(found_BC, wanted_BC, reduction="sum")
        return total * loss_scales[0], total.detach()[None]


def inputs_of(step):
    return torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(step))


def next_step(progress):
    """Two micro-batches; a pure function of the step, so that a resumed run sees what it would have seen."""
    if progress.step == STEPS:
        return None
    micros = inputs_of(progress.step).split(BATCH // 2)
    return StepInput(micros, (BATCH,), 0.05 * (1 - progress.step / STEPS), progress)


def folder_of(path):
    return RunFolder(path, "job.json", "student.safetensors")


def distill(path, next_step=next_step):
    """Train in a folder or resume there; True once the student is finished."""
    folder, objective = folder_of(path), Distillation()
    folder.check_no_unknown_files()
    trainer = Trainer(objective, torch.optim.AdamW(objective.student.parameters()), clip_norm=1.0, seed=3)
    with folder.locked(), StopRequested() as stop:
        write_json(folder.config, {"steps": STEPS})
        saved, progress = latest_state(folder.checkpoints), Progress()
        if saved is not None:
            load_checkpoint(saved, trainer)
            progress = saved.state.progress
        cadence = Cadence(
            stop,
            ALONE,
            ends=lambda after: after.step == STEPS,
            at_the_end=Due(evaluation=True),
            evaluates=lambda after: after.step % EVALUATE_EVERY == 0,
            saves=lambda after: after.step % SAVE_EVERY == 0,
        )
        steps = training_steps(
            trainer, next_step, progress, clock=Clock(progress.seconds), due_after=cadence.due_after
        )
        with RunJournal(folder.path, ALONE, resume_step=progress.step) as journal:
            for report in steps:
                step = report.progress.step
                journal.write("train", step, {"loss": float(report.sums[0]) / BATCH})
                if report.due.evaluation:
                    objective.eval()
                    _, sums = objective(inputs_of(-1), torch.ones(1))
                    objective.train()
                    journal.write("held-out", step, {"loss": float(sums[0]) / BATCH})
                if report.due.saving:
                    save_checkpoint(
                        folder.checkpoints, TrainingState.at(report.progress), trainer, keep_last=1
                    )
                if report.due.stopping:
                    return False
        write_safetensors(folder.path / "student.safetensors", objective.student.state_dict())
    return True


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder of a run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("distillation") / "straight"
    assert distill(folder)
    return folder


def same_results(folder, other):
    name = "student.safetensors"
    return (folder / name).read_bytes() == (other / name).read_bytes() and (
        read_metrics(folder) == read_metrics(other)
    )


def test_a_student_comes_nearer_to_its_teacher(straight):
    losses = [line["loss"] for line in read_metrics(straight) if line["kind"] == "held-out"]
    assert len(losses) == STEPS // EVALUATE_EVERY
    assert losses[-1] < losses[0]
    assert folder_of(straight).finished


@pytest.mark.parametrize("step", [0, 5, 8])
def test_a_stopped_distillation_resumes_to_the_same_bits(straight, tmp_path, step):
    def next_step_with_a_signal(progress):
        if progress.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return next_step(progress)

    assert not distill(tmp_path / "run", next_step_with_a_signal)
    assert latest_state(folder_of(tmp_path / "run").checkpoints).state.progress.step == step + 1
    assert distill(tmp_path / "run")
    assert same_results(tmp_path / "run", straight)


def test_a_killed_distillation_resumes_from_its_last_checkpoint(straight, tmp_path):
    def next_step_without_power(progress):
        if progress.step == 7:
            raise KeyboardInterrupt
        return next_step(progress)

    with pytest.raises(KeyboardInterrupt):
        distill(tmp_path / "run", next_step_without_power)
    assert latest_state(folder_of(tmp_path / "run").checkpoints).state.progress.step == SAVE_EVERY
    assert distill(tmp_path / "run")
    assert same_results(tmp_path / "run", straight)
    assert read_json(tmp_path / "run" / "job.json", remedy="") == {"steps": STEPS}
