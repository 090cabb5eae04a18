import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.core.errors import UserError
from bertsmith.tasks.conll import TASKS, conllu_reader, read_columns, read_tagged_rows
from bertsmith.tasks.example_types import BadLine
from bertsmith.tasks.task import labels_of, read_split

NER = """-DOCSTART- -X- -X- O

EU NNP I-NP I-ORG
rejects VBZ I-VP O

Peter NNP I-NP I-PER
Blackburn NNP I-NP I-PER

-DOCSTART- -X- -X- O

BRUSSELS NNP I-NP I-LOC
"""

CONLLU = """# newdoc id = first
# sent_id = first-1
# text = I don't.
1\tI\tI\tPRON\tPRP\tCase=Nom\t3\tnsubj\t3:nsubj\t_
2-3\tdon't\t_\t_\t_\t_\t_\t_\t_\t_
2\tdo\tdo\tAUX\tVBP\t_\t0\troot\t0:root\t_
3\tn't\tnot\tPART\tRB\t_\t2\tadvmod\t2:advmod\t_
3.1\tgo\tgo\tVERB\tVB\t_\t_\t_\t0:root\t_

# sent_id = first-2
1\tYes\tyes\tINTJ\tUH\t_\t0\troot\t0:root\t_

# newdoc id = second
# sent_id = second-1
1\tNo\tno\tINTJ\tUH\t_\t0\troot\t0:root\t_
"""


def written(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def task(name: str):
    return next(task for task in TASKS if task.name == name)


def conllu(tmp_path: Path, column: str, text: str = CONLLU) -> list:
    return list(conllu_reader(column)(written(tmp_path / "x-ud-train.conllu", text)))


# Columns


def test_the_first_column_is_the_word_and_the_last_its_tag(tmp_path):
    first, *_ = read_columns(written(tmp_path / "eng.train", NER))
    assert (first.words, first.tags) == (("EU", "rejects"), ("I-ORG", "O"))


def test_document_starts_are_no_sentences_but_part_the_documents(tmp_path):
    sentences = list(read_columns(written(tmp_path / "eng.train", NER)))
    assert [sentence.document for sentence in sentences] == [0, 0, 1]


def test_without_document_starts_every_sentence_is_a_document(tmp_path):
    sentences = list(read_columns(written(tmp_path / "a.txt", "a O\n\nb O\n\nc O")))
    assert [sentence.document for sentence in sentences] == [0, 1, 2]


def test_sentences_are_named_by_their_place_and_say_where_they_stand(tmp_path):
    file = written(tmp_path / "eng.train", NER)
    assert [(each.key, each.where) for each in read_columns(file)] == [
        ("0", f"{file}:3"),
        ("1", f"{file}:6"),
        ("2", f"{file}:11"),
    ]


def test_a_lone_tab_between_sentences_parts_them_as_an_empty_line_does(tmp_path):
    sentences = list(read_columns(written(tmp_path / "wnut17train.conll", "a\tO\n\t\n#b\tB-person\n\t\n")))
    assert [sentence.words for sentence in sentences] == [("a",), ("#b",)]


def test_words_alone_have_no_tags(tmp_path):
    (sentence,) = read_columns(written(tmp_path / "new.txt", "Peter\nsleeps\n"))
    assert (sentence.words, sentence.tags) == (("Peter", "sleeps"), None)


def test_carriage_returns_a_mark_at_the_start_and_compression_do_not_show(tmp_path):
    (tmp_path / "dev.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbfa O\r\nb B-X\r\n\r\n"))
    (sentence,) = read_columns(tmp_path / "dev.txt.gz")
    assert (sentence.words, sentence.tags) == (("a", "b"), ("O", "B-X"))


