"""Base class of all kinds of tasks: encoding, predictions and their evaluation.

A kind has no state. A new kind is a file in this folder, a line in `registry.KINDS` and one in
`objective.LOSSES`; no other code depends on which kind a task has.

Shapes: M items, N sequences, P tagged words, T tokens, C classes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.errors import UserError
from bertsmith.recipe.finetuning_schema import AnswersSection, HeadSection, TextSection
from bertsmith.tasks.encoded import EncodedSet, ScoredUnit
from bertsmith.tasks.example_types import unreadable
from bertsmith.tasks.metrics import ClassScores, Metric, metric_in, scores_of_classes
from bertsmith.tasks.predictions import (
    ExampleT,
    HardError,
    Numbers,
    PredictedSplit,
    Predictions,
    mean_surprise,
    softmax,
)
from bertsmith.text.tokenizer import Tokenizer

Plot = Literal["confusion", "calibration"]
LinearProblem = Literal["classes", "labels", "numbers"]
"""Regression that a kind's linear head solves: multinomial logistic, one logistic per label, or ridge."""


@dataclass(frozen=True, slots=True)
class TaskHead:
    """The head that a kind needs, on its own network or on a mix of a frozen encoder's layers."""

    name: str
    """Name of the network's head (`model.heads`)."""
    reads: Literal["sentence", "tokens"]
    """Scored unit: sequences or tokens; for a mix it decides what is read (`features.bilstm`)."""
    size: int | None = None
    """Number of outputs per sequence or token; None: one per label."""

    def outputs(self, labels: Sequence[str]) -> int:
        """Return the number of outputs per sequence or token."""
        return len(labels) if self.size is None else self.size


