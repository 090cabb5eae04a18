"""`bertsmith distill`: a thin verb over a pre-training run."""

import json
from pathlib import Path

import pytest

from bertsmith.corpus.token_store import TokenStore
from bertsmith.recipe.load import load_recipe
from tests.command_line import bertsmith, mistake
from tests.tiny_runs import TINY, run_tiny, tiny_store, without_pictures
from tests.tuning import quickly, shared_lesson, toy_model

__all__ = ["quickly", "shared_lesson", "toy_model"]

SIZES = tuple(part for each in TINY if not each.startswith("model.") for part in ("--set", each))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return tiny_store(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def teacher(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("teacher") / "run"
    with without_pictures():
        run_tiny(store, out, "model.layers=4", "examples.pairs=none", "run.steps=1")
    return out


def asked(store: TokenStore, teacher: Path, out: Path, *more: object) -> tuple[object, ...]:
    words = ("distill", "--teacher", teacher, "--store", store.folder, "--out", out, "--batch", 4)
    return (*words, *SIZES, *more)


def test_layers_of_the_teacher_make_a_distilbert_by_its_recipe(capsys, store, teacher, tmp_path):
    words = asked(store, teacher, tmp_path / "run", "--layers", 2, "--steps", 1, "--json")
    told = bertsmith(capsys, *words)
    assert told.code == 0 and json.loads(told.out.splitlines()[-1])["state"] == "finished"
    recipe = load_recipe(tmp_path / "run" / "recipe.toml")
    assert recipe.distill.layers == (0, 3) and recipe.model.type == "distilbert"
    assert (recipe.distill.soft_weight, recipe.distill.mlm_weight, recipe.distill.cosine_weight) == (5, 2, 1)
    assert (recipe.distill.temperature, recipe.masking.smoothing, recipe.optim.clip_norm) == (2, 0.7, 5)
    again = bertsmith(capsys, *words)
    assert again.code == 0 and "--student" in again.out + again.err
    assert "already finished" in again.out + again.err


def test_a_student_may_have_a_shape_of_its_own(capsys, store, teacher, tmp_path):
    shape = ("--set", "model.width=16", "--set", "model.positions=64", "--set", "model.layers=1")
    told = bertsmith(
        capsys, *asked(store, teacher, tmp_path / "run", "--student", "bert-tiny", "--steps", 1, *shape)
    )
    assert told.code == 0, told.err
    assert "as the teacher" in told.out + told.err
    model = load_recipe(tmp_path / "run" / "recipe.toml").model
    assert (model.type, model.width, model.heads, model.segments) == ("bert", 16, 2, 2)


def test_a_student_may_be_a_model(capsys, store, teacher, tmp_path):
    told = bertsmith(capsys, *asked(store, teacher, tmp_path / "run", "--student", teacher, "--steps", 1))
    assert told.code == 0, told.err
    recipe = load_recipe(tmp_path / "run" / "recipe.toml")
    assert recipe.start.model == str(teacher) and recipe.model.layers == 4


def test_a_student_may_have_the_shape_of_a_recipe_file(capsys, store, teacher, tmp_path):
    shape = "layers = 1\nwidth = 16\nheads = 2\ninner = 32\n"
    (tmp_path / "own.toml").write_text(f'base = "bert-tiny"\n[model]\n{shape}', encoding="utf-8")
    student = ("--student", tmp_path / "own.toml", "--steps", 1)
    told = bertsmith(capsys, *asked(store, teacher, tmp_path / "run", *student))
    assert told.code == 0, told.err
    recipe = load_recipe(tmp_path / "run" / "recipe.toml")
    assert (recipe.model.type, recipe.model.width, recipe.model.layers) == ("bert", 16, 1)
    assert recipe.start.model == "scratch" and recipe.masking.smoothing == 0.7


def test_a_larger_student_is_a_warning(capsys, caplog, store, teacher, tmp_path):
    told = bertsmith(capsys, *asked(store, teacher, tmp_path / "run", "--student", "bert-tiny", "--steps", 1))
    assert told.code == 0, told.err
    (warning,) = [each.getMessage() for each in caplog.records if "teacher" in each.getMessage()]
    assert "the student has" in warning and "encoder weights, more than its teacher" in warning


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (("--layers", 5), "the teacher has 4 layers, but a student of 5 would be larger"),
        (("--layers", 0), "would be empty"),
        ((), "--layers, --student: give one of the two"),
        (("--layers", 2, "--student", "bert-tiny"), "--layers, --student: give one of the two"),
        (("--student", "absent.toml"), "absent.toml: is not a preset or a file"),
        (("--layers", 2, "--set", "distill.temperature=0"), "distill.temperature"),
        (("--layers", 2, "--steps", 1, "--minutes", 1), "a run has one budget"),
        (("--layers", 2, "--set", "examples.stages=[{fraction=1,length=128,predictions=9}]"), "128"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(capsys, store, teacher, tmp_path, more, word):
    assert word in mistake(capsys, *asked(store, teacher, tmp_path / "run", *more))
    assert not (tmp_path / "run").exists()


def test_an_adapter_is_no_teacher_of_text(capsys, store, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    told = mistake(capsys, *asked(store, tmp_path / "adapter", tmp_path / "run", "--layers", 2))
    assert "is an adapter" in told and "bertsmith merge" in told


def test_a_teacher_that_is_not_there_is_named(capsys, store, tmp_path):
    assert "nowhere" in mistake(capsys, *asked(store, tmp_path / "nowhere", tmp_path / "run", "--layers", 2))


# ---- of a task


def test_a_task_is_distilled_from_the_labels_and_a_teacher(capsys, lesson, model, tmp_path):
    teacher, data = lesson("sst2"), lesson("sst2").parents[1] / "data" / "sst2"
    words = ("distill", "--teacher", teacher, "--student", model, "--task", "sst2", "--data", data)
    words += ("--out", tmp_path / "run", "--epochs", 0.2, "--max-length", 64, "--json")
    told = bertsmith(capsys, *words)
    assert told.code == 0, told.err
    assert json.loads(told.out.splitlines()[-1])["finished"]
    recipe = (tmp_path / "run" / "recipe.toml").read_text(encoding="utf-8")
    assert str(teacher) in recipe and "soft_weight = 0.5" in recipe


def test_the_task_of_ones_own_is_that_of_the_teacher(capsys, model, tmp_path):
    rows = "".join(f"the {'sun' if n % 2 else 'snow'},{n % 2}\n" for n in range(40))
    (tmp_path / "my.csv").write_text("text,label\n" + rows, encoding="utf-8")
    table = ("--data", tmp_path / "my.csv", "--epochs", 0.5, "--json")
    own = ("finetune", "custom", "--model", model, "--text", "text", "--label", "label")
    assert bertsmith(capsys, *own, "--out", tmp_path / "teacher", *table).code == 0
    words = ("distill", "--teacher", tmp_path / "teacher", "--student", model, "--task", "custom")
    told = bertsmith(capsys, *words, "--out", tmp_path / "run", *table)
    assert told.code == 0, told.err


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (("--task", "sst2", "--data", "x"), "a task needs both"),
        (("--task", "sst2", "--student", "x"), "a task needs both"),
        (("--task", "sst2", "--data", "x", "--student", "bert-mini"), "bert-mini: is a recipe, but a task"),
        (("--task", "sst2", "--data", "x", "--student", "own.toml"), "own.toml: is a recipe, but a task"),
        (("--task", "sst2", "--store", "x"), "--store, --task: give one of the two"),
        ((), "--store, --task: give one of the two"),
        (("--task", "sst2", "--layers", 2), "cannot be used with --task"),
        (("--store", "x", "--epochs", 2), "cannot be used with --store"),
        (("--store", "x", "--teacher", "y", "--layers", 2), "supports one teacher"),
        (("--task", "custom", "--student", "x", "--data", "x"), "your own table"),
    ],
)
def test_what_does_not_go_together_is_one_line(capsys, model, tmp_path, words, word):
    told = mistake(capsys, "distill", "--teacher", model, "--out", tmp_path / "run", *words)
    assert word in told and not (tmp_path / "run").exists()
