"""Adapters over one base: it is in memory once, and each answers as if it were served alone."""

import json
import shutil

import pytest

from bertsmith.core.errors import UserError
from bertsmith.inference.engine import Engine
from bertsmith.inference.loaded_model import Bert, load
from bertsmith.model.inference.inference_linear import AdaptedLinear
from bertsmith.model.lora import adapters_of
from bertsmith.recipe.finetuning_schema import TextSection
from bertsmith.serve.app import Application
from bertsmith.serve.server_config import ServerConfig
from bertsmith.tasks.task_config import TaskConfig
from tests.lively_adapters import write_lively_adapter
from tests.toy_folder import write_toy_folder
from tests.unit.serve.serving import application_of, post

TASKS = {
    "mood": TaskConfig(
        task="sst2", kind="classify", metrics=(), labels=("cold", "warm"), text=TextSection(longest=64)
    ),
    "names": TaskConfig(
        task="ner", kind="tag", metrics=(), labels=("O", "B-PER", "B-LOC"), text=TextSection(longest=64)
    ),
}
REQUESTS = {
    "mood": ("/classify", {"texts": ["warm tea", "the cold rain and the river"]}),
    "names": ("/tag", {"texts": ["the boy sits in london"]}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base and adapters over it with lively weights."""
    place = tmp_path_factory.mktemp("adapters")
    write_toy_folder(place / "base")
    base = load(place / "base", device="cpu").model.network
    for seed, (name, config) in enumerate(TASKS.items()):
        write_lively_adapter(place / name, base, config, named="../base", seed=seed)
    return {name: place / name for name in ("base", *TASKS)}


def numbers_of(reply):
    assert reply.status_code == 200, reply.text
    return json.loads(reply.text, parse_float=lambda text: round(float(text), 4))


def test_the_base_is_held_once_and_answers_are_those_of_separate_servers(folders):
    together = application_of(folders)
    for name, (path, body) in REQUESTS.items():
        alone = application_of({name: folders[name]})
        assert not any(adapters_of(alone.models[name].load().model.network))  # merged: it shares with nobody
        (one, other) = (numbers_of(post(each, path, body | {"model": name})) for each in (together, alone))
        assert one == other
    base = together.models["base"].load()
    weights = dict(base.model.network.named_parameters())
    for name in TASKS:
        bert = together.models[name].load()
        assert any(adapters_of(bert.model.network))
        shared = {key: each for key, each in bert.model.network.encoder.named_parameters(prefix="encoder")}
        for key, parameter in shared.items():
            assert ".adapters." in key or parameter.data_ptr() == weights[key].data_ptr()
        for mine, theirs in zip(
            bert.engine.network.encoder.blocks, base.engine.network.encoder.blocks, strict=True
        ):
            for linear, packed in zip(mine.linears.in_order(), theirs.linears.in_order(), strict=True):
                assert (linear.frozen if isinstance(linear, AdaptedLinear) else linear) is packed


def test_what_is_opened_is_warmed_up_before_it_answers(folders, monkeypatch):
    warmed = []
    monkeypatch.setattr(Bert, "warm_up", lambda bert: warmed.append(bert.model.network))
    application = application_of(folders)
    base = application.models["base"].load()
    for name in TASKS:
        application.models[name].load()
    assert warmed == [base.model.network]  # adapters have no kernels of their own


def test_a_cpu_is_not_warmed_up(folders, monkeypatch):
    monkeypatch.setattr(Engine, "warm_up", lambda _: pytest.fail("it has nothing to compile"))
    load(folders["base"], device="cpu").warm_up()


def test_a_base_that_is_not_served_itself_is_shared_too(folders):
    application = application_of({name: folders[name] for name in TASKS})
    one, other = (application.models[name].load() for name in TASKS)
    assert (
        one.model.network.encoder.embeddings.words.weight
        is other.model.network.encoder.embeddings.words.weight
    )
    assert "fill" not in one.abilities


def test_adapters_are_merged_one_by_one_where_weights_have_8_bits(folders):
    application = Application(ServerConfig(models=folders, device="cpu", precision="int8"))
    assert not any(adapters_of(application.models["mood"].load().model.network))


def test_adapters_can_be_served_over_another_place_of_their_base(folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what the base is called is also looked for from here
    for name in TASKS:
        shutil.copytree(folders[name], tmp_path / name)  # "../base" is nothing there
    models = {name: tmp_path / name for name in TASKS}
    with pytest.raises(UserError, match="`base=FOLDER`"):
        Application(ServerConfig(models, device="cpu", precision="fp32"))
    moved = application_of(models, base=folders["base"])
    beside = application_of({name: folders[name] for name in TASKS})
    for name, (path, body) in REQUESTS.items():
        one, other = (numbers_of(post(each, path, body | {"model": name})) for each in (moved, beside))
        assert one == other


def test_a_base_without_adapters_is_refused(folders):
    with pytest.raises(UserError, match="^--base: none of the models is an adapter; remove it"):
        Application(ServerConfig({"base": folders["base"]}, device="cpu", base=folders["base"]))
