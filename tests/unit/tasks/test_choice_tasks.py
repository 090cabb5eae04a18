import csv
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from bertsmith.core.errors import UserError
from bertsmith.tasks.choice_tasks import TASKS, read_adversarial_arct, read_arct, read_race, read_swag
from bertsmith.tasks.example_types import BadLine
from bertsmith.tasks.task import read_split

SWAG_HEADER = ["", "video-id", "fold-ind", "startphrase", "sent1", "sent2", "gold-source"]
SWAG_HEADER += ["ending0", "ending1", "ending2", "ending3", "label"]
SWAG_ROW = [
    "0",
    "v",
    "3",
    "A man sits, on it. He",
    'A "man" sits, on it.',
    "He",
    "gold",
    "a.",
    "b.",
    "c.",
    "d.",
]
ARCT_HEADER = ["#id", "warrant0", "warrant1", "correctLabelW0orW1", "reason", "claim", "debateTitle"]
PASSAGE = {
    "id": "middle7.txt",
    "article": "Tom has a cat.\nIt is black.",
    "questions": ["The cat is  _ .", "Who has it?", "_ has a _ ."],
    "options": [
        ["red", "black", "green", "blue"],
        ["Tom", "Ann", "Bob", "Eve"],
        ["a; b", "c; d", "e; f", "g; h"],
    ],
    "answers": ["B", "A", "D"],
}


