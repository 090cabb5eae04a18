"""The table of the hardest errors holds what is wrong, with what would be right, and nothing else."""

import numpy as np
import pytest

from bertsmith.recipe.finetuning_schema import TextSection
from bertsmith.tasks.answers import QuestionAnswer
from bertsmith.tasks.example_types import Answer, ChoiceExample, Question, TaggedExample, TextExample
from bertsmith.tasks.predictions import PredictedSplit, Predictions, errors_table, hardest_errors
from bertsmith.tasks.task_config import TaskConfig
from bertsmith.text.tokenizer import Tokenizer
from tests.unit.tasks.encoding_tools import encode_split

TEXT = TextSection(longest=32)
LABELS = {"tag": ("O", "B-location"), "classify": ("cold", "warm"), "multilabel": ("cold", "warm")}


@pytest.fixture
def rows(model):
    """The rows of errors-dev.md for examples of a kind and what is predicted of them."""
    tokenizer = Tokenizer.load(model)

    def listed(kind, examples, scores, answers=()):
        labels = LABELS.get(kind, ())
        config = TaskConfig(task="toy", kind=kind, metrics=(), labels=labels, text=TEXT)
        encoded = encode_split(kind, examples, labels, tokenizer, TEXT)
        outcome = Predictions(np.array(scores, np.float32), tuple(answers))
        split = PredictedSplit(examples, encoded, outcome)
        table = errors_table(hardest_errors(config.kind.errors(labels, split))).splitlines()
        assert table[2].startswith("| off by |" if kind == "regress" else "| sure |")
        return table[4:]

    return listed


def test_of_a_sentence_only_the_wrong_words_are_listed(rows):
    tags = ("B-location", "O", "O", "B-location")
    sentences = [
        TaggedExample("0", ("paris", "is", "my", "city"), ("B-location", "O", "O", "O"), 0, "dev:1"),
        TaggedExample("1", ("paris", "is", "in", "london"), tags, 1, "dev:6"),
    ]
    right = [[0.1, 0.9], [0.9, 0.1], [0.95, 0.05], [0.8, 0.2]]
    wrong = [[0.1, 0.9], [0.3, 0.7], [0.95, 0.05], [0.6, 0.4]]
    assert rows("tag", sentences, [*right, *wrong]) == [
        "| 70.0% | is/O london/B-location | is/B-location london/O | paris is in london | dev:6 |"
    ]


def question(key, *texts):
    answers = tuple(Answer(text, 0) for text in texts)
    return Question(key, f"where is {key}?", "paris london", answers, True, "a", f"dev:{key}")


def answered(key, text, probability):
    return QuestionAnswer(key, text, 0, len(text), 0.0, probability, 0.0, ())


def test_of_answers_only_those_without_a_right_word_are_listed(rows):
    questions = [question("a", "paris"), question("b", "paris"), question("c"), question("d", "the paris")]
    questions += [question("e"), question("f", "paris", "london")]
    answers = [answered("a", "london", 0.5), answered("b", "", 0.9), answered("c", "paris", 0.7)]
    answers += [answered("d", "Paris london", 0.99), answered("e", "", 0.99), answered("f", "london", 0.99)]
    scores = np.zeros((40, 2))
    assert rows("span", questions, scores, answers) == [
        "| 90.0% | paris | no answer | where is b? | dev:b |",
        "| 70.0% |  | paris | where is c? | dev:c |",
        "| 50.0% | paris | london | where is a? | dev:a |",
    ]


def test_of_choices_only_the_wrong_ones_are_listed(rows):
    options = (("the boy", "sits"), ("the boy", "runs"), ("the boy", "is tea"))
    examples = [
        ChoiceExample("0", options, 1, "dev:2"),
        ChoiceExample("1", options[:2], 0, "dev:3"),
        ChoiceExample("2", options, 2, "dev:4"),
    ]
    scores = [0.1, 0.8, 0.1, 0.4, 0.6, 0.7, 0.1, 0.2]
    assert rows("choice", examples, scores) == [
        "| 70.0% | 2 | 0 | sits // runs // is tea | dev:4 |",
        "| 60.0% | 0 | 1 | sits // runs | dev:3 |",
    ]


def test_of_classes_only_the_wrong_ones_are_listed(rows):
    examples = [
        TextExample("0", ("a", "sun"), "warm", "dev:1"),
        TextExample("1", ("a", "snow"), "cold", "dev:2"),
    ]
    assert rows("classify", examples, [[0.2, 0.8], [0.4, 0.6]]) == [
        "| 60.0% | cold | warm | a // snow | dev:2 |"
    ]


def test_of_label_sets_only_the_wrong_ones_are_listed(rows):
    examples = [
        TextExample("0", "the sun", ("warm",), "dev:1"),
        TextExample("1", "tea and snow", ("cold", "warm"), "dev:2"),
        TextExample("2", "the mat", (), "dev:3"),
    ]
    assert rows("multilabel", examples, [[0.45, 0.55], [0.9, 0.25], [0.6, 0.1]]) == [
        "| 75.0% | cold, warm | cold | tea and snow | dev:2 |",
        "| 60.0% | none | cold | the mat | dev:3 |",
    ]


def test_numbers_are_listed_by_how_far_off_they_are(rows):
    examples = [TextExample("0", "the sun", 4.5, "dev:1"), TextExample("1", "the snow", 0.5, "dev:2")]
    assert rows("regress", examples, [4.25, 3.0]) == [
        "| 2.50 | 0.5 | 3.00 | the snow | dev:2 |",
        "| 0.25 | 4.5 | 4.25 | the sun | dev:1 |",
    ]