class Kind(ABC, Generic[ExampleT]):
    """A kind of task, for one class of examples."""

    name: ClassVar[str]
    """Name in task.json, in JSON and on the command line."""
    head: ClassVar[TaskHead]
    losses: ClassVar[str]
    """Name of its losses in `objective.LOSSES`."""
    unit: ClassVar[ScoredUnit]
    """Unit that has one row of scores."""
    metrics: ClassVar[tuple[Metric, ...]]
    ability: ClassVar[str]
    """The method of `bertsmith.Bert` that predicts this kind."""
    pipeline_tag: ClassVar[str]
    """Name of such a task on model hubs."""
    usage: ClassVar[str]
    """Python code that uses a model of this kind; {text} is replaced by a text or a pair."""
    taught_by: ClassVar[str]
    """Tasks of `bertsmith finetune` that train a head for it, as named in an error."""
    min_labels: ClassVar[int] = 0
    """Minimum number of distinct labels in the training file; 0 for kinds without labels."""
    problem_type: ClassVar[str] = ""
    """Value of problem_type in config.json, for other tools."""
    plots: ClassVar[tuple[Plot, ...]] = ()
    has_class_weights: ClassVar[bool] = False
    """True if classes may have different weights in the loss."""
    many_labels: ClassVar[bool] = False
    """True if an example may have any number of labels."""
    linear_problem: ClassVar[LinearProblem | None] = None
    """The regression that a linear head on frozen states solves; None if rows compete (spans, options)."""
    numeric: ClassVar[bool] = False
    """True if it predicts numbers."""
    from_tables: ClassVar[bool] = False
    """True if examples are texts with a label, which can be read from any table."""
    simple_model: ClassVar[str] = ""
    """Model without a network that a trained one should beat (`simple_predictions`); empty: none."""
    own_form: ClassVar[Literal["file", "folder"] | None] = None
    """Form of predictions that other tools (conlleval, the SQuAD scripts) expect; None: only a table."""
    has_subsets: ClassVar[bool] = False
    """True if published sets have splits that are parts of another one (RACE's schools)."""

    # ---- from examples to tokens

    def encode(
        self, examples: Sequence[ExampleT], labels: tuple[str, ...], tokenizer: Tokenizer, text: TextSection
    ) -> EncodedSet:
        """Encode the examples as tokens; the labels are the classes or tags in order."""
        for index, example in enumerate(examples):  # examples may come from Python, unchecked
            if fault := unreadable(example):
                raise UserError(fault.what, where=fault.where, index=index, remedy=fault.remedy)
        return self.encode_checked(examples, labels, tokenizer, text)

    @abstractmethod
    def encode_checked(
        self, examples: Sequence[ExampleT], labels: tuple[str, ...], tokenizer: Tokenizer, text: TextSection
    ) -> EncodedSet:
        """Encode examples that every tokenizer can read; see `encode`."""

    @abstractmethod
    def without_tokens(self, examples: Sequence[ExampleT], labels: tuple[str, ...]) -> EncodedSet:
        """Return the targets of labelled examples without a tokenizer, for constant answers."""

    def has_pairs(self, examples: Sequence[ExampleT]) -> bool:
        """True if the texts are pairs, for kinds that accept both texts and pairs."""
        return False

    def usual_length(self, positions: int) -> int:
        """Return the longest sequence in tokens for a head without a task.json."""
        return positions

    # ---- from scores to predictions

    def loss_name(self, head: HeadSection) -> str:
        """Return the name of the losses in `objective.LOSSES`."""
        return self.losses

    def activation(self, logits: Numbers) -> Numbers:
        """Map the head's raw scores to `Predictions.scores`, which have the same shape."""
        return softmax(logits)

    def predict(
        self, logits: Numbers, encoded: EncodedSet, examples: Sequence[ExampleT], answers: AnswersSection
    ) -> Predictions:
        """Return predictions from the head's raw scores."""
        return self.predict_together(self.activation(logits), encoded, examples, answers)

    def predict_together(
        self, scores: Numbers, encoded: EncodedSet, examples: Sequence[ExampleT], answers: AnswersSection
    ) -> Predictions:
        """Return predictions from the mean `Predictions.scores` of several ensemble members."""
        thresholds = () if isinstance(answers.label_thresholds, str) else answers.label_thresholds
        return Predictions(scores, thresholds=thresholds)

    def threshold_count(self, labels: tuple[str, ...]) -> int:
        """Return the number of thresholds for giving labels; 0 if the most likely label is given."""
        return 0

    def tuned_thresholds(
        self, metric: Metric, labels: tuple[str, ...], split: PredictedSplit[ExampleT]
    ) -> tuple[float, ...]:
        """Return the best label thresholds on this split, for kinds with a `threshold_count`."""
        raise NotImplementedError

    def ensemble_settings(self, answers: AnswersSection) -> tuple[object, ...]:
        """Return the settings that ensemble members must share besides kind and labels."""
        return ()

    def subset(self, predictions: Predictions, encoded: EncodedSet, indices: Sequence[int]) -> Predictions:
        """Return the predictions of some examples of a split, for kinds that have `has_subsets`."""
        raise NotImplementedError

    def predicted_targets(self, encoded: EncodedSet, predictions: Predictions) -> NDArray[Any]:
        """Return the most likely targets, in the form of `EncodedSet.targets`."""
        likeliest: NDArray[np.int64] = predictions.scores.argmax(-1)
        return likeliest

    def judged(self, split: PredictedSplit[ExampleT]) -> dict[str, NDArray[Any]]:
        """Return arrays that suffice to compute the metrics of any part of the examples."""
        predicted = self.predicted_targets(split.encoded, split.predictions)
        return {"predicted": predicted, "targets": split.encoded.targets}

    # ---- how right they are, and how they are written

    def metric_named(self, name: str) -> Metric:
        """Return one of the kind's metrics."""
        return metric_in(self.metrics, name)

    def own_metrics(self, metrics: tuple[str, ...], labels: tuple[str, ...]) -> tuple[str, ...]:
        """Return the metrics of a user's own data with these labels, the deciding one first."""
        return metrics

    @abstractmethod
    def evaluate(
        self, metrics: Sequence[str], labels: tuple[str, ...], split: PredictedSplit[ExampleT]
    ) -> dict[str, float]:
        """Return the named metrics as fractions, the deciding one first, and other results of the kind."""

    def constant_predictions(
        self, labels: tuple[str, ...], known: NDArray[Any], encoded: EncodedSet
    ) -> Predictions:
        """Predict the most frequent of the known targets for every example of a split."""
        counts_C = np.bincount(known[known >= 0], minlength=len(labels))
        scores = np.zeros((len(encoded.targets), len(labels)), np.float32)
        scores[:, counts_C.argmax()] = 1.0
        return Predictions(scores)

    def constant_answer(self, labels: tuple[str, ...], known: NDArray[Any]) -> str:
        """Return the constant answer in words."""
        return labels[int(np.bincount(known[known >= 0], minlength=len(labels)).argmax())]

    def baseline(
        self,
        metrics: Sequence[str],
        labels: tuple[str, ...],
        examples: Sequence[ExampleT],
        encoded: EncodedSet,
        *,
        known: NDArray[Any] | None = None,
    ) -> dict[str, float]:
        """Return the metrics of the constant answer, fitted to `known` targets or else to the split's."""
        known = encoded.targets if known is None else known
        constant = self.constant_predictions(labels, known, encoded)
        found = self.evaluate(metrics, labels, PredictedSplit(examples, encoded, constant))
        return {name: found[name] for name in metrics if name in found}

    def simple_predictions(
        self,
        labels: tuple[str, ...],
        train: Sequence[ExampleT],
        examples: Sequence[ExampleT],
        encoded: EncodedSet,
    ) -> Predictions:
        """Return the predictions for a split of `simple_model`, fitted to the training examples."""
        raise NotImplementedError

    def mean_loss(self, encoded: EncodedSet, predictions: Predictions) -> float:
        """Return the mean loss of a split, which breaks ties between equal metrics."""
        known = encoded.targets >= 0
        rows = np.arange(len(encoded.targets))[known]
        return mean_surprise(predictions.scores[rows, encoded.targets[known]])

    def class_scores(
        self, labels: tuple[str, ...], split: PredictedSplit[ExampleT]
    ) -> dict[str, ClassScores]:
        """Return precision, recall and F1 of each class or tag; empty if the kind does not compute them."""
        if not self.min_labels:
            return {}
        predicted = self.predicted_targets(split.encoded, split.predictions)
        found = scores_of_classes(split.encoded.targets, predicted, len(labels))
        return dict(zip(labels, found, strict=True))

    @abstractmethod
    def errors(self, labels: tuple[str, ...], split: PredictedSplit[ExampleT]) -> Iterator[HardError]:
        """Yield the wrong predictions, in the order of the examples."""

    @abstractmethod
    def prediction_rows(
        self, labels: tuple[str, ...], split: PredictedSplit[ExampleT], *, separator: str
    ) -> list[dict[str, Any]]:
        """Return the rows of a table: each example's id, its prediction, and the probability of that."""

    def write_predictions(
        self, out: Path, labels: tuple[str, ...], split: PredictedSplit[ExampleT]
    ) -> list[Path]:
        """Write the predictions in the kind's `own_form`; return the files."""
        raise NotImplementedError

    def config_keys(self, labels: tuple[str, ...]) -> dict[str, Any]:
        """Return the keys of config.json that give other tools the output names and the type of problem."""
        named = self.output_names(labels)
        keys: dict[str, Any] = {}
        if named:
            keys["id2label"] = {str(id): label for id, label in enumerate(named)}
            keys["label2id"] = {label: id for id, label in enumerate(named)}
        if self.problem_type:
            keys["problem_type"] = self.problem_type
        return keys

    def output_names(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the outputs for other tools; empty if outputs are unnamed."""
        return labels if self.min_labels else ()


AnyKind = Kind[Any]
