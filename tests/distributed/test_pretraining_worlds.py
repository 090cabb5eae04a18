"""Pre-training in two processes, started as torchrun starts them, is pre-training in one."""

import fcntl
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file

from bertsmith.core.errors import UserError
from bertsmith.corpus.token_store import TokenStore
from bertsmith.training.checkpoint_storage import saved_steps
from tests.tiny_runs import Listener, differing, metrics_of, run_tiny, stop_at, tiny_store, without_pictures
from tests.worlds import as_torchrun, meeting, run_processes

EXACT = 1e-5
STOPPED_AFTER = 4
# Five sequences a step: one process has two of them, the other three. All held-out sequences are looked at.
SETTINGS = ("model.dropout=0", "model.attention_dropout=0", "batch.sequences=5", "run.log_every_steps=1")
SETTINGS += ("run.evaluation_sequences=1000", "run.evaluate_every_steps=4", "optim.warmup_fraction=0.2")
SETTINGS += ("run.average_from=0.3",)  # the evaluations between steps then exchange all weights
ELECTRA = ("model.type=electra", "model.embedding_width=16", "examples.pairs=none")
ELECTRA += ("examples.objective=replaced", "replaced.generator_size=0.5")

ELMO = ("model.dropout=0", "model.type=elmo", "model.segments=0", "model.cell=48", "model.heads=12")
ELMO += ("model.inner=3072", "examples.objective=two-directions", "examples.pairs=full-sentences")


@dataclass(frozen=True)
class Start:
    """One start of a run in both processes."""

    out: Path
    overrides: tuple[str, ...]
    port: int
    stops: bool = False
    """Whether the second process, and only that one, is asked to stop during the fourth step."""


@dataclass(frozen=True)
class Runs:
    """The folders of finished runs, and what each process said about each start."""

    alone: Path
    ddp: Path
    fsdp: Path
    from_one_to_two: Path
    from_two_to_one: Path
    answers: list[list[tuple[str, int, bool, int]]]


def take_part(rank: int, store: Path, starts: list[Start]) -> list[tuple[str, int, bool, int]]:
    """State, steps, whether it is the main process, and how many remarks it made, for each start."""
    with without_pictures():
        return [_started(rank, TokenStore.open(store), start) for start in starts]


def _started(rank: int, store: TokenStore, start: Start) -> tuple[str, int, bool, int]:
    as_torchrun(rank, start.port)
    listener = Listener()
    with stop_at(STOPPED_AFTER - 1 if start.stops and rank == 1 else -1):
        result = run_tiny(store, start.out, *start.overrides, listener=listener)
    return result.state, result.steps, result.main_process, len(listener.notes)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, full: bool) -> Runs:
    folder = tmp_path_factory.mktemp("worlds")
    store = tiny_store(folder)
    settings = (*SETTINGS, f"run.steps={50 if full else 10}")
    with without_pictures():
        run_tiny(store, folder / "alone", *settings)
        with stop_at(STOPPED_AFTER - 1):
            run_tiny(store, folder / "from-1-to-2", *settings)
        starts = [
            Start(folder / "ddp", settings, meeting()),
            Start(folder / "fsdp", (*settings, "run.parallel=fsdp"), meeting()),
            Start(folder / "from-1-to-2", settings, meeting()),
            Start(folder / "from-2-to-1", (*settings, "run.parallel=fsdp"), meeting(), stops=True),
        ]
        answers = run_processes(2, take_part, store.folder, starts)
        run_tiny(store, folder / "from-2-to-1", *settings)
    return Runs(*(folder / name for name in ("alone", "ddp", "fsdp", "from-1-to-2", "from-2-to-1")), answers)


def assert_same_learning(ours: Path, theirs: Path) -> None:
    """The same examples at every step, and the same losses and norms but for rounding."""
    assert len(metrics_of(ours)) == len(metrics_of(theirs)) > 3
    for one, other in zip(metrics_of(ours), metrics_of(theirs), strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            if "loss" in name or name in ("gradient_norm", "fixed_bits_per_character"):
                assert value == pytest.approx(other[name], abs=EXACT), (one["step"], name)
            elif "perplexity" in name:
                assert value == pytest.approx(other[name], rel=EXACT), (one["step"], name)
            else:
                assert value == other[name], (one["step"], name)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_processes_learn_what_one_does(runs, how):
    assert_same_learning(getattr(runs, how), runs.alone)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_processes_write_the_model_that_one_does(runs, how):
    ours, theirs = (
        load_file(run / "model" / "model.safetensors") for run in (getattr(runs, how), runs.alone)
    )
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) <= 1e-4


def test_two_processes_go_on_from_what_one_began(runs):
    assert_same_learning(runs.from_one_to_two, runs.alone)


def test_one_process_resumes_from_what_two_began(runs):
    assert_same_learning(runs.from_two_to_one, runs.alone)


