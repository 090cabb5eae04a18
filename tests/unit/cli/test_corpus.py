"""`bertsmith corpus` as people and machines see it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bertsmith.cli.corpus import corpus
from bertsmith.cli.verb import App
from bertsmith.cli.vocab import vocab
from bertsmith.core.errors import UserError
from bertsmith.corpus.token_store import TokenStore
from tests.tokenizer_makers import PARAGRAPH, uncased_wordpiece

app = App()
app.command()(corpus)
vocab_app = App()
vocab_app.command()(vocab)

PROGRAM = "from typer import run; from bertsmith.cli.corpus import corpus; run(corpus)"


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """A text, a vocabulary and a place for the store."""
    uncased_wordpiece(tmp_path / "vocab")
    (tmp_path / "text.txt").write_text(
        "The iron is hot. It was.\n\nThe smith.\n\nThe smith.\n", encoding="utf-8"
    )
    text, vocabulary, store = (str(tmp_path / name) for name in ("text.txt", "vocab", "store"))
    return [text, "--vocab", vocabulary, "--out", store, "--workers", "1"]


def run(*arguments: str) -> str:
    answer = CliRunner().invoke(app, arguments)
    if isinstance(answer.exception, UserError):
        raise answer.exception
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def test_help_teaches_by_example() -> None:
    assert "Example: bertsmith corpus corpus/*.txt.xz --vocab vocab/ --out store/" in run("--help")


def test_the_summary_tells_what_was_kept_and_what_was_dropped(given) -> None:
    told = run(*given, "--duplicates", "exact")
    for line in ("documents  2", "sentences  3", "tokens     13, 1.182 a word", "dropped    1 duplicate"):
        assert line in told


def test_the_summary_tells_what_was_marked_and_added(given, tmp_path) -> None:
    (tmp_path / "lexicon.txt").write_text("the smith\nit was\tphrase\n", encoding="utf-8")
    (tmp_path / "words.txt").write_text("anvilry\n", encoding="utf-8")
    options = ["--lexicon", str(tmp_path / "lexicon.txt"), "--add-words", str(tmp_path / "words.txt")]
    told = run(*given, *options)
    assert "marked     1 phrases, 2 entities" in told
    assert "added      1 words to the vocabulary" in told


@pytest.mark.parametrize("kind", ["wordpiece", "byte-bpe"])
@pytest.mark.parametrize("text", [PARAGRAPH, "铁匠在炉火旁打铁，火花飞溅。\n鍛冶屋は鉄を打つ。"])
def test_tokens_per_word_are_those_that_the_vocabulary_was_said_to_have(tmp_path, kind, text) -> None:
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    source, vocabulary = str(tmp_path / "text.txt"), str(tmp_path / "learned")
    options = ["--out", vocabulary, "--kind", kind, "--size", "300", "--held-out", "0", "--json"]
    learned = CliRunner().invoke(vocab_app, [source, *options])
    given = [source, "--vocab", vocabulary, "--out", str(tmp_path / "store"), "--workers", "1"]
    report = json.loads(run(*given, "--sentences", "line", "--json"))
    assert report["tokens_per_word"] == pytest.approx(json.loads(learned.stdout)["tokens_per_word"])


@pytest.mark.parametrize(("language", "is_told"), [("en", False), ("sw", True)])
def test_rules_of_another_language_are_reported(given, language: str, is_told: bool) -> None:
    answer = CliRunner().invoke(app, [*given, "--language", language])
    assert answer.exit_code == 0
    assert ("sw does not have sentence rules; the rules of a related" in answer.stderr) == is_told


def test_machines_get_one_json_object(given, tmp_path) -> None:
    report = json.loads(run(*given, "--json"))
    assert report["out"] == str(tmp_path / "store")
    assert (report["documents"], report["sentences"], report["tokens"]) == (3, 4, 16)
    assert report["unknown_rate"] == 0
    assert report["megabytes_per_second"] > 0


def test_every_option_reaches_the_store(given, tmp_path) -> None:
    for name in ("lexicon.txt", "task.tsv"):
        (tmp_path / name).write_text("the iron\n", encoding="utf-8")
    (tmp_path / "text.txt").rename(tmp_path / "text.jsonl")
    (tmp_path / "text.jsonl").write_text(json.dumps({"body": "The iron is hot. It was."}), encoding="utf-8")
    options = ["--format", "jsonl", "--text", "body", "--sentences", "line", "--language", "fr"]
    options += ["--min-characters", "5", "--repair-mojibake", "--drop-junk", "--duplicates", "near"]
    options += ["--exclude", str(tmp_path / "task.tsv"), "--lexicon", str(tmp_path / "lexicon.txt")]
    (tmp_path / "words.txt").write_text("anvilry\n", encoding="utf-8")
    options += ["--add-words", str(tmp_path / "words.txt")]
    run(str(tmp_path / "text.jsonl"), *given[1:], *options, "--encoding-errors", "replace")
    manifest = TokenStore.open(tmp_path / "store").manifest
    assert manifest.sentences == 1
    assert manifest.units == ["basic", "phrase", "entity"]
    assert TokenStore.open(tmp_path / "store").tokenizer().id("anvilry")
    assert manifest.settings == {
        "add_words": ["words.txt"],
        "sources": ["text.jsonl"],
        "format": "jsonl",
        "field": "body",
        "encoding_errors": "replace",
        "sentences": "line",
        "language": "fr",
        "cleaning": {"repair_mojibake": True, "minimum_characters": 5, "drop_junk": True},
        "duplicates": "near",
        "exclude": ["task.tsv"],
        "lexicons": ["lexicon.txt"],
    }


def test_a_store_that_is_there_is_left_alone(given) -> None:
    run(*given)
    with pytest.raises(UserError, match="store: already exists; choose another --out, or remove it"):
        run(*given)


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_one_line_and_leaves_nothing_behind(given, tmp_path, workers: str, number: int) -> None:
    (tmp_path / "text.txt").write_text((PARAGRAPH + "\n") * 30_000, encoding="utf-8")
    source = str(Path(corpus.__code__.co_filename).parents[2])
    running = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *given[:-1], workers],
        env=os.environ | {"PYTHONPATH": source},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    while not list(tmp_path.glob(".store*/shard-00000.tokens")):
        assert running.poll() is None, "ended before it could be interrupted"
        time.sleep(0.02)
    os.killpg(running.pid, number)  # as a terminal does: to the workers, too
    _, told = running.communicate(timeout=30)
    assert (running.returncode, told) == (130, b"bertsmith: stopped; nothing was written\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt", "vocab"]
