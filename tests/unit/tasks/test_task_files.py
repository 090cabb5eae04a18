"""Finding a split's file, and what is said of bad data."""

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest

from bertsmith.core.errors import UserError
from bertsmith.tasks.catalogue import TASKS, task_named
from bertsmith.tasks.custom import CustomSpec, custom_task
from bertsmith.tasks.example_types import TaggedExample, TextExample
from bertsmith.tasks.kinds.registry import kind_named
from bertsmith.tasks.task import Split, Task, has_split, labels_of, read_for_prediction, read_split

SST2 = task_named("sst2")
GOOD = "sentence\tlabel\na fine film\t1\na bad film\t0\n"


def texts(data: Path, split: str = "dev") -> list[object]:
    found = read_split(SST2, data, split, skip_bad=False).examples
    return [example.texts for example in found if isinstance(example, TextExample)]


def test_a_split_is_found_in_its_folder_or_in_the_folder_of_the_collection(tmp_path) -> None:
    folder = tmp_path / "SST-2"
    folder.mkdir()
    (folder / "dev.tsv").write_text(GOOD)
    assert texts(folder) == texts(tmp_path) == texts(folder / "dev.tsv") == ["a fine film", "a bad film"]
    assert has_split(SST2, tmp_path, "dev")
    assert not has_split(SST2, tmp_path, "train")


def test_a_file_of_any_name_is_read_by_its_format(tmp_path) -> None:
    (tmp_path / "new.tsv").write_text("sentence\nwell made\n")
    assert texts(tmp_path / "new.tsv", "test") == ["well made"]


def test_a_packed_file_is_found_too(tmp_path) -> None:
    (tmp_path / "dev.tsv.gz").write_bytes(gzip.compress(GOOD.encode()))
    assert len(texts(tmp_path)) == 2


def test_a_missing_file_says_which_names_were_looked_for(tmp_path) -> None:
    with pytest.raises(UserError) as error:
        read_split(SST2, tmp_path, "dev", skip_bad=False)
    assert "dev file of SST-2" in error.value.what
    assert "looked for dev.tsv, validation*.parquet" in error.value.remedy


def test_a_folder_that_is_not_there_is_reported(tmp_path) -> None:
    with pytest.raises(UserError, match="nowhere: does not exist"):
        read_split(SST2, tmp_path / "nowhere", "dev", skip_bad=False)


def test_an_unknown_split_lists_the_known_ones(tmp_path) -> None:
    with pytest.raises(UserError, match="split 'validation'; its splits are train, dev, test"):
        read_split(SST2, tmp_path, "validation", skip_bad=False)


@pytest.mark.parametrize("content", ["", "sentence\tlabel\n", "\n\n"])
def test_an_empty_file_is_rejected(tmp_path, content) -> None:
    (tmp_path / "dev.tsv").write_text(content)
    with pytest.raises(UserError, match=r"dev\.tsv: contains no examples"):
        texts(tmp_path)


def test_a_bad_line_ends_reading_with_a_way_out(tmp_path) -> None:
    (tmp_path / "dev.tsv").write_text(GOOD + "cut off\n")
    with pytest.raises(UserError) as error:
        texts(tmp_path)
    assert error.value.where == f"{tmp_path / 'dev.tsv'}:4"
    assert "has 1 columns instead of 2" in error.value.what
    assert error.value.remedy.endswith("`skip_bad=True`")


def test_bad_lines_are_skipped_and_counted_on_demand(tmp_path) -> None:
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\ncut off\na fine film\t1\nodd\t7\na bad film\t0\n")
    found = read_split(SST2, tmp_path, "dev", skip_bad=True)
    assert [example.key for example in found.examples] == ["1", "3"]
    assert [bad.where for bad in found.skipped] == [f"{tmp_path / 'dev.tsv'}:{line}" for line in (2, 4)]
    assert found.path == tmp_path / "dev.tsv"


def test_a_second_example_with_the_same_id_names_the_first(tmp_path) -> None:
    (tmp_path / "dev.tsv").write_text("index\tsentence\tlabel\n3\ta\t1\n3\tb\t0\n")
    with pytest.raises(UserError, match=r"dev\.tsv:3: has the id '3', as .*dev\.tsv:2 has"):
        texts(tmp_path)


def tagging(*tags: str, known: tuple[str, ...] = ()) -> Task:
    def read(path: Path) -> Iterator[TaggedExample]:
        yield TaggedExample("0", tuple("w" for _ in tags), tags, 0, f"{path}:1")

    return Task("t", "T", kind_named("tag"), ("accuracy",), {"dev": Split({"*.conll": read})}, labels=known)


def test_unknown_tags_are_reported_where_the_tags_are_fixed(tmp_path) -> None:
    (tmp_path / "a.conll").write_text("")
    with pytest.raises(UserError, match="unknown label 'B-X'"):
        read_split(tagging("O", "B-X", known=("O", "B-PER")), tmp_path, "dev", skip_bad=False)


def test_tags_come_from_the_examples_where_they_are_not_fixed(tmp_path) -> None:
    (tmp_path / "a.conll").write_text("")
    task = tagging("O", "B-X", "O", "I-X")
    assert labels_of(task, read_split(task, tmp_path, "dev", skip_bad=False).examples) == ("B-X", "I-X", "O")


