"""What is found in a data set, on sets small enough to count by hand."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from bertsmith.core.errors import UserError
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.example_types import (
    Answer,
    BadLine,
    ChoiceExample,
    Example,
    Label,
    Question,
    TaggedExample,
    TextExample,
)
from bertsmith.tasks.inspection import Inspection, inspect_files, inspect_splits
from bertsmith.tasks.kinds.registry import TEXT_KINDS, kind_named
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
    assert (overlap.examples, overlap.share) == (3, 0.75)
    assert (overlap.pairs_same_label, overlap.pairs_other_label) == (2, 2)
    assert overlap.only_other_label == 1
    assert overlap.copying_accuracy == pytest.approx((0.5 + 0 + 1) / 3)


def test_shown_pairs_disagree_and_begin_with_those_that_never_agree() -> None:
    train: Rows = [("a", "x"), ("a", "y"), ("b", "x"), ("c", "x")]
    (overlap,) = inspected(train, [("a", "x"), ("b", "y"), ("c", "x")]).overlaps
    first, second = overlap.shown
    assert (first.text, first.train_where, first.train_label) == ("b", "train:2", "x")
    assert (first.where, first.label) == ("dev:1", "y")
    assert (second.text, second.train_where, second.train_label) == ("a", "train:1", "y")


def test_pairs_that_share_their_first_text_are_found() -> None:
    train: Rows = [(("It fell.", "The cup fell."), "yes"), (("He ran.", "Bob ran."), "yes")]
    whole, first, second = inspected(train, [(("it fell.", "The table fell."), "no")]).overlaps
    assert (whole.text, whole.examples) == ("whole", 0)
    assert (first.text, first.examples, first.only_other_label) == ("first", 1, 1)
    assert first.copying_accuracy == 0
    assert (second.text, second.examples) == ("second", 0)


def test_numbers_within_a_deviation_agree() -> None:
    train: Rows = [("a", 1.0), ("b", 3.0)]
    (overlap,) = inspected(train, [("a", 1.9), ("b", 1.0)], "regress").overlaps
    assert (overlap.pairs_same_label, overlap.pairs_other_label) == (1, 1)


def test_shift_compares_labels_words_and_lengths() -> None:
    train: Rows = [("one two", "x"), ("two three", "y")]
    (shift,) = inspected(train, [("one two new words", "x"), ("three two Two zwei", "x")]).shifts
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
    assert (found.baseline, found.overlaps, found.shifts) == (None, (), ())


def test_a_place_that_is_not_there_is_reported(tmp_path) -> None:
    (tmp_path / "train.tsv").write_text("sentence\tlabel\na\t1\n")
    with pytest.raises(UserError, match=r"/dev\.tsv: .*; name a folder with dev\.tsv"):
        inspect_files(task_named("sst2"), {"train": tmp_path, "dev": tmp_path / "dev.tsv"})


def found_in(task: str, **splits: Sequence[Example]) -> Inspection:
    read = {name: ReadSplit(tuple(examples), (), Path(name)) for name, examples in splits.items()}
    return inspect_splits(task_named(task), read)


def test_tags_are_counted_word_by_word() -> None:
    def tagged(words: str, tags: str | None) -> TaggedExample:
        return TaggedExample(words, tuple(words.split()), tuple(tags.split()) if tags else None, 0, "here")

    train = [tagged("Ada sleeps now", "B-PER O O"), tagged("Bob runs", "B-PER O")]
    dev = [tagged("ada sleeps now", "B-PER O O"), tagged("Bob runs", "O O")]
    found = found_in("ner", train=train, dev=dev, test=[tagged("Ada sleeps now", None)])
    first, _, last = found.splits
    assert [(each.label, each.count, each.share) for each in first.labels] == [
        ("O", 3, 0.6),
        ("B-PER", 2, 0.4),
    ]
    assert (first.words.largest, last.unlabelled, last.labels) == (3, 1, ())
    assert found.baseline is not None
    assert (found.baseline.says, found.baseline.train["span_f1"]) == ("O", 0)
    dev_overlap, test_overlap = found.overlaps
    assert (dev_overlap.examples, dev_overlap.only_other_label) == (2, 1)
    assert (test_overlap.split, test_overlap.examples, test_overlap.labelled) == ("test", 1, False)
    assert [shift.labels for shift in found.shifts] == [pytest.approx(0.2), None]


def test_questions_are_counted_by_whether_they_have_an_answer() -> None:
    def asked(key: str, passage: str, *answers: str) -> Question:
        return Question(
            key, f"what is {key} ?", passage, tuple(Answer(each, 0) for each in answers), True, "", "here"
        )

    train = [
        asked("tea", "tea is hot", "hot"),
        asked("ice", "ice is cold"),
        asked("fire", "tea is hot", "hot"),
    ]
    found = found_in("squad2", train=train, dev=[asked("milk", "Tea  is hot")])
    first, dev = found.splits
    assert [(each.label, each.count) for each in first.labels] == [("an answer", 2), ("no answer", 1)]
    assert dev.words.median == 7
    assert found.baseline is not None
    assert (found.baseline.says, found.baseline.train["f1"]) == ("no answer", pytest.approx(1 / 3))
    whole, passage = found.overlaps
    assert (whole.examples, passage.text, passage.examples, passage.labelled) == (0, "passage", 1, False)
    # In SQuAD 1.1 every question has an answer: there is no constant one.
    assert found_in("squad", train=[train[0]]).baseline is None


def test_choices_are_counted_by_the_right_option() -> None:
    def choice(context: str, label: int | None, *options: str) -> ChoiceExample:
        return ChoiceExample(context, tuple((context, option) for option in options), label, "here")

    train = [choice("a b", 1, "c", "d e"), choice("f", 1, "g", "h"), choice("i", 0, "j", "k")]
    found = found_in("swag", train=train, dev=[choice("a b", 0, "c", "d e"), choice("F", 1, "x", "y")])
    first = found.splits[0]
    assert [(each.label, each.count) for each in first.labels] == [("option 1", 2), ("option 0", 1)]
    assert first.words.largest == 4  # of the longest option, with the context
    assert found.baseline is not None and found.baseline.dev is not None
    assert (found.baseline.says, found.baseline.train["accuracy"]) == ("option 1", 2 / 3)
    assert found.baseline.dev["accuracy"] == 0.5
    whole, context = found.overlaps
    assert (whole.examples, whole.only_other_label) == (1, 1)
    assert (context.text, context.examples, context.labelled) == ("first", 2, False)


def test_labels_that_shift_between_splits_are_pointed_out() -> None:
    def rows(positive: int, negative: int) -> Rows:
        return [
            (f"{label} {n}", label)
            for label, count in (("x", positive), ("y", negative))
            for n in range(count)
        ]

    (line,) = inspected(rows(630, 370), rows(200, 200)).warnings
    assert line.startswith("the labels shift: 'x' is 63.0% of train and 50.0% of dev;")
    assert inspected(rows(630, 370), rows(62, 38)).warnings == ()  # as good as equal
    assert inspected(rows(63, 37), rows(5, 5)).warnings == ()  # ten examples may be a whim


def test_a_development_set_with_the_opposite_labels_is_called_adversarial() -> None:
    pairs = [(f"it fell {n}.", f"the cup fell {n}.") for n in range(4)]
    train: Rows = [((one, other), "yes") for one, other in pairs]
    dev: Rows = [((one, "the mat fell."), "no") for one, _ in pairs[:3]] + [(("new", pairs[0][1]), "no")]
    warnings = [line for line in inspected(train, dev).warnings if "adversarial" in line]
    assert len(warnings) == 1
    assert "dev is adversarial: of 3 examples (75%) the first text also occurs in train, 3" in warnings[0]


@pytest.mark.parametrize("task", ["qqp", "wnli"])
def test_what_is_published_of_the_test_sets_labels_is_told(task) -> None:
    rows: Rows = [(("a", "b"), task_named(task).labels[0])]
    read = {"train": split_of("train", rows)}
    assert "Wang et al. 2018" in inspect_splits(task_named(task), read).warnings[-1]
