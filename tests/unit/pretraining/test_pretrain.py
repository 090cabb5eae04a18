"""A run from its recipe to its model folder, and what its folder rejects."""

import json
import shutil
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import pytest
import torch
import transformers

import bertsmith
from bertsmith.core.errors import UserError
from bertsmith.model.folder.model_folder import read_model
from bertsmith.objectives.pretraining_objective import PretrainingObjective
from bertsmith.packed import pack
from bertsmith.pretraining.pretrain import Clock, pretrain
from bertsmith.recipe.load import load_recipe
from bertsmith.training.checkpoint_storage import saved_steps
from bertsmith.training.journal import PACKAGE, read_metrics, source_hash
from tests.tiny_runs import (
    BeforeSteps,
    Listener,
    ask_to_stop,
    metrics_of,
    run_tiny,
    stop_at,
    tiny_recipe,
    tiny_store,
)


def snapshot(folder: Path) -> dict[str, tuple[int, str]]:
    """When each file was written and what is in it."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {
        str(file.relative_to(folder)): (file.stat().st_mtime_ns, sha256(file.read_bytes()).hexdigest())
        for file in files
    }


# ---- what a finished run leaves


def test_a_run_leaves_all_that_tells_how_it_was_made(finished):
    names = {path.name for path in finished.iterdir()}
    assert names >= {
        "recipe.toml",
        "versions.json",
        "source.sha256",
        "store.json",
        "metrics.jsonl",
        "card.md",
    }
    assert names >= {"curves.png", "tensorboard", "checkpoints", "model"}
    assert not [path for path in finished.rglob("*.partial")]
    assert load_recipe(finished / "recipe.toml") == tiny_recipe()
    assert json.loads((finished / "versions.json").read_text())["torch"] == torch.__version__
    assert (finished / "source.sha256").read_text().strip() == source_hash(PACKAGE)
    assert (finished / "curves.png").read_bytes()[1:4] == b"PNG"
    assert saved_steps(finished / "checkpoints") == [8]


def test_metrics_come_when_the_recipe_says_and_at_both_ends(finished):
    found = [(line["kind"], line["step"]) for line in read_metrics(finished)]
    assert [step for kind, step in found if kind == "train"] == [3, 6, 8]
    assert [step for kind, step in found if kind == "held-out"] == [0, 5, 8]
    assert found[-1] == ("event", 8)


def test_a_run_learns(finished):
    held_out = metrics_of(finished, "held-out")
    assert held_out[-1]["token_loss"] < held_out[0]["token_loss"] - 0.2


def test_losses_add_up_and_the_rate_follows_the_schedule(finished):
    first, _, last = metrics_of(finished, "train")
    assert first["loss"] == first["token_loss"] + first["pair_loss"]
    assert first["learning_rate"] == pytest.approx(1e-3 * (1 - 2 / 8))  # at the third step
    assert (last["skipped"], last["tokens"]) == (0, metrics_of(finished, "held-out")[-1]["tokens"])


def test_the_model_opens_in_transformers_as_it_is(finished):
    loaded, report = transformers.BertForPreTraining.from_pretrained(
        finished / "model", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = transformers.AutoTokenizer.from_pretrained(finished / "model")("the smith heats the iron .")
    network = read_model(finished / "model").network
    batch = pack([ids["input_ids"]])
    with torch.no_grad():
        theirs = loaded.eval()(input_ids=batch.tokens_T[None])
        hidden = network(batch)
        ours = network.word_scores(hidden, torch.arange(len(hidden)))
        pair = network.scores("nsp", hidden, batch.layout)
    assert (theirs.prediction_logits[0] - ours).abs().max() <= 2e-5
    assert (theirs.seq_relationship_logits - pair).abs().max() <= 2e-5


def test_the_model_opens_in_bertsmith_and_fills_masks(finished, store):
    bert = bertsmith.load(finished / "model", device="cpu")
    assert set(bert.heads) == {"pooler", "mlm", "nsp"}
    (guesses,) = bert.fill("the smith heats the [MASK] .", top=3)
    assert len(guesses) == 3 and guesses[0].probability > 1 / store.vocabulary


def test_the_model_folder_carries_recipe_metrics_and_card(finished):
    for name in ("recipe.toml", "metrics.jsonl", "card.md"):
        assert (finished / "model" / name).read_bytes() == (finished / name).read_bytes()


def test_the_card_tells_what_happened(finished):
    card = (finished / "card.md").read_text()
    last = metrics_of(finished, "held-out")[-1]
    assert 'pipeline_tag: "fill-mask"' in card.split("---")[1]
    assert "\n# bert-tiny\n" in card
    assert "vectors were not trained for similarity" in card
    assert "![Curves of the run](curves.png)" in card or not (finished / "curves.png").exists()
    for fact in (
        "A bert encoder (2 layers, width 32, 2 heads, 80 entries;",
        "- Corpus: 60 documents,",
        "next-sentence prediction; longest 24 for 50% of the run, then 32 for 50% of the run.",
        "masked; 15% of the tokens, chosen one by one, of these 80% masked, 10% random, 10% kept (dynamic",
        f"8 steps, {last['tokens']:,} tokens,",
        "0 steps skipped; from scratch.",
        f"| token loss | {last['token_loss']:.4f} |",
        f"| pair accuracy of always giving the more frequent answer | {last['pair_majority']:.1%} |",
        "| sequences | 8 |",
        "unigram entropy",
    ):
        assert fact in card


# ---- the same command once more


def test_a_finished_run_took_as_long_as_its_end_said(store, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "bertsmith.pretraining.pretraining_parts.plot_curves", lambda *_: time.sleep(0.2)
    )  # after the last step
    settings = ("run.steps=1", "run.evaluation_sequences=1")
    first, again = (run_tiny(store, tmp_path / "run", *settings) for _ in range(2))
    assert again.seconds == first.seconds > 0.2


def test_a_finished_run_only_reports_its_result(finished, store):
    before, listener = snapshot(finished), Listener()
    result = run_tiny(store, finished, "run.keep_last=5", listener=listener)
    assert snapshot(finished) == before
    assert listener.notes == [
        f"{finished} is already finished: there is nothing to do",
        f"to continue from its model: `start.model={finished / 'model'}` and a new `out`",
    ]
    assert (result.state, result.steps) == ("finished", 8)
    last = metrics_of(finished, "held-out")[-1]
    assert result.tokens == last["tokens"] > 0 and result.seconds > 0
    assert result.saved_step == 8
    assert result.held_out == {name: each for name, each in last.items() if name in result.declared.reported}


def test_a_finished_run_tells_its_result_without_its_journal(finished, store, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    result = run_tiny(store, tmp_path / "run")
    assert (result.state, result.steps) == ("finished", 8)
    assert result.held_out == run_tiny(store, finished).held_out


def test_another_recipe_is_rejected_with_the_keys_that_differ(finished, store):
    before = snapshot(finished)
    with pytest.raises(UserError) as caught:
        run_tiny(store, finished, "optim.peak_lr=2e-3", "run.seed=7", "run.log_every_steps=1")
    message = caught.value.line()
    assert "optim.peak_lr: 0.001 there, 0.002 now; run.seed: 0 there, 7 now" in message
    assert "log_every" not in message and str(finished) in message and "`out`" in message
    assert snapshot(finished) == before


def test_another_store_is_rejected(finished, tmp_path):
    with pytest.raises(UserError, match="the store has changed since"):
        run_tiny(tiny_store(tmp_path, seed=1), finished)


def test_another_recipe_is_rejected_in_a_run_that_is_not_finished_too(store, tmp_path):
    with stop_at(1):
        assert run_tiny(store, tmp_path / "run").state == "stopped"
    with pytest.raises(UserError, match="optim.weight_decay: 0.01 there, 0.1 now"):
        run_tiny(store, tmp_path / "run", "optim.weight_decay=0.1")
    with pytest.raises(UserError, match="the store has changed since"):
        run_tiny(tiny_store(tmp_path, seed=1), tmp_path / "run")


def test_a_folder_of_other_things_is_rejected_and_left_alone(store, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="contains files, but not a run"):
        run_tiny(store, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_in_the_place_of_the_run_folder_is_rejected(store, tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match="contains files, but not a run"):
        run_tiny(store, tmp_path / "run")


def test_a_start_that_was_killed_before_it_wrote_its_recipe_can_be_repeated(finished, store, tmp_path):
    for name in ("versions.json", "source.sha256", "store.json"):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    (tmp_path / ".recipe.toml.x7.partial").write_text("[mod")
    (tmp_path / ".model.x7.partial").mkdir()
    with stop_at(0):
        run_tiny(store, tmp_path)
    assert load_recipe(tmp_path / "recipe.toml") == tiny_recipe()
    assert not list(tmp_path.glob(".*.partial"))


def test_a_run_killed_while_it_wrote_its_model_writes_it_again(finished, store, tmp_path):
    with stop_at(0):
        run_tiny(store, tmp_path / "run")
    run_tiny(store, tmp_path / "run")
    (tmp_path / "run" / "model" / "config.json").unlink()
    run_tiny(store, tmp_path / "run")
    ours, theirs = (read_model(run / "model").network for run in (tmp_path / "run", finished))
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


# ---- states


def test_states_asked_for_are_kept_among_the_newest(store, tmp_path):
    run_tiny(store, tmp_path / "run", "run.save_every_steps=2", "run.keep_last=1", "run.keep_at=[2, 3]")
    assert saved_steps(tmp_path / "run" / "checkpoints") == [2, 3, 8]


def test_a_state_is_saved_by_the_clock_too(store, tmp_path, monkeypatch):
    passed = [0.0]
    monkeypatch.setattr(Clock, "__call__", lambda _: passed[0])

    def pass_time(*_: object) -> None:
        passed[0] += 20.0  # a step takes 20 seconds

    with BeforeSteps(pass_time):
        run_tiny(store, tmp_path / "run", "run.save_every_minutes=1", "run.keep_last=100")
    assert saved_steps(tmp_path / "run" / "checkpoints") == [3, 6, 8]


def test_a_stopped_run_says_so_and_has_saved_its_last_step(store, tmp_path):
    with stop_at(2):
        result = run_tiny(store, tmp_path / "run")
    assert (result.state, result.steps, result.saved_step) == ("stopped", 3, 3)
    assert saved_steps(tmp_path / "run" / "checkpoints") == [3]
    assert read_metrics(tmp_path / "run")[-1] == {"step": 3, "kind": "event", "state": "stopped"}
    assert not (tmp_path / "run" / "model").exists()


def test_a_stopped_run_is_drawn_before_it_ends(store, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "bertsmith.pretraining.pretraining_parts.draw_curves", lambda folder, _: drawn.append(folder)
    )
    with stop_at(2):
        run_tiny(store, tmp_path / "run")
    assert drawn == [tmp_path / "run"]


def test_a_wish_to_stop_in_the_last_step_comes_too_late(store, tmp_path):
    with stop_at(7):
        assert run_tiny(store, tmp_path / "run").state == "finished"
    assert (tmp_path / "run" / "model" / "config.json").is_file()


def test_a_wish_to_stop_is_acknowledged_at_once(store, tmp_path):
    listener, alerts = Listener(), []

    def act(_: PretrainingObjective, seen: int) -> None:
        if seen == 2:
            ask_to_stop()
            alerts.extend(listener.alerts)

    with BeforeSteps(act):
        run_tiny(store, tmp_path / "run", listener=listener)
    assert alerts == ["stopping after this step"]


def test_settings_that_touch_nothing_learned_may_change_when_a_run_resumes(store, tmp_path):
    with stop_at(2):
        run_tiny(store, tmp_path / "run")
    listener = Listener()
    changed = ("run.log_every_steps=1", "run.keep_last=9", "run.save_every_steps=2")
    run_tiny(store, tmp_path / "run", *changed, listener=listener)
    assert "resumes from step 3" in listener.notes
    assert [line["step"] for line in listener.lines] == [4, 5, 6, 7, 8]
    assert saved_steps(tmp_path / "run" / "checkpoints") == [3, 4, 6, 8]
    assert load_recipe(tmp_path / "run" / "recipe.toml") == tiny_recipe(*changed)


# ---- budgets and objectives


def test_a_token_budget_ends_the_run_once_it_is_spent(store, tmp_path):
    result = run_tiny(store, tmp_path / "run", "run.budget=tokens", "run.tokens=500")
    assert 500 <= result.tokens < 500 + 4 * 32
    assert result.steps < 8


def test_a_budget_in_minutes_ends_the_run_at_once_where_it_is_tiny(store, tmp_path):
    result = run_tiny(store, tmp_path / "run", "run.budget=minutes", "run.minutes=1e-6")
    assert (result.state, result.steps) == ("finished", 1)


def test_a_budget_in_minutes_counts_from_when_the_command_was_given(store, tmp_path):
    recipe = tiny_recipe("run.budget=minutes", "run.minutes=60")
    hour_ago = time.monotonic() - 3600
    result = pretrain(recipe, store=store.folder, out=tmp_path, callback=Listener(), started=hour_ago)
    assert result.steps == 1 and result.seconds >= 3600


@pytest.mark.parametrize("objective", ["left-to-right", "right-to-left"])
def test_an_objective_of_one_side_does_not_see_the_other(store, tmp_path, objective):
    seen = []
    with BeforeSteps(lambda module, _: seen.append(module.network.config.direction)):
        settings = (f"examples.objective={objective}", "examples.pairs=none", "run.steps=1")
        result = run_tiny(store, tmp_path / "run", *settings)
    assert seen == [objective]
    assert "pair_loss" not in result.held_out


def test_bf16_and_recomputation_train_too(store, tmp_path):
    settings = ("run.precision=bf16", "run.recompute=true", "run.steps=2")
    result = run_tiny(store, tmp_path / "run", *settings)
    assert result.held_out["loss"] == pytest.approx(5.07, abs=0.1)


def test_recomputation_changes_no_number(finished, store, tmp_path):
    run_tiny(store, tmp_path / "run", "run.recompute=true")
    assert metrics_of(tmp_path / "run") == metrics_of(finished)


def test_a_store_with_too_little_text_is_reported(store, tmp_path):
    with pytest.raises(UserError, match="not enough for batch.sequences = 5000"):
        run_tiny(store, tmp_path / "run", "batch.sequences=5000")
    assert not (tmp_path / "run").exists()
    assert run_tiny(store, tmp_path / "run", "run.steps=1").state == "finished"  # the remedy is taken


def test_a_folder_that_was_there_stays_when_a_run_is_rejected(store, tmp_path):
    (tmp_path / "versions.json").write_text("{}")  # of a start that was killed
    with pytest.raises(UserError, match="not enough"):
        run_tiny(store, tmp_path, "batch.sequences=5000")
    assert [path.name for path in tmp_path.iterdir()] == ["versions.json"]


def test_a_later_stage_with_too_little_text_is_reported_before_the_first_step(store, tmp_path):
    stages = (
        "examples.stages=[{fraction=0.5, length=16, predictions=2}, {fraction=0.5, length=64, predictions=9}]"
    )
    settings = (stages, "examples.pairs=full-sentences", "batch.sequences=80")
    with (
        BeforeSteps(lambda *_: pytest.fail("it trains")),
        pytest.raises(UserError, match="at most 64 tokens"),
    ):
        run_tiny(store, tmp_path / "run", *settings)


# ---- one run at a time

HOLDER = """
import fcntl, os, sys
handle = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)
fcntl.lockf(handle, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.readline()
"""


def test_a_folder_in_which_another_run_works_is_rejected(store, tmp_path):
    run = tmp_path / "run"
    with stop_at(1):
        run_tiny(store, run)
    before = snapshot(run)
    command = [sys.executable, "-c", HOLDER, run / ".lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="another run is using this folder; wait for it or stop it"):
            run_tiny(store, run)
        assert snapshot(run) == before
        other.communicate("go\n")
    assert run_tiny(store, run).state == "finished"


def test_a_lock_alone_is_no_run(store, tmp_path):
    (tmp_path / ".lock").touch()
    with stop_at(0):
        assert run_tiny(store, tmp_path).state == "stopped"


def test_pairs_of_sentences_train_the_next_sentence_head(store, tmp_path):
    by_tokens = ("batch.by=tokens", "batch.tokens=200")
    run_tiny(store, tmp_path / "run", "examples.pairs=sentence-pair", *by_tokens, "run.steps=2")
    lines = metrics_of(tmp_path / "run")
    assert all(line["pair_loss"] > 0 for line in lines)
    assert 2 * 150 < lines[-1]["tokens"] <= 2 * 200
    assert "nsp" in read_model(tmp_path / "run" / "model").network.heads
    card = (tmp_path / "run" / "card.md").read_text(encoding="utf-8")
    assert "next-sentence prediction on pairs of single sentences" in card
