"""Choosing one of several texts; an item has a sequence for each. Shapes: M items, N sequences."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.errors import UserError
from bertsmith.recipe.finetuning_schema import AnswersSection, TextSection
from bertsmith.tasks.encoded import NO_LABEL, EncodedSet
from bertsmith.tasks.example_types import ChoiceExample
from bertsmith.tasks.kinds.kind import Kind, TaskHead
from bertsmith.tasks.metrics import OF_CLASSES, compute_metrics
from bertsmith.tasks.predictions import (
    HardError,
    Numbers,
    PredictedSplit,
    Predictions,
    mean_surprise,
    softmax_of_items,
)
from bertsmith.tasks.text_encoding import joined_pieces, lay_pieces, lay_texts, text_set
from bertsmith.text.tokenizer import Tokenizer


class Choose(Kind[ChoiceExample]):
    """The kind that chooses one of several pairs of texts."""

    name = "choice"
    losses = "choice"
    pipeline_tag = "multiple-choice"
    usage = 'bert.choose([("It is wet.", "It rained."), ("It is wet.", "It is hot.")]).index'
    head = TaskHead("choice", "sentence", size=1)
    unit = "sequence"
    metrics = OF_CLASSES
    ability = "choose"
    taught_by = "swag"
    has_subsets = True

    def encode_checked(
        self,
        examples: Sequence[ChoiceExample],
        labels: tuple[str, ...],
        tokenizer: Tokenizer,
        text: TextSection,
    ) -> EncodedSet:
        """Encode a sequence for each option; all options of an example are one item."""
        if text.long_texts == "windows":
            remedy = "set text.long_texts to truncate or head-tail"
            raise UserError("options of a choice cannot be shown in windows", remedy=remedy)
        for example in examples:
            if example.label is not None and not 0 <= example.label < len(example.options):
                what = f"option {example.label} is right, but there are {len(example.options)}"
                raise UserError(what, where=example.where, remedy="options are numbered from 0")
        bare = self.without_tokens(examples, labels)
        if known := [piece for example in examples for piece in example.pieces]:
            laid, _ = lay_pieces(joined_pieces(known), 2, tokenizer, text)
        else:
            pairs = [option for example in examples for option in example.options]
            laid, _ = lay_texts(pairs, tokenizer, text)
        return text_set(self.unit, laid, bare.targets, np.diff(bare.items_M1))

    def without_tokens(self, examples: Sequence[ChoiceExample], labels: tuple[str, ...]) -> EncodedSet:
        targets_M = np.array([NO_LABEL if each.label is None else each.label for each in examples], np.int64)
        items_M1 = np.cumsum([0, *(len(each.options) for each in examples)])
        bare = EncodedSet.without_tokens(self.unit, targets_M)
        return replace(bare, items_M1=items_M1, starts_N1=np.zeros(int(items_M1[-1]) + 1, np.int64))

    def predict(
        self,
        logits: Numbers,
        encoded: EncodedSet,
        examples: Sequence[ChoiceExample],
        answers: AnswersSection,
    ) -> Predictions:
        return Predictions(softmax_of_items(logits, encoded.items_M1))

    def subset(self, predictions: Predictions, encoded: EncodedSet, indices: Sequence[int]) -> Predictions:
        options = _by_item(predictions, encoded)
        return Predictions(np.concatenate([options[index] for index in indices]))

    def predicted_targets(self, encoded: EncodedSet, predictions: Predictions) -> NDArray[Any]:
        return np.array([int(options.argmax()) for options in _by_item(predictions, encoded)], np.int64)

    def constant_predictions(
        self, labels: tuple[str, ...], known: NDArray[Any], encoded: EncodedSet
    ) -> Predictions:
        """Predict the most frequent index of the right option, or 0 if an item has fewer options."""
        frequent = np.bincount(known[known >= 0], minlength=1).argmax()
        options_M = np.diff(encoded.items_M1)
        scores_N = np.zeros(len(encoded.starts_N1) - 1, np.float32)
        scores_N[encoded.items_M1[:-1] + np.where(options_M > frequent, frequent, 0)] = 1.0
        return Predictions(scores_N)

    def constant_answer(self, labels: tuple[str, ...], known: NDArray[Any]) -> str:
        return f"option {np.bincount(known[known >= 0], minlength=1).argmax()}"

    def mean_loss(self, encoded: EncodedSet, predictions: Predictions) -> float:
        known = encoded.targets >= 0
        return mean_surprise(predictions.scores[encoded.items_M1[:-1][known] + encoded.targets[known]])

    def evaluate(
        self, metrics: Sequence[str], labels: tuple[str, ...], split: PredictedSplit[ChoiceExample]
    ) -> dict[str, float]:
        predicted_M = self.predicted_targets(split.encoded, split.predictions)
        chosen = [self.metric_named(name) for name in metrics]
        return compute_metrics(chosen, split.encoded.targets, predicted_M)

    def errors(self, labels: tuple[str, ...], split: PredictedSplit[ChoiceExample]) -> Iterator[HardError]:
        predicted_M = self.predicted_targets(split.encoded, split.predictions)
        for index, example in enumerate(split.examples):
            chosen = int(predicted_M[index])
            if split.encoded.targets[index] != chosen:
                confidence = float(split.predictions.scores[split.encoded.items_M1[index] + chosen])
                right = str(example.label)
                yield HardError(example.where, example.summary, right, str(chosen), confidence)

    def prediction_rows(
        self, labels: tuple[str, ...], split: PredictedSplit[ChoiceExample], *, separator: str
    ) -> list[dict[str, Any]]:
        """Return a row for each example: its id, the index of the chosen option, and all probabilities."""
        predicted_M = self.predicted_targets(split.encoded, split.predictions)
        probabilities = [each.tolist() for each in _by_item(split.predictions, split.encoded)]
        return [
            {"id": example.key, "prediction": int(chosen)}
            | {str(index): each for index, each in enumerate(options)}
            for example, chosen, options in zip(split.examples, predicted_M, probabilities, strict=True)
        ]


def _by_item(predictions: Predictions, encoded: EncodedSet) -> list[Numbers]:
    """Return the probabilities of each item's options."""
    return np.split(predictions.scores, encoded.items_M1[1:-1])


CHOICE = Choose()
