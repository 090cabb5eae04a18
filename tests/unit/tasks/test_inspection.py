"""What is found in a data set, on sets small enough to count by hand."""

from pathlib import Path

import pytest

from bertsmith.core.errors import UserError
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.example_types import BadLine, TextExample
from bertsmith.tasks.inspection import Inspection, inspect_files, inspect_splits
from bertsmith.tasks.kinds.registry import TEXT_KINDS, kind_named
from bertsmith.tasks.tables import Label
from bertsmith.tasks.task import ReadSplit, Task

Rows = list[tuple[str | tuple[str, str], Label | None]]


def split_of(name: str, rows: Rows, *skipped: BadLine) -> ReadSplit:
    examples = [TextExample(str(n), texts, label, f"{name}:{n}") for n, (texts, label) in enumerate(rows)]
    return ReadSplit(tuple(examples), skipped, Path(name))


def inspected(train: Rows, dev: Rows, kind: str = "classify") -> Inspection:
    task = Task("custom", "Custom", kind_named(kind), TEXT_KINDS[kind].custom_metrics, {})
    splits = {"train": split_of("train", train), "dev": split_of("dev", dev)}
    return inspect_splits(task, {name: split for name, split in splits.items() if split.examples})


def test_labels_are_counted_most_frequent_first() -> None:
    (summary,) = inspected([("a", "x"), ("b", "y"), ("c", "y"), ("d", None)], []).splits
    assert [(each.label, each.count, each.share) for each in summary.labels] == [
        ("y", 2, 2 / 3),
        ("x", 1, 1 / 3),
    ]
    assert (summary.examples, summary.unlabelled) == (4, 1)


def test_several_labels_are_counted_each() -> None:
    (summary,) = inspected([("a", ("x", "y")), ("b", ("y",)), ("c", ())], [], "multilabel").splits
    assert [(each.label, each.count) for each in summary.labels] == [("y", 2), ("x", 1)]


def test_numbers_are_reported_by_their_spread() -> None:
    (summary,) = inspected([("a", 1.0), ("b", 3.0)], [], "regress").splits
    assert summary.numbers is not None
    assert (summary.numbers.smallest, summary.numbers.mean, summary.numbers.largest) == (1, 2, 3)
    assert summary.numbers.deviation == 1
    assert summary.labels == ()


def test_lengths_count_the_words_of_both_texts() -> None:
    (summary,) = inspected([(("a b", "c"), "x")] * 99 + [(("a " * 40, "b"), "x")], []).splits
    words = summary.words
    assert (words.smallest, words.median, words.of_95_percent, words.of_99_percent) == (3, 3, 3, 3)
    assert words.largest == 41


def test_copies_and_contradictions_ignore_case_and_spaces() -> None:
    rows: Rows = [("A film", "x"), ("a  film ", "y"), ("a film", "x"), ("b", "x"), ("b", "x"), ("c", "y")]
    (summary,) = inspected(rows, []).splits
    assert summary.copies == 3
    assert summary.contradictions == 3


def test_the_baseline_says_the_most_frequent_label_of_the_training_set() -> None:
    baseline = inspected([("a", "x"), ("b", "x"), ("c", "y")], [("d", "y"), ("e", "y")]).baseline
    assert baseline is not None
    assert (baseline.says, baseline.train["accuracy"]) == ("x", 2 / 3)
    assert baseline.dev == {"accuracy": 0, "macro_f1": 0}


def test_the_baseline_of_numbers_is_the_mean() -> None:
    baseline = inspected([("a", 1.0), ("b", 3.0)], [("c", 5.0)], "regress").baseline
    assert baseline is not None
    assert (baseline.says, baseline.train["root_mean_squared_error"]) == ("2", 1)
    assert baseline.dev is not None
    assert (baseline.dev["root_mean_squared_error"], baseline.dev["spearman"]) == (3, 0)


