"""Python reaches all that the command line does: each verb is a function with the verb's options."""

import inspect
import json
from typing import Any

import pytest
from typer.main import get_command

import bertsmith
from bertsmith.cli.app import app
from bertsmith.cli.prune import PruneRequest
from bertsmith.cli.request import lines_of
from bertsmith.studies.sweep import points_of
from tests.command_line import bertsmith as command
from tests.toy_folder import write_toy_folder


def verbs_of(group: Any, prefix: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """All commands with their names, those of groups too."""
    found = []
    for name, each in group.commands.items():
        found += verbs_of(each, (*prefix, name)) if hasattr(each, "commands") else [((*prefix, name), each)]
    return found


COMMANDS = verbs_of(get_command(app))


@pytest.mark.parametrize(("name", "verb"), COMMANDS, ids=[" ".join(name) for name, _ in COMMANDS])
def test_every_option_of_a_verb_is_a_parameter_in_python(name, verb):
    function = bertsmith.verbs
    for part in name:
        function = getattr(function, part.replace("-", "_"))
    options = {each.name for each in verb.params} - {"as_json"}
    assert set(inspect.signature(function).parameters) == options and function.__doc__


@pytest.mark.parametrize("name", ["finetune", "pretrain", "evaluate"])
def test_a_function_with_data_frames_takes_every_option_too(name):
    options = set(inspect.signature(getattr(bertsmith.verbs, name)).parameters)
    assert set(inspect.signature(getattr(bertsmith, name)).parameters) == options


def test_a_verb_returns_what_the_command_prints_for_machines(tmp_path, capsys):
    write_toy_folder(tmp_path / "model")
    words = ("share", "--model", tmp_path / "model", "--groups", "1", "--json")
    told = command(capsys, *words, "--out", tmp_path / "one")
    found = bertsmith.verbs.share(model=str(tmp_path / "model"), groups=1, out=tmp_path / "two")
    assert found.values == json.loads(told.out) | {"out": str(tmp_path / "two")}
    assert found.finished and capsys.readouterr().out == ""


def test_a_notebook_shows_the_values_of_a_verb():
    shown = bertsmith.verbs.tasks()._repr_html_()
    assert shown.startswith("<table>") and "sst2" in shown
    shown = bertsmith.verbs.recipe.list()._repr_html_()
    assert "bert-base" in shown and "<caption>recipe list (the first 20)</caption>" in shown


def test_a_mistake_in_a_verb_is_told_in_terms_of_arguments(tmp_path):
    write_toy_folder(tmp_path / "model")
    with pytest.raises(bertsmith.UserError, match=r"^bits: is 5; choose 8 or 4"):
        bertsmith.verbs.quantise(model=tmp_path / "model", out=tmp_path / "out", bits=5)
    with pytest.raises(bertsmith.UserError, match="give heads=, ffn= or drop_layers="):
        bertsmith.verbs.prune(model=tmp_path / "model", data=tmp_path, out=tmp_path / "out")
    with pytest.raises(AttributeError, match="there is no verb pruned; there are answer"):
        bertsmith.verbs.pruned()
    assert not (tmp_path / "out").exists()


PRUNED = {"model": "m", "data": "d", "out": "o"}


@pytest.mark.parametrize(
    ("verb", "given", "what"),
    [
        (
            "prune",
            PRUNED | {"method": "magnitud", "heads": 0.2},
            "^method: 'magnitud' is not a valid choice; .*magnitude",
        ),
        ("prune", PRUNED | {"heads": 1.5}, "^heads: is 1.5; give 1 or less"),
        ("prune", PRUNED | {"heads": "many"}, "^heads: 'many' is not a number"),
        ("finetune", {"data": "d", "out": "o", "random": -1}, "^random: is -1; give 1 or more"),
        ("finetune", {"data": "d", "out": "o", "seeds": -3}, "^seeds: is -3; give 1 or more"),
        ("finetune", {"data": "d", "out": "o", "folds": 1}, "^folds: is 1; give 2 or more"),
        (
            "features",
            {"source": "t.txt", "out": "o", "layers": "lats"},
            "^layers: 'lats' is not a valid choice",
        ),
        ("prune", PRUNED | {"sparsity": 0.5}, "add method=.magnitude"),
        ("glue", {"data": "d", "out": "o", "tasks": ["sst2", "sst9"]}, "sst9"),
    ],
)
def test_python_checks_options_as_the_command_line_does(verb, given, what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(bertsmith.UserError, match=what):
        getattr(bertsmith.verbs, verb)(**given)
    if verb == "finetune":
        with pytest.raises(bertsmith.UserError, match=what):
            bertsmith.finetune(**given)
    assert not list(tmp_path.iterdir())


def test_a_list_is_as_good_as_values_with_commas():
    request = PruneRequest(**PRUNED, drop_layers=[1, 2], sparsity=0.5)
    assert (request.drop_layers, request.sparsity) == ("1,2", "0.5")


def test_one_setting_and_one_key_of_a_sweep_need_no_list():
    assert lines_of("optim.peak_lr=1e-3") == ["optim.peak_lr=1e-3"]
    assert [*points_of("optim.peak_lr=1e-3,2e-3")] == [{"optim.peak_lr": "1e-3"}, {"optim.peak_lr": "2e-3"}]


@pytest.mark.parametrize("verb", ["classify", "embed"])
def test_the_column_of_a_table_is_named_as_python_has_it(verb, tmp_path):
    file = tmp_path / "t.txt"
    file.write_text("tea\n")
    with pytest.raises(
        bertsmith.UserError, match="give the column of the texts with column=..., or remove it"
    ):
        getattr(bertsmith.verbs, verb)(
            source=file, delimiter=";", **({"out": tmp_path / "o"} if verb == "embed" else {})
        )
