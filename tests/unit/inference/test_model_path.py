"""Which folder is meant by a path or a name: of a run, of the best of several, or in the hub's cache."""

import json
import shutil
from pathlib import Path

import pytest

import bertsmith
from bertsmith.core.errors import UserError
from bertsmith.inference.model_path import model_folder

COMMIT = "0" * 40


@pytest.fixture
def seeds(folder, tmp_path) -> Path:
    """The folder of two runs."""
    for name in ("seed-0", "seed-1"):
        shutil.copytree(folder, tmp_path / "runs" / name / "model")
    return tmp_path / "runs"


def test_the_best_of_several_runs_is_opened(seeds):
    (seeds / "spread.json").write_text(json.dumps({"runs": {}, "best": "seed-1"}))
    assert model_folder(seeds) == seeds / "seed-1" / "model"
    assert bertsmith.load(seeds).abilities == ("fill", "next", "embed", "look")


@pytest.mark.parametrize("spread", [None, {}, {"best": ""}, {"best": "gone"}])
def test_several_runs_are_named_where_nothing_says_which_is_best(seeds, spread):
    if spread is not None:
        (seeds / "spread.json").write_text(json.dumps(spread))
    with pytest.raises(UserError) as caught:
        bertsmith.load(seeds)
    said = "contains 2 runs, without a record of the best one; give one of them"
    assert caught.value.line() == f"{seeds}: {said}: {seeds / 'seed-0'}, {seeds / 'seed-1'}"


# ---- the cache of the Hugging Face tools


@pytest.fixture
def cache(folder, tmp_path, monkeypatch) -> Path:
    """A cache with one model, as `hf download` leaves it: a snapshot of links to blobs."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "home" / "hub" / "models--org--tiny.model"
    (place / "blobs").mkdir(parents=True)
    (place / "refs").mkdir()
    snapshot = place / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, place / "blobs" / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    (place / "refs" / "main").write_text(COMMIT)
    return tmp_path / "home" / "hub"


def test_a_name_opens_what_was_fetched(cache):
    assert bertsmith.load("org/tiny.model").abilities == ("fill", "next", "embed", "look")
    place = cache / "models--org--tiny.model"
    (place / "snapshots" / ("1" * 40)).mkdir()  # an older revision, to which main does not point
    assert model_folder("org/tiny.model") == place / "snapshots" / COMMIT


def test_a_folder_goes_before_a_name(cache, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "org" / "tiny.model")
    assert model_folder("org/tiny.model") == Path("org/tiny.model")


def test_without_a_main_revision_the_only_one_is_taken(cache):
    place = cache / "models--org--tiny.model"
    (place / "refs" / "main").unlink()
    assert model_folder("org/tiny.model").name == COMMIT
    (place / "snapshots" / ("1" * 40)).mkdir()
    with pytest.raises(UserError, match="lacks a model of this name"):
        model_folder("org/tiny.model")


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"HF_HUB_CACHE": "{}/a", "HF_HOME": "/b"}, "a"),
        ({"HUGGINGFACE_HUB_CACHE": "{}/a"}, "a"),
        ({"HF_HOME": "{}/h"}, "h/hub"),
        ({"XDG_CACHE_HOME": "{}/x"}, "x/huggingface/hub"),
    ],
)
def test_the_cache_lies_where_the_hugging_face_tools_have_it(variables, place, tmp_path):
    snapshot = tmp_path / place / "models--org--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    environment = {name: value.format(tmp_path) for name, value in variables.items()}
    assert model_folder("org/name", environment=environment) == snapshot


def test_a_name_that_was_not_fetched_says_how_to(cache):
    with pytest.raises(UserError) as caught:
        bertsmith.load("org/other")
    said = f"org/other: this folder does not exist, and {cache} lacks a model of this name"
    remedy = "give the path of a folder on this machine, or download the model with: hf download org/other"
    assert caught.value.line() == f"{said}; {remedy}; bertsmith itself downloads nothing"


@pytest.mark.parametrize("name", ["nowhere", "a/b/c", "/no/where", "../x"])
def test_what_is_no_name_of_a_model_is_a_folder_that_is_missing(cache, name):
    with pytest.raises(
        UserError, match="this folder does not exist; give the path of a folder on this machine"
    ):
        model_folder(name)
