"""What a model says, judged by the measures of its task."""

import numpy as np
import pytest

from bertsmith.ground.errors import UserError
from bertsmith.recipe.finetuning import TextSection
from bertsmith.tasks.answers import Guess, QuestionAnswer
from bertsmith.tasks.encoding import encode_split
from bertsmith.tasks.examples import Answer, Question
from bertsmith.tasks.judging import judged
from bertsmith.tasks.outcome import Outcome, outcome_of
from bertsmith.tasks.task_file import TaskNote
from tests.unit.tasks.encoding_tools import sentence, text_example


def encoded(note, examples, tokenizer):
    return encode_split(note.kind, examples, note.labels, tokenizer, TextSection(longest=16))


def sure_of(*guesses, classes):
    return Outcome(np.eye(classes, dtype=np.float32)[list(guesses)])


def test_several_labels_that_training_has_not_are_missed(uncased) -> None:
    note = TaskNote(task="custom", kind="multilabel", metrics=("micro_f1", "accuracy"), labels=("x", "y"))
    examples = [text_example("a", label) for label in (("x",), ("x", "?"), ("!", "?"), ("y",))]
    outcome = Outcome(np.array([[1, 0], [1, 0], [0, 0], [0, 1]], np.float32))
    measures = judged(note, examples, encoded(note, examples, uncased), outcome)
    assert measures == pytest.approx({"micro_f1": 2 * 3 / (6 + 3), "accuracy": 2 / 4})


def test_spans_of_a_type_that_training_has_not_are_missed(uncased) -> None:
    note = TaskNote(task="ner", kind="tag", metrics=("span_f1", "accuracy"), labels=("B-LOC", "O"))
    examples = [sentence(["the", "iron", "is", "hot"], ["B-NEW", "O", "B-LOC", "O"])]
    outcome = sure_of(1, 1, 0, 1, classes=2)
    measures = judged(note, examples, encoded(note, examples, uncased), outcome)
    assert measures["recall"] == 1 / 2
    assert measures["accuracy"] == 3 / 4


def test_each_type_of_the_file_has_an_f1_of_its_own(uncased) -> None:
    labels = ("O", "B-LOC", "B-PER", "B-ORG")
    note = TaskNote(task="ner", kind="tag", metrics=("span_f1", "accuracy"), labels=labels)
    examples = [sentence(["the", "iron", "is", "hot"], ["B-LOC", "O", "B-PER", "B-LOC"])]
    outcome = sure_of(1, 3, 2, 0, classes=4)
    measures = judged(note, examples, encoded(note, examples, uncased), outcome)
    types = {name: value for name, value in measures.items() if name.startswith("span_f1_")}
    assert types == pytest.approx({"span_f1_LOC": 2 / 3, "span_f1_PER": 1.0})  # no ORG is in the file
    assert next(iter(measures)) == "span_f1"


@pytest.mark.parametrize("metrics", [("span_f1",), ("span_f1", "accuracy"), ("accuracy", "macro_f1")])
def test_sentences_without_tags_cannot_be_judged(uncased, metrics) -> None:
    note = TaskNote(task="ner", kind="tag", metrics=metrics, labels=("B-LOC", "O"))
    examples = [sentence(["the", "iron", "is"])]
    with pytest.raises(UserError, match="some examples have no label to compare with"):
        judged(note, examples, encoded(note, examples, uncased), sure_of(1, 1, 0, classes=2))


def answered(number, text, *, odds, best="iron"):
    guesses = (Guess(text, 0, 0.6, 0.0, 0.0), Guess(best, 0, 0.4, 0.0, 0.0))
    return QuestionAnswer(str(number), text, 0, len(text), 0.0, 0.6, odds, guesses)


SPANS = TaskNote(task="squad2", kind="span", metrics=("f1", "exact"))
ANSWERS = Outcome(
    np.zeros((0, 2), np.float32),
    (
        answered(0, "iron", odds=-2.0),
        answered(1, "iron hot", odds=-1.0, best="iron hot"),
        answered(2, "", odds=1.0),
        answered(3, "iron", odds=2.0),
    ),
)


def asked(number, *, answerable):
    answers = (Answer("iron", 0),) if answerable else ()
    return Question(str(number), "what?", "iron hot", answers, True, "", f"file:{number}")


def test_answers_are_judged_with_and_without_one_and_by_the_best_threshold() -> None:
    questions = [asked(number, answerable=number != 3) for number in range(4)]
    found = judged(SPANS, questions, None, ANSWERS)
    assert list(found)[:2] == ["f1", "exact"]
    assert found == pytest.approx(
        {
            "f1": (1 + 2 / 3 + 0 + 0) / 4,
            "exact": 1 / 4,
            "f1_with_answer": (1 + 2 / 3) / 3,
            "exact_with_answer": 1 / 3,
            "f1_without_answer": 0.0,
            "exact_without_answer": 0.0,
            # With a threshold of 1 the third question is answered and the fourth is not.
            "best_f1": (1 + 2 / 3 + 1 + 1) / 4,
            "best_f1_threshold": 1.0,
            "best_exact": 3 / 4,
            "best_exact_threshold": 1.0,
        }
    )


def test_where_every_question_has_an_answer_there_is_no_threshold() -> None:
    questions = [asked(number, answerable=True) for number in range(4)]
    assert set(judged(SPANS, questions, None, ANSWERS)) == {
        *("f1", "exact"),
        *("f1_with_answer", "exact_with_answer"),
    }


def test_numbers_are_judged_by_how_far_off_they_are_too(uncased) -> None:
    metrics = ("spearman", "mean_absolute_error", "root_mean_squared_error")
    note = TaskNote(task="custom", kind="regress", metrics=metrics)
    examples = [text_example("a", label) for label in (10.0, 20.0, 30.0)]
    outcome = Outcome(np.array([10, 23, 34], np.float32))
    found = judged(note, examples, encoded(note, examples, uncased), outcome)
    expected = {"spearman": 1.0, "mean_absolute_error": 7 / 3, "root_mean_squared_error": (25 / 3) ** 0.5}
    assert found == pytest.approx(expected)


def test_several_labels_of_any_score_have_a_probability_without_a_warning(uncased, recwarn) -> None:
    note = TaskNote(task="custom", kind="multilabel", metrics=("micro_f1",), labels=("x", "y", "z"))
    logits = np.array([[-1000, 0, 1000], [-89, -3, 3]], np.float32)
    found = outcome_of(note, [], encoded(note, [text_example("a", ("x",))], uncased), logits)
    shares = 1 / (1 + np.exp(-np.array([-3.0, 3.0])))
    expected = [[0, 0.5, 1], [0, *shares]]
    np.testing.assert_allclose(found.scores, expected, atol=1e-7)
    assert not recwarn.list
