"""Labels that are hardly meant as they are written."""

import pytest

from bertsmith.core.errors import UserError
from bertsmith.tasks.custom import CustomSpec, custom_task
from bertsmith.tasks.example_types import TextExample
from bertsmith.tasks.label_checks import check_classes, check_spelling, odd_labels


def task(kind="classify"):
    return custom_task(CustomSpec("text", "price", kind=kind))


def examples(labels):
    return [TextExample(str(n), f"text {n}", label, f"my.csv:{n + 2}") for n, label in enumerate(labels)]


@pytest.mark.parametrize(
    ("label", "fault"),
    [
        ("\x1b[31mred", r"'\\x1b\[31mred' .*control"),
        ("half \ud800", r"'half \\ud800' .*control"),
        ("x" * 2**20, "has 1,048,576 characters"),
    ],
)
def test_a_label_that_is_no_name_is_refused(label, fault):
    with pytest.raises(UserError, match=f"^my.csv:3: the label .*{fault}.*; clean the column") as told:
        check_spelling(task(), examples(["fine", label]))
    assert len(told.value.line()) < 300


def test_labels_in_any_script_are_names():
    check_spelling(task(), examples(["sehr gut", "très bien", "良い", "👍🏽", "two\nlines"]))


def test_a_column_of_numbers_is_no_column_of_classes():
    line = "'price' has 250 different labels in 300 training rows, all of them numbers; add `kind=regress`"
    with pytest.raises(UserError, match=line):
        check_classes(task(), examples([f"{n % 250}.5" for n in range(300)]))


@pytest.mark.parametrize("written", ["2,{:03}.48", "2.{:03},48"])
def test_numbers_with_thousands_marks_are_numbers_too(written):
    with pytest.raises(UserError, match="300 training rows, all of them numbers; add `kind=regress`"):
        check_classes(task(), examples([written.format(n) for n in range(300)]))


def test_a_column_in_which_every_row_differs_is_no_column_of_classes():
    with pytest.raises(
        UserError, match="300 different labels in 300 training rows: nearly every class has only one row"
    ):
        check_classes(task(), examples([f"name {n}" for n in range(300)]))


@pytest.mark.parametrize(
    "labels",
    [
        [str(1 + n % 5) for n in range(40)],
        [str(n % 77) for n in range(1000)],  # as the classes of Banking77 are numbered
        [f"intent {n % 70}" for n in range(90)],  # few rows of many classes
        [f"class {n % 150}" for n in range(450)],
        [f"class {n}" for n in range(5)],
    ],
)
def test_classes_with_examples_are_taken(labels):
    check_classes(task(), examples(labels))


def test_numbers_to_be_learned_as_numbers_are_taken():
    check_classes(task("regress"), examples([float(n) for n in range(300)]))


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (
            ["good", "bad", "NaN", "NaN"],
            "2 training examples have the label 'NaN', which is read as a class",
        ),
        (["1", "1.0", "0"], "the labels '1' (1) and '1.0' (1) differ in spelling only, and are 2 classes"),
        (["Good", "good", "bad"], "the labels 'Good' (1) and 'good' (1) differ in spelling only"),
    ],
)
def test_labels_that_look_like_a_slip_are_pointed_out(labels, told):
    (line,) = odd_labels(task(), examples(labels))
    assert line.startswith(told)


def test_ordinary_labels_are_not_pointed_out():
    assert not list(odd_labels(task(), examples(["good", "bad", "10", "1"])))
