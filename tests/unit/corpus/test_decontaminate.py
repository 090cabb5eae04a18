import csv
import gzip
import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.core.errors import UserError
from bertsmith.corpus import decontaminate as module
from bertsmith.corpus.decontaminate import TaskTexts
from bertsmith.corpus.word_hashes import words_of

LONG = "It's a charming, funny and often affecting journey through the streets of old Lisbon at night."
WHOLE = "Nobody in the village remembered the old stone bridge."
SHORT = "The film is good."


def tasks(folder: Path, *contents: str) -> TaskTexts:
    paths = []
    for number, content in enumerate(contents):
        paths.append(folder / f"task{number}.tsv")
        paths[-1].write_text(content)
    return TaskTexts.read(paths)


def reference_match(task_texts: list[str], text: str) -> bool:
    """Whether a task's text occurs, by comparing strings of plain words."""

    def plain(string: str) -> list[str]:
        return words_of(string).run(0, len(string)).split()

    haystack = " ".join(["", *plain(text), ""])
    for words in map(plain, task_texts):
        length = min(len(words), 13)
        runs = [words[at : at + length] for at in range(len(words) - length + 1)] if length >= 8 else []
        if any(" ".join(["", *run, ""]) in haystack for run in runs):
            return True
    return False


def test_a_document_with_a_run_of_13_words_of_a_task_is_found(tmp_path):
    texts = tasks(tmp_path, f"sentence\tlabel\n{LONG}\t1\n")
    run = LONG.split()[2:15]
    assert texts.match(f"He wrote: {' '.join(run).upper()}!") == str(tmp_path / "task0.tsv")
    assert texts.match(f"He wrote: {' '.join(run[:12])}!") is None
    assert texts.match("He wrote: " + ", ".join(run[:6]) + " really " + ", ".join(run[6:])) is None


def test_a_text_of_8_to_12_words_must_occur_whole(tmp_path):
    texts = tasks(tmp_path, WHOLE)
    assert texts.match(f"They say: nobody -- in the village\nremembered the 'old stone' bridge. {SHORT}")
    assert texts.match("They say nobody in the village remembered the old stone wall.") is None


def test_shorter_texts_are_counted_and_not_looked_for(tmp_path):
    texts = tasks(tmp_path, f"{SHORT}\t{LONG}\t1\n{SHORT}\t{WHOLE}\t0")
    assert texts.match(SHORT * 5) is None
    (file,) = texts.files
    assert (file.texts, file.too_short) == (2, 1)  # the two labels hold no letter


def test_the_first_match_in_a_document_names_its_file(tmp_path):
    texts = tasks(tmp_path, LONG, WHOLE)
    assert texts.match(f"{WHOLE} {LONG}") == str(tmp_path / "task1.tsv")
    assert texts.match(f"{LONG} {WHOLE}") == str(tmp_path / "task0.tsv")


def tagged(text: str) -> str:
    return "".join(f"{word}\tO\n" for word in text.split())


def in_conllu(text: str) -> str:
    rest = "\t_" * 8
    return "".join(f"{number}\t{word}{rest}\n" for number, word in enumerate(text.split(), start=1))


@pytest.mark.parametrize(
    "content",
    [
        f"-DOCSTART- -X- O O\n\n{tagged(LONG)}\n{tagged(WHOLE)}".replace("\tO", " NN I-NP B-LOC"),
        f"{tagged(LONG)}\n{tagged(WHOLE)}",
        f"# sent_id = 1\n# text = hidden\n{in_conllu(LONG)}\n\n{in_conllu(WHOLE)}\n",
    ],
    ids=["conll", "tab", "conllu"],
)
def test_words_one_a_line_are_read_as_the_sentences_they_make(tmp_path, content):
    texts = tasks(tmp_path, content)
    assert texts.files[0].texts == 2
    assert texts.match(f"He wrote: {WHOLE}")
    assert texts.match(f"He wrote: {LONG}")
    assert texts.match(f"{' '.join(WHOLE.split()[-6:])} {' '.join(LONG.split()[:7])}") is None


def test_a_table_in_which_only_some_lines_look_like_tagged_words_is_a_table(tmp_path):
    texts = tasks(tmp_path, f"Really\tO\n{LONG}\t1\n{WHOLE}\t0\n")
    assert texts.files[0].texts == 2


def test_runs_do_not_cross_from_one_text_into_the_next(tmp_path):
    texts = tasks(tmp_path, f"{WHOLE}\t{LONG}")
    across = WHOLE.split()[-6:] + LONG.split()[:7]
    assert texts.match(" ".join(across)) is None


@pytest.mark.parametrize(("count", "is_found"), [(7, False), (8, True), (12, True)])
def test_a_text_of_eight_words_is_looked_for_and_one_of_seven_is_not(tmp_path, count, is_found):
    words = " ".join(f"word{number}" for number in range(count))
    texts = tasks(tmp_path, words)
    assert (texts.files[0].texts, texts.files[0].too_short) == (int(is_found), int(not is_found))
    assert (texts.match(f"He wrote: {words}.") is not None) == is_found


