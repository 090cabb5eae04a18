"""Measures against scikit-learn, scipy and seqeval; those of SQuAD against its own script, retold."""

import math
import re
import string
import warnings
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from bertsmith.tasks import metrics
from bertsmith.tasks.answers import best_threshold, exact, f1, normalised, squad_scores
from bertsmith.tasks.example_types import Answer, Question
from bertsmith.tasks.metrics import OF_CLASSES, OF_NUMBERS, reliability
from bertsmith.tasks.tag_spans import span_scores
from tests.lazily import Lazily

scipy_stats, seqeval = Lazily("scipy.stats"), Lazily("seqeval.metrics.sequence_labeling")
sklearn_calibration, sklearn_metrics = Lazily("sklearn.calibration"), Lazily("sklearn.metrics")
CLOSE = 1e-9
counts = st.integers(1, 30)
pytestmark = pytest.mark.filterwarnings("ignore:A single label was found:UserWarning")
METRICS = {metric.name: metric.compute for metric in (*OF_CLASSES, *OF_NUMBERS)}
IN_OWN_UNIT = {metric.name for metric in OF_NUMBERS if not metric.in_percent}


def both(values: st.SearchStrategy, dtype: type, *width: int) -> st.SearchStrategy:
    """Labels and predictions of one length."""
    return counts.flatmap(
        lambda count: st.tuples(*[arrays(dtype, (count, *width), elements=values) for _ in range(2)])
    )


binary = both(st.integers(0, 1), np.int64)
classes = both(st.integers(0, 4), np.int64)
matrices = st.integers(1, 4).flatmap(lambda width: both(st.integers(0, 1), np.int64, width))
numbers = both(st.integers(-5, 5).map(float) | st.floats(-1e3, 1e3), np.float64)


@given(classes)
def test_accuracy_is_scikit_learns(pair):
    assert metrics.accuracy(*pair) == pytest.approx(sklearn_metrics.accuracy_score(*pair), abs=CLOSE)


@given(matrices)
def test_accuracy_of_several_labels_is_scikit_learns(pair):
    right = np.mean([np.array_equal(*rows) for rows in zip(*pair, strict=True)])
    assert metrics.accuracy(*pair) == pytest.approx(right, abs=CLOSE)
    if pair[0].shape[1] > 1:
        assert right == pytest.approx(sklearn_metrics.accuracy_score(*pair), abs=CLOSE)


@given(binary)
def test_f1_is_scikit_learns(pair):
    assert metrics.f1(*pair) == pytest.approx(sklearn_metrics.f1_score(*pair, zero_division=0), abs=CLOSE)


@given(classes)
def test_f1_of_one_class_among_many_is_scikit_learns(pair):
    theirs = sklearn_metrics.f1_score(*pair, labels=[1], average="macro", zero_division=0)
    assert metrics.f1(*pair) == pytest.approx(theirs, abs=CLOSE)


@pytest.mark.parametrize("average", ["macro", "micro"])
@given(pair=classes)
def test_averaged_f1_of_classes_is_scikit_learns(average, pair):
    theirs = sklearn_metrics.f1_score(*pair, average=average, zero_division=0)
    assert getattr(metrics, f"{average}_f1")(*pair) == pytest.approx(theirs, abs=CLOSE)


@pytest.mark.parametrize("average", ["macro", "micro"])
@given(pair=both(st.integers(0, 1), np.int64, 3))
def test_averaged_f1_of_several_labels_is_scikit_learns(average, pair):
    theirs = sklearn_metrics.f1_score(*pair, average=average, zero_division=0)
    assert getattr(metrics, f"{average}_f1")(*pair) == pytest.approx(theirs, abs=CLOSE)


@given(binary | classes)
def test_matthews_is_scikit_learns(pair):
    assert metrics.matthews(*pair) == pytest.approx(sklearn_metrics.matthews_corrcoef(*pair), abs=CLOSE)


