"""SQuAD 2.0: the null threshold is tuned, kept with its sign, and used again."""

import json
import shutil

import pytest

from bertsmith.core.errors import UserError
from bertsmith.finetuning.evaluation import threshold_report, threshold_trials, tuned_threshold
from bertsmith.finetuning.predict import predict_labelled
from bertsmith.tasks.answers import QuestionAnswer, squad_scores
from bertsmith.tasks.example_types import Answer, Question
from bertsmith.training.journal import read_metrics
from tests.tuning import tune


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    place = tmp_path_factory.mktemp("squad2")
    return tune("squad2", model, place, "run.evaluations=2"), place / "data" / "squad2"


def note_of(folder):
    return json.loads((folder / "model" / "task.json").read_text())


def test_the_tuned_threshold_is_stored_with_its_sign(run):
    result, _ = run
    note = note_of(result.folder)
    assert isinstance(note["answers"]["null_threshold"], float)
    assert note["null_rule"] == "no answer where null score - best span score > answers.null_threshold"
    assert (
        note["answers"]["null_threshold"]
        == json.loads((result.folder / "thresholds.json").read_text())["tuned"]
    )
    assert "Null threshold" in (result.folder / "card.md").read_text()


def test_the_stored_threshold_decides_what_is_answered(run):
    result, data = run
    predicted = predict_labelled([result.folder], data, device="cpu")
    # How a set is cut decides its rounding, so a threshold in logits agrees to fewer digits than a fraction.
    assert predicted.metrics() == pytest.approx(result.metrics["dev"], rel=1e-4, abs=1e-4)
    threshold = note_of(result.folder)["answers"]["null_threshold"]
    silent = {answer.key for answer in predicted.predictions.answers if not answer.text}
    assert silent == {answer.key for answer in predicted.predictions.answers if answer.null_odds > threshold}
    assert 0 < len(silent) < len(predicted.examples)


def test_another_stored_threshold_answers_otherwise(run, tmp_path):
    result, data = run
    folder = shutil.copytree(result.folder / "model", tmp_path / "model")
    note = note_of(result.folder)
    note["answers"]["null_threshold"] = -1e9
    (folder / "task.json").write_text(json.dumps(note))
    predicted = predict_labelled([folder], data, device="cpu")
    assert not any(answer.text for answer in predicted.predictions.answers)
    assert predicted.metrics()["f1_without_answer"] == 1


def with_answers(folder, place, **changed):
    """A copy of a model whose task.json says otherwise how answers are made."""
    shutil.copytree(folder / "model", place)
    note = note_of(folder)
    note["answers"] |= changed
    (place / "task.json").write_text(json.dumps(note))
    return place


def test_an_ensemble_has_the_mean_of_its_members_thresholds_in_any_order(run, tmp_path):
    result, data = run
    odds = sorted(
        answer.null_odds
        for answer in predict_labelled([result.folder], data, device="cpu").predictions.answers
    )
    low, high = (
        with_answers(result.folder, tmp_path / name, null_threshold=threshold)
        for name, threshold in (("low", odds[0] - 1), ("high", odds[-1] + 1))
    )
    both = [predict_labelled(folders, data, device="cpu") for folders in ([low, high], [high, low])]
    answers = [[answer.text for answer in predicted.predictions.answers] for predicted in both]
    assert answers[0] == answers[1]
    middle = (odds[0] + odds[-1]) / 2
    assert [predicted.config.answers.null_threshold for predicted in both] == pytest.approx([middle, middle])
    assert answers[0].count("") == sum(each > middle for each in odds) > 0


@pytest.mark.parametrize("changed", [{"null_threshold": "off"}, {"longest": 3}, {"best": 2}])
def test_members_who_make_answers_otherwise_are_rejected(run, tmp_path, changed):
    result, data = run
    other = with_answers(result.folder, tmp_path / "other", **changed)
    with pytest.raises(UserError, match="was not fine-tuned for the same task and labels"):
        predict_labelled([result.folder, other], data, device="cpu")


