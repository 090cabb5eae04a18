"""What a kind of task is: how it encodes, learns, predicts, and how right its predictions are.

A kind has no state. A new one is a file beside this one and a line in `registry.KINDS`; nothing else asks
which kind a task has. Shapes: M items, N sequences, P tagged words, T tokens, C classes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal

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

if TYPE_CHECKING:  # a kind is told of in `inspect` and `--help`, which do without torch
    from torch import Tensor

    from bertsmith.tasks.batches import TaskBatch

LossFunction = Callable[["Tensor", "TaskBatch"], tuple["Tensor", "Tensor"]]
"""From a scorer's outputs to the loss of each target, and what part of it is predicted right."""
SoftLossFunction = Callable[["Tensor", "TaskBatch", float], "Tensor"]
"""From a scorer's outputs to how far each target's scores are from a teacher's, at a temperature."""
Plot = Literal["confusion", "calibration"]
LinearProblem = Literal["classes", "labels", "numbers"]
"""The regression whose optimum is a kind's linear head: multinomial logistic, one logistic a label, ridge."""


@dataclass(frozen=True, slots=True)
class TaskHead:
    """The head that a kind needs, on a network of its own or on a mix of a frozen encoder's layers."""

    name: str
    """Of the network's head (`model.heads`)."""
    reads: Literal["sentence", "tokens"]
    """Whether it scores sequences or tokens; of a mix it decides what is read (`features.bilstm`)."""
    size: int | None = None
    """How many numbers it gives for a sequence or token; None: one for each label."""

    def outputs(self, labels: Sequence[str]) -> int:
        """How many numbers it gives for a sequence or token."""
        return len(labels) if self.size is None else self.size


