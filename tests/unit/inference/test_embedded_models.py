"""The models of the package: found by name, chosen by what is asked, over one encoder in memory."""

import json
import shutil

import pytest

import bertsmith as package
from bertsmith.cli.serve import named_folders
from bertsmith.core.errors import UserError
from bertsmith.inference import embedded_models as embedded
from bertsmith.inference.adapter_folder import base_folder, base_name
from bertsmith.recipe.finetuning_schema import TextSection
from bertsmith.tasks.task_config import TaskConfig
from tests.command_line import bertsmith, mistake
from tests.lively_adapters import write_lively_adapter
from tests.toy_folder import write_toy_folder
from tests.unit.serve.serving import application_of, get, post

TEXT = TextSection(longest=48, longest_question=16)
TASKS = {
    "bertsmith-small-sentiment": TaskConfig(
        task="sst2", kind="classify", metrics=(), labels=("cold", "warm"), text=TEXT
    ),
    "bertsmith-small-entities": TaskConfig(
        task="ner", kind="tag", metrics=(), labels=("O", "B-PER", "B-LOC"), text=TEXT
    ),
    "bertsmith-small-questions": TaskConfig(task="squad1", kind="span", metrics=(), text=TEXT),
}
COMMANDS = {
    ("fill", "the [MASK] sits under the tree"): "bertsmith-small",
    ("next", "the sun", "the rain"): "bertsmith-small",
    ("compare", "warm tea", "cold rain"): "bertsmith-small",
    ("classify", "warm tea"): "bertsmith-small-sentiment",
    ("tag", "the boy sits in london"): "bertsmith-small-entities",
    ("answer", "who sits", "--passage-text", "the boy sits in london"): "bertsmith-small-questions",
}
REQUESTS = {
    "/fill": ({"text": "the [MASK] sits"}, "bertsmith-small"),
    "/next": ({"first": "the sun", "second": "the rain"}, "bertsmith-small"),
    "/compare": ({"texts": ["warm tea", "cold rain"]}, "bertsmith-small"),
    "/look/tokens": ({"first": "warm tea"}, "bertsmith-small"),
    "/classify": ({"texts": ["warm tea"]}, "bertsmith-small-sentiment"),
    "/tag": ({"texts": ["the boy sits in london"]}, "bertsmith-small-entities"),
    "/answer": ({"question": "who sits", "passage": "the boy sits"}, "bertsmith-small-questions"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of embedded models as the package holds it, of toys."""
    place = tmp_path_factory.mktemp("pretrained")
    write_toy_folder(place / "bertsmith-small")
    base = package.load(place / "bertsmith-small", device="cpu").model.network
    for seed, (name, config) in enumerate(TASKS.items()):
        write_lively_adapter(place / name, base, config, named="bertsmith-small", seed=seed)
    return place


@pytest.fixture
def installed(made, monkeypatch):
    """They are those of this package."""
    monkeypatch.setattr(embedded, "PRETRAINED", made)
    return made


def test_the_table_knows_every_folder_of_the_package():
    assert {folder.name for folder in embedded.PRETRAINED.iterdir()} == {*embedded.embedded_models()}


def test_the_package_has_a_model_for_what_encoders_do():
    for ability in embedded.OF_ENCODERS:
        assert embedded.default_model() in embedded.embedded_models_for(ability)


def test_names_open_embedded_models_and_adapters_find_their_base(installed, monkeypatch, tmp_path):
    (tmp_path / "bertsmith-small").mkdir()  # somebody's own of the same name is not their base
    monkeypatch.chdir(tmp_path)
    for name, config in TASKS.items():
        assert base_folder(installed / name) == installed / "bertsmith-small"
        bert = package.load(name, device="cpu")
        assert config.kind.ability in bert.abilities and "fill" not in bert.abilities
    assert base_name(installed / "bertsmith-small") == "bertsmith-small"
    assert package.load(device="cpu").heads == ("pooler", "mlm", "nsp")


@pytest.mark.parametrize(("words", "name"), COMMANDS.items(), ids=[words[0] for words in COMMANDS])
def test_a_command_without_a_model_takes_the_one_for_it_and_names_it(capsys, installed, words, name):
    told = bertsmith(capsys, *words, "--json", "--device", "cpu")
    assert told.code == 0 and told.err == f"model: {name}\n"
    assert told.out == bertsmith(capsys, *words, "--json", "--model", installed / name).out


def test_a_command_for_which_there_is_none_says_how_to_get_one(capsys, installed):
    said = mistake(capsys, "choose", "the boy", "sits", "plays")
    assert "this model cannot choose among texts; it can predict words" in said
    assert "bertsmith finetune swag" in said
    said = mistake(capsys, "tag", "the boy", "--model", installed / "bertsmith-small")
    assert "this model cannot tag words" in said and "remove --model" in said


@pytest.mark.parametrize("words", [("classify", "a day"), ("tag", "a day"), ("choose", "a", "b", "c")])
def test_without_task_models_tasks_ask_for_one(capsys, made, monkeypatch, tmp_path, words):
    shutil.copytree(made / "bertsmith-small", tmp_path / "bertsmith-small")
    monkeypatch.setattr(embedded, "PRETRAINED", tmp_path)
    assert embedded.default_model() == tmp_path / "bertsmith-small"
    said = mistake(capsys, *words)
    assert "bertsmith-small: this model cannot" in said and "make one with bertsmith finetune" in said


def test_the_server_has_them_all_over_one_encoder(installed):
    application = application_of(named_folders([]))
    listed = json.loads(get(application, "/models").text)["models"]
    assert [each["name"] for each in listed] == [*embedded.embedded_models()]
    for path, (body, name) in REQUESTS.items():
        assert json.loads(post(application, path, body).text)["model"] == name
    words = {
        id(application.models[name].load().model.network.encoder.embeddings.words.weight)
        for name in ("bertsmith-small", *TASKS)
    }
    assert len(words) == 1


def test_a_name_that_is_not_there_is_one_line(made, monkeypatch, tmp_path):
    monkeypatch.setattr(embedded, "PRETRAINED", tmp_path)
    with pytest.raises(UserError, match="bertsmith-small-sentiment: this folder does not exist"):
        package.load("bertsmith-small-sentiment")
