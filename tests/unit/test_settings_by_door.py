"""A wrong setting is named as its door spells it: by an option, an argument, or a key of a recipe file."""

import inspect
import re
from typing import Any

import pytest
from typer.main import get_command

import bertsmith
from bertsmith.cli.app import app
from bertsmith.core.errors import UserError, in_file, spelled
from bertsmith.recipe.load import load_recipe
from bertsmith.recipe.toml_text import toml_text, value_text
from tests.command_line import mistake

WRONG = [
    # the parameter of the command and of the Python function, its key, a wrong value, and what is said
    ("steps", "run.steps", -1, "run.steps = -1 is invalid"),
    ("tokens", "run.tokens", -5, "run.tokens = -5 is invalid"),
    ("minutes", "run.minutes", -0.5, "run.minutes = -0.5 is invalid"),
    ("", "run.seed", "x", 'run.seed = "x" is invalid'),
    ("", "run.stepz", 3, "unknown key run.stepz; did you mean run.steps?"),
    ("", "optim.peak_lr", 0, "optim.peak_lr = 0 is invalid"),
    ("", "optim.algorithm", "adam", 'optim.algorithm = "adam" is invalid'),
    ("", "optim.beta2", 1.5, "optim.beta2 = 1.5 is invalid"),
    ("", "optim.clip_norm", "of", "it should be a number or 'off'"),
    ("", "optim.muon_momentum", 0.9, "`optim.algorithm=muon`"),
    ("", "optim.decay_from", 0.6, "`optim.schedule=wsd`"),
    ("", "run.average_decay", 0.5, "`run.average_from=0.8`"),
    ("", "masking.masks", "fresh", "it should be 'dynamic' or 'static'"),
    ("", "masking.levels", "token", "[{ unit = "),
    ("", "model.layers", [3], "model.layers = [3] is invalid; it should be a whole number"),
    ("", "model.heads", 7, "model.heads = 7 does not divide model.width = 128"),
    ("", "examples.stages", [], "the fractions of examples.stages must add up to 1"),
    ("", "examples.objective", "left-to-right", "`examples.pairs=none`"),
    ("", "run.keep_at", [0], "run.keep_at[0] = 0 is invalid"),
    ("", "run.recompute", "maybe", "it should be true or false"),
]


def refused(call, *arguments, **named) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments, **named)
    return caught.value.line()


def in_settings(key: str, value: str) -> str:
    return f'settings={{"{key}": {value if value[0].isdigit() else repr(value)}}}'


@pytest.mark.parametrize(("name", "key", "value", "what"), WRONG, ids=[case[1] for case in WRONG])
@pytest.mark.parametrize("door", ["command line", "Python", "recipe file"])
def test_a_wrong_setting_is_named_as_its_door_spells_it(door, name, key, value, what, tmp_path, capsys):
    out = tmp_path / "run"
    if door == "command line":
        words = (f"--{name}={value}",) if name else ("--set", f"{key}={value_text(value)}")
        place = ("--store", tmp_path, "--out", out)
        line = mistake(capsys, "pretrain", "bert-tiny", *place, *words).removeprefix("bertsmith: ")
        where, spelling = f"--{name or 'set'}: ", lambda key, value: f"--set {key}={value}"
    elif door == "Python":
        given = {name: value} if name else {"settings": {key: value}}
        line = refused(bertsmith.pretrain, "bert-tiny", store=tmp_path, out=out, **given)
        where = f"{name or 'settings'}: "
        spelling = in_settings
    else:
        file = tmp_path / "mine.toml"
        section, _, last = key.partition(".")
        file.write_text(f'base = "bert-tiny"\n{toml_text({section: {last: value}})}')
        line, where, spelling = refused(load_recipe, file), f"{file}: ", in_file
    assert where in line.partition(": ")[0] + ": " and not out.exists()
    assert spelled(what, spelling).replace("'", '"') in line.replace("'", '"')
    assert not re.search("`|--", line) or door == "command line"


@pytest.mark.parametrize("name", ["finetune", "pretrain"])
def test_a_python_function_takes_every_option_of_its_verb(name):
    verb: Any = get_command(app).commands[name]
    options = {each.name for each in verb.params} - {"as_json"}
    assert set(inspect.signature(getattr(bertsmith, name)).parameters) == options