@pytest.mark.parametrize(("ours", "theirs"), [("pearson", "pearsonr"), ("spearman", "spearmanr")])
@given(pair=numbers)
def test_correlations_are_scipys(ours, theirs, pair):
    found = METRICS[ours](*pair)
    if any((side == side[0]).all() for side in pair):
        assert found == 0.0
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy warns of nearly constant input
        expected = getattr(scipy_stats, theirs)(*pair).statistic
    assert found == pytest.approx(expected, abs=1e-7)


@given(numbers)
def test_ranks_are_scipys(pair):
    assert metrics._ranks(pair[0]).tolist() == scipy_stats.rankdata(pair[0]).tolist()


@given(st.sampled_from(sorted(METRICS.keys() - IN_OWN_UNIT)), both(st.floats(width=32), np.float32))
def test_no_metric_is_ever_nan_or_out_of_range(name, pair):
    assert -1.0 <= METRICS[name](*pair) <= 1.0


@given(st.sampled_from(sorted(METRICS.keys() & IN_OWN_UNIT)), both(st.floats(width=32), np.float32))
def test_no_error_of_numbers_is_ever_nan_infinite_or_negative(name, pair):
    assert 0.0 <= METRICS[name](*pair) < math.inf


@given(numbers)
def test_errors_of_numbers_are_those_of_scikit_learn(pair):
    for name in ("mean_absolute_error", "root_mean_squared_error"):
        assert METRICS[name](*pair) == pytest.approx(getattr(sklearn_metrics, name)(*pair), abs=CLOSE)


@given(
    arrays(np.float64, st.tuples(counts, st.integers(2, 4)), elements=st.floats(0.01, 1)),
    st.integers(1, 12),
    st.data(),
)
def test_reliability_is_scikit_learns_calibration_curve(raw, bins, data):
    probabilities = raw / raw.sum(1, keepdims=True)
    labels = data.draw(arrays(np.int64, len(raw), elements=st.integers(0, raw.shape[1] - 1)))
    sure, right = probabilities.max(1), probabilities.argmax(1) == labels
    shares, means = sklearn_calibration.calibration_curve(right, sure, n_bins=bins)
    found = reliability(probabilities, labels, bins=bins)
    filled = found.counts_B > 0
    assert found.accuracies_B[filled] == pytest.approx(shares)
    assert found.confidences_B[filled] == pytest.approx(means)
    assert found.expected_error == pytest.approx(np.abs(shares - means) @ found.counts_B[filled] / len(raw))


WORDS = st.sampled_from(
    [f"{letter}-{kind}" for letter in "BIES" for kind in ("PER", "LOC", "x-y")] + ["O", "O"]
)
tagged = st.lists(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=9), min_size=1, max_size=5)


def two_readings(pairs: list[list[tuple[str, str]]]) -> tuple[list[list[str]], list[list[str]]]:
    return [[right for right, _ in each] for each in pairs], [
        [predicted for _, predicted in each] for each in pairs
    ]


@pytest.mark.parametrize("scheme", ["iob1", "iob2", "bioes"])
@given(pairs=tagged)
def test_scores_of_any_tags_are_seqevals(scheme, pairs):
    labels, predictions = two_readings(pairs)
    found = span_scores(labels, predictions, scheme)
    expected = seqeval.precision_recall_fscore_support(labels, predictions, average="micro", zero_division=0)
    assert (found.precision, found.recall, found.f1) == pytest.approx(expected[:3], abs=CLOSE)


@given(tagged)
def test_scores_of_each_type_are_seqevals(pairs):
    labels, predictions = two_readings(pairs)
    by_type = span_scores(labels, predictions, "bioes").by_type
    if not by_type:
        return
    expected = seqeval.precision_recall_fscore_support(labels, predictions, average=None, zero_division=0)
    for number, scores in enumerate(by_type.values()):
        ours = (scores.precision, scores.recall, scores.f1, scores.labels)
        assert ours == pytest.approx(tuple(column[number] for column in expected), abs=CLOSE)


def plain_words(text: str) -> list[str]:
    """The words that count: one step after the other, as the official script takes them."""
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(?:the|an|a)\b", " ", kept).split()


