"""From scores to answers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.recipe.finetuning_schema import AnswersSection, TextSection
from bertsmith.tasks.answers import QuestionAnswer, answers_of
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.example_types import Question
from bertsmith.text.tokenizer import Tokenizer
from tests.unit.tasks.encoding_tools import encode_split, kinds, question, spaces, words

PASSAGE = "The iron is hot, hammers it again"


def encode(questions: list[Question], tokenizer: Tokenizer, longest: int = 24) -> EncodedSet:
    return encode_split(
        "span", questions, (), tokenizer, TextSection(longest=longest, step=6, longest_question=8)
    )


def plain_nbest(passage: str, encoded: EncodedSet, windows: list[int], scores, section) -> list[tuple]:
    """(text, start, start score, end score), best first, by the loops of run_squad.py."""
    found = []
    for number in windows:
        begin, end = encoded.starts_N1[number], encoded.starts_N1[number + 1]
        rows = range(begin, end)
        best_starts = sorted(rows, key=lambda row: -scores[row, 0])[: section.best]
        best_ends = sorted(rows, key=lambda row: -scores[row, 1])[: section.best]
        for start in best_starts:
            for last in best_ends:
                in_passage = encoded.windows.offsets_T2[last, 0] >= 0
                if not (encoded.windows.best_T[start] and in_passage and 0 <= last - start < section.longest):
                    continue
                place = int(encoded.windows.offsets_T2[start, 0])
                text = passage[place : encoded.windows.offsets_T2[last, 1]]
                found.append((text, place, float(scores[start, 0]), float(scores[last, 1])))
    found.sort(key=lambda span: -(span[2] + span[3]))
    distinct = {}
    for span in found:
        if span[0]:
            distinct.setdefault(span[0], span)
    return list(distinct.values())[: section.best]


@given(
    kind=kinds,
    texts=st.lists(words, min_size=1, max_size=3),
    seed=st.integers(0, 1000),
    best=st.integers(1, 6),
    longest=st.integers(1, 6),
    threshold=st.sampled_from(["off", "tuned", 0.0, 2.0]),
)
def test_answers_are_those_of_the_plain_loops(
    kind, tokenizers, texts, seed, best, longest, threshold
) -> None:
    questions = [question(" ".join(text), []) for text in texts]
    encoded = encode(questions, tokenizers[kind])
    section = AnswersSection(best=best, longest=longest, null_threshold=threshold)
    scores = np.random.default_rng(seed).integers(-3, 4, (len(encoded.tokens_T), 2)).astype(np.float32)
    answers = answers_of(questions, encoded, scores, section)
    for number, (asked, answer) in enumerate(zip(questions, answers, strict=True)):
        windows = np.flatnonzero(encoded.windows.questions_N == number).tolist()
        spans = plain_nbest(asked.passage, encoded, windows, scores, section)
        null = min(scores[encoded.starts_N1[window]].sum() for window in windows)
        check(answer, spans, float(null), threshold)


def check(answer: QuestionAnswer, spans: list[tuple], null: float, threshold: str | float) -> None:
    best = spans[0][2] + spans[0][3] if spans else 0.0
    assert answer.null_odds == null - best
    says_none = not spans or (not isinstance(threshold, str) and null - best > threshold)
    assert (answer.text, answer.start) == (("", -1) if says_none else spans[0][:2])
    assert answer.end == answer.start + len(answer.text)
    given = [(each.text, each.start, each.start_score, each.end_score) for each in answer.nbest]
    assert [each for each in given if each[0]] == spans
    assert given.count(("", -1, *given_null(answer))) == (threshold != "off")
    totals = [each[2] + each[3] for each in given]
    assert totals == sorted(totals, reverse=True)
    shares = [math.exp(total) for total in totals]
    assert [each.probability for each in answer.nbest] == pytest.approx([it / sum(shares) for it in shares])


def given_null(answer: QuestionAnswer) -> tuple[float, float]:
    nulls = [(each.start_score, each.end_score) for each in answer.nbest if not each.text]
    return nulls[0] if nulls else (0.0, 0.0)


@given(kind=kinds, words=words, gaps=st.lists(spaces, min_size=30, max_size=30), data=st.data())
def test_where_the_scores_point_to_the_gold_the_answer_is_the_gold(
    kind, tokenizers, words, gaps, data
) -> None:
    first = data.draw(st.integers(0, len(words) - 1))
    last = data.draw(st.integers(first, len(words) - 1))
    passage, starts = "", []
    for word, gap in zip(words, gaps, strict=False):
        starts.append(len(passage))
        passage += word + gap
    right = passage[starts[first] : starts[last] + len(words[last])]
    asked = question(passage, [(right, starts[first])])
    encoded = encode([asked], tokenizers[kind], longest=4000)
    scores = np.zeros((len(encoded.tokens_T), 2), np.float32)
    scores[encoded.targets[0, 0], 0] = scores[encoded.targets[0, 1], 1] = 9
    (answer,) = answers_of([asked], encoded, scores, AnswersSection(longest=4000))
    assert (answer.text, answer.start, answer.end) == (right, starts[first], starts[first] + len(right))
    assert answer.score == 18


def pointed(encoded: EncodedSet, uncased: Tokenizer, **scores: tuple[float, float]) -> np.ndarray:
    """Scores of 0, but for the passage's tokens that are named."""
    scores_T2 = np.zeros((len(encoded.tokens_T), 2), np.float32)
    for row in np.flatnonzero(encoded.windows.offsets_T2[:, 0] >= 0):
        scores_T2[row] = scores.get(uncased.token(int(encoded.tokens_T[row])), (0, 0))
    return scores_T2


