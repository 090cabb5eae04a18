"""The official evaluation of SQuAD on cases worked out by hand."""

from collections import Counter

import pytest

from bertsmith.core.errors import UserError
from bertsmith.tasks.answers import best_threshold, exact, f1, normalised, squad_scores
from bertsmith.tasks.example_types import Answer, Question


def question(key: str, *texts: str, labelled: bool = True) -> Question:
    answers = tuple(Answer(right, 0) for right in texts)
    return Question(key, "?", "passage", answers, labelled=labelled, article="", where=f"dev.json: {key}")


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("The Eiffel Tower!", "eiffel tower"),
        ("an apple a day", "apple day"),
        ("  two \t words\n", "two words"),
        ("Theatre of Athens", "theatre of athens"),  # articles are whole words
        ("U.S.A.", "usa"),
        ("A.", ""),  # punctuation goes first, and leaves an article
        ("the-end", "theend"),  # and joins what it stood between
        ("$1,000.50", "100050"),
        ("", ""),
        ("the a an", ""),
        ("Zürich", "zürich"),
        ("ÉCOLE", "école"),
        ("1914–1918", "1914–1918"),  # only ASCII punctuation goes
        ("“quoted”", "“quoted”"),
        ("the\xa0River\u3000Thames", "river thames"),  # every kind of space is one
        ("東京、日本", "東京、日本"),
        ("the\u0301 x", "\u0301 x"),  # a letter with a combining accent is a word's end, as in the script
        ("ⅷ thé", "ⅷ thé"),
    ],
)
def test_texts_are_normalised_as_in_the_official_script(text, bare):
    assert normalised(text) == bare


@pytest.mark.parametrize(
    ("right", "answer", "same", "overlap"),
    [
        ("the Normans", "Normans.", 1.0, 1.0),
        ("Denver Broncos", "Broncos", 0.0, 2 / 3),
        ("10th and 11th centuries", "in the 10th and 11th centuries", 0.0, 2 * 4 / (4 + 5)),
        ("New York", "Boston", 0.0, 0.0),
        ("to be or not to be", "to to to", 0.0, 2 * 2 / (6 + 3)),  # a word counts as often as both have it
        ("a b", "b a", 1.0, 1.0),  # a is an article
        ("c b", "b c", 0.0, 1.0),  # F1 sees no order
        ("", "", 1.0, 1.0),
        ("", "the", 1.0, 1.0),
        ("", "France", 0.0, 0.0),
        ("France", "", 0.0, 0.0),
        ("France", "the", 0.0, 0.0),
        ("Beyoncé", "beyoncé", 1.0, 1.0),
        ("Beyonce\u0301", "Beyoncé", 0.0, 0.0),  # the script does not compose letters
        ("4,000", "4000", 1.0, 1.0),
    ],
)
def test_exact_match_and_f1_of_two_texts(right, answer, same, overlap):
    assert exact(right, answer) == same
    assert f1(right, answer) == pytest.approx(overlap)


def test_the_gold_that_fits_best_counts_for_each_metric():
    asked = question("q", "Denver", "the Denver Broncos team", "Carolina Panthers")
    scores = squad_scores([asked], {"q": "Denver Broncos"})
    assert scores["exact"] == 0.0
    assert scores["f1"] == pytest.approx(100 * 2 * 2 / (2 + 3))


def test_scores_are_percentages_of_all_questions():
    asked = [question("1", "one"), question("2", "two"), question("3", "three four")]
    scores = squad_scores(asked, {"1": "one", "2": "2", "3": "four"})
    assert scores["exact"] == pytest.approx(100 / 3)
    assert scores["f1"] == pytest.approx(100 * (1 + 0 + 2 / 3) / 3)
    assert scores["total"] == 3


def test_questions_with_and_without_an_answer_are_reported_apart():
    asked = [question("1", "one"), question("2", "two words"), question("3"), question("4")]
    scores = squad_scores(asked, {"1": "one", "2": "words", "3": "", "4": "something"})
    assert (scores["HasAns_exact"], scores["HasAns_total"]) == (50.0, 2)
    assert scores["HasAns_f1"] == pytest.approx(100 * (1 + 2 / 3) / 2)
    assert (scores["NoAns_exact"], scores["NoAns_f1"], scores["NoAns_total"]) == (50.0, 50.0, 2)
    assert scores["exact"] == 50.0


def test_a_part_without_questions_is_not_reported():
    scores = squad_scores([question("1", "one")], {"1": "one"})
    assert not [name for name in scores if name.startswith("NoAns") or name.startswith("best")]


def official_v1(questions: list[Question], answers: dict[str, str]) -> dict[str, float]:
    """evaluate-v1.1.py of SQuAD, its lines for one question after the other."""
    exact_match = overlap = 0.0
    for each in questions:
        if each.key not in answers:
            continue
        golds, predicted = [gold.text for gold in each.answers], normalised(answers[each.key])
        exact_match += max(normalised(gold) == predicted for gold in golds)
        found = []
        for gold in golds:
            common = Counter(predicted.split()) & Counter(normalised(gold).split())
            if (num_same := sum(common.values())) == 0:
                found.append(0.0)
                continue
            precision, recall = num_same / len(predicted.split()), num_same / len(normalised(gold).split())
            found.append(2 * precision * recall / (precision + recall))
        overlap += max(found)
    return {"exact": 100 * exact_match / len(questions), "f1": 100 * overlap / len(questions)}


