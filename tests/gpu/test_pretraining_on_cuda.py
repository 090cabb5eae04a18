"""The pre-training job on a GPU: compiled, in bf16, fed by loader processes."""

import gc
import math
import multiprocessing
from dataclasses import dataclass

import pytest
import torch

from bertsmith.pretraining.pretraining_parts import StepLoader
from bertsmith.training import background_saving
from bertsmith.training.checkpoint import TrainingState, latest_state, load_checkpoint, save_checkpoint
from bertsmith.training.distributed import start_world
from bertsmith.training.journal import read_metrics
from bertsmith.training.trainer import Progress, same_bits, take_step
from tests.compile_counter import counters
from tests.tiny_runs import (
    BeforeSteps,
    Listener,
    ask_to_stop,
    differing,
    last_scalars,
    last_state,
    metrics_of,
    run_tiny,
    saving_threads,
    set_up_tiny,
    state_of,
    stop_at,
    tiny_store,
)

pytestmark = pytest.mark.gpu

ON_GPU = ("run.device=cuda", "model.width=128", "model.heads=2", "model.inner=256", "run.loader_workers=2")
ELECTRA = ("model.type=electra", "model.embedding_width=64", "examples.pairs=none")
ELECTRA += ("examples.objective=replaced", "replaced.generator_size=0.5")
REPLACED_PAIRS = ("model.type=modernbert", "model.segments=0", "examples.pairs=nsp")
REPLACED_PAIRS += ("examples.objective=replaced", "replaced.generator_size=0.5")
GPT = ("model.type=gpt2", "model.segments=0", "model.activation=gelu_new", "examples.pairs=full-sentences")
GPT += ("examples.objective=left-to-right",)
ELMO = ("model.type=elmo", "model.segments=0", "model.cell=96", "model.heads=12", "model.inner=3072")
ELMO += ("examples.objective=two-directions", "examples.pairs=full-sentences")
each_objective = pytest.mark.parametrize(
    "objective",
    [(), ELECTRA, REPLACED_PAIRS, GPT],
    ids=["masked", "replaced", "replaced with pairs", "left-to-right"],
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tiny_store(tmp_path_factory.mktemp("store"))


@each_objective
def test_a_compiled_run_in_bf16_learns_and_compiles_once_for_both_lengths(store, tmp_path, objective):
    torch.compiler.reset()
    counters.clear()
    settings = ("run.steps=60", "batch.sequences=16", "optim.peak_lr=3e-3")
    run_tiny(store, tmp_path / "run", *ON_GPU, *objective, *settings)
    losses = [line["token_loss"] for line in read_metrics(tmp_path / "run") if line["kind"] == "held-out"]
    assert losses[-1] < losses[0] - 0.5
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["recompiles"]


def test_an_elmo_in_bf16_learns_and_stays_near_fp32(store, tmp_path):
    settings = (*ON_GPU, *ELMO, "run.steps=40", "batch.sequences=16", "optim.peak_lr=1e-2")
    losses = {}
    for precision in ("bf16", "fp32"):
        run_tiny(store, tmp_path / precision, *settings, f"run.precision={precision}")
        losses[precision] = [line["token_loss"] for line in metrics_of(tmp_path / precision, "held-out")]
    assert losses["bf16"][-1] < losses["bf16"][0] - 0.3
    # Rounding grows from step to step at this rate: 9 % apart in the steepest part, 3 % at the end.
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.15)


def test_no_process_that_builds_batches_outlives_its_run(store, tmp_path):
    gc.disable()
    try:
        run_tiny(store, tmp_path / "run", *ON_GPU, "run.steps=8")
        assert not multiprocessing.active_children()
    finally:
        gc.enable()


@each_objective
def test_with_deterministic_algorithms_a_run_gives_the_same_bits_again(store, tmp_path, objective):
    settings = (*ON_GPU, *objective, "run.steps=8", "run.deterministic=on", "run.compile=off")
    one, other = (run_tiny(store, tmp_path / name, *settings).folder for name in ("one", "other"))
    assert metrics_of(one) == metrics_of(other)
    assert not differing(last_state(one), last_state(other))