def test_the_baseline_is_measured_by_the_metrics_of_the_task(tmp_path) -> None:
    rows = ["Quality\t#1 String\t#2 String"] + [f"{int(n < 3)}\tone {n}\tother {n}" for n in range(4)]
    (tmp_path / "train.tsv").write_text("\n".join(rows) + "\n")
    baseline = inspect_files(task_named("mrpc"), {"train": tmp_path, "dev": tmp_path}).baseline
    assert baseline is not None
    assert baseline.train == {"f1": pytest.approx(6 / 7), "accuracy": 0.75}


def test_overlap_tells_equal_from_opposite_labels() -> None:
    train: Rows = [("a", "x"), ("a", "y"), ("b", "x"), ("c", "x")]
    dev: Rows = [("A", "x"), ("b", "y"), ("c", "x"), ("new", "x")]
    (overlap,) = inspected(train, dev).overlaps
    assert (overlap.dev_examples, overlap.dev_share) == (3, 0.75)
    assert (overlap.pairs_same_label, overlap.pairs_other_label) == (2, 2)
    assert overlap.only_other_label == 1
    assert overlap.copying_accuracy == pytest.approx((0.5 + 0 + 1) / 3)


def test_shown_pairs_disagree_and_begin_with_those_that_never_agree() -> None:
    train: Rows = [("a", "x"), ("a", "y"), ("b", "x"), ("c", "x")]
    (overlap,) = inspected(train, [("a", "x"), ("b", "y"), ("c", "x")]).overlaps
    first, second = overlap.shown
    assert (first.text, first.train_where, first.train_label) == ("b", "train:2", "x")
    assert (first.dev_where, first.dev_label) == ("dev:1", "y")
    assert (second.text, second.train_where, second.train_label) == ("a", "train:1", "y")


def test_pairs_that_share_their_first_text_are_found() -> None:
    train: Rows = [(("It fell.", "The cup fell."), "yes"), (("He ran.", "Bob ran."), "yes")]
    whole, first = inspected(train, [(("it fell.", "The table fell."), "no")]).overlaps
    assert (whole.text, whole.dev_examples) == ("whole", 0)
    assert (first.text, first.dev_examples, first.only_other_label) == ("first", 1, 1)
    assert first.copying_accuracy == 0


def test_numbers_within_a_deviation_agree() -> None:
    train: Rows = [("a", 1.0), ("b", 3.0)]
    (overlap,) = inspected(train, [("a", 1.9), ("b", 1.0)], "regress").overlaps
    assert (overlap.pairs_same_label, overlap.pairs_other_label) == (1, 1)


def test_shift_compares_labels_words_and_lengths() -> None:
    train: Rows = [("one two", "x"), ("two three", "y")]
    shift = inspected(train, [("one two new words", "x"), ("three two Two zwei", "x")]).shift
    assert shift is not None
    assert shift.labels == 0.5
    assert shift.unknown_words == 3 / 8
    assert shift.median_words == 2


def test_skipped_lines_are_counted_and_the_first_is_shown() -> None:
    bad = BadLine("has 1 columns", "train:9", "mend it")
    task = Task("custom", "Custom", kind_named("classify"), (), {})
    (summary,) = inspect_splits(task, {"train": split_of("train", [("a", "x")], bad)}).splits
    assert (summary.skipped, summary.first_skipped) == (1, "train:9: has 1 columns")


def test_a_split_alone_is_looked_at_alone(tmp_path) -> None:
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\na\t1\n")
    found = inspect_files(task_named("sst2"), {"train": tmp_path, "dev": tmp_path})
    assert [summary.name for summary in found.splits] == ["dev"]
    assert (found.baseline, found.overlaps, found.shift) == (None, (), None)


def test_a_place_that_is_not_there_is_reported(tmp_path) -> None:
    (tmp_path / "train.tsv").write_text("sentence\tlabel\na\t1\n")
    with pytest.raises(UserError, match=r"dev\.tsv: no such file"):
        inspect_files(task_named("sst2"), {"train": tmp_path, "dev": tmp_path / "dev.tsv"})


def test_questions_are_not_looked_at(tmp_path) -> None:
    with pytest.raises(UserError, match="has no labelled texts"):
        inspect_files(task_named("squad"), {"train": tmp_path})