def task(name: str):
    return next(task for task in TASKS if task.name == name)


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def swag_file(path: Path, *rows: list[str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([SWAG_HEADER, *rows])
    return path


def tsv_file(path: Path, *rows: list[str]) -> Path:
    return written(path, "".join("\t".join(row) + "\n" for row in rows))


def race_file(path: Path, *passages: dict) -> Path:
    return written(path, "".join(json.dumps(passage) + "\n" for passage in passages))


def seconds(example) -> list[str]:
    return [second for _, second in example.options]


# SWAG


def test_an_option_of_swag_is_the_sentence_and_the_begun_one_with_its_ending(tmp_path):
    (example,) = read_swag(swag_file(tmp_path / "train.csv", [*SWAG_ROW, "2"]))
    assert example.options[2] == ('A "man" sits, on it.', "He c.")
    assert (len(example.options), example.label, example.key) == (4, 2, "0")


def test_the_test_set_of_swag_has_no_labels(tmp_path):
    with (tmp_path / "test.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([SWAG_HEADER[:-1], SWAG_ROW])
    (example,) = read_swag(tmp_path / "test.csv")
    assert example.label is None


def test_swag_is_read_from_the_hubs_parquet_too(tmp_path):
    row = dict(zip(SWAG_HEADER[1:], [*SWAG_ROW[1:], -1], strict=True))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "test-00000-of-00001.parquet")
    (example,) = read_split(task("swag"), tmp_path, "test", skip_bad=False).examples
    assert (seconds(example), example.label) == (["He a.", "He b.", "He c.", "He d."], None)


@pytest.mark.parametrize("label", ["4", "-2", "x", "1.0"])
def test_a_label_that_names_no_option_is_a_bad_line(tmp_path, label):
    (bad,) = read_swag(swag_file(tmp_path / "train.csv", [*SWAG_ROW, label]))
    assert isinstance(bad, BadLine)
    assert (repr(label) in bad.what, bad.where) == (True, f"{tmp_path / 'train.csv'}:2")


def test_a_table_that_is_not_swag_is_rejected_with_its_columns(tmp_path):
    with pytest.raises(UserError, match="lacks the column 'sent1'; its columns are 'a', 'b'"):
        list(read_swag(written(tmp_path / "train.csv", "a,b\n1,2\n")))


# RACE


def test_an_option_fills_the_blank_or_follows_the_question(tmp_path):
    filled, followed, two_blanks = read_race(race_file(tmp_path / "middle-dev.jsonl", PASSAGE))
    assert seconds(filled)[1] == "The cat is  black ."
    assert seconds(followed)[0] == "Who has it? Tom"
    assert seconds(two_blanks)[3] == "g; h has a g; h ."
    assert filled.options[0][0] == PASSAGE["article"]


def test_answers_are_letters_and_each_question_has_its_own_id(tmp_path):
    examples = list(read_race(race_file(tmp_path / "middle-dev.jsonl", PASSAGE)))
    expected = [("middle7.txt-1", 1), ("middle7.txt-2", 0), ("middle7.txt-3", 3)]
    assert [(example.key, example.label) for example in examples] == expected


def test_questions_without_answers_are_unlabelled(tmp_path):
    secret = {key: value for key, value in PASSAGE.items() if key != "answers"}
    assert [example.label for example in read_race(race_file(tmp_path / "a.jsonl", secret))] == [None] * 3


@pytest.mark.parametrize(
    "change",
    [{"answers": ["B"]}, {"options": [["a", "b"]]}, {"article": 3}, {"questions": "Who?"}, {"options": None}],
)
def test_a_passage_with_missing_parts_is_one_bad_line(tmp_path, change):
    (bad,) = read_race(race_file(tmp_path / "a.jsonl", PASSAGE | change))
    assert isinstance(bad, BadLine)
    assert bad.where.endswith("a.jsonl:1")


@pytest.mark.parametrize("options", [["a"], "abcd", ["a", 3], None])
def test_a_question_without_proper_options_is_a_bad_line_among_good_ones(tmp_path, options):
    spoilt = PASSAGE | {"options": [PASSAGE["options"][0], options, PASSAGE["options"][2]]}
    first, bad, third = read_race(race_file(tmp_path / "a.jsonl", spoilt))
    assert isinstance(bad, BadLine)
    assert bad.where.endswith("a.jsonl:1 question 2")
    assert (first.label, third.label) == (1, 3)


def test_an_answer_beyond_the_options_is_a_bad_line(tmp_path):
    spoilt = PASSAGE | {"answers": ["B", "E", "D"]}
    found = list(read_race(race_file(tmp_path / "a.jsonl", spoilt)))
    assert [isinstance(each, BadLine) for each in found] == [False, True, False]


def test_the_published_folders_are_read_together_and_by_school(tmp_path):
    for school, name in (("high", "2.txt"), ("high", "1.txt"), ("middle", "3.txt")):
        file = tmp_path / "RACE" / "dev" / school / name
        written(file, json.dumps(PASSAGE | {"id": f"{school}{name}"}))
    counts = {
        split: len(read_split(task("race"), tmp_path, split, skip_bad=False).examples)
        for split in ("dev", "dev-high", "dev-middle")
    }
    assert counts == {"dev": 9, "dev-high": 6, "dev-middle": 3}


# ARCT


def test_an_option_of_arct_is_claim_and_reason_and_then_a_warrant(tmp_path):
    row = ["7_a", "it rains", 'it "pours"', "1", "Wet is bad.", "Stay in", "Title"]
    (example,) = read_arct(tsv_file(tmp_path / "train.tsv", ARCT_HEADER, row))
    argument = "Stay in. Wet is bad."
    assert example.options == ((argument, "it rains"), (argument, 'it "pours"'))
    assert (example.key, example.label) == ("7_a", 1)


def test_the_adversarial_files_have_quoted_cells_parted_by_tabs(tmp_path):
    row = ["7_a", "it rains, often", '"it ""pours"""', "0", "Wet is bad.", "Stay in", "Title"]
    (example,) = read_adversarial_arct(tsv_file(tmp_path / "dev-adv-negated.csv", ARCT_HEADER, row))
    assert seconds(example) == ["it rains, often", 'it "pours"']


def test_the_adversarial_training_set_is_the_one_with_swapped_warrants(tmp_path):
    row = ["7_a", "it rains", "it pours", "1", "Wet is bad.", "Stay in", "Title"]
    swapped = ["7_a_swapped", "it pours", "it rains", "0", *row[4:]]
    tsv_file(tmp_path / "train-adv-swapped.csv", ARCT_HEADER, row, swapped)
    examples = read_split(task("arct-adversarial"), tmp_path, "train", skip_bad=False).examples
    assert [(example.key, example.label) for example in examples] == [("7_a", 1), ("7_a_swapped", 0)]


def test_a_ragged_line_of_an_adversarial_file_is_a_bad_line(tmp_path):
    (bad,) = read_adversarial_arct(tsv_file(tmp_path / "a.csv", ARCT_HEADER, ["7_a", "it rains"]))
    assert isinstance(bad, BadLine)
    assert (bad.what, bad.where) == ("has 2 columns instead of 7", f"{tmp_path / 'a.csv'}:2")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"", "lacks the column"), (b"a,b\n", "lacks the column 'reason'"), (b"\xff\n", "is not UTF-8 CSV")],
)
def test_an_adversarial_file_without_its_columns_is_rejected(tmp_path, content, complaint):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        list(read_adversarial_arct(tmp_path / "a.csv"))


def test_the_adversarial_set_can_be_asked_for_beside_the_original(tmp_path):
    row = ["7_a", "it rains", "it pours", "1", "Wet is bad.", "Stay in", "Title"]
    tsv_file(tmp_path / "test.tsv", ARCT_HEADER, row)
    tsv_file(tmp_path / "test-adv-negated.csv", ARCT_HEADER, ["8_b", *row[1:]])
    keys = [
        read_split(task("arct"), tmp_path, split, skip_bad=False).examples[0].key
        for split in ("test", "test-adversarial")
    ]
    assert keys == ["7_a", "8_b"]