def plain_f1(right: str, answer: str) -> float:
    words, left, shared = plain_words(right), Counter(plain_words(answer)), 0
    size = left.total()
    for word in words:
        shared += left[word] > 0
        left[word] -= 1
    if not words or not size:
        return float(not words and not size)
    return 2 * shared / (len(words) + size)


def plain_best(questions: list[Question], spans: dict[str, str], odds: dict[str, float], metric) -> float:
    """The best of all thresholds, each tried on all questions."""
    places = [-math.inf, *odds.values()]
    return max(
        sum(
            float(not each.answers)
            if odds[each.key] > place
            else max(
                metric(right, spans[each.key]) for right in [answer.text for answer in each.answers] or [""]
            )
            for each in questions
        )
        / len(questions)
        for place in places
    )


def official_sweep(questions: list[Question], spans: dict[str, str], odds: dict[str, float]) -> float:
    """The official walk over rising odds for F1, right where odds differ and spans have words."""
    score = best = sum(not each.answers for each in questions)
    for each in sorted(questions, key=lambda each: odds[each.key]):
        score += max((plain_f1(right.text, spans[each.key]) for right in each.answers), default=-1)
        best = max(best, score)
    return 100 * best / len(questions)


phrases = st.lists(
    st.sampled_from(["the", "A", "An", "Red", "red.", "fox", "fox's", "Ünal", "–", "x-y"]), max_size=4
).map(" ".join)
wordy = phrases.map(lambda phrase: f"{phrase} fox")


MOST = 8
tied = st.lists(st.integers(-3, 3).map(float), min_size=MOST, max_size=MOST)
distinct = st.lists(st.floats(-9, 9), min_size=MOST, max_size=MOST, unique=True)


@st.composite
def quizzes(draw, spans=phrases, odds=tied):
    """Questions with up to three labels or none, a best span and null odds for each."""
    labels = draw(st.lists(st.lists(wordy, max_size=3), min_size=1, max_size=MOST))
    questions = [
        Question(
            str(n), "?", "", tuple(Answer(text, 0) for text in texts), labelled=True, article="", where=""
        )
        for n, texts in enumerate(labels)
    ]
    chosen = {question.key: draw(spans) for question in questions}
    return questions, chosen, dict(zip(chosen, draw(odds), strict=False))


@given(st.text() | phrases, st.text() | phrases)
def test_squads_metrics_of_any_texts_are_the_plain_ones(right, answer):
    assert normalised(right) == " ".join(plain_words(right))
    assert exact(right, answer) == float(plain_words(right) == plain_words(answer))
    assert f1(right, answer) == pytest.approx(plain_f1(right, answer))
    assert f1(right, right) == exact(right, right) == 1.0


@pytest.mark.parametrize(("name", "plain"), [("exact", exact), ("f1", plain_f1)])
@given(quiz=quizzes())
def test_the_best_threshold_is_the_best_and_gives_what_it_promises(name, plain, quiz):
    questions, spans, odds = quiz
    value, threshold = best_threshold(questions, spans, odds, name)
    assert value == pytest.approx(100 * plain_best(questions, spans, odds, plain))
    assert squad_scores(questions, spans, odds, threshold)[name] == pytest.approx(value)


@given(quizzes(spans=wordy, odds=distinct))
def test_the_best_f1_is_that_of_the_official_sweep(quiz):
    assert squad_scores(*quiz)["best_f1"] == pytest.approx(official_sweep(*quiz))


@given(quizzes())
def test_the_whole_is_the_mean_of_questions_with_and_without_an_answer(quiz):
    questions, spans, _ = quiz
    scores = squad_scores(questions, spans)
    for metric in ("exact", "f1"):
        parts = [
            scores.get(f"{part}_{metric}", 0.0) * scores.get(f"{part}_total", 0)
            for part in ("HasAns", "NoAns")
        ]
        assert sum(parts) / scores["total"] == pytest.approx(scores[metric])
