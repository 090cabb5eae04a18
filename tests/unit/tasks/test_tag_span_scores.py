"""Counts of exact spans."""

import pytest

from bertsmith.tasks.tag_spans import TypeScores, span_scores

LABELS = [["B-PER", "I-PER", "O", "B-LOC"], ["B-PER", "O"]]
PREDICTIONS = [["B-PER", "I-PER", "O", "B-ORG"], ["B-PER", "I-PER"]]


def test_a_span_counts_only_with_all_its_words_and_its_type():
    scores = span_scores(LABELS, PREDICTIONS, "iob2")
    assert (scores.precision, scores.recall, scores.f1) == (1 / 3, 1 / 3, 1 / 3)


def test_each_type_has_its_own_scores_in_the_order_of_the_alphabet():
    by_type = span_scores(LABELS, PREDICTIONS, "iob2").by_type
    assert list(by_type) == ["LOC", "ORG", "PER"]
    assert by_type["PER"] == TypeScores(0.5, 0.5, 0.5, right=1, labels=2, predictions=2)
    assert by_type["LOC"] == TypeScores(0.0, 0.0, 0.0, right=0, labels=1, predictions=0)


def test_the_same_words_of_two_sentences_are_two_spans():
    scores = span_scores([["B-PER"], ["B-PER"]], [["B-PER"], ["O"]], "iob2")
    assert (scores.precision, scores.recall) == (1.0, 0.5)


def test_nothing_to_find_and_nothing_found_is_zero():
    scores = span_scores([["O"]], [["O"]], "iob2")
    assert (scores.precision, scores.recall, scores.f1, scores.by_type) == (0.0, 0.0, 0.0, {})


def test_a_span_does_not_run_on_into_the_next_sentence():
    scores = span_scores([["I-PER"], ["I-PER"]], [["I-PER"], ["I-PER"]], "iob1")
    assert scores.by_type["PER"].labels == 2


def test_a_sentence_with_too_few_guesses_is_named():
    with pytest.raises(ValueError, match="sentence 1 has 2 tags, but 1 are predicted"):
        span_scores([["O"], ["O", "O"]], [["O"], ["O"]], "iob2")