def test_a_ragged_line_spoils_its_sentence_only_and_is_named(tmp_path):
    file = written(tmp_path / "a.txt", "a X O\n\nb X O\nc O\n\nd X O\n")
    good, bad, after = read_columns(file)
    assert isinstance(bad, BadLine)
    assert (bad.where, bad.what) == (f"{file}:4", "the line has 2 columns, the file's first has 3")
    assert (good.words, after.words, after.key) == (("a",), ("d",), "2")


def test_a_word_without_a_tag_is_a_bad_line(tmp_path):
    (bad,) = read_columns(written(tmp_path / "a.tsv", "a\tO\nb\t\n"))
    assert isinstance(bad, BadLine)
    assert bad.where.endswith(":2")


def test_a_sentence_that_is_not_utf8_is_a_bad_line_between_others(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a O\n\nin O\nK\xf6ln I-LOC\n\nb O\n")
    first, bad, last = read_columns(tmp_path / "a.txt")
    assert (first.words, last.words) == (("a",), ("b",))
    assert (bad.what, bad.where) == ("is not UTF-8 text", f"{tmp_path / 'a.txt'}:4")


@pytest.mark.parametrize("torn", [b"K\xf6ln", b"in\n# text = K\xf6ln"])
def test_a_sentence_of_conllu_that_is_not_utf8_is_a_bad_line(tmp_path, torn):
    row = b"1\tin\tin\tADP\tIN\t_\t0\troot\t_\t_\n"
    (tmp_path / "a.conllu").write_bytes(b"# text = " + torn + b"\n" + row + b"\n" + row)
    bad, good = conllu_reader("upos")(tmp_path / "a.conllu")
    assert (bad.what, good.words) == ("is not UTF-8 text", ("in",))


def test_utf16_is_rejected_by_its_name(tmp_path):
    (tmp_path / "a.txt").write_text("a O\n", encoding="utf-16")
    with pytest.raises(UserError, match=r"a\.txt: is UTF-16 text; convert it"):
        list(read_columns(tmp_path / "a.txt"))


word = st.text(st.characters(exclude_characters="\t\n\r", exclude_categories=["Cs"]), min_size=1, max_size=5)
visible = word.filter(str.strip).filter(
    lambda text: text[0] != "\ufeff" and not text.startswith("-DOCSTART-")
)
sentences = st.lists(st.lists(st.tuples(visible, st.sampled_from("OBI")), min_size=1, max_size=4), max_size=4)


@given(sentences)
def test_any_words_come_back_from_tab_separated_columns(tmp_path_factory, expected):
    blocks = ["".join(f"{word}\t{tag}\n" for word, tag in sentence) for sentence in expected]
    file = written(tmp_path_factory.mktemp("columns") / "a.tsv", "\n".join(blocks))
    found = [list(zip(each.words, each.tags, strict=True)) for each in read_columns(file)]
    assert found == expected


# CoNLL-U


def test_multi_word_tokens_and_empty_nodes_are_no_words(tmp_path):
    assert conllu(tmp_path, "upos")[0].words == ("I", "do", "n't")


@pytest.mark.parametrize(
    ("column", "tags"),
    [
        ("upos", ("PRON", "AUX", "PART")),
        ("xpos", ("PRP", "VBP", "RB")),
        ("feats", ("Case=Nom", "_", "_")),
        ("deprel", ("nsubj", "root", "advmod")),
    ],
)
def test_any_column_can_be_the_tags(tmp_path, column, tags):
    assert conllu(tmp_path, column)[0].tags == tags


def test_new_documents_and_sentence_ids_are_taken_from_the_comments(tmp_path):
    assert [(each.key, each.document) for each in conllu(tmp_path, "upos")] == [
        ("first-1", 0),
        ("first-2", 0),
        ("second-1", 1),
    ]


def test_a_column_that_nobody_filled_in_is_no_label(tmp_path):
    line = "1\tYes\tyes\t_\tUH\t_\t0\troot\t_\t_\n"
    assert conllu(tmp_path, "upos", line)[0].tags is None
    assert conllu(tmp_path, "feats", line)[0].tags == ("_",)


def test_a_line_with_spaces_for_tabs_is_a_bad_line(tmp_path):
    (bad,) = conllu(tmp_path, "upos", "1 Yes yes INTJ UH _ 0 root _ _\n")
    assert isinstance(bad, BadLine)
    assert "has 1 tab-separated columns, CoNLL-U has 10" in bad.what


def test_a_line_without_a_number_is_a_bad_line(tmp_path):
    (bad,) = conllu(tmp_path, "upos", "x\tYes\tyes\tINTJ\tUH\t_\t0\troot\t_\t_\n")
    assert isinstance(bad, BadLine)
    assert "'x' is not a word number" in bad.what


def test_an_unknown_column_is_rejected_with_the_known_ones():
    with pytest.raises(UserError, match="upos, xpos, feats, deprel"):
        conllu_reader("head")


# JSON lines


def test_sentences_can_be_json_lines(tmp_path):
    rows = [{"words": ["a", "b"], "tags": ["X", "Y"]}, {"id": "s7", "tokens": ["c"]}]
    file = written(tmp_path / "train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    first, second = read_tagged_rows(file)
    assert (first.key, first.words, first.tags) == ("0", ("a", "b"), ("X", "Y"))
    assert (second.key, second.words, second.tags) == ("s7", ("c",), None)


@pytest.mark.parametrize(
    "row",
    [
        {"words": ["a", "b"], "tags": ["X"]},
        {"words": ["a"], "tags": [3]},
        {"words": []},
        {"words": "a b"},
        {"text": "a b"},
        {"words": ["a", ""], "tags": ["X", "Y"]},
    ],
)
def test_a_row_without_a_tag_for_each_word_is_a_bad_line(tmp_path, row):
    (bad,) = read_tagged_rows(written(tmp_path / "train.jsonl", json.dumps(row)))
    assert isinstance(bad, BadLine)
    assert bad.where.endswith("train.jsonl:1")


# Tasks


def test_a_folder_of_wnut17_is_found_by_its_names(tmp_path):
    names = ("wnut17train.conll", "emerging.dev.conll", "emerging.test.annotated")
    for name in names:
        written(tmp_path / name, f"{name}\tB-person\n")
    for split, name in zip(("train", "dev", "test"), names, strict=True):
        (sentence,) = read_split(task("wnut17"), tmp_path, split, skip_bad=False).examples
        assert sentence.words == (name,)


@pytest.mark.parametrize(
    "names", [("eng.train", "eng.testa", "eng.testb"), ("train.txt", "valid.txt", "test.txt")]
)
def test_both_spellings_of_the_conll_2003_files_are_found(tmp_path, names):
    for name in names:
        written(tmp_path / name, f"{name} NNP I-NP I-PER\n{name} NNP I-NP O\n")
    for split, name in zip(("train", "dev", "test"), names, strict=True):
        (sentence,) = read_split(task("ner"), tmp_path, split, skip_bad=False).examples
        assert sentence.words[0] == name


def test_the_tags_of_entities_are_those_of_the_file(tmp_path):
    written(tmp_path / "eng.train", NER)
    examples = read_split(task("ner"), tmp_path, "train", skip_bad=False).examples
    assert labels_of(task("ner"), examples) == ("I-LOC", "I-ORG", "I-PER", "O")


def test_treebanks_are_found_by_the_ends_of_their_names(tmp_path):
    written(tmp_path / "en_ewt-ud-dev.conllu", CONLLU)
    assert len(read_split(task("pos"), tmp_path, "dev", skip_bad=False).examples) == 3


def test_an_unknown_part_of_speech_is_reported_with_its_line(tmp_path):
    written(tmp_path / "train.conllu", CONLLU.replace("INTJ", "JJ"))
    with pytest.raises(UserError, match=r"train\.conllu:11: has the unknown label 'JJ'"):
        read_split(task("pos"), tmp_path, "train", skip_bad=False)
