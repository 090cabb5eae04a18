"""A grid of pre-training runs: its folders, its table, and what is ended early."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from bertsmith.cli.pretrain import pretrain
from bertsmith.cli.verb import App
from bertsmith.core.errors import UserError
from bertsmith.corpus.token_store import TokenStore
from bertsmith.objectives.registry import declaration
from bertsmith.pretraining.pretrain import PretrainingResult
from bertsmith.studies.sweep import draw_sweep, name_of, points_of, ranking
from tests.tiny_runs import TINY, metrics_of, stop_at, tiny_recipe, tiny_store

app = App()
app.command()(pretrain)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return tiny_store(tmp_path_factory.mktemp("tiny"))


def sweep(store: TokenStore, out: Path, *arguments: str) -> Result:
    settings = [part for override in TINY for part in ("--set", override)]
    words = ["bert-tiny", "--store", str(store.folder), "--out", str(out), *settings, *arguments]
    return CliRunner().invoke(app, words, catch_exceptions=False)


DECLARED = declaration(tiny_recipe())


def outcome(name: str, loss: float | None = None, **ends: str) -> PretrainingResult:
    held_out = {} if loss is None else {DECLARED.deciding.name: loss}
    return PretrainingResult(Path(name), "finished", DECLARED, held_out=held_out, **ends)


def test_several_keys_make_a_grid():
    points = points_of(["optim.peak_lr=1e-3, 2e-3", "masking.rate=0.15,0.3"])
    assert [name_of(point) for point in points] == [
        "peak_lr-1e-3_rate-0.15",
        "peak_lr-1e-3_rate-0.3",
        "peak_lr-2e-3_rate-0.15",
        "peak_lr-2e-3_rate-0.3",
    ]


@pytest.mark.parametrize("text", ["optim.peak_lr", "=1e-3", "optim.peak_lr=", "optim.peak_lr=1e-3,,2e-3"])
def test_a_sweep_without_values_is_rejected(text):
    with pytest.raises(UserError, match="^sweep: .*write a key and its values"):
        points_of([text])
    with pytest.raises(UserError, match="has a value twice"):
        points_of(["optim.peak_lr=1e-3,1e-3"])


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ("optim.peak_lr=1e-3,fast", '^--sweep: optim.peak_lr = "fast" is invalid'),
        ("optim.peek_lr=1e-3", "^--sweep: unknown key optim.peek_lr"),
        ("run.seed=[1", r"^--sweep: \[1 is not valid TOML"),
    ],
)
def test_a_wrong_value_is_told_of_the_sweep(store, tmp_path, values, what):
    with pytest.raises(UserError, match=what):
        sweep(store, tmp_path / "out", "--set", "optim.peak_lr=1e-4", "--sweep", values)
    assert not (tmp_path / "out").exists()


def test_the_smallest_loss_comes_first_then_what_was_ended_early_then_what_failed():
    outcomes = [
        outcome("a", 4.0),
        outcome("f", failure="diverged"),
        outcome("b", 3.0, early_end="flat"),
        outcome("c", 3.5),
        outcome("d"),
    ]
    metric = DECLARED.deciding
    assert [each.folder.name for each in ranking(outcomes, metric)] == ["c", "a", "d", "b", "f"]
    larger = replace(metric, larger_is_better=True)
    assert [each.folder.name for each in ranking(outcomes, larger)] == ["a", "c", "d", "b", "f"]


def test_a_sweep_runs_each_value_in_its_folder_and_ranks_them(store, tmp_path):
    arguments = ("--steps", "4", "--sweep", "optim.peak_lr=1e-6,3e-3")
    with stop_at(1):
        stopped = sweep(store, tmp_path / "out", *arguments)
    assert stopped.exit_code == 130 and "stopped in peak_lr-1e-6" in stopped.stdout
    with stop_at(1):  # the last step of the run: the next one is not begun
        stopped = sweep(store, tmp_path / "out", *arguments)
    assert stopped.exit_code == 130 and "resumes from step 2" in stopped.stdout
    assert (tmp_path / "out" / "peak_lr-1e-6" / "model").is_dir()
    assert not (tmp_path / "out" / "peak_lr-3e-3").exists()
    result = sweep(store, tmp_path / "out", *arguments)
    assert result.exit_code == 0
    losses = {}
    for rate in ("1e-6", "3e-3"):
        folder = tmp_path / "out" / f"peak_lr-{rate}"
        assert (folder / "model" / "config.json").is_file()
        losses[rate] = metrics_of(folder, "held-out")[-1]["fixed_token_loss"]
    assert losses["3e-3"] < losses["1e-6"]
    table = [line.split() for line in result.stdout.splitlines() if line.startswith("peak_lr-")]
    assert [(row[0], row[2]) for row in table] == [
        (f"peak_lr-{each}", f"{losses[each]:.4f}") for each in ("3e-3", "1e-6")
    ]
    assert f"best: peak_lr-3e-3 ({tmp_path / 'out' / 'peak_lr-3e-3' / 'model'})" in result.stdout
    written = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert (written["metric"], [run["name"] for run in written["runs"]]) == (
        "fixed_token_loss",
        ["peak_lr-3e-3", "peak_lr-1e-6"],
    )
    with pytest.raises(UserError, match="contains another run"):
        sweep(store, tmp_path / "out", *arguments, "--set", "run.seed=3")
    with pytest.raises(UserError, match="contains a single run"):
        sweep(store, tmp_path / "out" / "peak_lr-1e-6", *arguments)


def test_a_hopeless_run_is_ended_early_and_not_begun_again(store, tmp_path):
    flat = ("--set", "run.log_every_steps=2", "--set", "run.evaluate_every_steps=60")
    arguments = ("--steps", "60", *flat, "--sweep", "optim.peak_lr=3.0", "--json")
    first, again = (
        json.loads(sweep(store, tmp_path / "out", *arguments).stdout.splitlines()[-1]) for _ in range(2)
    )
    assert first == again and first["best"] == ""
    (run,) = first["runs"]
    assert "the unigram line" in run["early_end"] and run["steps"] < 60


def test_a_sweep_says_first_why_a_run_may_end_early(store, tmp_path):
    with stop_at(1):
        told = sweep(store, tmp_path / "out", "--steps", "2", "--sweep", "optim.peak_lr=1e-3").stdout
    assert "a run at the unigram line ends early\n" in told.partition("[1/1]")[0]


def test_a_run_that_diverges_is_a_row_and_ends_no_other(store, tmp_path):
    arguments = ("--steps", "4", "--sweep", "optim.peak_lr=1e30,1e-3", "--json")
    found = json.loads(sweep(store, tmp_path / "out", *arguments).stdout.splitlines()[-1])
    assert [run["name"] for run in found["runs"]] == ["peak_lr-1e-3", "peak_lr-1e30"]
    assert found["best"] == "peak_lr-1e-3" and "lower optim.peak_lr" in found["runs"][1]["failure"]


def test_the_picture_has_a_line_for_each_run(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)  # the other tests draw nothing
    from matplotlib.axes import Axes

    drawn, plot = [], Axes.plot

    def spy(axes, steps, values, *style, **manner):
        drawn.append((list(steps), list(values), manner["label"]))
        return plot(axes, steps, values, *style, **manner)

    monkeypatch.setattr(Axes, "plot", spy)
    curves = {"a": {1: 5.0, 2: 4.0}, "b": {1: 6.0}}
    draw_sweep(tmp_path / "sweep.png", curves, DECLARED.deciding, ended={"b"})
    assert (tmp_path / "sweep.png").read_bytes()[1:4] == b"PNG"
    assert drawn == [([1, 2], [5.0, 4.0], "a (4.000)"), ([1], [6.0], "b (6.000, ended early)")]