class Kind(ABC, Generic[ExampleT]):
    """A kind of task, for one class of examples."""

    name: ClassVar[str]
    """As in task.json, in JSON and on the command line."""
    head: ClassVar[TaskHead]
    unit: ClassVar[ScoredUnit]
    """What has a row of scores."""
    metrics: ClassVar[tuple[Metric, ...]]
    ability: ClassVar[str]
    """The method of `bertsmith.Bert` that predicts it."""
    pipeline_tag: ClassVar[str]
    """How model hubs call such a task."""
    usage: ClassVar[str]
    """What asks a model of this kind, in Python; {text} stands for a text or a pair."""
    taught_by: ClassVar[str]
    """The tasks of `bertsmith finetune` that make a head for it, as an error names them."""
    min_labels: ClassVar[int] = 0
    """So many different labels the training file must have; 0: the kind has none."""
    problem_type: ClassVar[str] = ""
    """What config.json says to other tools."""
    plots: ClassVar[tuple[Plot, ...]] = ()
    has_class_weights: ClassVar[bool] = False
    """Whether classes may weigh differently in the loss."""
    many_labels: ClassVar[bool] = False
    """Whether an example may have any number of labels."""
    linear_problem: ClassVar[LinearProblem | None] = None
    """The regression that a linear head on frozen states solves; None if rows compete (spans, options)."""
    numeric: ClassVar[bool] = False
    """Whether it predicts numbers."""
    from_tables: ClassVar[bool] = False
    """Whether examples are texts with a label, which are read from any table."""
    simple_model: ClassVar[str] = ""
    """The model without a network that a trained one should beat (`simple_predictions`); empty: none."""
    own_form: ClassVar[Literal["file", "folder"] | None] = None
    """What other tools (conlleval, the SQuAD scripts) expect its predictions in; None: only a table."""
    has_subsets: ClassVar[bool] = False
    """Whether published sets have further splits that are parts of another one (RACE's schools)."""

    # ---- from examples to tokens

    def encode(
        self, examples: Sequence[ExampleT], labels: tuple[str, ...], tokenizer: Tokenizer, text: TextSection
    ) -> EncodedSet:
        """The examples as tokens; the labels are the classes or tags in their order."""
        for index, example in enumerate(examples):  # files were searched, but examples come from Python, too
            if fault := unreadable(example):
                raise UserError(fault.what, where=fault.where, index=index, remedy=fault.remedy)
        return self.encode_checked(examples, labels, tokenizer, text)

    @abstractmethod
    def encode_checked(
        self, examples: Sequence[ExampleT], labels: tuple[str, ...], tokenizer: Tokenizer, text: TextSection
    ) -> EncodedSet:
        """As `encode`, of examples that every tokenizer can read."""

    @abstractmethod
    def without_tokens(self, examples: Sequence[ExampleT], labels: tuple[str, ...]) -> EncodedSet:
        """The targets of labelled examples, before there is a tokenizer: for constant answers."""

    def has_pairs(self, examples: Sequence[ExampleT]) -> bool:
        """Whether the texts are pairs, where the kind takes either."""
        return False

    def usual_length(self, positions: int) -> int:
        """Longest sequence for a head that comes without a task.json."""
        return positions

    # ---- from scores to predictions

    @abstractmethod
    def loss_function(self, head: HeadSection) -> LossFunction:
        """The loss of each target."""

    @abstractmethod
    def soft_loss_function(self, head: HeadSection) -> SoftLossFunction:
        """The loss of each target beside a teacher, whose scores a batch brings along."""

    def activation(self, logits: Numbers) -> Numbers:
        """From the head's raw scores to `Predictions.scores`, which have the same shape."""
        return softmax(logits)

    def predict(
        self, logits: Numbers, encoded: EncodedSet, examples: Sequence[ExampleT], answers: AnswersSection
    ) -> Predictions:
        """What the head's raw scores come to."""
        return self.predict_together(self.activation(logits), encoded, examples, answers)

    def predict_together(
        self, scores: Numbers, encoded: EncodedSet, examples: Sequence[ExampleT], answers: AnswersSection
    ) -> Predictions:
        """What the mean of several members' `Predictions.scores` comes to."""
        thresholds = () if isinstance(answers.label_thresholds, str) else answers.label_thresholds
        return Predictions(scores, thresholds=thresholds)

    def threshold_count(self, labels: tuple[str, ...]) -> int:
        """How many thresholds decide which of the labels are given; 0 where the likeliest one is."""
        return 0

    def tuned_thresholds(
        self, metric: Metric, labels: tuple[str, ...], split: PredictedSplit[ExampleT]
    ) -> tuple[float, ...]:
        """From which probabilities on a label is best given, on this split, where `threshold_count`."""
        raise NotImplementedError

    def ensemble_settings(self, answers: AnswersSection) -> tuple[object, ...]:
        """What the members of an ensemble must have in common beside kind and labels."""
        return ()

    def subset(self, predictions: Predictions, encoded: EncodedSet, indices: Sequence[int]) -> Predictions:
        """The predictions of some examples of a split, where `has_subsets`."""
        raise NotImplementedError

    def predicted_targets(self, encoded: EncodedSet, predictions: Predictions) -> NDArray[Any]:
        """The likeliest targets, in the form of `EncodedSet.targets`."""
        likeliest: NDArray[np.int64] = predictions.scores.argmax(-1)
        return likeliest

    # ---- how right they are, and how they are written

    def metric_named(self, name: str) -> Metric:
        """One of its metrics."""
        return metric_in(self.metrics, name)

    def own_metrics(self, metrics: tuple[str, ...], labels: tuple[str, ...]) -> tuple[str, ...]:
        """Return the metrics of a user's own data with these labels, the deciding one first."""
        return metrics

    @abstractmethod
    def evaluate(
        self, metrics: Sequence[str], labels: tuple[str, ...], split: PredictedSplit[ExampleT]
    ) -> dict[str, float]:
        """The named metrics, as fractions, the deciding one first, and what else the kind reports."""

    def constant_predictions(
        self, labels: tuple[str, ...], known: NDArray[Any], encoded: EncodedSet
    ) -> Predictions:
        """What one predicts of a split who always gives the most frequent of the known targets."""
        counts_C = np.bincount(known[known >= 0], minlength=len(labels))
        scores = np.zeros((len(encoded.targets), len(labels)), np.float32)
        scores[:, counts_C.argmax()] = 1.0
        return Predictions(scores)

    def constant_answer(self, labels: tuple[str, ...], known: NDArray[Any]) -> str:
        """The same in words."""
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
        """The named metrics of the constant answer: the most frequent of the known targets, or of this very
        split."""
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
        """Return what `simple_model`, fitted to the training examples, predicts of a split."""
        raise NotImplementedError

    def mean_loss(self, encoded: EncodedSet, predictions: Predictions) -> float:
        """The mean loss of a split, which tells apart what is equally right."""
        known = encoded.targets >= 0
        rows = np.arange(len(encoded.targets))[known]
        return mean_surprise(predictions.scores[rows, encoded.targets[known]])

    def class_scores(
        self, labels: tuple[str, ...], split: PredictedSplit[ExampleT]
    ) -> dict[str, ClassScores]:
        """Precision, recall and F1 of each class or tag; nothing where the kind has none."""
        if not self.min_labels:
            return {}
        predicted = self.predicted_targets(split.encoded, split.predictions)
        found = scores_of_classes(split.encoded.targets, predicted, len(labels))
        return dict(zip(labels, found, strict=True))

    @abstractmethod
    def errors(self, labels: tuple[str, ...], split: PredictedSplit[ExampleT]) -> Iterator[HardError]:
        """What was predicted wrong, in the order of the examples."""

    @abstractmethod
    def prediction_rows(
        self, labels: tuple[str, ...], split: PredictedSplit[ExampleT], *, separator: str
    ) -> list[dict[str, Any]]:
        """The rows of a table: for each example its id, the prediction, and how probable it is."""

    def write_predictions(
        self, out: Path, labels: tuple[str, ...], split: PredictedSplit[ExampleT]
    ) -> list[Path]:
        """Write the predictions in the kind's `own_form`; return the files."""
        raise NotImplementedError

    def config_keys(self, labels: tuple[str, ...]) -> dict[str, Any]:
        """What tells other tools, in config.json, the names of the outputs and the kind of the problem."""
        named = self.output_names(labels)
        keys: dict[str, Any] = {}
        if named:
            keys["id2label"] = {str(id): label for id, label in enumerate(named)}
            keys["label2id"] = {label: id for id, label in enumerate(named)}
        if self.problem_type:
            keys["problem_type"] = self.problem_type
        return keys

    def output_names(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        """The names of the outputs for other tools; none where they have no names."""
        return labels if self.min_labels else ()


AnyKind = Kind[Any]