def test_several_files_of_one_pattern_are_read_in_order(tmp_path) -> None:
    def read(path: Path) -> Iterator[TextExample]:
        yield TextExample(path.name, path.name, "x", f"{path}:1")

    task = Task("t", "T", kind_named("classify"), (), {"train": Split({"train-*.x": read})})
    for name in ("train-1.x", "train-0.x"):
        (tmp_path / name).write_text("")
    found = read_split(task, tmp_path, "train", skip_bad=False)
    assert [example.key for example in found.examples] == ["train-0.x", "train-1.x"]
    assert found.path == tmp_path


@pytest.mark.parametrize(("labels", "what"), [((), "no labels"), (("x",), "only the label 'x'")])
def test_fewer_than_two_classes_are_rejected(labels, what) -> None:
    examples = [TextExample(label, "text", label, "my.csv:2") for label in labels]
    task = Task("custom", "Custom", kind_named("classify"), (), {})
    with pytest.raises(UserError, match=what):
        labels_of(task, examples)


def test_numbers_have_no_classes() -> None:
    assert labels_of(task_named("stsb"), [TextExample("0", "a", 2.0, "")]) == ()


def test_a_task_is_found_by_its_name_or_title_in_any_case() -> None:
    assert task_named("SST-2") is task_named("sst2") is task_named("Sst2")


def test_a_misspelt_task_gets_a_close_match() -> None:
    with pytest.raises(UserError) as error:
        task_named("squda")
    assert "did you mean squad?" in error.value.remedy
    assert "cola, sst2" in error.value.remedy


def test_no_two_tasks_share_a_name_or_title() -> None:
    names = [name for task in TASKS for name in {task.name, task.title.lower()}]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "content"),
    [("new.csv", "sentence,label\nwell made,1\n"), ("new.jsonl", '{"sentence": "well made"}\n')],
)
def test_texts_are_read_from_any_table_with_the_columns_of_the_task(tmp_path, name, content) -> None:
    (tmp_path / name).write_text(content)
    assert texts(tmp_path / name, "test") == ["well made"]


@pytest.mark.parametrize(
    ("task", "remedy"),
    [("sst2", "write it as .tsv, .txt, .csv, .jsonl, "), ("race", "write it as .jsonl, .txt")],
)
def test_a_file_of_another_format_is_answered_with_the_formats(tmp_path, task, remedy) -> None:
    (tmp_path / "new.docx").write_text("")
    with pytest.raises(UserError, match="is not in a supported format of") as error:
        read_split(task_named(task), tmp_path / "new.docx", "test", skip_bad=False)
    assert error.value.remedy.startswith(remedy)


def test_for_predictions_no_label_is_wrong(tmp_path) -> None:
    (tmp_path / "dev.tsv").write_text(GOOD + "odd\t7\nuntold\t\n")
    found = read_for_prediction(SST2, tmp_path, "dev", skip_bad=False)
    labels = [example.label for example in found.examples if isinstance(example, TextExample)]
    assert labels == ["positive", "negative", None, None]


def test_for_predictions_unknown_tags_stay_with_their_words(tmp_path) -> None:
    (tmp_path / "a.conll").write_text("")
    task = tagging("O", "B-X", known=("O", "B-PER"))
    (found,) = read_for_prediction(task, tmp_path, "dev", skip_bad=False).examples
    assert isinstance(found, TaggedExample) and found.tags == ("O", "B-X")


def test_a_line_without_text_is_bad_for_predictions_too(tmp_path) -> None:
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\n \t1\n")
    with pytest.raises(UserError, match=r"dev\.tsv:2: lacks a text in sentence"):
        read_for_prediction(SST2, tmp_path, "dev", skip_bad=False)


def test_an_empty_file_of_ones_own_is_not_to_be_fetched_again(tmp_path) -> None:
    (tmp_path / "my.csv").write_text("text,label\n")
    task = custom_task(CustomSpec("text", "label"))
    with pytest.raises(UserError, match=r"my\.csv: contains no examples; put examples into it"):
        read_split(task, tmp_path / "my.csv", "train", skip_bad=False)


@pytest.mark.parametrize(
    ("name", "remedy"), [("sst3", "did you mean sst2?"), ("costum", "did you mean custom?")]
)
def test_the_list_of_tasks_tells_of_ones_own(name, remedy) -> None:
    with pytest.raises(UserError) as error:
        task_named(name)
    assert error.value.remedy.startswith(remedy)
    assert error.value.remedy.endswith("and, for your own table, custom")


def test_half_a_character_is_a_bad_line_like_others(tmp_path) -> None:
    lines = ('{"words": ["a", "b"]}', '{"words": ["a\\ud83d", "b"]}')
    (tmp_path / "dev.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=r"dev\.jsonl:2: character 1 is a lone surrogate.*`skip_bad=True`"):
        read_split(task_named("tags"), tmp_path, "dev", skip_bad=False)
    read = read_split(task_named("tags"), tmp_path, "dev", skip_bad=True)
    assert (len(read.examples), [line.where for line in read.skipped]) == (1, [f"{tmp_path / 'dev.jsonl'}:2"])
