"""A question's answer as a span of its passage (SQuAD). Shapes: N windows, T tokens."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.files import write_json
from bertsmith.recipe.finetuning_schema import AnswersSection, HeadSection, TextSection
from bertsmith.tasks.answers import answers_of, f1, question_scores, squad_scores
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.example_types import Question
from bertsmith.tasks.kinds.kind import Kind, TaskHead
from bertsmith.tasks.metrics import PERCENT, Metric
from bertsmith.tasks.predictions import HardError, Numbers, PredictedSplit, Predictions
from bertsmith.tasks.question_windows import encode_questions
from bertsmith.text.tokenizer import Tokenizer

SQUAD_LENGTH = 384
"""Longest window of a question and its passage in run_squad.py."""
OFFICIAL_NAMES = {
    "f1": "f1",
    "exact": "exact",
    "HasAns_f1": "f1_with_answer",
    "HasAns_exact": "exact_with_answer",
    "NoAns_f1": "f1_without_answer",
    "NoAns_exact": "exact_without_answer",
}
"""Our names for the metrics of the official script."""


class Span(Kind[Question]):
    """The kind that predicts an answer's first and last token, or "no answer"; each window is an item."""

    name = "span"
    losses = "span"
    pipeline_tag = "question-answering"
    usage = 'bert.answer("Who was born in Warsaw?", "Marie Curie was born in Warsaw.").text'
    head = TaskHead("span", "tokens", size=2)
    unit = "token"
    metrics = (
        *(Metric(ours) for ours in OFFICIAL_NAMES.values()),
        Metric("best_f1"),
        Metric("best_exact"),
        Metric("best_f1_threshold", unit="number"),
        Metric("best_exact_threshold", unit="number"),
    )
    ability = "answer"
    own_form = "folder"
    taught_by = "squad2"

    def encode_checked(
        self, examples: Sequence[Question], labels: tuple[str, ...], tokenizer: Tokenizer, text: TextSection
    ) -> EncodedSet:
        return encode_questions(examples, tokenizer, text)

    def without_tokens(self, examples: Sequence[Question], labels: tuple[str, ...]) -> EncodedSet:
        """Return no windows: the constant answer, "no answer", does not depend on them."""
        return EncodedSet.without_tokens(self.unit, np.zeros((0, 2), np.int64))

    def constant_answer(self, labels: tuple[str, ...], known: NDArray[Any]) -> str:
        return "no answer"

    def usual_length(self, positions: int) -> int:
        return min(SQUAD_LENGTH, positions)

    def loss_name(self, head: HeadSection) -> str:
        return "passage" if head.span_over == "passage" else self.losses

    def predict(
        self, logits: Numbers, encoded: EncodedSet, examples: Sequence[Question], answers: AnswersSection
    ) -> Predictions:
        return Predictions(logits, tuple(answers_of(examples, encoded, logits, answers)))

    def predict_together(
        self, scores: Numbers, encoded: EncodedSet, examples: Sequence[Question], answers: AnswersSection
    ) -> Predictions:
        return self.predict(scores, encoded, examples, answers)

    def ensemble_settings(self, answers: AnswersSection) -> tuple[object, ...]:
        return answers.best, answers.longest, answers.null_threshold == "off"

    def predicted_targets(self, encoded: EncodedSet, predictions: Predictions) -> NDArray[Any]:
        """Return the most likely first and last row of each window, whatever the answers are."""
        windows = np.split(predictions.scores, encoded.starts_N1[1:-1])
        return np.array([scores_T2.argmax(0) for scores_T2 in windows], np.int64)

    def judged(self, split: PredictedSplit[Question]) -> dict[str, NDArray[Any]]:
        """Return exact match and F1 of each question."""
        texts = {answer.key: answer.text for answer in split.predictions.answers}
        return question_scores(split.examples, texts)

    def evaluate(
        self, metrics: Sequence[str], labels: tuple[str, ...], split: PredictedSplit[Question]
    ) -> dict[str, float]:
        """Return all metrics of SQuAD's official script, whatever metrics are named."""
        answers = split.predictions.answers
        texts = {answer.key: answer.text for answer in answers}
        official = squad_scores(split.examples, texts, null_odds=None, threshold=None)
        found = {ours: official[name] / PERCENT for name, ours in OFFICIAL_NAMES.items() if name in official}
        if "NoAns_f1" not in official:
            return found
        # Results with the best null threshold for this file, as the official script reports them.
        odds = {answer.key: answer.null_odds for answer in answers}
        spans = {answer.key: answer.best_span for answer in answers}
        best = squad_scores(split.examples, spans, null_odds=odds, threshold=None)
        for name in ("best_f1", "best_exact"):
            found |= {name: best[name] / PERCENT, f"{name}_threshold": best[f"{name}_thresh"]}
        return found

    def mean_loss(self, encoded: EncodedSet, predictions: Predictions) -> float:
        """Return the mean of `span_loss` over all windows."""
        scores_T2, starts_N = predictions.scores.astype(np.float64), encoded.starts_N1[:-1]
        right_N2 = scores_T2[starts_N[:, None] + encoded.targets, [0, 1]]
        return float((np.logaddexp.reduceat(scores_T2, starts_N, axis=0) - right_N2).mean())

    def baseline(
        self,
        metrics: Sequence[str],
        labels: tuple[str, ...],
        examples: Sequence[Question],
        encoded: EncodedSet,
        *,
        known: NDArray[Any] | None = None,
    ) -> dict[str, float]:
        """Return the metrics of never answering; empty if every question has an answer (SQuAD 1.1)."""
        if all(example.answers for example in examples):
            return {}
        official = squad_scores(examples, {example.key: "" for example in examples})
        return {name: official[name] / PERCENT for name in metrics}

    def errors(self, labels: tuple[str, ...], split: PredictedSplit[Question]) -> Iterator[HardError]:
        for example, answer in zip(split.examples, split.predictions.answers, strict=True):
            right = [each.text for each in example.answers] or [""]
            if max(f1(each, answer.text) for each in right) == 0:
                predicted = answer.text or "no answer"
                yield HardError(example.where, example.summary, right[0], predicted, answer.probability)

    def prediction_rows(
        self, labels: tuple[str, ...], split: PredictedSplit[Question], *, separator: str
    ) -> list[dict[str, Any]]:
        """Return a row for each question: its id, the answer, its start, and its probability."""
        return [
            {
                "id": answer.key,
                "prediction": answer.text,
                "start": answer.start,
                "probability": answer.probability,
                "null_odds": answer.null_odds,
            }
            for answer in split.predictions.answers
        ]

    def write_predictions(
        self, out: Path, labels: tuple[str, ...], split: PredictedSplit[Question]
    ) -> list[Path]:
        """Write predictions.json, nbest_predictions.json and null_odds.json, as run_squad.py does."""
        names = ("predictions", "nbest_predictions", "null_odds")
        predictions, nbest, odds = (out / f"{name}.json" for name in names)
        answers = split.predictions.answers
        candidates: dict[str, list[dict[str, str | float]]] = {}
        for answer in answers:
            candidates[answer.key] = [
                {
                    "text": candidate.text,
                    "probability": candidate.probability,
                    "start_logit": candidate.start_score,
                    "end_logit": candidate.end_score,
                }
                for candidate in answer.nbest
            ]
        write_json(predictions, {answer.key: answer.text for answer in answers})
        write_json(nbest, candidates)
        write_json(odds, {answer.key: answer.null_odds for answer in answers})
        return [predictions, nbest, odds]


SPAN = Span()
