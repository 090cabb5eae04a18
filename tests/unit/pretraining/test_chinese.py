"""Chinese from raw text to a model: no spaces, a token a character, nothing unknown."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import bertsmith
from bertsmith.cli.corpus import corpus
from bertsmith.cli.verb import App
from bertsmith.cli.vocab import vocab
from bertsmith.corpus.token_store import TokenStore
from tests.tiny_runs import run_tiny

WHO = ["铁匠", "农夫", "面包师", "国王", "骑手"]
DOES = ["打铁", "买马", "卖面包", "找到王冠", "修好马蹄铁"]
WHERE = ["在村子里", "在河边", "在山上", "在炉火旁", "在城里"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    chance = np.random.default_rng(0)
    documents = [
        "".join(
            f"{WHO[chance.integers(5)]}{WHERE[chance.integers(5)]}{DOES[chance.integers(5)]}。"
            for _ in range(chance.integers(3, 7))
        )
        for _ in range(40)
    ]
    (tmp_path / "text.txt").write_text("\n\n".join(documents), encoding="utf-8")
    return tmp_path / "text.txt"


def run(command, *arguments: str | Path) -> None:
    app = App()
    app.command()(command)
    CliRunner().invoke(app, [str(word) for word in arguments], catch_exceptions=False)


def test_chinese_text_becomes_a_model_without_unknown_tokens(text, tmp_path):
    run(vocab, text, "--size", "200", "--out", tmp_path / "vocab", "--workers", "1")
    settings = ("--language", "zh", "--workers", "1")
    run(corpus, text, "--vocab", tmp_path / "vocab", "--out", tmp_path / "store", *settings)
    store = TokenStore.open(tmp_path / "store")
    assert store.token_counts[store.tokenizer().unknown_id] == 0
    assert len(store.document_starts) - 1 == 40
    assert len(store.sentence_starts) - 1 > 3 * 40  # 。 ends a sentence
    result = run_tiny(store, tmp_path / "run", "run.steps=2")
    assert (result.state, result.steps) == ("finished", 2)
    bert = bertsmith.load(tmp_path / "run" / "model", device="cpu")
    (guesses,) = bert.fill("铁匠在炉[MASK]旁打铁。", top=2)
    assert len(guesses) == 2
