import json

import pytest
from typer.testing import CliRunner

from bertsmith.cli.recipe import recipe
from bertsmith.core.errors import UserError
from bertsmith.recipe.load import load_recipe, preset_names


def answer(*words):
    """What the command prints."""
    result = CliRunner().invoke(recipe, words)
    if result.exception:
        raise result.exception
    return result.output


def test_show_prints_every_value_with_origin_and_description():
    lines = answer("show", "roberta-large", "--set", "run.steps=5", "--set", "run.seed=1").splitlines()
    assert "[optim]" in lines
    shown = {line.split(" = ")[0]: line for line in lines if " = " in line}
    assert shown["peak_lr"].startswith("peak_lr = 0.0004 ")
    assert "# preset roberta-large: Learning rate at the end of the warm-up" in shown["peak_lr"]
    assert "# preset roberta-base: Decay of the second moment." in shown["beta2"]
    assert "# default: Decay of the first moment." in shown["beta1"]
    assert shown["steps"].startswith("steps = 5 ") and "# --set: " in shown["steps"]


def test_what_show_prints_is_itself_a_recipe_file(tmp_path):
    (tmp_path / "mine.toml").write_text(answer("show", "ernie-base", "--set", "run.seed=3"))
    assert load_recipe(tmp_path / "mine.toml") == load_recipe("ernie-base", ["run.seed=3"])


def test_show_explains_a_file_by_its_path(tmp_path):
    (tmp_path / "mine.toml").write_text('base = "bert-tiny"\n[run]\nseed = 3\n')
    [seed] = [line for line in answer("show", str(tmp_path / "mine.toml")).splitlines() if "seed = " in line]
    assert f"# {tmp_path / 'mine.toml'}: Seed of every random number" in seed


def test_show_for_machines_is_one_object_with_a_key_for_each_value():
    facts = json.loads(answer("show", "bert-tiny", "--json", "--set", "optim.clip_norm=off"))
    assert facts["optim.clip_norm"]["value"] == "off" and facts["optim.clip_norm"]["origin"] == "--set"
    assert facts["model.width"] == {
        "value": 128,
        "origin": "preset bert-tiny",
        "description": "Width of the hidden states.",
    }


def test_list_has_a_line_for_each_preset():
    lines = answer("list").splitlines()
    assert [line.split()[0] for line in lines][-1] == "auto"  # no preset, but a choice beside them
    assert sorted(line.split()[0] for line in lines[:-1]) == preset_names()
    [base] = [line for line in lines if line.startswith("bert-base ")]
    assert base.split()[1] == "109.5M" and "12 layers, 768 wide" in base


def test_list_for_machines_has_exact_counts():
    facts = json.loads(answer("list", "--json"))
    assert facts["bert-base"]["parameters"] == 109_482_240
    assert facts["roberta-base"]["vocabulary"] == 50_265


@pytest.mark.parametrize("verb", ["show", "list"])
def test_each_verb_teaches_by_example(verb):
    assert f"Example: bertsmith recipe {verb}" in answer(verb, "--help")


def test_a_mistake_reaches_the_user_as_one():
    with pytest.raises(UserError, match="did you mean model.layers?"):
        answer("show", "bert-base", "--set", "model.layer=3")


def test_show_prints_the_recipe_of_a_task_with_its_published_settings():
    lines = answer("show", "squad2", "--set", "run.seed=3").splitlines()
    shown = {line.split(" = ")[0]: line for line in lines if " = " in line}
    assert shown["task"].startswith('task = "squad2"')
    assert shown["examples"].startswith("examples = 48 ") and "# task squad2: " in shown["examples"]
    assert "# default: " in shown["beta1"] and "# --set: " in shown["seed"]


def test_show_prints_the_settings_for_a_table_of_ones_own():
    assert 'task = "custom"' in answer("show", "custom")


def test_a_wrong_setting_of_a_task_is_told():
    with pytest.raises(UserError, match="run.epoch"):
        answer("show", "sst2", "--set", "run.epoch=3")
