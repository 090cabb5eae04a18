"""`bertsmith pretrain`: its flags are keys of the recipe, and a run that is stopped says so and goes on."""

import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from bertsmith.cli.pretrain import live_line, pretrain, show
from bertsmith.cli.terminal import JsonProgress, LogProgress, progress_display
from bertsmith.cli.verb import App
from bertsmith.core.errors import UserError
from bertsmith.corpus.token_store import TokenStore
from bertsmith.objectives.masked_language_modelling import declare_words
from bertsmith.objectives.registry import declaration
from bertsmith.pretraining.pretrain import PretrainingResult
from bertsmith.recipe.load import load_recipe
from bertsmith.recipe.schema import Recipe
from tests.commands import commanded
from tests.tiny_runs import TINY, metrics_of, stop_at, tiny_recipe, tiny_store, without_pictures

app = App()
app.command()(pretrain)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return tiny_store(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def quickly() -> Iterator[None]:
    with without_pictures():
        yield


def run(store: TokenStore, out: Path, *arguments: str | Path, recipe: str | Path = "bert-tiny") -> Result:
    settings = [part for override in TINY for part in ("--set", override)]
    words = [recipe, "--store", store.folder, "--out", out, *settings, *arguments]
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


def recipe_of(out: Path) -> Recipe:
    return load_recipe(out / "recipe.toml")


def test_a_run_ends_with_its_results_and_where_they_are(store, tmp_path):
    result = run(store, tmp_path / "run", "--steps", "1")
    assert result.exit_code == 0
    assert "finished after 1 step and" in result.stdout
    held_out = metrics_of(tmp_path / "run", "held-out")[-1]
    assert f"held-out token loss: {held_out['token_loss']:.4f}" in result.stdout
    assert "held-out sequences: 8\n" in result.stdout
    assert f"model: {tmp_path / 'run' / 'model'}" in result.stdout
    assert "curves" not in result.stdout  # there are none to look at
    assert "the same bits each time" in result.stdout  # what was chosen is told


def test_steps_are_a_budget_in_steps_also_where_the_preset_counts_tokens(store, tmp_path):
    pairs = ("--set", "examples.pairs=doc-sentences")
    result = run(store, tmp_path / "run", "--steps", "1", *pairs, recipe="distilbert")
    assert "finished after 1 step and" in result.stdout
    assert (recipe_of(tmp_path / "run").run.steps, recipe_of(tmp_path / "run").run.budget) == (1, "steps")


def test_minutes_are_a_budget_in_minutes(store, tmp_path):
    result = run(store, tmp_path / "run", "--minutes", "1e-6")
    assert "finished after 1 step and" in result.stdout
    written = recipe_of(tmp_path / "run").run
    assert (written.budget, written.minutes) == ("minutes", 1e-6)


def test_short_options_are_keys_of_the_recipe(store, tmp_path):
    options = ("--batch", "3", "--max-length", "32", "--device", "cpu", "--precision", "bf16")
    small = ("model.layers=2", "model.width=32", "model.heads=2", "model.inner=64")
    small += ("examples.held_out_fraction=0.2", "run.evaluation_sequences=8")
    result = CliRunner().invoke(
        app,
        [
            *(
                "bert-tiny",
                "--store",
                str(store.folder),
                "--out",
                str(tmp_path / "run"),
                "--steps",
                "1",
                *options,
            ),
            *(part for override in small for part in ("--set", override)),
        ],
        catch_exceptions=False,
    )
    assert "finished after 1 step and" in result.stdout
    recipe = recipe_of(tmp_path / "run")
    assert (recipe.batch.by, recipe.batch.sequences) == ("sequences", 3)
    assert [(each.fraction, each.length, each.predictions) for each in recipe.examples.stages] == [
        (1.0, 32, 5)
    ]
    assert (recipe.run.device, recipe.run.precision) == ("cpu", "bf16")


def test_a_loss_that_is_not_below_word_frequencies_is_told(capsys):
    result = PretrainingResult(
        folder=Path("runs/x"),
        state="finished",
        steps=10,
        tokens=1000,
        seconds=9.0,
        declared=declare_words(),
        held_out={"loss": 7.5, "token_loss": 7.5},
        unigram_entropy=7.25,
        saved_step=10,
        main_process=True,
    )
    show(result, as_json=False)
    told = "held-out token loss: 7.50 is not below 7.25, the loss of mere word frequencies (the unigram line)"
    out = capsys.readouterr().out
    assert told in out and "train longer (--steps, --minutes), or try a lower optim.peak_lr" in out
    show(replace(result, held_out={"token_loss": 7.0}), as_json=False)
    assert "frequencies" not in capsys.readouterr().out
    before = {"token_loss": 8.25, "sequences": 16}
    show(
        replace(result, held_out={"token_loss": 7.0, "sequences": 16}, held_out_before=before), as_json=False
    )
    out = capsys.readouterr().out
    assert "held-out token loss: 8.2500 → 7.0000\n" in out and "held-out sequences: 16\n" in out
    show(result, as_json=True)
    assert json.loads(capsys.readouterr().out)["unigram_entropy"] == 7.25


def test_a_run_that_was_ended_early_says_why_and_how_it_goes_on(capsys):
    result = PretrainingResult(
        folder=Path("runs/x"),
        state="stopped",
        steps=10,
        tokens=1000,
        seconds=9.0,
        declared=declare_words(),
        held_out={},
        unigram_entropy=7.25,
        saved_step=10,
        main_process=True,
        early_end="the loss stays near 7.30",
    )
    show(result, as_json=False)
    out = capsys.readouterr().out
    assert "ended early: the loss stays near 7.30; try a lower optim.peak_lr" in out
    assert "saved; run the same command again, without --stop-if-flat, to resume (runs/x)" in out


def test_both_budgets_are_rejected(store, tmp_path):
    with pytest.raises(UserError, match="a run has one budget"):
        run(store, tmp_path / "run", "--steps", "2", "--minutes", "2")


@pytest.mark.parametrize(
    "arguments", [("--steps", "0"), ("--minutes", "0"), ("--steps", "-3"), ("--minutes", "nan")]
)
def test_a_budget_of_nothing_is_rejected_by_the_name_of_its_option(store, tmp_path, arguments):
    with pytest.raises(UserError, match=rf"^{arguments[0]}: run\.\w+ = \S+ is invalid"):
        run(store, tmp_path / "run", *arguments)


@pytest.mark.parametrize(
    ("option", "value", "key"),
    [
        ("--batch", "0", "batch.sequences"),
        ("--max-length", "-1", "examples.stages"),
        ("--device", "tpu", "run.device"),
        ("--precision", "fp8", "run.precision"),
    ],
)
def test_a_wrong_value_is_blamed_on_the_option_that_was_given(tmp_path, option, value, key):
    words = ["bert-tiny", "--store", str(tmp_path), "--out", str(tmp_path / "run"), option, value]
    with pytest.raises(UserError, match=rf"^{option}: {key}.* is invalid"):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_words_to_add_without_a_model_are_rejected(store, tmp_path):
    with pytest.raises(UserError, match="--add-words words.txt: .*; give --from"):
        run(store, tmp_path / "run", "--add-words", "words.txt")


@pytest.mark.parametrize(
    ("saved_step", "told"),
    [
        (6, "saved; run the same command again to resume (run)"),
        (
            4,
            "last steps had no usable gradient; the same command resumes from step 4 (run)",
        ),
        (0, "there is no saved state: the same command starts again at step 0 (run)"),
    ],
)
def test_a_stopped_run_says_where_the_same_command_would_resume(capsys, saved_step, told):
    numbers = {
        "tokens": 100,
        "seconds": 1.0,
        "declared": declare_words(),
        "held_out": {},
        "unigram_entropy": 7.0,
        "main_process": True,
    }
    show(PretrainingResult(Path("run"), "stopped", steps=6, saved_step=saved_step, **numbers), as_json=False)
    assert capsys.readouterr().out.splitlines()[-1].endswith(told)


@pytest.mark.parametrize("callback", [JsonProgress(), LogProgress(str)])
def test_an_alert_comes_at_once_and_to_stderr(capfd, callback):
    callback.on_signal("stopping after this step")
    assert tuple(capfd.readouterr()) == ("", "\nstopping after this step\n")


def test_from_and_set_reach_the_recipe(store, tmp_path):
    first = tmp_path / 'a "quoted" \\ folder'
    run(store, first, "--steps", "1", "--set", "masking.rate=0.3")
    assert recipe_of(first).masking.rate == 0.3
    words = tmp_path / "words.txt"
    words.write_text("smith\n")  # known already: the vocabulary stays that of the store
    out = tmp_path / "run"
    run(store, out, "--steps", "1", "--from", first / "model", "--add-words", words)
    assert recipe_of(out).start.model == str(first / "model")
    assert recipe_of(out).start.add_words == str(words)


def test_a_file_is_a_recipe_too(store, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('base = "bert-tiny"\nname = "mine"\n[masking]\nunit = "word"\n')
    run(store, tmp_path / "run", "--steps", "1", recipe=file)
    assert (recipe_of(tmp_path / "run").name, recipe_of(tmp_path / "run").masking.unit) == ("mine", "word")


def test_for_machines_every_line_is_an_object(store, tmp_path):
    result = run(store, tmp_path / "run", "--steps", "3", "--json")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert {"note": "1 process on cpu, fp32, not compiled; the same bits each time"} in lines
    (measured,) = [line for line in lines if "progress" in line]
    assert (measured["progress"], measured["step"]) == (1.0, 3) and measured["token_loss"] > 0
    assert lines[-1]["state"] == "finished" and lines[-1]["held_out"]["token_loss"] > 0
    assert (lines[-1]["steps"], lines[-1]["tokens"]) == (3, measured["tokens"])


def test_for_machines_a_number_that_is_none_is_null(capsys):
    JsonProgress().on_step(
        0.5, {"step": 3, "loss": math.nan, "gradient_norm": math.inf, "token_accuracy": 0.25}
    )
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert told == {"progress": 0.5, "step": 3, "loss": None, "gradient_norm": None, "token_accuracy": 0.25}


def test_a_stopped_run_exits_with_130_and_resumes_with_the_same_command(store, tmp_path):
    with stop_at(2):
        result = run(store, tmp_path / "run", "--steps", "8")
    assert result.exit_code == 130
    assert "stopped after 3 steps" in result.stdout
    assert "run the same command again to resume" in result.stdout
    again = run(store, tmp_path / "run", "--steps", "8")
    assert again.exit_code == 0
    assert "resumes from step 3" in again.stdout and "finished after 8 steps" in again.stdout
    once_more = run(store, tmp_path / "run", "--steps", "8")
    assert once_more.exit_code == 0
    assert "is already finished: there is nothing to do" in once_more.stdout
    assert "finished after 8 steps" in once_more.stdout


def test_help_does_not_load_torch():
    program = "import sys; from bertsmith.cli.pretrain import pretrain; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_process_told_to_stop_exits_with_130(store, tmp_path):
    settings = [part for override in (*TINY, "run.steps=100000") for part in ("--set", override)]
    words = ("bert-tiny", "--store", store.folder, "--out", tmp_path / "run", *settings, "--json")
    with commanded("pretrain", *words) as run:
        for line in run.stdout:
            if "progress" in line:  # it trains
                run.send_signal(signal.SIGTERM)
                break
        told = run.stdout.read()
    assert run.returncode == 130
    assert json.loads(told.splitlines()[-1])["state"] == "stopped"


def test_the_live_line_has_what_a_person_watches():
    values = {"step": 1234, "loss": 2.5, "token_accuracy": 0.5, "pair_accuracy": 0.9}
    values |= {"tokens_per_second": 98765.4, "eta_seconds": 3725.0, "mfu": 0.41}
    line = live_line(declaration(tiny_recipe()).own, values)
    assert line == "step 1,234  loss 2.500  words 50.0%  pairs 90.0%  98,765 tokens/s  MFU 41.0%  ETA 1:02:05"


def test_the_tiny_recipe_of_these_tests_is_that_of_the_command(store, tmp_path):
    run(store, tmp_path / "run", "--steps", "1")
    assert recipe_of(tmp_path / "run") == tiny_recipe("run.steps=1")


def test_the_bar_moves_with_steps_and_by_the_clock(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress_display(str, as_json=False) as callback:
        task = callback.bar.tasks[0]
        callback.on_progress(0.25)
        assert task.completed == 0.25
        callback.on_deadline(30.0, 40.0)
        list(callback.bar.get_renderables())
        assert task.completed == pytest.approx(0.25, abs=0.05)
        callback.on_progress(0.9)  # a budget in minutes is told by the clock
        assert task.completed < 0.5
        callback.on_deadline(0.0, 40.0)
        list(callback.bar.get_renderables())
        assert task.completed == 1.0


# ---- auto


def auto(store: TokenStore, out: Path, *arguments: str) -> Result:
    words = ["auto", "--store", store.folder, "--out", out, *arguments]
    return CliRunner().invoke(app, [str(word) for word in words])


def test_auto_writes_the_recipe_it_chose_and_resumes_with_it(store, tmp_path, monkeypatch):
    sizes = ("--size", "tiny", "--steps", "2", "--device", "cpu", "--set", "examples.held_out_fraction=0.2")
    sizes += ("--set", "run.evaluation_sequences=8", "--set", "batch.tokens=300")
    first = auto(store, tmp_path / "run", *sizes)
    assert (first.exit_code, first.exception) == (0, None)
    assert "auto: 2 x 128, " in first.stdout
    assert "expected at the end" in first.stdout
    assert "finished after 2 steps" in first.stdout
    written = recipe_of(tmp_path / "run")
    assert (written.name, written.model.layers, written.model.width) == ("auto", 2, 128)
    assert (written.run.budget, written.run.steps, written.batch.tokens) == ("steps", 2, 300)
    again = auto(store, tmp_path / "run", *sizes)
    assert "auto: the initial recipe of the run" in again.stdout
    assert "is already finished" in again.stdout
    changed = auto(store, tmp_path / "run", *sizes, "--set", "optim.peak_lr=0.5")
    assert "contains another run: optim.peak_lr" in str(changed.exception)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("auto", "--sweep", "optim.peak_lr=1e-3,2e-3"), "--sweep: auto chooses one recipe"),
        (("auto", "--minutes", "1", "--tokens", "5"), "--tokens and --minutes: a run has one budget"),
        (("auto", "--tokens", "0"), "--tokens: run.tokens = 0 is invalid"),
        (("auto", "--size", "huge"), "--size: 'huge' is not a valid choice"),
        (("auto", "--objective", "sop"), "--objective: 'sop' is not a valid choice"),
        (("auto", "--from", "somewhere"), "--from: auto trains from scratch"),
        (("bert-tiny", "--size", "tiny"), "--size: is an option of auto, not of bert-tiny"),
        (("bert-tiny", "--objective", "masked"), "--objective: is an option of auto, not of bert-tiny"),
    ],
)
def test_what_auto_cannot_do_is_one_line_with_option_and_remedy(store, tmp_path, arguments, told):
    words = [*arguments, "--store", str(store.folder), "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, UserError)
    assert result.exception.line().startswith(told)
    assert result.exception.remedy
    assert not (tmp_path / "run").exists()


def test_a_budget_in_tokens_is_one_of_any_recipe(store, tmp_path):
    result = run(store, tmp_path / "run", "--tokens", "100")
    assert "finished after " in result.stdout
    written = recipe_of(tmp_path / "run").run
    assert (written.budget, written.tokens) == ("tokens", 100)
    last = metrics_of(tmp_path / "run", "train")[-1]
    assert 100 <= last["tokens"] < 220  # its last step is whole
