"""Models without a network: words and their weights, a dictionary of spans."""

import numpy as np
import pytest

from bertsmith.core.errors import UserError
from bertsmith.tasks.example_types import TaggedExample, TextExample
from bertsmith.tasks.simple_models import dictionary_tags, tfidf_probabilities


def texts(*rows):
    return [TextExample(str(number), text, label, "file") for number, (text, label) in enumerate(rows)]


def sentence(*tagged):
    words, tags = zip(*tagged, strict=True)
    return TaggedExample("1", words, tags, 0, "file")


def test_words_decide_a_class():
    train = texts(
        ("a sunny day", "warm"), ("sunny and hot", "warm"), ("snow and ice", "cold"), ("icy snow", "cold")
    )
    scores = tfidf_probabilities(train, texts(("hot sunny", None), ("snow", None)), ("cold", "rare", "warm"))
    assert scores.argmax(-1).tolist() == [2, 0]
    assert scores[:, 1].tolist() == [0, 0]
    assert scores.sum(-1) == pytest.approx(np.ones(2))


def test_texts_without_words_are_told():
    with pytest.raises(UserError, match="cannot be fitted"):
        tfidf_probabilities(texts(("!", "a"), ("?", "b")), texts(("!", None)), ("a", "b"))


LABELS = ("B-LOC", "B-PER", "I-LOC", "O")


def test_the_longest_known_span_wins():
    train = [
        sentence(("New", "B-LOC"), ("York", "I-LOC"), ("is", "O")),
        sentence(("York", "B-LOC"), ("and", "O"), ("Ada", "B-PER")),
    ]
    asked = [sentence(("Ada", "O"), ("saw", "O"), ("New", "O"), ("York", "O"), ("York", "O"), ("New", "O"))]
    assert dictionary_tags(train, asked, LABELS) == [["B-PER", "O", "B-LOC", "I-LOC", "B-LOC", "O"]]


def test_a_span_whose_tags_are_unknown_stays_untagged():
    train = [sentence(("Ada", "I-PER"), ("King", "I-PER"))]
    assert dictionary_tags(train, train, ("O", "B-PER")) == [["O", "O"]]


def test_tags_that_are_no_spans_come_from_a_dictionary_of_words():
    train = [
        sentence(("the", "DET"), ("run", "NOUN")),
        sentence(("run", "VERB"), ("run", "VERB"), ("dog", "NOUN")),
    ]
    asked = [sentence(("run", "X"), ("unseen", "X"))]
    assert dictionary_tags(train, asked, ("DET", "NOUN", "VERB")) == [["VERB", "NOUN"]]


def test_tags_without_a_tag_for_no_span_come_from_a_dictionary_of_words():
    train = [sentence(("a", "B"), ("b", "E"), ("c", "S"))]
    assert dictionary_tags(train, [sentence(("c", "S"), ("x", "S"))], ("B", "E", "S")) == [["S", "B"]]