def test_equal_hashes_of_other_words_do_not_drop_a_document(tmp_path, monkeypatch):
    def all_alike(words, count):
        return np.full(len(words) - count + 1, 7, np.uint64)

    monkeypatch.setattr(module, "run_hashes", all_alike)
    monkeypatch.setattr(module, "run_hash", lambda words: np.uint64(7))
    texts = tasks(tmp_path, WHOLE)
    assert texts.match("Some nine words that stand nowhere in any task.") is None
    assert texts.match(WHOLE)


def test_chinese_and_thai_texts_are_measured_in_characters(tmp_path):
    chinese = "村里没有人记得那座古老的石桥曾经站立在河流转弯的地方也没有人在意"
    thai = "ไม่มีใครในหมู่บ้านจำสะพานหินเก่าที่เคยตั้งอยู่ตรงโค้งแม่น้ำได้และไม่มีใครสนใจเรื่องนั้นเลย"
    texts = tasks(tmp_path, f"{chinese}\n{thai}\n东京是日本的首都")
    assert texts.files[0].too_short == 1
    assert texts.match(f"他说，{chinese[2:28]}。")
    assert texts.match(f"他说，{chinese[2:27]}。") is None
    assert texts.match(thai[3:70])
    assert texts.match(thai[:40]) is None


def test_no_task_and_no_text_match_nothing(tmp_path):
    assert TaskTexts.read([]).match(LONG) is None
    assert tasks(tmp_path, "").match(LONG) is None
    assert tasks(tmp_path, LONG).match("") is None
    assert tasks(tmp_path, LONG).match("...") is None


def test_task_texts_can_be_sent_to_a_worker(tmp_path):
    texts = pickle.loads(pickle.dumps(tasks(tmp_path, WHOLE, LONG)))
    assert texts.match(LONG) == str(tmp_path / "task1.tsv")


WORDS = st.lists(st.sampled_from("abc"), max_size=22).map(" ".join)


@given(
    task_texts=st.lists(WORDS, max_size=4), text=st.lists(st.sampled_from("abc"), max_size=150).map(" ".join)
)
def test_matches_agree_with_a_search_for_strings(tmp_path_factory, task_texts, text):
    texts = tasks(tmp_path_factory.getbasetemp(), "\n".join(task_texts))
    assert (texts.match(text) is not None) == reference_match(task_texts, text)


@given(where=st.integers(0, 60), length=st.integers(8, 20), kept=st.integers(8, 20))
def test_a_planted_text_is_found_as_a_search_for_strings_finds_it(tmp_path_factory, where, length, kept):
    planted = [f"planted{number}" for number in range(length)]
    words = [f"word{number}" for number in range(60)]
    words[where:where] = planted[:kept]
    texts = tasks(tmp_path_factory.getbasetemp(), " ".join(planted))
    assert (texts.match(" ".join(words)) is not None) == reference_match([" ".join(planted)], " ".join(words))


# Formats of task files


def as_json(text: str) -> str:
    return json.dumps({"version": "1.1", "data": [{"paragraphs": [{"context": text, "qas": [{"id": "x"}]}]}]})


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", f'1\t"{LONG}\t0\n'),
        ("a.csv", f'id,text\n1,"{LONG}"\n'),
        ("a.txt", f"A line\r\n{LONG}\r\n"),
        ("a.txt.dev", LONG),
        ("a.json", as_json(LONG)),
        ("a.json", f'{{"text": "x"}}\n{json.dumps({"text": LONG})}\n'),
        ("a.jsonl", f'{{"text": "x"}}\n{json.dumps({"choices": ["x", LONG]})}\n'),
    ],
)
def test_every_text_of_a_task_file_counts(tmp_path, name, content):
    (tmp_path / name).write_bytes(content.encode())
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content.encode()))
    assert TaskTexts.read([tmp_path / name]).match(LONG) == str(tmp_path / name)
    assert TaskTexts.read([tmp_path / f"{name}.gz"]).match(LONG) == str(tmp_path / f"{name}.gz")


def test_every_text_column_of_a_parquet_file_counts(tmp_path):
    table = pyarrow.table({"id": [1, 2], "question": ["x", None], "context": [WHOLE, LONG]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    texts = TaskTexts.read([tmp_path / "a.parquet"])
    assert texts.match(LONG)
    assert texts.match(WHOLE)
    assert texts.files[0].too_short == 1


def test_a_text_of_several_lines_is_one_text(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": WHOLE.replace(" the ", "\nthe\n")}))
    assert TaskTexts.read([tmp_path / "a.jsonl"]).match(WHOLE)


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.json", b'{"text": "x"}\n{"text": ', "a.json:2: is not valid JSON"),
        ("a.json", b"[" * 100_000, "a.json:1: is not valid JSON"),
        ("a.tsv", b"good\nsch\xf6n", "a.tsv:2: is not UTF-8 text (byte 8)"),
        ("a.parquet", b"junk", "is not a whole Parquet file"),
    ],
)
def test_a_broken_task_file_is_named(tmp_path, name, content, what):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        TaskTexts.read([tmp_path / name])
    assert what in caught.value.line()


def test_a_table_whose_quotes_never_end_is_named(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'x,"' + b"y" * 200_000)
    before = csv.field_size_limit(100_000)  # one limit for the whole process
    try:
        with pytest.raises(UserError, match="is not CSV"):
            TaskTexts.read([tmp_path / "a.csv"])
    finally:
        csv.field_size_limit(before)


def test_a_missing_task_file_is_named(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        TaskTexts.read([tmp_path / "none.tsv"])
