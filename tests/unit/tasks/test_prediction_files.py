import json
from dataclasses import replace

import numpy as np
import pytest

from bertsmith.tasks.answers import Candidate, QuestionAnswer
from bertsmith.tasks.conll import read_columns
from bertsmith.tasks.example_types import ChoiceExample, TaggedExample, TextExample
from bertsmith.tasks.kinds.choice import CHOICE
from bertsmith.tasks.kinds.classify import CLASSIFY
from bertsmith.tasks.kinds.span import SPAN
from bertsmith.tasks.kinds.tag import TAG
from bertsmith.tasks.predictions import PredictedSplit, Predictions
from bertsmith.tasks.table_files import write_table
from tests.unit.tasks.made_sets import made_set


def tagged(words: str, tags: str | None) -> TaggedExample:
    return TaggedExample(words, tuple(words.split("|")), tags and tuple(tags.split()), 0, "here")


def answer(key: str, text: str, *nbest: Candidate) -> QuestionAnswer:
    return QuestionAnswer(
        key=key, text=text, start=0, end=len(text), score=2.0, probability=0.5, null_odds=-1.5, nbest=nbest
    )


def written(kind, out, examples, predictions, *, labels=(), encoded=None):
    """Write the predictions of these examples; the files."""
    return kind.write_predictions(out, labels, PredictedSplit(examples, encoded, predictions))


def write_tags(out, sentences, *, predictions):
    """Write these tags as if a model had predicted them."""
    labels = tuple(sorted({tag for tags in predictions for tag in tags}))
    words = [(m, w) for m, sentence in enumerate(sentences) for w in range(len(sentence.words))]
    chosen = [labels.index(tag) for tags in predictions for tag in tags]
    encoded = replace(made_set("tag"), words_P2=np.array(words[: len(chosen)]))
    predictions = Predictions(np.eye(len(labels), dtype=np.float32)[chosen])
    written(TAG, out, sentences, predictions, labels=labels, encoded=encoded)


def test_answers_are_written_in_the_three_files_of_the_official_code(tmp_path):
    best = Candidate("caf\u00e9", 0, 0.75, 2.0, 1.0)
    answers = (answer("q1", "caf\u00e9", best), answer("q2", ""))
    paths = written(SPAN, tmp_path / "new", [], Predictions(np.zeros((0, 2), np.float32), answers))
    assert [path.name for path in paths] == ["predictions.json", "nbest_predictions.json", "null_odds.json"]
    predictions, nbest, odds = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
    assert predictions == {"q1": "caf\u00e9", "q2": ""}
    guess = {"text": "caf\u00e9", "probability": 0.75, "start_logit": 2.0, "end_logit": 1.0}
    assert nbest == {"q1": [guess], "q2": []}
    assert odds == {"q1": -1.5, "q2": -1.5}


def test_tags_are_columns_of_word_gold_and_guess(tmp_path):
    sentences = [tagged("EU|rejects", "B-ORG O"), tagged("Peter", "B-PER")]
    write_tags(tmp_path / "tags.txt", sentences, predictions=[["O", "O"], ["B-PER"]])
    content = (tmp_path / "tags.txt").read_text(encoding="utf-8")
    assert content == "EU B-ORG O\nrejects O O\n\nPeter B-PER B-PER\n"


def test_words_without_gold_tags_have_two_columns_and_can_be_read_again(tmp_path):
    write_tags(tmp_path / "tags.txt", [tagged("EU|rejects", None)], predictions=[["B-ORG", "O"]])
    (sentence,) = read_columns(tmp_path / "tags.txt")
    assert (sentence.words, sentence.tags) == (("EU", "rejects"), ("B-ORG", "O"))


def test_tabs_part_the_columns_where_a_word_holds_a_space(tmp_path):
    write_tags(tmp_path / "tags.txt", [tagged("10 000|men", "O O")], predictions=[["B-X", "O"]])
    (sentence,) = read_columns(tmp_path / "tags.txt")
    assert (sentence.words, sentence.tags) == (("10 000", "men"), ("B-X", "O"))


def test_a_sentence_with_too_few_tags_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="zip"):
        write_tags(tmp_path / "tags.txt", [tagged("EU|rejects", "O O")], predictions=[["O"]])
    assert not list(tmp_path.iterdir())


def test_choices_have_the_probability_of_each_option(tmp_path):
    pairs = (("a", "b"), ("a", "c"), ("a", "d"))
    examples = [ChoiceExample("x", pairs, None, "here"), ChoiceExample("y", pairs[:2], None, "here")]
    encoded = replace(made_set("choice"), items_M1=np.array([0, 3, 5]))
    predictions = Predictions(np.array([0.25, 0.5, 0.25, 0.75, 0.25], np.float32))
    split = PredictedSplit(examples, encoded, predictions)
    write_table(tmp_path / "choices.tsv", CHOICE.prediction_rows((), split, separator=","))
    assert (tmp_path / "choices.tsv").read_text(encoding="utf-8").splitlines() == [
        "id\tprediction\t0\t1\t2",
        "x\t1\t0.25\t0.5\t0.25",
        "y\t0\t0.75\t0.25\t",
    ]


def test_a_label_that_is_called_as_another_column_keeps_its_probability():
    examples = [TextExample("7", "a", None, "here")]
    split = PredictedSplit(examples, made_set("classify"), Predictions(np.array([[0.25, 0.75]], np.float32)))
    (row,) = CLASSIFY.prediction_rows(("id", "text"), split, separator=",")
    assert row == {
        "id": "7",
        "prediction": "text",
        "probability of id": 0.25,
        "probability of text": 0.75,
    }


def test_tags_and_answers_are_rows_too():
    encoded = replace(made_set("tag"), words_P2=np.array([(0, 0), (0, 1)]))
    split = PredictedSplit([tagged("EU|rejects", None)], encoded, Predictions(np.eye(2, dtype=np.float32)))
    (row,) = TAG.prediction_rows(("B-ORG", "O"), split, separator=",")
    assert row == {"id": "EU|rejects", "words": ["EU", "rejects"], "tags": ["B-ORG", "O"]}
    answers = Predictions(np.zeros((0, 2), np.float32), (answer("q1", "tea"),))
    (row,) = SPAN.prediction_rows((), PredictedSplit([], None, answers), separator=",")
    assert row == {"id": "q1", "prediction": "tea", "start": 0, "probability": 0.5, "null_odds": -1.5}
