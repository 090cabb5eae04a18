import csv
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.core.errors import UserError
from bertsmith.tasks.example_types import Answer, BadLine
from bertsmith.tasks.squad import TASKS, question_table_reader, squad_reader
from bertsmith.tasks.task import read_split

PASSAGE = "The cat sat on the mat. The dog sat on the log."


def entry(key: str = "q1", *answers: tuple[str, int], **more) -> dict:
    entries = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": key, "question": "Where?", "answers": entries, **more}


def squad(*entries, passage: str = PASSAGE) -> dict:
    paragraphs = [{"context": passage, "qas": list(entries)}]
    return {"version": "v2.0", "data": [{"title": "Animals", "paragraphs": paragraphs}]}


def read(folder: Path, value, unanswered="unknown") -> list:
    file = folder / "questions.json"
    file.write_text(json.dumps(value), encoding="utf-8")
    return list(squad_reader(unanswered)(file))


def task(name: str):
    return next(task for task in TASKS if task.name == name)


# SQuAD's JSON


def test_a_question_comes_with_its_passage_and_all_its_answers(tmp_path):
    (question,) = read(tmp_path, squad(entry("q1", ("on the mat", 12), ("the mat", 15))))
    assert (question.key, question.question, question.passage) == ("q1", "Where?", PASSAGE)
    assert question.answers == (Answer("on the mat", 12), Answer("the mat", 15))
    assert (question.article, question.labelled) == ("Animals", True)


def test_places_are_counted_in_code_points(tmp_path):
    passage = "\U0001f600 \u00e9t\u00e9 cat"
    (question,) = read(tmp_path, squad(entry("q", ("cat", 6)), passage=passage))
    assert question.answers[0].start == passage.index("cat") == 6


def test_an_answer_at_a_wrong_place_is_taken_where_it_stands_nearest(tmp_path):
    (question,) = read(tmp_path, squad(entry("q", ("sat on", 30))))
    assert question.answers == (Answer("sat on", PASSAGE.rindex("sat on")),)


def test_an_answer_that_is_not_in_its_passage_is_a_bad_line(tmp_path):
    bad, good = read(tmp_path, squad(entry("q1", ("a horse", 3)), entry("q2", ("cat", 4))))
    assert isinstance(bad, BadLine)
    assert "'a horse' is not in its passage" in bad.what
    assert bad.where.endswith("questions.json: data[0].paragraphs[0].qas[0]")
    assert good.key == "q2"


@pytest.mark.parametrize(
    "given",
    [{"answer_start": 3}, {"text": "", "answer_start": 3}, {"text": "cat", "answer_start": "x"}, "cat", None],
)
def test_an_answer_without_text_or_with_a_strange_start_is_a_bad_line(tmp_path, given):
    (bad,) = read(tmp_path, squad({"id": "q", "question": "Where?", "answers": [given]}))
    assert isinstance(bad, BadLine)


@pytest.mark.parametrize("key", ["id", "question"])
def test_a_question_without_its_parts_is_a_bad_line(tmp_path, key):
    whole = entry("q", ("cat", 4))
    del whole[key]
    (bad,) = read(tmp_path, squad(whole))
    assert isinstance(bad, BadLine)
    assert f"the {key} is missing" in bad.what


def test_an_empty_list_of_answers_says_none_in_squad2_and_nothing_in_squad(tmp_path):
    (of_squad2,) = read(tmp_path, squad(entry()), "impossible")
    (of_squad,) = read(tmp_path, squad(entry()), "unknown")
    assert (of_squad2.labelled, of_squad.labelled) == (True, False)


def test_an_impossible_question_is_labelled_everywhere_and_has_no_answers(tmp_path):
    (question,) = read(tmp_path, squad(entry("q", ("cat", 4), is_impossible=True)))
    assert (question.answers, question.labelled) == ((), True)


def test_a_question_without_a_list_of_answers_is_unlabelled(tmp_path):
    (question,) = read(tmp_path, squad({"id": "q", "question": "Where?"}), "impossible")
    assert (question.answers, question.labelled) == ((), False)


@pytest.mark.parametrize(
    "value", [[], {}, {"data": 3}, {"data": [3]}, {"data": [{"paragraphs": [{}]}]}, squad("no question")]
)
def test_json_of_another_shape_is_rejected(tmp_path, value):
    with pytest.raises(UserError, match="SQuAD's form is"):
        read(tmp_path, value)


def test_what_is_no_json_is_rejected(tmp_path):
    (tmp_path / "a.json").write_bytes(b'{"data": [')
    with pytest.raises(UserError, match="is not valid JSON"):
        list(squad_reader("unknown")(tmp_path / "a.json"))