@pytest.mark.parametrize("golds", [("the",), ("A.", "Thames"), ("Thames", "the river"), ("!",)], ids=str)
@pytest.mark.parametrize("answer", ["", "the", "an!", "Thames", "a river", None])
def test_squad_1_is_evaluated_as_its_own_script_does(golds, answer):
    asked = [question("q", *golds), question("other", "right")]
    answers = {"other": "right"} | ({} if answer is None else {"q": answer})
    scores = squad_scores(asked, answers)
    assert {name: scores[name] for name in ("exact", "f1")} == official_v1(asked, answers)


def test_a_right_answer_of_nothing_but_articles_counts_in_squad_1_and_not_in_squad_2():
    asked = question("q", "the", "Thames")
    first = squad_scores([asked], {"q": "a"})
    assert (first["exact"], first["f1"]) == (100.0, 0.0)
    second = squad_scores([asked, question("none")], {"q": "a", "none": ""})
    assert (second["HasAns_exact"], second["HasAns_f1"]) == (0.0, 0.0)
    assert squad_scores([asked, question("none")], {"q": "a Thames", "none": ""})["exact"] == 100.0


def test_in_squad_2_right_answers_that_are_all_nothing_are_one_empty_answer():
    scores = squad_scores([question("q", "the"), question("none")], {"q": "", "none": ""})
    assert (scores["HasAns_exact"], scores["HasAns_f1"]) == (100.0, 100.0)


def test_an_unanswered_question_is_wrong_and_counted_even_if_it_has_no_answer():
    asked = [question("1", "one"), question("2"), question("3", "three")]
    scores = squad_scores(asked, {"1": "one"})
    assert scores["exact"] == scores["f1"] == pytest.approx(100 / 3)
    assert (scores["total"], scores["unanswered"], scores["NoAns_exact"]) == (3, 2, 0.0)


def test_no_questions_score_nothing():
    assert squad_scores([], {})["f1"] == 0.0


def test_a_question_that_nobody_labelled_is_not_evaluated():
    with pytest.raises(UserError, match="dev.json: q: question q lacks a right answer to compare with"):
        squad_scores([question("q", labelled=False)], {"q": ""})


ASKED = [question("1", "one"), question("2", "two"), question("3"), question("4"), question("5", "five six")]
SPANS = {"1": "one", "2": "to", "3": "three", "4": "four", "5": "five"}
ODDS = {"1": -5.0, "2": 1.0, "3": 2.0, "4": -3.0, "5": -4.0}


def test_odds_above_the_threshold_take_the_answer_away():
    scores = squad_scores(ASKED, SPANS, ODDS, threshold=0.0)
    assert scores["exact"] == pytest.approx(100 * 2 / 5)  # 1 as answered, 3 as unanswerable
    assert scores["NoAns_exact"] == 50.0
    assert scores["HasAns_f1"] == pytest.approx(100 * (1 + 2 / 3) / 3)


def test_odds_at_the_threshold_leave_the_answer():
    assert squad_scores(ASKED, SPANS, ODDS, threshold=2.0)["NoAns_exact"] == 0.0


def test_the_best_threshold_of_each_metric_is_found():
    scores = squad_scores(ASKED, SPANS, ODDS)
    assert scores["best_exact"] == pytest.approx(100 * 3 / 5)  # only 1 is answered
    assert scores["best_exact_thresh"] == -5.0
    assert scores["best_f1"] == pytest.approx(100 * (3 + 2 / 3) / 5)  # 1 and 5 are answered
    assert scores["best_f1_thresh"] == -4.0


def test_answering_nothing_can_be_best_and_its_threshold_does_so():
    asked, spans = [question("1"), question("2", "two")], {"1": "one", "2": "too"}
    odds = {"1": -7.0, "2": -6.0}
    value, threshold = best_threshold(asked, spans, odds, "f1")
    assert (value, threshold) == (50.0, -8.0)
    assert squad_scores(asked, spans, odds, threshold)["f1"] == 50.0


def test_answering_nothing_is_threshold_zero_for_probabilities():
    assert best_threshold([question("1")], {"1": "one"}, {"1": 0.4}, "f1") == (100.0, 0.0)


def test_unanswered_questions_are_wrong_at_every_threshold():
    asked = [question("1", "one"), question("2", "two"), question("3")]
    assert best_threshold(asked, {"1": "one"}, {"1": -1.0}, "f1") == (pytest.approx(100 / 3), -1.0)


def test_no_threshold_parts_questions_of_equal_odds():
    asked = [question("1", "one"), question("2")]
    assert best_threshold(asked, {"1": "one", "2": "two"}, {"1": 3.0, "2": 3.0}, "exact") == (50.0, 0.0)


def test_an_answer_without_odds_is_named():
    with pytest.raises(UserError, match="question 5 has an answer, but null odds are missing"):
        best_threshold(ASKED, SPANS, {key: odds for key, odds in ODDS.items() if key != "5"}, "f1")


def test_a_threshold_without_odds_is_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="null odds"):
        squad_scores(ASKED, SPANS, threshold=0.0)
