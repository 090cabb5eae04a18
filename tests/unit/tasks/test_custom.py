"""A user's own tables."""

import json
from pathlib import Path

import pytest

from bertsmith.core.errors import UserError
from bertsmith.tasks.custom import CustomSpec, custom_task, has_own_dev
from bertsmith.tasks.example_types import TextExample
from bertsmith.tasks.task import has_split, labels_of, read_split

WHOLE = 0.0


def table(path: Path, *rows: str) -> Path:
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def read(spec: CustomSpec, data: Path, split: str = "train") -> list[TextExample]:
    examples = read_split(custom_task(spec), data, split, skip_bad=False).examples
    return [example for example in examples if isinstance(example, TextExample)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("my.csv", 'id,review,stars\n7,"Good, really",5\n'),
        ("my.tsv", "id\treview\tstars\n7\tGood, really\t5\n"),
        ("my.jsonl", '{"id": 7, "review": "Good, really", "stars": 5}\n'),
    ],
)
def test_a_text_and_a_label_in_any_format(tmp_path, name, content) -> None:
    (tmp_path / name).write_text(content)
    (example,) = read(CustomSpec("review", "stars", key="id", dev_fraction=WHOLE), tmp_path / name)
    assert (example.key, example.texts, example.label) == ("7", "Good, really", "5")


def test_pairs_have_a_second_text(tmp_path) -> None:
    path = table(tmp_path / "my.csv", "a,b,same", "x,y,yes")
    (example,) = read(CustomSpec("a", "same", second="b", dev_fraction=WHOLE), path)
    assert example.texts == ("x", "y")


def test_classes_come_from_the_file_and_numbers_are_in_their_order(tmp_path) -> None:
    path = table(tmp_path / "my.csv", "text,stars", "a,10", "b,9", "c,2", "d,10")
    spec = CustomSpec("text", "stars", dev_fraction=WHOLE)
    assert labels_of(custom_task(spec), read(spec, path)) == ("2", "9", "10")


def test_several_labels_are_parted_by_the_separator(tmp_path) -> None:
    path = table(tmp_path / "my.csv", "text,topics", "a,war;peace", "b,", "c,peace; peace")
    spec = CustomSpec("text", "topics", kind="multilabel", separator=";", dev_fraction=WHOLE)
    assert [example.label for example in read(spec, path)] == [("war", "peace"), (), ("peace",)]
    assert labels_of(custom_task(spec), read(spec, path)) == ("peace", "war")


def test_several_labels_may_be_a_json_list(tmp_path) -> None:
    path = table(tmp_path / "my.jsonl", json.dumps({"text": "a", "topics": ["war, old", 3]}))
    (example,) = read(CustomSpec("text", "topics", kind="multilabel", dev_fraction=WHOLE), path)
    assert example.label == ("war, old", "3")


def test_numbers_are_read_as_numbers(tmp_path) -> None:
    path = table(tmp_path / "my.csv", "text,score", "a,2.5", "b,-1")
    spec = CustomSpec("text", "score", kind="regress", dev_fraction=WHOLE)
    assert [example.label for example in read(spec, path)] == [2.5, -1.0]


@pytest.mark.parametrize(
    ("cell", "number"),
    [
        ("2,040.48", 2040.48),
        ("-1,234,567", -1234567.0),
        ("2.040,48", 2040.48),
        ("2,5", 2.5),
        ("+1,0625", 1.0625),
        (" 7 ", 7.0),
        ("1e3", 1000.0),
    ],
)
def test_numbers_are_read_as_people_write_them(tmp_path, cell, number) -> None:
    path = table(tmp_path / "my.csv", "text,score", f'a,"{cell}"')
    (example,) = read(CustomSpec("text", "score", kind="regress", dev_fraction=WHOLE), path)
    assert example.label == number