def test_two_processes_learn_to_find_replaced_tokens_as_one_does(tmp_path):
    store, settings = tiny_store(tmp_path), (*SETTINGS, *ELECTRA, "run.steps=4")
    with without_pictures():
        run_tiny(store, tmp_path / "alone", *settings)
    starts = [Start(tmp_path / how, (*settings, f"run.parallel={how}"), meeting()) for how in ("ddp", "fsdp")]
    run_processes(2, take_part, store.folder, starts)
    for how in ("ddp", "fsdp"):
        assert_same_learning(tmp_path / how, tmp_path / "alone")
        for folder in ("model", "model/generator"):
            ours, theirs = (
                load_file(tmp_path / run / folder / "model.safetensors") for run in (how, "alone")
            )
            assert ours.keys() == theirs.keys()
            assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) <= 1e-4


def test_two_processes_train_lstms_as_one_does(tmp_path):
    others = tuple(each for each in SETTINGS if "attention" not in each)
    store, settings = tiny_store(tmp_path), (*others, *ELMO, "run.steps=4")
    with without_pictures():
        run_tiny(store, tmp_path / "alone", *settings)
    starts = [Start(tmp_path / how, (*settings, f"run.parallel={how}"), meeting()) for how in ("ddp", "fsdp")]
    run_processes(2, take_part, store.folder, starts)
    assert_same_learning(tmp_path / "ddp", tmp_path / "alone")
    assert_same_learning(tmp_path / "fsdp", tmp_path / "alone")


def test_shards_of_layers_that_share_a_part_learn_what_one_process_does(tmp_path):
    store = tiny_store(tmp_path)
    settings = (
        *SETTINGS,
        "model.type=albert",
        "examples.pairs=none",
        "model.sharing=attention",
        "run.steps=3",
    )
    with without_pictures():
        run_tiny(store, tmp_path / "alone", *settings)
    start = Start(tmp_path / "fsdp", (*settings, "run.parallel=fsdp"), meeting())
    run_processes(2, take_part, store.folder, [start])
    assert_same_learning(tmp_path / "fsdp", tmp_path / "alone")


def test_a_wish_to_stop_that_one_process_hears_stops_both(runs):
    assert [of_rank[3][:2] for of_rank in runs.answers] == [("stopped", STOPPED_AFTER)] * 2
    assert STOPPED_AFTER not in saved_steps(runs.alone / "checkpoints")
    assert STOPPED_AFTER in saved_steps(runs.from_two_to_one / "checkpoints")


def test_the_main_process_alone_speaks(runs):
    first, second = runs.answers
    assert [main for _, _, main, _ in first] == [True] * 4 and all(count for *_, count in first)
    assert [(main, count) for _, _, main, count in second] == [(False, 0)] * 4


def test_two_processes_go_on_to_the_bit_with_dropout(tmp_path):
    store = tiny_store(tmp_path)
    settings = ("run.steps=6",)
    starts = [
        Start(tmp_path / "straight", settings, meeting()),
        Start(tmp_path / "run", settings, meeting(), stops=True),
        Start(tmp_path / "run", settings, meeting()),
    ]
    run_processes(2, take_part, store.folder, starts)
    straight, run = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("straight", "run")
    )
    assert differing(straight, run) == []
    assert_same_learning(tmp_path / "run", tmp_path / "straight")  # the line of step 6 spans both starts


def refused(rank: int, store: Path, start: Start) -> str | int:
    """What a process is told, or with which code it ends without a word."""
    try:
        take_part(rank, store, [start])
    except UserError as error:
        return error.what
    except SystemExit as ending:
        return int(ending.code)
    return "it ran"


def test_what_the_main_process_rejects_ends_the_other_without_a_word(tmp_path):
    store, out = tiny_store(tmp_path), tmp_path / "run"
    out.mkdir()
    with (out / ".lock").open("w") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        start = Start(out, ("run.steps=1",), meeting())
        assert run_processes(2, refused, store.folder, start) == ["another run is using this folder", 2]


def looked_at(run: Path) -> list[tuple[int, float, float]]:
    lines = metrics_of(run, "held-out")
    return [
        (line["sequences"], line["pair_majority"], pytest.approx(line["token_loss"], abs=EXACT))
        for line in lines
    ]


def test_as_many_held_out_sequences_as_asked_for_and_the_same_ones_for_any_number_of_processes(tmp_path):
    store = tiny_store(tmp_path)
    settings = (*SETTINGS, "run.steps=2", "run.evaluation_sequences=7")
    with without_pictures():
        run_tiny(store, tmp_path / "alone", *settings)
    run_processes(2, take_part, store.folder, [Start(tmp_path / "two", settings, meeting())])
    assert looked_at(tmp_path / "two") == looked_at(tmp_path / "alone")
    assert looked_at(tmp_path / "two")[0][0] == 7
