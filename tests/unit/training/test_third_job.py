"""A third job on the frame of training: a student learns a teacher's soft answers (Hinton et al. 2015).

What such a job has of its own is its objective, its data, its evaluation and its results. The story of a run,
with its folder and lock, checkpoints, journal, stopping and resuming, comes from `training/job.py`.
"""

import os
import signal
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from bertsmith.core.errors import UserError
from bertsmith.core.files import read_json, write_json
from bertsmith.model.folder.tensor_files import write_safetensors
from bertsmith.training.budget import Steps
from bertsmith.training.callbacks import SilentCallback
from bertsmith.training.checkpoint import latest_state
from bertsmith.training.distributed import ALONE
from bertsmith.training.job import Cadence, Job, run_job
from bertsmith.training.journal import read_metrics
from bertsmith.training.run_folder import RunFolder
from bertsmith.training.trainer import StepInput, Trainer

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


class LastLoss:
    """A line of metrics for each step."""

    def add(self, report):
        self.loss = float(report.sums[0]) / BATCH

    def line(self, report):
        return {"loss": self.loss}

    def scalars(self):
        return {}

    def restore(self, saved):
        pass


class UnseenLoss(LastLoss):
    """The loss on inputs that no step has, without dropout."""

    due = False

    def __init__(self, objective):
        self.objective = objective

    def is_due_after(self, at):
        return at.step % EVALUATE_EVERY == 0

    def evaluate(self, at, journal, *, last):
        self.objective.eval()
        _, sums = self.objective(inputs_of(-1), torch.ones(1))
        self.objective.train()
        self.found = float(sums[0]) / BATCH
        journal.write("held-out", at.step, {"loss": self.found})
        return {"unseen": self.found}


@dataclass(frozen=True)
class Request:
    path: Path
    next_step: object = next_step
    keeps_state: bool = True

    @cached_property
    def folder(self):
        return RunFolder(self.path, "job.json", "result.json")

    def check_same_run(self):
        self.folder.check_no_unknown_files()

    def goes_on(self):
        return False

    def build(self, start):
        objective = Distillation()
        optimizer = torch.optim.AdamW(objective.student.parameters())
        evaluation = UnseenLoss(objective)

        def finish(at, seconds, journal):
            write_safetensors(self.path / "student.safetensors", objective.student.state_dict())
            return {"metrics": {"unseen": {"loss": evaluation.found}}}

        return Job(
            Trainer(objective, optimizer, clip_norm=1.0, seed=3),
            Steps(STEPS),
            Cadence(log_every_steps=1, save_every_seconds=1e9, save_every_steps=SAVE_EVERY),
            lambda at: nullcontext(self.next_step),
            LastLoss(),
            evaluation,
            SimpleNamespace(finish=finish, stop=lambda *_: {}),
            begin=partial(write_json, self.folder.config, {"steps": STEPS}),
        )


def distill(path, next_step=next_step):
    """Train in a folder or resume there; return the end."""
    return run_job(Request(path, next_step), ALONE, SilentCallback())


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder of a run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("distillation") / "straight"
    assert distill(folder).kind == "finished"
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


def test_the_result_file_tells_the_end_the_work_and_the_machine(straight):
    result = read_json(straight / "result.json", remedy="")
    last = read_metrics(straight)[-1]
    assert (result["ending"], result["steps"], last["step"]) == ("finished", STEPS, STEPS)
    assert result["metrics"] == {"unseen": {"loss": last["loss"]}}
    assert result["seconds"] > 0 and len(result["source"]) == 64 and result["machine"]["threads"] > 0


def test_a_finished_run_is_not_done_again(straight):
    before = {file: file.stat().st_mtime_ns for file in straight.rglob("*")}
    again = distill(straight, next_step=None)
    assert again.before and again.result == read_json(straight / "result.json", remedy="")
    assert {file: file.stat().st_mtime_ns for file in straight.rglob("*")} == before


@pytest.mark.parametrize("step", [0, 5, 8])
def test_a_stopped_distillation_resumes_to_the_same_bits(straight, tmp_path, step):
    def next_step_with_a_signal(progress):
        if progress.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return next_step(progress)

    stopped = distill(tmp_path / "run", next_step_with_a_signal)
    assert (stopped.kind, stopped.saved_step) == ("stopped", step + 1)
    assert latest_state(tmp_path / "run" / "checkpoints").state.progress.step == step + 1
    assert distill(tmp_path / "run").kind == "finished"
    assert same_results(tmp_path / "run", straight)


def test_a_killed_distillation_resumes_from_its_last_checkpoint(straight, tmp_path):
    def next_step_without_power(progress):
        if progress.step == 7:
            raise KeyboardInterrupt
        return next_step(progress)

    with pytest.raises(KeyboardInterrupt):
        distill(tmp_path / "run", next_step_without_power)
    assert latest_state(tmp_path / "run" / "checkpoints").state.progress.step == SAVE_EVERY
    assert distill(tmp_path / "run").kind == "finished"
    assert same_results(tmp_path / "run", straight)
    assert read_json(tmp_path / "run" / "job.json", remedy="") == {"steps": STEPS}


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "letter.txt").write_text("dear reader")
    with pytest.raises(UserError, match="contains files, but not a run"):
        distill(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["letter.txt"]


@pytest.mark.parametrize("step", [4, STEPS - 1])
def test_a_run_that_cannot_roll_back_is_saved_after_a_skipped_step(tmp_path, step):
    def next_step_without_a_gradient(progress):
        given = next_step(progress)
        if progress.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
            return replace(given, micros=tuple(each * torch.nan for each in given.micros))
        return given

    distill(tmp_path / "run", next_step_without_a_gradient)
    assert latest_state(tmp_path / "run" / "checkpoints").state.progress.step == step + 1


@dataclass(frozen=True)
class AskedRequest(Request):
    """A request that notes each time it is asked whether a finished run goes on."""

    asked: list = field(default_factory=list)

    def goes_on(self):
        self.asked.append(self.folder.config.exists())
        return False


def test_processes_ask_whether_a_run_goes_on_only_before_one_of_them_can_have_begun_it(tmp_path):
    request = AskedRequest(tmp_path / "run")
    assert run_job(request, ALONE, SilentCallback()).kind == "finished"
    # Before the lock and under it; a third answer could differ in a process that is late.
    assert request.asked == [False, False]