def test_a_comma_that_may_part_thousands_or_decimals_is_told(tmp_path) -> None:
    path = table(tmp_path / "my.csv", "text,score", 'a,"1,234"')
    with pytest.raises(
        UserError, match="my.csv:2: has '1,234': its comma may separate thousands or decimals"
    ):
        read(CustomSpec("text", "score", kind="regress", dev_fraction=WHOLE), path)


@pytest.mark.parametrize("cell", ["much", "nan", "inf", "12,34,567.8"])
def test_what_is_no_number_is_told(tmp_path, cell) -> None:
    path = table(tmp_path / "my.csv", "text,score", f'a,"{cell}"')
    with pytest.raises(UserError, match=f"my.csv:2: has '{cell}' instead of a number"):
        read(CustomSpec("text", "score", kind="regress", dev_fraction=WHOLE), path)


@pytest.mark.parametrize(
    ("row", "what"), [("a,", "lacks a label in 'label'"), (" ,x", "lacks a text in text")]
)
def test_an_empty_cell_is_reported(tmp_path, row, what) -> None:
    path = table(tmp_path / "my.csv", "text,label", row)
    with pytest.raises(UserError, match=f"my.csv:2: {what}"):
        read(CustomSpec("text", "label", dev_fraction=WHOLE), path)


def test_a_file_to_predict_needs_no_labels(tmp_path) -> None:
    path = table(tmp_path / "new.csv", "text", "a", "b")
    assert [example.label for example in read(CustomSpec("text", "label"), path, "test")] == [None, None]


def test_a_share_of_one_file_is_kept_for_development(tmp_path) -> None:
    path = table(tmp_path / "my.csv", "text,label", *(f"text {n},{n % 2}" for n in range(1000)))
    spec = CustomSpec("text", "label", dev_fraction=0.2)
    train, dev = ({example.key for example in read(spec, path, split)} for split in ("train", "dev"))
    assert not train & dev
    assert len(train | dev) == 1000
    assert len(dev) == 200


@pytest.mark.parametrize(("rows", "held"), [(300, 30), (40, 4), (30, 3), (14, 1)])
def test_the_development_set_is_exactly_the_fraction_and_has_the_rare_class(tmp_path, rows, held) -> None:
    labels = ["bad" if n % 50 == 3 or n == 5 else "good" for n in range(rows)]
    path = table(tmp_path / "my.csv", "text,label", *(f"text {n},{label}" for n, label in enumerate(labels)))
    train, dev = parts(path)
    assert (len(train), len(dev)) == (rows - held, held)
    assert "bad" in {example.label for example in train}
    if held > 1:
        assert {example.label for example in dev} == {"good", "bad"}


def test_each_class_is_held_back_in_the_same_fraction(tmp_path) -> None:
    labels = ["a"] * 500 + ["b"] * 300 + ["c"] * 150 + ["d"] * 50
    path = table(tmp_path / "my.csv", "text,label", *(f"text {n},{label}" for n, label in enumerate(labels)))
    _, dev = parts(path, dev_fraction=0.2)
    counts = [sum(example.label == label for example in dev) for label in "abcd"]
    assert counts == [100, 60, 30, 10]


def test_how_a_file_is_sorted_does_not_change_its_parts(tmp_path) -> None:
    rows = [f"{n},text {n},{n % 3}" for n in range(100)]
    one = table(tmp_path / "one.csv", "id,text,label", *rows)
    other = table(tmp_path / "other.csv", "id,text,label", *reversed(rows))
    (_, dev), (_, again) = (parts(path, key="id") for path in (one, other))
    assert {example.key for example in dev} == {example.key for example in again}


def test_a_test_part_is_neither_trained_nor_developed_on(tmp_path) -> None:
    path = table(tmp_path / "my.csv", "text,label", *(f"text {n},{n % 2}" for n in range(100)))
    spec = CustomSpec("text", "label", dev_fraction=0.1, test_fraction=0.2)
    keys = [[example.key for example in read(spec, path, name)] for name in ("train", "dev", "test-part")]
    assert [len(each) for each in keys] == [70, 10, 20]
    assert len({key for each in keys for key in each}) == 100
    assert len(read(spec, path, "test")) == 100  # any other file is predicted as a whole


