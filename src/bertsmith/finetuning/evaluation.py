"""Evaluation on the development sets, and tuning of the null threshold of SQuAD 2.0."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from bertsmith.core.seeds import stream
from bertsmith.finetuning.splits import EncodedSplit
from bertsmith.finetuning.target_scaler import TargetScaler
from bertsmith.inference.task_model import TaskModel
from bertsmith.tasks.answers import QuestionAnswer, best_threshold, squad_scores
from bertsmith.tasks.example_types import Question
from bertsmith.tasks.kinds.kind import AnyKind
from bertsmith.tasks.metrics import ClassScores, Metric
from bertsmith.tasks.predictions import PredictedSplit, Predictions
from bertsmith.tasks.task_config import TaskConfig

SPLITS = 5
MARGIN = 1.0
"""Distance of the threshold above the largest null odds if it is best to answer every question."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A model's predictions for each development set, with their metrics."""

    config: TaskConfig
    """The config to predict with, including thresholds that were tuned on the first set, if any."""
    predictions: dict[str, Predictions]
    metrics: dict[str, dict[str, float]]
    loss: float
    """Mean loss on the first set."""

    @property
    def deciding(self) -> dict[str, float]:
        """Return the metrics on the deciding set, which is the first one."""
        return next(iter(self.metrics.values()))


def evaluate(
    model: TaskModel, splits: Mapping[str, EncodedSplit], *, scaler: TargetScaler | None = None
) -> Evaluation:
    """Evaluate the model on each split; thresholds set to "tuned" are tuned on the first one.

    A scaler turns predictions on the scale of training back into true numbers.
    """
    config = model.config
    first, parts = next(iter(splits), ""), parts_of_first(config.kind, splits)
    predictions: dict[str, Predictions] = {}
    for name, split in splits.items():
        if name in parts:  # predicted with the first split already
            whole = splits[first].encoded
            predictions[name] = config.kind.subset(predictions[first], whole, parts[name])
        else:
            found = model.predict(split.examples, split.encoded)
            predictions[name] = (
                found if scaler is None else Predictions(scaler.inverse_transform(found.scores))
            )
    if config.answers.null_threshold == "tuned" and splits:
        threshold = tuned_threshold(_questions_of(splits[first]), predictions[first].answers)
        config = with_threshold(config, threshold)
        # Before this, every question was answered with its best span.
        predictions = {name: _with_answers(config, splits[name], each) for name, each in predictions.items()}
    if config.answers.label_thresholds == "tuned" and splits:
        tuning = PredictedSplit(splits[first].examples, splits[first].encoded, predictions[first])
        thresholds = config.kind.tuned_thresholds(config.deciding_metric, config.labels, tuning)
        answers = config.answers.model_copy(update={"label_thresholds": thresholds})
        config = config.model_copy(update={"answers": answers})
        predictions = {name: replace(each, thresholds=thresholds) for name, each in predictions.items()}
    metrics = {}
    for name, split in splits.items():
        predicted = PredictedSplit(split.examples, split.encoded, predictions[name])
        metrics[name] = config.kind.evaluate(config.metrics, config.labels, predicted)
    loss = config.kind.mean_loss(splits[first].encoded, predictions[first]) if splits else 0.0
    return Evaluation(config, predictions, metrics, loss)


def baselines(config: TaskConfig, splits: Mapping[str, EncodedSplit]) -> dict[str, dict[str, float]]:
    """Return the constant answer's metrics on each split; leave out splits without a constant answer."""
    found = {
        name: config.kind.baseline(config.metrics, config.labels, split.examples, split.encoded)
        for name, split in splits.items()
    }
    return {name: scores for name, scores in found.items() if scores}


def simple_baseline(
    config: TaskConfig, train: EncodedSplit, splits: Mapping[str, EncodedSplit]
) -> dict[str, dict[str, float]]:
    """Return the task's metrics of `Kind.simple_model` on each split; raise if it needs a missing package."""
    found = {}
    for name, split in splits.items():
        predicted = config.kind.simple_predictions(
            config.labels, train.examples, split.examples, split.encoded
        )
        scores = config.kind.evaluate(
            config.metrics, config.labels, PredictedSplit(split.examples, split.encoded, predicted)
        )
        found[name] = {metric: scores[metric] for metric in config.metrics}
    return found


def class_scores(
    evaluation: Evaluation, splits: Mapping[str, EncodedSplit]
) -> dict[str, dict[str, ClassScores]]:
    """Return precision, recall and F1 of each class on each split; empty for tasks without classes."""
    config, found = evaluation.config, {}
    for name, split in splits.items():
        predicted = PredictedSplit(split.examples, split.encoded, evaluation.predictions[name])
        found[name] = config.kind.class_scores(config.labels, predicted)
    return {name: scores for name, scores in found.items() if scores}