def test_trivia_qa_in_its_own_form_is_rejected_with_the_converter(tmp_path):
    with pytest.raises(UserError, match="convert_to_squad_format"):
        read(tmp_path, {"Data": [], "Domain": "Web"})


@given(st.text("ab", min_size=1, max_size=3), st.text("ab", max_size=12), st.integers(0, 14))
def test_the_nearest_place_is_that_of_a_plain_search(tmp_path_factory, text, passage, start):
    places = [place for place in range(len(passage)) if passage[place:].startswith(text)]
    (found,) = read(
        tmp_path_factory.mktemp("nearest"), squad(entry("q", (text, start)), passage=f"{passage} ")
    )
    if places:
        assert found.answers == (Answer(text, min(places, key=lambda place: (abs(place - start), place))),)
    else:
        assert isinstance(found, BadLine)


# Tables


def read_table(file: Path, unanswered="unknown") -> list:
    return list(question_table_reader(unanswered)(file))


def csv_file(path: Path, *rows: list[str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return path


def test_a_table_of_questions_may_leave_out_ids_and_starts(tmp_path):
    header, row = ["question", "passage", "answer"], ["Who?", "It was\nthe cat.", "the cat"]
    (question,) = read_table(csv_file(tmp_path / "a.csv", header, row))
    assert (question.key, question.answers) == ("0", (Answer("the cat", 7),))


def test_a_start_in_a_table_tells_equal_answers_apart(tmp_path):
    header = ["id", "question", "passage", "answer", "start"]
    (question,) = read_table(csv_file(tmp_path / "a.csv", header, ["x", "Who?", PASSAGE, "sat", "32"]))
    assert (question.key, question.answers) == ("x", (Answer("sat", 32),))


def test_an_empty_answer_in_a_table_says_what_an_empty_list_says(tmp_path):
    file = csv_file(tmp_path / "a.csv", ["question", "passage", "answer"], ["Who?", PASSAGE, ""])
    assert [read_table(file, each)[0].labelled for each in ("unknown", "impossible")] == [False, True]


def test_a_table_without_answers_is_unlabelled(tmp_path):
    (question,) = read_table(
        csv_file(tmp_path / "a.csv", ["question", "context"], ["Who?", PASSAGE]), "impossible"
    )
    assert (question.passage, question.labelled) == (PASSAGE, False)


def test_json_lines_may_have_several_answers(tmp_path):
    row = {"id": 7, "question": "Who?", "passage": PASSAGE, "answer": ["cat", "The cat"]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row), encoding="utf-8")
    (question,) = read_table(tmp_path / "a.jsonl")
    assert (question.key, question.answers) == ("7", (Answer("cat", 4), Answer("The cat", 0)))


def test_the_parquet_files_of_the_hub_are_read(tmp_path):
    entries = [{"text": ["cat"], "answer_start": [4]}, {"text": [], "answer_start": []}]
    columns = {"id": ["a", "b"], "title": ["T", "T"], "context": [PASSAGE] * 2, "question": ["Who?"] * 2}
    table = pyarrow.table({**columns, "answers": entries})
    pyarrow.parquet.write_table(table, tmp_path / "validation-00000-of-00001.parquet")
    first, second = read_split(task("squad2"), tmp_path, "dev", skip_bad=False).examples
    assert (first.answers, first.article) == ((Answer("cat", 4),), "T")
    assert (second.answers, second.labelled) == ((), True)


@pytest.mark.parametrize("header", [["question", "text"], ["query", "passage"]])
def test_a_table_without_questions_or_passages_is_rejected_with_its_columns(tmp_path, header):
    with pytest.raises(UserError, match=f"its columns are '{header[0]}', '{header[1]}'"):
        read_table(csv_file(tmp_path / "a.csv", header, ["a", "b"]))


# Tasks


def test_each_version_finds_its_own_files_in_one_folder(tmp_path):
    for name in ("train-v1.1-part", "train-v2.0"):
        content = json.dumps(squad(entry(name, ("cat", 4))))
        (tmp_path / f"{name}.json").write_text(content, encoding="utf-8")
    (old,) = read_split(task("squad"), tmp_path, "train", skip_bad=False).examples
    (new,) = read_split(task("squad2"), tmp_path, "train", skip_bad=False).examples
    assert (old.key, new.key) == ("train-v1.1-part", "train-v2.0")


def test_a_second_question_of_the_same_id_is_rejected(tmp_path):
    content = json.dumps(squad(entry("q", ("cat", 4)), entry("q", ("dog", 28))))
    (tmp_path / "dev-v1.1.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"qas\[1\]: has the id 'q'"):
        read_split(task("squad"), tmp_path, "dev", skip_bad=False)