def test_bf16_stays_near_fp32(store, tmp_path):
    common = (*ON_GPU, "run.steps=20", "model.dropout=0", "model.attention_dropout=0", "run.compile=off")
    losses = []
    for precision in ("fp32", "bf16"):
        run_tiny(store, tmp_path / precision, *common, f"run.precision={precision}")
        lines = read_metrics(tmp_path / precision)
        losses.append([line["loss"] for line in lines if line["kind"] == "train"])
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize("compiled", ["off", "on"])
def test_fp16_with_its_loss_scale_stays_near_fp32_and_resumes_with_it(store, tmp_path, compiled):
    common = (
        *ON_GPU,
        "run.steps=20",
        "model.dropout=0",
        "model.attention_dropout=0",
        f"run.compile={compiled}",
    )
    run_tiny(store, tmp_path / "fp32", *common, "run.precision=fp32")
    fp16 = (*common, "run.precision=fp16")
    with stop_at(9):
        assert run_tiny(store, tmp_path / "fp16", *fp16).state == "stopped"
    stopped = last_scalars(tmp_path / "fp16")["loss_scaler"]
    run_tiny(store, tmp_path / "fp16", *fp16)
    finished = last_scalars(tmp_path / "fp16")["loss_scaler"]
    # Ten more steps without an overflow, or a smaller scale: one that began anew would have seen just ten.
    assert finished["_growth_tracker"] > 10 or finished["scale"] < stopped["scale"]
    losses = [metrics_of(tmp_path / name, "held-out")[-1]["loss"] for name in ("fp32", "fp16")]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_recomputing_gives_the_same_losses_with_less_memory(store, tmp_path):
    common = (*ON_GPU, "run.steps=6", "model.layers=8", "run.compile=off", "batch.sequences=64")
    losses, peaks = [], []
    for recompute in ("false", "true"):
        gc.collect()  # what other tests left behind would hide the difference
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run_tiny(store, tmp_path / recompute, *common, f"run.recompute={recompute}")
        peaks.append(torch.cuda.max_memory_allocated() - before)
        lines = read_metrics(tmp_path / recompute)
        losses.append([line["loss"] for line in lines if line["kind"] == "train"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert peaks[1] < 0.8 * peaks[0]


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_a_gradient_that_is_no_number_is_skipped_by_the_gpu_itself(store, tmp_path, algorithm):
    kept: dict[str, torch.Tensor] = {}

    def act(objective, seen):
        bias = objective.network.heads["nsp"].output.bias
        with torch.no_grad():
            if seen == 4:
                kept.update({name: each.clone() for name, each in objective.named_parameters()})
                bias.fill_(math.nan)
            elif seen == 5:
                bias.copy_(kept["network.heads.nsp.output.bias"])
                assert not differing(kept, dict(objective.named_parameters()))

    settings = (*ON_GPU, "run.steps=12", "run.compile=off", "run.loader_workers=0")
    settings += (f"optim.algorithm={algorithm}",)
    run = set_up_tiny(store, tmp_path / "look", *settings, world=start_world("cuda"))
    assert run.trainer.runs_ahead
    with BeforeSteps(act):
        run_tiny(store, tmp_path / "run", *settings)
    skipped = [
        line["step"] for line in read_metrics(tmp_path / "run") if line.get("skipped") == "not a number"
    ]
    assert kept and skipped == [5]
    assert all(tensor.isfinite().all() for tensor in last_state(tmp_path / "run").values())


def test_a_run_whose_weights_break_takes_the_saved_ones_again(store, tmp_path):
    def act(objective, seen):
        if seen == 5:
            with torch.no_grad():
                objective.network.encoder.embeddings.words.weight[3, 3] = math.nan

    settings = (*ON_GPU, "run.steps=12", "run.compile=off", "run.save_every_steps=4", "run.rollback_after=1")
    with BeforeSteps(act):
        assert run_tiny(store, tmp_path / "run", *settings).state == "finished"
    events = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "event"]
    told = [(line["step"], line.get("skipped", line.get("rolled_back_to"))) for line in events[:-1]]
    assert told == [(6, "not a number"), (6, 4), (7, "taken back")]


@each_objective
def test_recorded_steps_teach_what_ordinary_ones_do(store, tmp_path, objective):
    common = (*ON_GPU, *objective, "run.steps=24", "batch.sequences=32", "run.log_every_steps=1")
    # At a rate that learns steadily: rounding grows from step to step where the loss jumps.
    common += ("optim.peak_lr=1e-4",)
    losses = {}
    # A rule for spikes reads each gradient norm back, so that nothing is recorded.
    for name, settings in {"recorded": (), "ordinary": ("run.spike_factor=1e9",)}.items():
        place = tmp_path / f"look-{name}"
        run = set_up_tiny(store, place, *common, *settings, world=start_world("cuda"))
        assert (run.trainer.graphs is not None) == run.machine.recorded == (name == "recorded")
        run_tiny(store, tmp_path / name, *common, *settings)
        losses[name] = [line["loss"] for line in metrics_of(tmp_path / name, "train")]
    assert len(losses["recorded"]) == 24
    assert losses["recorded"] == pytest.approx(losses["ordinary"], rel=0.01)


@dataclass
class StopAt(Listener):
    """Asks the run to stop when it is told of this many lines of metrics."""

    count: int = 0

    def on_step(self, progress, values):
        super().on_step(progress, values)
        if len(self.lines) == self.count:
            ask_to_stop()


def test_a_recorded_run_resumes_with_the_same_bits(store, tmp_path):
    settings = (*ON_GPU, "run.steps=30", "batch.sequences=32", "run.deterministic=on")
    run_tiny(store, tmp_path / "whole", *settings)
    # A recorded step calls no forward that could be hooked; the fourth line of metrics is that of step 12.
    assert run_tiny(store, tmp_path / "parts", *settings, listener=StopAt(count=4)).state == "stopped"
    run_tiny(store, tmp_path / "parts", *settings)
    assert not differing(last_state(tmp_path / "whole"), last_state(tmp_path / "parts"))


def test_states_saved_beside_recorded_steps_are_those_of_their_own_steps(store, tmp_path, monkeypatch):
    settings = (*ON_GPU, "run.steps=40", "batch.sequences=32", "run.deterministic=on")
    settings += ("run.save_every_steps=1", "run.keep_last=99")
    with saving_threads() as threads:
        run_tiny(store, tmp_path / "beside", *settings)
    assert threads == ["saving"] * 40
    monkeypatch.setattr(background_saving, "room_for_copies", lambda *_: False)
    run_tiny(store, tmp_path / "before", *settings)
    for step in range(1, 41):
        assert differing(*(state_of(tmp_path / run, step) for run in ("beside", "before"))) == []


def test_recordings_are_made_anew_when_saved_weights_come_back(store, tmp_path):
    settings = (*ON_GPU, "run.steps=40", "batch.sequences=32", "run.deterministic=on", "run.loader_workers=0")
    run = set_up_tiny(store, tmp_path / "run", *settings, world=start_world("cuda"))
    loader, progress, inputs = StepLoader(run), Progress(), []
    for _ in range(16):
        inputs.append(loader(progress))
        progress = progress.after(tokens=inputs[-1].tokens, seconds=0.0)

    def weights_after(steps):
        for step in steps:
            assert not take_step(run.trainer, step).skipped
        return {name: each.detach().clone() for name, each in run.objective.named_parameters()}

    with same_bits(True):
        weights_after(inputs[:8])
    graphs = run.trainer.graphs
    assert graphs is not None and graphs._recordings
    save_checkpoint(tmp_path / "saved", TrainingState(8, 0, 0.0, {}), run.trainer, keep_last=1)
    with same_bits(True):
        once = weights_after(inputs[8:])
        saved = latest_state(tmp_path / "saved")
        assert saved is not None
        load_checkpoint(saved, run.trainer)
        assert not graphs._recordings
        assert not differing(once, weights_after(inputs[8:]))