def below_baseline(
    metric: Metric,
    metrics: Mapping[str, float],
    baseline: Mapping[str, float],
    *,
    split: str,
    named: str = "the constant answer",
) -> Iterator[str]:
    """Yield a line if the model does not beat a baseline by this metric."""
    value, theirs = metrics.get(metric.name), baseline.get(metric.name)
    if value is not None and theirs is not None and not metric.is_better(value, than=theirs):
        name = metric.name.replace("_", " ")
        yield (
            f"{split}: the model does not beat {named} ({name} {metric.text(value)}, "
            f"{named} {metric.text(theirs)})"
        )


def parts_of_first(kind: AnyKind, splits: Mapping[str, EncodedSplit]) -> dict[str, list[int]]:
    """Return the splits that are part of the first one (RACE's schools), with their indices in it."""
    if not splits or not kind.has_subsets:
        return {}
    first, *others = splits
    indices = {example: index for index, example in enumerate(splits[first].examples)}
    return {
        name: [indices[example] for example in splits[name].examples]
        for name in others
        if indices.keys() >= set(splits[name].examples)
    }


def with_threshold(config: TaskConfig, threshold: float) -> TaskConfig:
    """Return the config with this null threshold."""
    return config.model_copy(
        update={"answers": config.answers.model_copy(update={"null_threshold": threshold})}
    )


def tuning_report(
    model: TaskModel, splits: Mapping[str, EncodedSplit], evaluation: Evaluation
) -> dict[str, Any]:
    """Report how the null threshold was tuned on the first split, and how well it generalises."""
    name, split = next(iter(splits.items()))
    best_spans = _with_answers(model.config, split, evaluation.predictions[name])
    threshold = evaluation.config.answers.null_threshold
    assert isinstance(threshold, float)
    return threshold_report(_questions_of(split), best_spans.answers, threshold=threshold)


def _questions_of(split: EncodedSplit) -> list[Question]:
    return [example for example in split.examples if isinstance(example, Question)]


def _with_answers(config: TaskConfig, split: EncodedSplit, predictions: Predictions) -> Predictions:
    """Return the answers that follow from the same scores with the config's threshold."""
    return config.kind.predict(predictions.scores, split.encoded, split.examples, config.answers)


# ---- the null threshold


@dataclass(frozen=True, slots=True)
class ThresholdTrial:
    """A threshold tuned on one half of the articles, and its scores on the other half, in percent."""

    threshold: float
    tuned_f1: float
    zero_f1: float
    """F1 of threshold 0 on the same half."""
    tuned_exact: float
    zero_exact: float


def tuned_threshold(questions: Sequence[Question], answers: Sequence[QuestionAnswer]) -> float:
    """Return the threshold with the best F1 on these questions, in the middle of all such thresholds."""
    odds = {answer.key: answer.null_odds for answer in answers}
    texts = {answer.key: answer.text for answer in answers}
    _, least = best_threshold(questions, texts, odds, "f1")
    # Any number up to the next odds decides these questions alike; the middle is safest for others.
    above = min((each for each in odds.values() if each > least), default=least + 2 * MARGIN)
    middle = (least + above) / 2
    return middle if middle < above else least  # between neighbouring floats there is no middle


def threshold_trials(
    questions: Sequence[Question], answers: Sequence[QuestionAnswer], *, splits: int = SPLITS
) -> list[ThresholdTrial]:
    """Tune on one half of the articles and evaluate on the other, over several random halves."""
    pairs = list(zip(questions, answers, strict=True))
    articles = sorted({question.article for question in questions})
    trials = []
    for number in range(splits):
        # By article, not by question: questions about one passage are too alike to test each other.
        order = stream(0, "threshold halves", number).permutation(len(articles))
        first = {articles[index] for index in order[: len(articles) // 2]}
        tuning = [pair for pair in pairs if pair[0].article in first]
        others = [pair for pair in pairs if pair[0].article not in first]
        if not tuning or not others:
            continue
        threshold = tuned_threshold([question for question, _ in tuning], [answer for _, answer in tuning])
        scores = []
        for each in (threshold, 0.0):
            texts = {answer.key: "" if answer.null_odds > each else answer.text for _, answer in others}
            scores.append(squad_scores([question for question, _ in others], texts))
        tuned, zero = scores
        trials.append(ThresholdTrial(threshold, tuned["f1"], zero["f1"], tuned["exact"], zero["exact"]))
    return trials


def threshold_report(
    questions: Sequence[Question], answers: Sequence[QuestionAnswer], *, threshold: float
) -> dict[str, Any]:
    """Return the tuned threshold, each trial and their means, for thresholds.json; answers are best spans."""
    trials = threshold_trials(questions, answers)
    names = [field.name for field in fields(ThresholdTrial)]
    mean = {name: float(np.mean([getattr(trial, name) for trial in trials])) for name in names if trials}
    return {"tuned": threshold, "halves": [asdict(trial) for trial in trials], "mean": mean}
