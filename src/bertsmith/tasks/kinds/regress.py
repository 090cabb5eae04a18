"""A number for a text or a pair. Shapes: M texts."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.errors import UserError
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.example_types import TextExample
from bertsmith.tasks.kinds.kind import TaskHead
from bertsmith.tasks.kinds.text_kind import TextKind
from bertsmith.tasks.label_rules import LabelRule, number
from bertsmith.tasks.metrics import OF_NUMBERS
from bertsmith.tasks.predictions import HardError, Numbers, PredictedSplit, Predictions
from bertsmith.tasks.text_encoding import Targets


class Regress(TextKind):
    """The kind that predicts a number."""

    name = "regress"
    losses = "number"
    pipeline_tag = "text-classification"
    usage = "bert.score([{text}])[0]"
    head = TaskHead("classify", "sentence", size=1)
    metrics = OF_NUMBERS
    custom_metrics = tuple(metric.name for metric in OF_NUMBERS)
    ability = "score"
    problem_type = "regression"
    numeric = True
    linear_problem = "numbers"

    def label_rule(self, separator: str) -> LabelRule:
        return number

    def targets(self, examples: Sequence[TextExample], labels: tuple[str, ...]) -> Targets:
        numbers = np.full(len(examples), np.nan, np.float32)
        for index, example in enumerate(examples):
            if example.label is not None:
                try:
                    numbers[index] = float(example.label)  # type: ignore[arg-type]  # a tuple is a TypeError, too
                except (TypeError, ValueError) as error:
                    what = f"{example.label!r} is not a number"
                    raise UserError(what, where=example.where, remedy="write it as 2.5") from error
        return numbers

    def activation(self, logits: Numbers) -> Numbers:
        return logits.reshape(-1)

    def predicted_targets(self, encoded: EncodedSet, predictions: Predictions) -> NDArray[Any]:
        return predictions.scores

    def constant_predictions(
        self, labels: tuple[str, ...], known: NDArray[Any], encoded: EncodedSet
    ) -> Predictions:
        """Predict the mean of the known targets."""
        mean = np.nanmean(known.astype(np.float64))
        return Predictions(np.full(len(encoded.targets), mean, np.float32))

    def mean_loss(self, encoded: EncodedSet, predictions: Predictions) -> float:
        squares_M = np.square(predictions.scores.astype(np.float64) - encoded.targets)
        return float(np.nanmean(squares_M))

    def written(self, labels: tuple[str, ...], target: Any, *, separator: str) -> str | float:
        return float(target)

    def errors(self, labels: tuple[str, ...], split: PredictedSplit[TextExample]) -> Iterator[HardError]:
        for example, predicted in zip(split.examples, split.predictions.scores.tolist(), strict=True):
            if isinstance(example.label, float):
                off = abs(predicted - example.label)
                right, guessed = f"{example.label:g}", f"{predicted:.2f}"
                yield HardError(example.where, example.summary, right, guessed, off, in_percent=False)

    def output_names(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        return ("score",)


REGRESS = Regress()
