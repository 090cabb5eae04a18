"""What a model says, judged by the measures of its task."""

import numpy as np
import pytest

from bertsmith.recipe.finetuning import TextSection
from bertsmith.tasks.encoding import encode_split
from bertsmith.tasks.judging import judged
from bertsmith.tasks.outcome import Outcome
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
