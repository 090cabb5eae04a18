"""`bertsmith examples`: what people and machines are told."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bertsmith.cli.examples import examples
from bertsmith.cli.verb import App
from bertsmith.core.errors import UserError
from tests.command_line import bertsmith
from tests.example_stores import random_store, wordpiece
from tests.plain_stores import write_store

SMALL = ["--set", "batch.sequences=8", "--set", "examples.held_out_fraction=0.2"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_store(tmp_path_factory.mktemp("cli"), documents=300, sentences=(1, 4)).folder


def answer(*arguments: str) -> str:
    app = App()
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
    assert "have a random B; the recipe's value is 50%, but" in " ".join(text.split())
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


@pytest.mark.parametrize(("stage", "steps"), [("0", 9), ("1", 1)])
def test_a_step_that_training_never_comes_to_is_rejected(store: Path, stage: str, steps: int) -> None:
    short = ["--stage", stage, "--set", "run.steps=10", *SMALL]
    assert answer("bert-tiny", "--store", str(store), "--step", str(steps - 1), *short)
    with pytest.raises(UserError, match=f"stage {stage} does not have a step {steps}; it has {steps} steps"):
        answer("bert-tiny", "--store", str(store), "--step", str(steps), *short)


def test_a_budget_of_tokens_has_about_so_many_steps(store: Path) -> None:
    tokens = ["--set", "run.budget=tokens", "--set", "run.tokens=100_000", "--over", "100_000_000"]
    arguments = ("bert-tiny", "--store", str(store), "--show", "0", *tokens, *SMALL)
    shares = json.loads(answer(*arguments, "--json"))["shares"]
    with pytest.raises(
        UserError, match=r"does not have a step 1,000,000,000; it has about [\d,]+ steps"
    ) as refused:
        answer(*arguments, "--step", "1_000_000_000")
    [about] = re.findall(r"about ([\d,]+) steps", refused.value.line())
    in_a_step = 8 * shares["tokens"] / shares["sequences"]
    assert int(about.replace(",", "")) == pytest.approx(0.9 * 100_000 / in_a_step, rel=0.02)


def test_people_and_machines_see_how_many_entities_are_masked_whole(tmp_path: Path) -> None:
    tokenizer = wordpiece(tmp_path / "vocabulary")
    line, codes = [10, 11, 12, 13, 14, 15], [0, 4, 5, 0, 0, 0]
    write_store(tmp_path / "store", [[line] * 5] * 40, tokenizer, units=[[codes] * 5] * 40)
    whole = ("--set", "masking.unit=entity", "--show", "0", *SMALL)
    arguments = ("bert-tiny", "--store", str(tmp_path / "store"), *whole)
    counts = json.loads(answer(*arguments, "--json"))["shares"]["units"]["entity"]
    assert counts["found"] > counts["whole"] > 0 == counts["in_part"]
    told = f"entities {counts['whole']} of {counts['found']} are predicted whole, 0 in part"
    assert told in " ".join(answer(*arguments).split())


def test_a_store_smaller_than_a_step_is_shown_and_told_to_be_too_small(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = ["--set", "batch.sequences=100_000", "--set", "examples.held_out_fraction=0.2"]
    arguments = ("bert-tiny", "--store", str(store), "--show", "3", "--json")
    told = bertsmith(capsys, "examples", *arguments, *large)
    assert told.code == 0, told.err
    assert told.err.endswith(
        "not enough for batch.sequences = 100000; add text, or make steps smaller before you train on it\n"
    )
    facts = json.loads(told.out)
    whole = json.loads(answer(*arguments, *SMALL))["examples_in_epoch"]
    assert len(facts["examples"]) == 3
    assert facts["shares"]["sequences"] == facts["examples_in_epoch"] == whole
    with pytest.raises(UserError, match="not enough for batch.sequences = 100000"):
        answer(*arguments, *large, "--step", "1")


@pytest.mark.parametrize("length", [33, 8])
def test_lengths_are_counted_in_ascending_bins_up_to_the_longest(store: Path, length: int) -> None:
    stage = f"examples.stages=[{{fraction=1.0, length={length}, predictions=3}}]"
    text = answer("bert-tiny", "--store", str(store), "--show", "0", "--set", stage, *SMALL)
    bins = re.findall(r"^ *(\d+)(?:-(\d+))? .*%$", text.partition("Lengths in tokens")[2], re.MULTILINE)
    edges = [(int(first), int(last or first)) for first, last in bins]
    assert edges[0][0] == 1 and edges[-1][1] == length
    assert all(first <= last for first, last in edges)
    assert [first for first, _ in edges[1:]] == [last + 1 for _, last in edges[:-1]]


def test_a_stage_the_recipe_lacks_is_rejected(store: Path) -> None:
    with pytest.raises(UserError, match="not have a stage 7; it has 2"):
        answer("bert-tiny", "--store", str(store), "--stage", "7", *SMALL)


def test_a_damaged_store_is_named_and_not_looked_at(tmp_path: Path) -> None:
    folder = random_store(tmp_path, documents=300, sentences=(1, 4)).folder
    shard = folder / "shard-00000.tokens"
    shard.write_bytes(b"\xff\xff" + shard.read_bytes()[2:])
    with pytest.raises(UserError, match=r"shard-00000\.tokens: has changed since it was written"):
        answer("bert-tiny", "--store", str(folder), *SMALL)
