"""The demonstration, in few steps: real commands on a text of few words, and a table of what was measured."""

import csv
import io
import json
import re

import pytest

from bertsmith.cli import demo, village
from tests.command_line import bertsmith, mistake
from tests.tiny_runs import without_pictures

MAX_TEXT_BYTES = 300_000
TRADE_WORDS = {word for each in village.TRADES for word in (*each.tools, *each.materials, *each.products)}


def words_of(table):
    """All words of a table's sentences."""
    rows = csv.DictReader(io.StringIO(table))
    return {word for row in rows for word in re.findall(r"\w+", row["sentence"])}


def test_words_to_be_known_from_the_text_alone_are_in_no_labelled_sentence():
    text, tables = village.village_text(), village.labelled_sentences()
    asked = words_of(tables["dev"]) & TRADE_WORDS
    assert asked and not asked & words_of(tables["train"])
    assert asked <= set(re.findall(r"\w+", text))
    assert len(text.encode()) <= MAX_TEXT_BYTES
    assert (text, tables) == (village.village_text(), village.labelled_sentences())


def test_no_word_belongs_to_two_trades():
    assert len(TRADE_WORDS) == sum(
        len(each.tools + each.materials + each.products) for each in village.TRADES
    )


def test_every_step_is_a_command_and_the_table_is_what_was_measured(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "FINETUNING", (*demo.FINETUNING, "--limit", "16", "--epochs", "1"))
    monkeypatch.setattr(village, "DOCUMENTS", 60)
    with without_pictures():
        told = bertsmith(capsys, "demo", "--steps", 2, "--out", tmp_path / "shown")
    assert told.code == 0, told
    commands = re.findall(r"^\$ bertsmith (\w+)", told.out, re.MULTILINE)
    assert commands[:3] == ["fill", "fill", "next"]
    assert commands[-7:] == ["vocab", "corpus", "pretrain", "fill", "finetune", "finetune", "classify"]
    assert "capital" in told.out and "finished after 2 steps" in told.out
    for start, row in (("fresh", "fresh weights"), ("pretrained", "the model that has read the village")):
        result = json.loads((tmp_path / "shown" / f"trades-{start}" / "result.json").read_text())
        (line,) = (line for line in told.out.splitlines() if row in line and "│" in line)
        assert f"{result['metrics']['dev']['accuracy']:.1%}" in line
    assert "bertsmith serve" in told.out
    assert "already exists" in mistake(capsys, "demo", "--out", tmp_path / "shown")


@pytest.mark.parametrize("there", [(), ("answer",), ("answer", "tag", "classify")])
def test_task_models_are_asked_where_they_come_with_the_package(monkeypatch, there):
    asked = []
    monkeypatch.setattr(demo, "_bertsmith", lambda *words: asked.append(words[0]))
    monkeypatch.setattr(demo, "embedded_models_for", lambda ability: ability in there)
    demo.ask_embedded_models()
    assert asked == ["fill", "fill", "next", *there]


def test_a_command_that_is_stopped_ends_the_demonstration(capsys, monkeypatch):
    def stopped(*_, **__):
        return 130

    monkeypatch.setattr("bertsmith.cli.app.app", stopped)
    with pytest.raises(demo.Exit) as ended:
        demo._bertsmith("fill", "a [MASK]")
    assert ended.value.exit_code == 130 and "$ bertsmith fill 'a [MASK]'" in capsys.readouterr().out
