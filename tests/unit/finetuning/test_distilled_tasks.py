"""Task distillation: fine-tuning beside models that were fine-tuned before, whose scores are kept on disk."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bertsmith.core.cache import caching_array
from bertsmith.core.errors import UserError
from bertsmith.finetuning.finetuning_setup import Run
from bertsmith.finetuning.teacher_scores import aligned
from bertsmith.inference.loaded_model import load_task_model
from bertsmith.model.folder.model_folder import Model, read_model, write_model
from bertsmith.model.layer_subset import network_of_layers
from bertsmith.model.network import new_network
from tests.tiny import tiny_encoder_config
from tests.tiny_runs import differing, metrics_of
from tests.tuning import SHORT, Notebook, set_up_run, stop_at, toy_assignment, tune, weights_of
from tests.unit.tasks.made_sets import made_set


@pytest.fixture(scope="module")
def student(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of the toy model's two layers, with its tokenizer."""
    folder, teacher = tmp_path_factory.mktemp("student") / "student", read_model(model).network
    write_model(folder, Model(network_of_layers(teacher, (0,), teacher.config.subset((0,)))))
    for file in ("vocab.txt", "tokenizer_config.json"):
        shutil.copy(model / file, folder / file)
    return folder


@pytest.fixture(scope="module")
def teachers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs that have hardly learned anything; not to be changed."""
    place = tmp_path_factory.mktemp("teachers")
    return {
        name: tune(name, model, place, *SHORT).folder for name in ("sst2", "stsb", "pos", "squad", "swag")
    }


def of(*folders: Path) -> str:
    listed = ", ".join(f'"{folder}"' for folder in folders)
    return f"distill.teachers=[{listed}]"


def told_by(run: Run) -> np.ndarray:
    teacher = run.batches.encoded.teacher
    assert teacher is not None
    return teacher


@pytest.mark.parametrize("name", ["sst2", "stsb", "pos", "squad", "swag"])
def test_a_student_of_every_kind_is_told_what_its_teacher_scores(name, student, teachers, tmp_path):
    assignment = toy_assignment(name, student, tmp_path, *SHORT, of(teachers[name]))
    run = set_up_run(assignment)
    encoded = run.batches.encoded
    expected = load_task_model(teachers[name], device="cpu").logits(encoded)
    assert told_by(run).dtype == (np.float32 if name == "stsb" else np.float16)
    np.testing.assert_allclose(told_by(run).astype(np.float32), expected, atol=2e-3)
    assert any(note.startswith("distillation: 0.5 x the scores of a teacher for 160") for note in run.notes)


def test_scores_are_computed_once_and_kept_in_half_the_room(student, teachers, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assignment = toy_assignment("sst2", student, tmp_path, *SHORT, of(teachers["sst2"]))
    first = told_by(set_up_run(assignment))
    (kept,) = (tmp_path / "cache" / "bertsmith" / "teacher-scores").glob("*.npy")
    assert np.load(kept).dtype == np.float16 and kept.stat().st_size < 160 * 2 * 2 + 200
    marked = np.full_like(np.load(kept), 7)
    with caching_array(kept) as temporary, temporary.open("wb") as written:
        np.save(written, marked)
    assert (told_by(set_up_run(assignment)) == 7).all()  # nobody asked the teacher again
    for damaged in (b"broken", first.astype(np.float16)[::-1].tobytes()):
        kept.write_bytes(kept.read_bytes()[:128] + damaged)
        assert np.array_equal(told_by(set_up_run(assignment)), first)


def test_several_teachers_tell_their_mean(model, student, teachers, tmp_path):
    other = tune("sst2", model, tmp_path, *SHORT, "run.seed=1").folder
    both = set_up_run(toy_assignment("sst2", student, tmp_path / "both", of(teachers["sst2"], other)))
    single = [
        told_by(set_up_run(toy_assignment("sst2", student, tmp_path / "both", of(each)))).astype(np.float32)
        for each in (teachers["sst2"], other)
    ]
    np.testing.assert_allclose(told_by(both).astype(np.float32), np.mean(single, 0), atol=1e-3)
    assert any("the mean of 2 teachers" in note for note in both.notes)


def test_a_run_stopped_twice_ends_as_one_that_was_not(student, teachers, tmp_path, monkeypatch):
    settings = ("run.epochs=0.9", "run.evaluations=3", of(teachers["pos"]))
    straight = tune("pos", student, tmp_path / "straight", *settings).folder
    with stop_at(3):
        assert not tune("pos", student, tmp_path, *settings).finished
    # The scores that were kept may be gone: they are computed again, the same.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    with stop_at(1):
        assert not tune("pos", student, tmp_path, *settings).finished
    ended = tune("pos", student, tmp_path, *settings)
    assert ended.finished and metrics_of(ended.folder) == metrics_of(straight)
    assert differing(weights_of(ended.folder), weights_of(straight)) == []


def test_what_a_teacher_tells_changes_what_is_learned(student, teachers, tmp_path):
    plain = tune("sst2", student, tmp_path / "plain", *SHORT).folder
    taught = tune("sst2", student, tmp_path / "taught", *SHORT, of(teachers["sst2"])).folder
    assert differing(weights_of(plain), weights_of(taught))


def test_a_student_without_labels_comes_near_its_teacher(student, teachers, tmp_path):
    only = ("distill.soft_weight=1", "run.epochs=2", of(teachers["sst2"]))
    run = set_up_run(toy_assignment("sst2", student, tmp_path, *only))
    before = run.model.logits(run.batches.encoded)
    result = tune("sst2", student, tmp_path, *only, notebook=Notebook())
    after = load_task_model(result.folder, device="cpu").logits(run.batches.encoded)
    told = told_by(run).astype(np.float32)
    distances = [np.abs(np.diff(each) - np.diff(told)).mean() for each in (before, after)]
    assert distances[1] < distances[0]


def test_a_resumed_run_wants_the_same_teacher(model, student, teachers, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(teachers["sst2"], teacher)
    with stop_at(1):
        tune("sst2", student, tmp_path, of(teacher))
    other = tune("sst2", model, tmp_path / "other", *SHORT, "run.seed=1").folder
    shutil.copy(other / "model" / "model.safetensors", teacher / "model" / "model.safetensors")
    with pytest.raises(UserError, match="contains another run"):
        tune("sst2", student, tmp_path, of(teacher))


@pytest.fixture(scope="module")
def mixes(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Runs that differ in what they learned on top of one frozen encoder; not to be changed."""
    settings = (*SHORT, "head.encoder=frozen-features")
    places = [tmp_path_factory.mktemp("mix") for _ in range(2)]
    return [
        tune("sst2", model, place, *settings, f"run.seed={seed}").folder for seed, place in enumerate(places)
    ]