def test_every_example_is_in_one_fold_and_classes_are_spread_evenly(tmp_path) -> None:
    labels = ["rare" if n % 20 == 0 else "common" for n in range(103)]
    path = table(tmp_path / "my.csv", "text,label", *(f"text {n},{label}" for n, label in enumerate(labels)))
    folds = [parts(path, folds=5, fold=fold) for fold in range(5)]
    assert sorted(example.key for _, dev in folds for example in dev) == sorted(map(str, range(103)))
    assert {len(dev) for _, dev in folds} == {20, 21}
    assert {sum(example.label == "rare" for example in dev) for _, dev in folds} <= {1, 2}
    assert all(len(train) + len(dev) == 103 for train, dev in folds)


def test_more_folds_than_a_file_can_fill_are_refused(tmp_path) -> None:
    path = table(tmp_path / "my.csv", "text,label", *(f"text {n},{n % 2}" for n in range(12)))
    with pytest.raises(UserError, match="folds: 12 rows are too few for 7 folds"):
        parts(path, folds=7)


def test_a_file_named_train_is_parted_as_any_other(tmp_path) -> None:
    path = table(tmp_path / "train.csv", "text,label", *(f"text {n},{n % 2}" for n in range(100)))
    spec = CustomSpec("text", "label", dev_fraction=0.3)
    for data in (path, tmp_path):
        assert len(read(spec, data, "train")) + len(read(spec, data, "dev")) == 100


def test_a_folder_may_bring_its_own_development_file(tmp_path) -> None:
    table(tmp_path / "train.csv", "text,label", "a,x", "b,y")
    assert not has_own_dev(tmp_path)
    table(tmp_path / "validation.csv", "text,label", "c,x")
    assert has_own_dev(tmp_path)
    spec = CustomSpec("text", "label", dev_fraction=WHOLE)
    assert len(read(spec, tmp_path, "train")) == 2
    assert [example.texts for example in read(spec, tmp_path, "dev")] == ["c"]


def test_a_wrong_column_lists_those_there_are(tmp_path) -> None:
    path = table(tmp_path / "my.csv", "text,stars", "a,1")
    with pytest.raises(UserError, match="column 'review'; .* 'text', 'stars'"):
        read(CustomSpec("review", "stars"), path)


def parts(path: Path, **changes: object) -> tuple[list[TextExample], list[TextExample]]:
    spec = CustomSpec("text", "label", **changes)  # type: ignore[arg-type]
    has_dev = has_split(custom_task(spec), path, "dev")
    return read(spec, path, "train"), read(spec, path, "dev") if has_dev else []


@pytest.mark.parametrize("rows", [10, 12, 20])
def test_a_small_file_holds_back_at_least_one_row(tmp_path, rows) -> None:
    path = table(tmp_path / "my.csv", "text,label", *(f"text {n},{n % 2}" for n in range(rows)))
    train, dev = parts(path, dev_fraction=0.0001)
    assert (len(train), len(dev)) == (rows - 1, 1)


@pytest.mark.parametrize("rows", [2, 5, 9])
def test_a_tiny_file_is_trained_on_as_a_whole(tmp_path, rows) -> None:
    path = table(tmp_path / "my.csv", "text,label", *(f"text {n},{n % 2}" for n in range(rows)))
    train, dev = parts(path, dev_fraction=0.9)
    assert (len(train), len(dev)) == (rows, 0)


