"""`bertsmith examples`: what people and machines are told."""

import json
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from bertsmith.cli.examples import examples
from bertsmith.ground.errors import UserError
from tests.example_stores import random_store

SMALL = ["--set", "batch.sequences=8", "--set", "examples.held_out_share=0.2"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_store(tmp_path_factory.mktemp("cli"), documents=300, sentences=(1, 4)).folder


def answer(*arguments: str) -> str:
    app = Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(examples)
    result = CliRunner().invoke(
        app, [*arguments], env={"COLUMNS": "90", "TERM": "dumb"}, catch_exceptions=False
    )
    assert result.exit_code == 0
    return result.stdout


def test_people_see_tokens_targets_and_shares(store: Path) -> None:
    text = answer("bert-tiny", "--store", str(store), "--show", "2", *SMALL)
    assert "Example 2:" in text and "Example 3:" not in text
    for word in ("position", "segment", "[CLS]", "[MASK]", "target", "label", "shown as", "Lengths", "█"):
        assert word in text
    assert "have a random B; the recipe asks for 50%, but" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 90


def test_machines_get_everything_in_one_object(store: Path) -> None:
    facts = json.loads(answer("bert-tiny", "--store", str(store), "--show", "3", "--json", *SMALL))
    assert len(facts["examples"]) == 3
    for example in facts["examples"]:
        assert len(example["tokens"]) == len(example["segments"]) == len(example["positions"])
        assert example["pieces"][0] == "[CLS]" and example["pair_label"] in (0, 1)
        assert example["targets"].keys() == example["target_pieces"].keys()
    shares = facts["shares"]
    assert shares["sequences"] == sum(shares["lengths"].values()) <= facts["examples_in_epoch"]


def test_a_step_shows_what_training_will_see_there(store: Path) -> None:
    arguments = ("bert-tiny", "--store", str(store), "--show", "1", "--json", *SMALL)
    first, third = (json.loads(answer(*arguments, "--step", step)) for step in ("0", "3"))
    assert first["examples"] != third["examples"]
    assert first["shares"] == third["shares"]


def test_one_sided_objectives_have_no_masks_to_count(store: Path) -> None:
    one_sided = ["--set", "examples.objective=left-to-right", "--set", "examples.pairs=none"]
    text = answer("bert-tiny", "--store", str(store), "--show", "1", *SMALL, *one_sided)
    assert "shown as" not in text and "label" not in text


def test_a_stage_the_recipe_lacks_is_refused(store: Path) -> None:
    with pytest.raises(UserError, match="no stage 7; it has 2"):
        answer("bert-tiny", "--store", str(store), "--stage", "7", *SMALL)