def test_teachers_over_one_frozen_encoder_each_tell_their_own_scores(student, mixes, tmp_path):
    runs = [set_up_run(toy_assignment("sst2", student, tmp_path, of(each))) for each in mixes]
    for run, teacher in zip(runs, mixes, strict=True):
        expected = load_task_model(teacher, device="cpu").logits(run.batches.encoded)
        np.testing.assert_allclose(told_by(run).astype(np.float32), expected, atol=2e-3)


def test_a_resumed_run_wants_the_same_teacher_over_a_frozen_encoder(student, mixes, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(mixes[0], teacher)
    with stop_at(1):
        tune("sst2", student, tmp_path, of(teacher))
    shutil.copy(mixes[1] / "model" / "mix.safetensors", teacher / "model" / "mix.safetensors")
    with pytest.raises(UserError, match=r"contains another run: .*mix\.safetensors"):
        tune("sst2", student, tmp_path, of(teacher))


def test_words_are_found_again_in_another_order():
    ours = made_set("tag")
    turned = np.random.default_rng(0).permutation(len(ours.rows_P))
    theirs = replace(ours, words_P2=ours.words_P2[turned])
    scores = np.arange(len(turned), dtype=np.float32)[:, None]
    found = aligned(scores[turned], theirs, ours, where="x")
    assert np.array_equal(found, scores)


def test_other_tokens_are_refused_where_tokens_are_asked_about():
    ours = made_set("span")
    theirs = replace(ours, tokens_T=ours.tokens_T + 1)
    scores = np.zeros((len(ours.tokens_T), 2), np.float32)
    assert aligned(scores, ours, ours, where="x") is scores
    with pytest.raises(UserError, match="into other tokens"):
        aligned(scores, theirs, ours, where="x")


def test_a_teacher_of_another_task_is_refused(student, teachers, tmp_path):
    word = r"was trained for pos \(tag: .*\), not for sst2 \(classify: negative, positive\)"
    with pytest.raises(UserError, match=word):
        tune("sst2", student, tmp_path, of(teachers["pos"]))
    assert not (tmp_path / "runs" / "sst2").exists()


def test_a_teacher_that_takes_shorter_texts_is_refused(student, teachers, tmp_path):
    long = tmp_path / "long"
    shutil.copytree(student, long)
    config = replace(read_model(student).network.config, positions=129)
    write_model(long, Model(new_network(config, {}, torch.Generator().manual_seed(0))))
    with pytest.raises(UserError, match="takes texts of at most 128 tokens, not 129"):
        tune("sst2", long, tmp_path, "text.longest=129", of(teachers["sst2"]))


def test_a_larger_student_is_a_warning(model, student, tmp_path, caplog):
    small = tune("sst2", student, tmp_path / "small", *SHORT).folder
    tune("sst2", model, tmp_path, of(small), *SHORT)
    (warning,) = [each.getMessage() for each in caplog.records if "teacher" in each.getMessage()]
    assert "the student has" in warning and "encoder weights, more than its teacher" in warning


@pytest.mark.parametrize("model_type", ["deberta-v2", "xlm-roberta"])
def test_an_architecture_that_is_not_pretrained_here_may_teach(model, student, tmp_path, model_type):
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    vocabulary = read_model(model).network.config.vocabulary
    config = tiny_encoder_config(model_type, vocabulary=vocabulary, width=64, inner=256)
    write_model(folder, Model(new_network(config, {"mlm": 0}, torch.Generator().manual_seed(0))))
    teacher = tune("sst2", folder, tmp_path / "teacher", *SHORT).folder
    # The adapters of a student are not counted: it may be as large as its teacher.
    for name, encoder in ((student, "tuned"), (folder, "lora")):
        run = set_up_run(toy_assignment("sst2", name, tmp_path, of(teacher), f"head.encoder={encoder}"))
        assert len(told_by(run)) == 160