def test_the_text_is_that_of_the_passage_not_of_the_tokens(uncased) -> None:
    asked = question("The  naïve CAFE\u0301, they", [])
    encoded = encode([asked], uncased)
    scores = pointed(encoded, uncased, naive=(5, 0), cafe=(0, 5))
    (answer,) = answers_of([asked], encoded, scores, AnswersSection())
    assert answer.text == "naïve CAFE\u0301"


def test_a_question_has_no_answer_only_above_the_threshold(uncased) -> None:
    asked = question(PASSAGE, [])
    encoded = encode([asked], uncased)
    scores = pointed(encoded, uncased, hot=(2, 2))
    scores[0] = 3
    texts = {
        threshold: answers_of([asked], encoded, scores, AnswersSection(null_threshold=threshold))[0].text
        for threshold in ("off", "tuned", 1.9, 2.0, 2.1)
    }
    assert texts == {"off": "hot", "tuned": "hot", 1.9: "", 2.0: "hot", 2.1: "hot"}


def test_no_answer_carries_its_own_score_and_probability(uncased) -> None:
    asked = question("iron", [])
    encoded = encode([asked], uncased)
    scores = pointed(encoded, uncased, iron=(1, 1))
    scores[0] = 2
    (answer,) = answers_of([asked], encoded, scores, AnswersSection(null_threshold=0.0))
    assert (answer.text, answer.start, answer.end, answer.score, answer.null_odds) == ("", -1, -1, 4.0, 2.0)
    assert answer.probability == pytest.approx(1 / (1 + math.exp(-2)))
    assert [each.text for each in answer.nbest] == ["", "iron"]


@pytest.mark.parametrize(("threshold", "probability"), [("off", 0.0), (0.0, 1.0), (9.0, 1.0)])
def test_without_any_possible_span_the_answer_is_empty(threshold, probability, uncased) -> None:
    asked = question(PASSAGE, [])
    encoded = encode([asked], uncased)
    scores = np.zeros((len(encoded.tokens_T), 2), np.float32)
    scores[1:4] = 5  # the question itself is all that is looked at
    section = AnswersSection(best=3, null_threshold=threshold)
    (answer,) = answers_of([asked], encoded, scores, section)
    assert (answer.text, answer.start, answer.end, answer.null_odds) == ("", -1, -1, 0.0)
    assert answer.probability == probability
    assert len(answer.nbest) == (threshold != "off")


def test_an_empty_passage_has_an_empty_answer(uncased) -> None:
    asked = question("", [])
    encoded = encode([asked], uncased)
    (answer,) = answers_of(
        [asked], encoded, np.ones((len(encoded.tokens_T), 2), np.float32), AnswersSection()
    )
    assert (answer.text, answer.nbest, answer.null_odds) == ("", (), 2.0)


def test_the_null_score_is_that_of_the_window_that_says_it_least(uncased) -> None:
    asked = question(" ".join(["iron"] * 40), [])
    encoded = encode([asked], uncased)
    scores = np.zeros((len(encoded.tokens_T), 2), np.float32)
    first_rows = encoded.starts_N1[:-1]
    scores[first_rows] = np.arange(len(first_rows))[::-1, None] - 1
    (answer,) = answers_of([asked], encoded, scores, AnswersSection(null_threshold=5.0))
    assert len(first_rows) > 2 and answer.null_odds == -2.0


def test_more_questions_than_are_looked_at_together_keep_their_order(uncased, monkeypatch) -> None:
    questions = [question(f"iron {'hot ' * (number % 5)}", [], key=str(number)) for number in range(30)]
    encoded = encode(questions, uncased, longest=12)
    scores = np.random.default_rng(0).normal(size=(len(encoded.tokens_T), 2))
    together = answers_of(questions, encoded, scores, AnswersSection())
    monkeypatch.setattr("bertsmith.tasks.answers.QUESTIONS_AT_ONCE", 7)
    assert answers_of(questions, encoded, scores, AnswersSection()) == together
    assert [answer.key for answer in together] == [asked.key for asked in questions]
