"""`bertsmith vocab` from text files to a tokenizer folder."""

import json
import lzma
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bertsmith.cli.verb import App
from bertsmith.cli.vocab import vocab
from bertsmith.core.errors import UserError
from bertsmith.text.tokenizer import Tokenizer
from tests.tokenizer_makers import PARAGRAPH

app = App()
app.command()(vocab)

PROGRAM = "from typer import run; from bertsmith.cli.vocab import vocab; run(vocab)"
A_MEGABYTE = f"{PARAGRAPH}\n".encode() * 1600


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(it) for it in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    documents = "\n\n".join(PARAGRAPH for _ in range(40))
    (folder / "a.txt.xz").write_bytes(lzma.compress(documents.encode()))
    lines = [json.dumps({"body": line}) for line in PARAGRAPH.splitlines()]
    (folder / "b.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def test_packed_text_becomes_a_tokenizer_folder(corpus: Path, tmp_path: Path) -> None:
    printed = run(corpus / "a.txt.xz", "--size", "200", "--out", tmp_path / "vocab")
    tokenizer = Tokenizer.load(tmp_path / "vocab")
    assert tokenizer.vocabulary_size == 200
    assert tokenizer.unknown_id not in tokenizer.encode(PARAGRAPH).ids
    assert "tokens per word" in printed


def test_the_report_for_machines_is_one_json_object(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "vocab"
    printed = run(corpus / "a.txt.xz", "--size", 200, "--held-out", 0.2, "--out", out, "--json")
    report = json.loads(printed)
    assert report["out"] == str(out)
    assert (report["pieces"], report["documents"], report["unknown_rate"]) == (200, 40, 0.0)
    assert report["scored_on"] == "held-out text"
    assert 0 < report["held_out_documents"] < 20
    assert report["tokens_per_word"] > 1
    assert report["seconds"] >= 0


def test_options_reach_the_learner(corpus: Path, tmp_path: Path) -> None:
    options = ("--cased", "--unused", 7, "--kind", "wordpiece-frequency", "--alphabet", 30, "--min-count", 3)
    run(corpus / "b.jsonl", "--text", "body", *options, "--out", tmp_path / "vocab", "--size", 90)
    tokenizer = Tokenizer.load(tmp_path / "vocab")
    assert tokenizer.token(7) == "[unused6]"
    assert "T" in [tokenizer.token(number) for number in range(tokenizer.vocabulary_size)]
    assert tokenizer.unknown_id in tokenizer.encode("铁匠").ids


def test_byte_bpe_is_written_as_of_roberta(corpus: Path, tmp_path: Path) -> None:
    run(corpus / "a.txt.xz", "--kind", "byte-bpe", "--size", 300, "--out", tmp_path / "vocab")
    config = json.loads((tmp_path / "vocab" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "RobertaTokenizer"


def test_a_unigram_vocabulary_is_written_as_of_albert(corpus: Path, tmp_path: Path) -> None:
    options = ("--kind", "unigram", "--size", 160, "--json")
    report = json.loads(run(corpus / "a.txt.xz", *options, "--out", tmp_path / "vocab"))
    tokenizer = Tokenizer.load(tmp_path / "vocab")
    assert tokenizer.vocabulary_size == report["pieces"] <= 160
    assert (tokenizer.pad_id, tokenizer.unknown_id, tokenizer.cls_id, tokenizer.mask_id) == (0, 1, 2, 4)


def test_a_vocabulary_smaller_than_asked_for_is_said_with_the_remedy(corpus: Path, tmp_path: Path) -> None:
    printed = run(corpus / "a.txt.xz", "--out", tmp_path / "vocab")
    assert "fewer than 30,522: all other pieces are too rare" in printed


def test_a_file_in_the_place_of_the_folder_is_rejected_before_any_work(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "vocab").write_text("")
    with pytest.raises(UserError, match="vocab: already exists"):
        run("no-such-text", "--out", tmp_path / "vocab")


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_a_folder_that_holds_anything_is_left_as_it_is(corpus: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).write_text("mine")
    with pytest.raises(UserError, match="model: already exists; choose another --out"):
        run(corpus / "a.txt.xz", "--out", tmp_path / "model")
    assert [(file.name, file.read_text()) for file in (tmp_path / "model").iterdir()] == [(name, "mine")]


def test_text_without_a_word_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(UserError, match=r"empty\.txt: there is no text to learn from"):
        run(tmp_path / "empty.txt", "--out", tmp_path / "vocab")


def test_of_some_documents_one_at_least_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(f"{PARAGRAPH}\n" * 20, encoding="utf-8")
    printed = run(tmp_path / "text.txt", "--size", 200, "--out", tmp_path / "vocab", "--json")
    assert json.loads(printed)["held_out_documents"] == 1


# Alone, it reads once there is more than a pipe holds; workers are at it past two tasks of 32 megabytes.
@pytest.mark.parametrize(("workers", "megabytes"), [("1", 3), ("2", 75)])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_one_line_and_leaves_nothing_behind(
    tmp_path: Path, number: int, workers: str, megabytes: int
) -> None:
    running = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "-", "--out", str(tmp_path / "vocab"), "--workers", workers],
        env=os.environ | {"PYTHONPATH": str(Path(vocab.__code__.co_filename).parents[2])},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert running.stdin and running.stderr
    with suppress(BrokenPipeError), running.stdin as text:
        for written in range(1000):  # without end: a read that began before the signal must not wait
            text.write(A_MEGABYTE)
            if written == megabytes:
                os.killpg(running.pid, number)  # as a terminal does: to the workers, too
    told = running.stderr.read().decode()
    assert (running.wait(), told) == (130, "bertsmith: stopped; nothing was written\n")
    assert list(tmp_path.iterdir()) == []
