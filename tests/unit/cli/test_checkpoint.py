"""`bertsmith checkpoint`: what a pre-training run kept opens as a model, and predicts together."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForPreTraining

from bertsmith.core.errors import UserError
from bertsmith.corpus.token_store import TokenStore
from bertsmith.inference.loaded_model import load
from bertsmith.pretraining.checkpoint_export import export_checkpoints
from bertsmith.training.checkpoint_storage import step_folder
from tests.command_line import bertsmith, mistake
from tests.tiny_runs import run_tiny, stop_at, tiny_store, without_pictures
from tests.tuning import SHORT, quickly, tune

__all__ = ["quickly"]

STEPS = (3, 6, 8)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return tiny_store(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def run(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("kept") / "run"
    with without_pictures():
        run_tiny(store, out, "run.keep_at=[3, 6]", "run.keep_last=1")
    return out


@pytest.fixture(scope="module")
def models(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    out = tmp_path_factory.mktemp("models")
    targets = {step: step_folder(out, step) for step in STEPS}
    export_checkpoints(run, targets)
    return targets


def test_kept_checkpoints_are_listed_with_their_losses(capsys, run):
    told = bertsmith(capsys, "checkpoint", "list", run, "--json")
    listed = [json.loads(line) for line in told.out.splitlines()]
    assert [each["step"] for each in listed] == list(STEPS)
    assert all(each["held_out"]["token_loss"] > 0 for each in listed)
    told = bertsmith(capsys, "checkpoint", "list", run)
    assert [line.split("  ")[0] for line in told.out.splitlines()] == ["step 3", "step 6", "step 8"]
    assert f"held-out token loss {listed[1]['held_out']['token_loss']:.4f}" in told.out.splitlines()[1]


def test_the_last_checkpoint_is_the_model_of_the_run_byte_for_byte(run, models):
    for file in (run / "model").iterdir():
        if file.name not in ("card.md", "metrics.jsonl"):
            assert (models[8] / file.name).read_bytes() == file.read_bytes(), file.name
    assert "step 8" in (models[8] / "card.md").read_text()


def test_an_export_of_all_that_was_killed_is_finished_by_the_same_command(run, models, tmp_path, capsys):
    shutil.copytree(models[3], step_folder(tmp_path, 3))
    before = (step_folder(tmp_path, 3) / "model.safetensors").stat()
    bertsmith(capsys, "checkpoint", "export", run, "--all", "--out", tmp_path)
    assert (step_folder(tmp_path, 3) / "model.safetensors").stat() == before
    name = "model.safetensors"
    assert all(
        (step_folder(tmp_path, step) / name).read_bytes() == (models[step] / name).read_bytes()
        for step in STEPS
    )
    (step_folder(tmp_path, 6) / "card.md").write_text("of another run")
    assert "step-00000006: already exists" in mistake(
        capsys, "checkpoint", "export", run, "--all", "--out", tmp_path
    )


def test_a_checkpoint_holds_the_weights_of_its_step(run, models):
    (shard,) = step_folder(run / "checkpoints", 3).glob("*.safetensors")
    saved = load_file(shard)
    early, late = (load_file(models[step] / "model.safetensors") for step in (3, 8))
    name = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(early[name], saved["model.network.encoder.embeddings.words.weight"])
    assert not torch.equal(early[name], late[name])


def test_a_run_that_averages_its_weights_exports_their_average(store, tmp_path):
    with without_pictures():
        run_tiny(store, tmp_path / "run", "run.keep_at=[3, 6]", "run.keep_last=1", "run.average_from=0.5")
    models = {step: tmp_path / str(step) for step in STEPS}
    export_checkpoints(tmp_path / "run", models)
    weights = {step: load_file(folder / "model.safetensors") for step, folder in models.items()}
    name, ours = "bert.embeddings.word_embeddings.weight", "network.encoder.embeddings.words.weight"
    saved = {
        step: load_file(next(step_folder(tmp_path / "run" / "checkpoints", step).glob("*.safetensors")))
        for step in STEPS
    }
    assert torch.equal(weights[3][name], saved[3][f"model.{ours}"])  # no average had begun
    assert torch.equal(weights[6][name], saved[6][f"optimizer.{ours}.average"])
    assert not torch.equal(weights[6][name], saved[6][f"model.{ours}"])
    finished = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert finished.keys() == weights[8].keys()
    assert all(torch.equal(finished[each], weights[8][each]) for each in finished)
    assert "the average of 2 steps'" in (models[6] / "card.md").read_text()
    assert "average" not in (models[3] / "card.md").read_text()


def test_a_checkpoint_opens_here_and_in_transformers(models):
    ours = load(models[3], precision="fp32")
    theirs = AutoModelForPreTraining.from_pretrained(models[3]).eval()
    text = "the smith heats the iron near the forge ."
    ids = torch.tensor([ours.tokenizer.encode(text).ids])
    with torch.no_grad():
        states = theirs.bert(ids).last_hidden_state[0]
    torch.testing.assert_close(ours.hidden_states([text])[0][-1], states, atol=1e-5, rtol=1e-5)


def test_one_step_all_steps_or_the_newest_are_exported(capsys, run, tmp_path):
    told = bertsmith(capsys, "checkpoint", "export", run, "--out", tmp_path / "newest")
    assert told.out == f"step 8 -> {tmp_path / 'newest'}\n"
    told = bertsmith(capsys, "checkpoint", "export", run, "--step", 3, "--out", tmp_path / "early", "--json")
    assert json.loads(told.out) == [{"step": 3, "out": str(tmp_path / "early")}]
    bertsmith(capsys, "checkpoint", "export", run, "--all", "--out", tmp_path / "all")
    assert sorted(each.name for each in (tmp_path / "all").iterdir()) == [
        "step-00000003",
        "step-00000006",
        "step-00000008",
    ]


def test_an_unfinished_run_is_exported_with_its_store(capsys, store, tmp_path):
    with without_pictures(), stop_at(3):
        assert run_tiny(store, tmp_path / "run").state == "stopped"
    words = ("checkpoint", "export", tmp_path / "run", "--out", tmp_path / "model")
    assert "add --store" in mistake(capsys, *words)
    other = tiny_store(tmp_path / "other", seed=1)
    assert "another store" in mistake(capsys, *words, "--store", other.folder)
    assert not (tmp_path / "model").exists()
    assert bertsmith(capsys, *words, "--store", store.folder).code == 0
    assert "mlm" in load(tmp_path / "model").heads


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--step", 5), "step 5 was not kept; choose one of 3, 6, 8"),
        (("--step", 0), "step 0 was not kept"),
        (("--step", 3, "--all"), "--step and --all: --step and --all exclude each other"),
    ],
)
def test_what_cannot_be_exported_is_refused(capsys, run, tmp_path, words, message):
    assert message in mistake(capsys, "checkpoint", "export", run, *words, "--out", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_folder_that_is_no_pretraining_run_is_refused(capsys, tmp_path):
    assert "is not a pre-training run" in mistake(capsys, "checkpoint", "list", tmp_path)


def test_a_damaged_checkpoint_and_a_taken_folder_are_refused(store, tmp_path):
    with without_pictures():
        run_tiny(store, tmp_path / "run", "run.steps=2")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="already exists"):
        export_checkpoints(tmp_path / "run", {2: tmp_path / "taken"})
    (shard,) = step_folder(tmp_path / "run" / "checkpoints", 2).glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match="is damaged"):
        export_checkpoints(tmp_path / "run", {2: tmp_path / "model"})
    assert not (tmp_path / "model").exists()


def test_fine_tuned_checkpoints_are_evaluated_together(capsys, models, tmp_path):
    runs = [tune("sst2", models[step], tmp_path / str(step), *SHORT).folder for step in (3, 8)]
    data = tmp_path / "3" / "data" / "sst2" / "dev.tsv"
    told = bertsmith(capsys, "evaluate", "--model", *runs, "--data", data, "--json")
    out = tmp_path / "together.jsonl"
    bertsmith(capsys, "predict", "--model", *runs, "--input", data, "--out", out)
    given = [json.loads(line)["prediction"] for line in out.read_text().splitlines()]
    right = [line.split("\t")[1] for line in data.read_text().splitlines()[1:]]
    names = {"0": "negative", "1": "positive"}
    hits = sum(one == names[other] for one, other in zip(given, right, strict=True))
    assert json.loads(told.out)["measures"]["accuracy"] == hits / len(right)