def test_exams_on_the_way_are_evaluated_with_a_threshold_too(run):
    result, _ = run
    evaluations = [line for line in read_metrics(result.folder) if line["kind"] == "held-out"]
    assert len(evaluations) == 2
    assert evaluations[-1]["f1"] == pytest.approx(result.metrics["dev"]["f1"])
    assert evaluations[0]["f1"] > 0.3  # what answering nothing gives, at least


def test_a_threshold_that_is_given_is_kept(model, tmp_path):
    result = tune("squad2", model, tmp_path, "run.epochs=0.2", "answers.null_threshold=1.5")
    assert note_of(result.folder)["answers"]["null_threshold"] == 1.5
    assert not (result.folder / "thresholds.json").exists()


def question(number, article, *, answerable):
    answers = (Answer("iron", 0),) if answerable else ()
    return Question(f"q{number}", "what?", "iron", answers, True, article, f"file:{number}")


def answer(number, odds):
    return QuestionAnswer(f"q{number}", "iron", 0, 4, 0.0, 0.5, odds, ())


@pytest.fixture(scope="module")
def judged():
    """Ten articles; in each, questions without an answer have higher odds of none than the others."""
    questions, answers = [], []
    for number in range(40):
        answerable = number % 2 == 0
        questions.append(question(number, f"article {number // 4}", answerable=answerable))
        answers.append(answer(number, (number // 4) / 10 + (0 if answerable else 5)))
    return questions, answers


def test_the_tuned_threshold_gives_the_best_f1(judged):
    questions, answers = judged
    texts = {each.key: each.text for each in answers}
    odds = {each.key: each.null_odds for each in answers}
    found = squad_scores(questions, texts, null_odds=odds, threshold=tuned_threshold(questions, answers))
    assert found["f1"] == 100


@pytest.mark.parametrize(
    ("odds", "threshold"),
    [
        ((0.0, 0.5, 3.0, 4.0), 1.75),  # between the last that is answered and the first that is not
        ((3.0, 4.0, 0.0, 0.5), -0.5),  # best is to answer nothing
        ((0.0, 1.0), 2.0),
    ],
)
def test_the_tuned_threshold_stands_amid_those_that_do_as_well(odds, threshold):
    questions = [question(number, "", answerable=number < 2) for number in range(len(odds))]
    answers = [answer(number, each) for number, each in enumerate(odds)]
    assert tuned_threshold(questions, answers) == threshold


def test_halves_are_made_of_whole_articles(judged, monkeypatch):
    questions, answers = judged
    seen = []

    def scores(judged_questions, *rest, **settings):
        seen.append({each.article for each in judged_questions})
        assert all(sum(each.article == article for each in judged_questions) == 4 for article in seen[-1])
        return squad_scores(judged_questions, *rest, **settings)

    monkeypatch.setattr("bertsmith.finetuning.evaluation.squad_scores", scores)
    trials = threshold_trials(questions, answers)
    assert len(trials) == 5
    assert {len(articles) for articles in seen} == {5}
    assert len({frozenset(articles) for articles in seen}) > 1


def test_the_report_has_every_trial_and_their_means(judged):
    report = threshold_report(*judged, threshold=0.9)
    assert (report["tuned"], len(report["halves"])) == (0.9, 5)
    assert report["mean"]["tuned_f1"] == pytest.approx(sum(t["tuned_f1"] for t in report["halves"]) / 5)
    assert report["mean"]["tuned_f1"] > report["mean"]["zero_f1"]


def test_one_article_cannot_be_halved():
    questions = [question(number, "all", answerable=number % 2 == 0) for number in range(6)]
    answers = [answer(number, float(number)) for number in range(6)]
    assert threshold_report(questions, answers, threshold=0.0) == {"tuned": 0.0, "halves": [], "mean": {}}
