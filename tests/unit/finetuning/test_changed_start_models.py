"""A run is bound to every file of its start model that decides what it begins with."""

import json

import pytest

from bertsmith.core.errors import UserError
from bertsmith.finetuning.finetune import finetune
from tests.toy_folder import write_toy_folder
from tests.tuning import SHORT, Notebook, stop_at, toy_assignment


def with_other_setting(file, key, value):
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))


def without_dropout(folder):
    with_other_setting(folder / "config.json", "hidden_dropout_prob", 0.0)


def cased(folder):
    with_other_setting(folder / "tokenizer_config.json", "do_lower_case", False)


def with_other_words(folder):
    words = (folder / "vocab.txt").read_text()
    (folder / "vocab.txt").write_text(words.replace("\nsun\n", "\nmoon\n"))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (without_dropout, "config.json"),
        (cased, "tokenizer_config.json"),
        (with_other_words, "vocab.txt"),
    ],
)
def test_a_run_does_not_go_on_with_another_start(tmp_path, change, name):
    start = tmp_path / "start"
    write_toy_folder(start)
    assignment = toy_assignment("sst2", start, tmp_path, *SHORT)
    with stop_at(0):
        assert finetune(assignment, Notebook()).steps == 1
    original = (start / name).read_text()
    change(start)
    assert (start / name).read_text() != original
    with pytest.raises(UserError, match=f"contains another run: {name} of the model has changed since; "):
        finetune(assignment, Notebook())
    (start / name).write_text(original)
    assert finetune(assignment, Notebook()).finished