def test_the_last_example_of_a_class_is_not_held_back(tmp_path) -> None:
    labels = ["common"] * 60 + [f"rare {n}" for n in range(20)] + ["twice"] * 2
    path = table(tmp_path / "my.csv", "text,label", *(f"text {n},{label}" for n, label in enumerate(labels)))
    train, dev = parts(path, dev_fraction=0.8)
    assert {example.label for example in train} == set(labels)
    assert len(dev) > 30 and {example.label for example in dev} <= {"common", "twice"}


def test_of_several_labels_none_is_left_without_an_example(tmp_path) -> None:
    cells = [f"{'a b c d'[2 * (n % 4)]};only {n}" if n % 5 == 0 else "a;b" for n in range(40)]
    path = table(tmp_path / "my.csv", "text,label", *(f"text {n},{cell}" for n, cell in enumerate(cells)))
    train, dev = parts(path, kind="multilabel", separator=";", dev_fraction=0.7)
    assert {label for example in train for label in example.label} == {
        label for cell in cells for label in cell.split(";")
    }
    assert dev


def test_a_development_file_may_lie_elsewhere(tmp_path) -> None:
    train = table(tmp_path / "my.csv", "text,label", "a,x", "b,y")
    dev = table(tmp_path / "held.jsonl", '{"text": "c", "label": "x"}')
    spec = CustomSpec("text", "label", dev_fraction=WHOLE, dev=str(dev))
    assert len(read(spec, train, "train")) == 2
    (held,) = read(spec, train, "dev")
    assert (held.texts, held.where) == ("c", f"{dev}:1")


def test_a_column_of_ids_that_is_not_there_is_reported_but_not_needed_for_predictions(tmp_path) -> None:
    path = table(tmp_path / "my.csv", "text,label", "a,x", "b,y")
    spec = CustomSpec("text", "label", key="number", dev_fraction=WHOLE)
    with pytest.raises(UserError, match="column 'number'; .* 'text', 'label'"):
        read(spec, path)
    assert [example.key for example in read(spec, path, "test")] == ["0", "1"]


def test_of_several_labels_an_empty_cell_says_that_there_are_none_in_any_split(tmp_path) -> None:
    path = table(tmp_path / "new.csv", "text,topics", "a,war", "b,")
    spec = CustomSpec("text", "topics", kind="multilabel", dev_fraction=WHOLE)
    assert [example.label for example in read(spec, path, "test")] == [("war",), ()]


@pytest.mark.parametrize("kind", ["classify", "multilabel", "regress"])
def test_a_file_without_the_column_of_labels_has_none(tmp_path, kind) -> None:
    path = table(tmp_path / "new.csv", "text", "a", "b")
    spec = CustomSpec("text", "topics", kind=kind, dev_fraction=WHOLE)
    assert [example.label for example in read(spec, path, "test")] == [None, None]


@pytest.mark.parametrize("kind", ["classify", "regress"])
def test_an_empty_cell_of_a_file_to_predict_is_no_label(tmp_path, kind) -> None:
    path = table(tmp_path / "new.csv", "text,stars", "a,5", "b,")
    spec = CustomSpec("text", "stars", kind=kind, dev_fraction=WHOLE)
    assert [example.label is None for example in read(spec, path, "test")] == [False, True]


def test_a_number_too_large_for_any_float_is_a_bad_line(tmp_path) -> None:
    path = table(tmp_path / "my.jsonl", '{"text": "a", "price": 1' + 400 * "0" + "}")
    with pytest.raises(UserError, match=r"my\.jsonl:1: has 1000.* instead of a number"):
        read(CustomSpec("text", "price", kind="regress", dev_fraction=WHOLE), path)


@pytest.mark.parametrize("part", ["dev_fraction", "test_fraction"])
@pytest.mark.parametrize("fraction", [float("nan"), -0.1, 1.0])
def test_a_part_that_is_no_fraction_is_refused(part, fraction) -> None:
    with pytest.raises(UserError, match="cannot be .* of the rows; give a fraction, for example 0.1"):
        custom_task(CustomSpec("text", "label", **{part: fraction}))
