"""Base of classify, multilabel and regress: a text or a pair of texts with a label, read from a table."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.errors import UserError
from bertsmith.recipe.finetuning_schema import TextSection
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.example_types import TextExample
from bertsmith.tasks.kinds.kind import Kind, TaskHead
from bertsmith.tasks.label_rules import LabelRule
from bertsmith.tasks.metrics import Metric, Values, compute_metrics
from bertsmith.tasks.predictions import PredictedSplit
from bertsmith.tasks.text_encoding import Targets, joined_pieces, lay_pieces, lay_texts, text_set
from bertsmith.text.tokenizer import Tokenizer

OTHER_COLUMNS = ("id", "prediction", "text", "text2")
"""Other columns of a table of predictions."""
USUAL_THRESHOLD = 0.5
MAX_THRESHOLDS = 200
"""Maximum thresholds to try, at quantiles of the probabilities: more would overfit the development set."""


class TextKind(Kind[TextExample]):
    """Texts or pairs with a label; each example is an item."""

    head = TaskHead("classify", "sentence")
    unit = "item"
    ability = "classify"
    taught_by = "sst2 (stsb for numbers, custom for your own table)"
    from_tables = True
    custom_metrics: ClassVar[tuple[str, ...]]
    """Metrics for a user's own table; the first one decides."""
    unlabelled_cells: ClassVar[tuple[str, ...]] = ("",)
    """Cells that mean an unknown label in a user's own table."""

    @abstractmethod
    def label_rule(self, separator: str) -> LabelRule:
        """Return the rule for reading a label from a cell of a user's own table."""

    @abstractmethod
    def targets(self, examples: Sequence[TextExample], labels: tuple[str, ...]) -> Targets:
        """Return the labels as `EncodedSet.targets`."""

    def labels_of(self, labels: tuple[str, ...], target: Any) -> tuple[str, ...]:
        """Return the labels of a predicted target; empty for a number."""
        return ()

    @abstractmethod
    def written(self, labels: tuple[str, ...], target: Any, *, separator: str) -> str | float:
        """Return a predicted target as written into a file."""

    def encode_checked(
        self,
        examples: Sequence[TextExample],
        labels: tuple[str, ...],
        tokenizer: Tokenizer,
        text: TextSection,
    ) -> EncodedSet:
        targets = self.targets(examples, labels)
        texts = [example.parts for example in examples]
        for index, (example, parts) in enumerate(zip(examples, texts, strict=True)):
            if len(parts) != len(texts[0]):
                what = f"has {len(parts)} texts, but the first example has {len(texts[0])}"
                remedy = "give every example one text, or every example two"
                raise UserError(what, where=example.where, index=index, remedy=remedy)
        if known := [piece for example in examples for piece in example.pieces]:
            laid, sequences_M = lay_pieces(joined_pieces(known), len(texts[0]), tokenizer, text)
        else:
            laid, sequences_M = lay_texts(texts, tokenizer, text)
        return text_set(self.unit, laid, targets, sequences_M)

    def without_tokens(self, examples: Sequence[TextExample], labels: tuple[str, ...]) -> EncodedSet:
        return EncodedSet.without_tokens(self.unit, self.targets(examples, labels))

    def constant_answer(self, labels: tuple[str, ...], known: NDArray[Any]) -> str:
        one = EncodedSet.without_tokens(self.unit, known[:1])
        predicted = self.predicted_targets(one, self.constant_predictions(labels, known, one))[0]
        written = self.written(labels, predicted, separator=" + ")
        return written if isinstance(written, str) else f"{written:g}"

    def has_pairs(self, examples: Sequence[TextExample]) -> bool:
        return len(examples[0].parts) > 1

    def evaluate(
        self, metrics: Sequence[str], labels: tuple[str, ...], split: PredictedSplit[TextExample]
    ) -> dict[str, float]:
        predicted, targets = self.predicted_targets(split.encoded, split.predictions), split.encoded.targets
        if predicted.ndim == 2:  # labels missing from training are columns that are never predicted
            predicted = np.pad(predicted, ((0, 0), (0, targets.shape[1] - predicted.shape[1])))
        chosen = [self.metric_named(name) for name in metrics]
        return compute_metrics(chosen, targets, predicted)

    def predicted_labels(
        self, labels: tuple[str, ...], split: PredictedSplit[Any], *, separator: str = ","
    ) -> list[str | float]:
        """Return the label, the labels or the number of each text."""
        predicted = self.predicted_targets(split.encoded, split.predictions)
        return [self.written(labels, target, separator=separator) for target in predicted]

    def prediction_rows(
        self, labels: tuple[str, ...], split: PredictedSplit[TextExample], *, separator: str
    ) -> list[dict[str, Any]]:
        """Return a row for each text: its id, the prediction, and the probability of each class."""
        rows = []
        for index, written in enumerate(self.predicted_labels(labels, split, separator=separator)):
            probabilities = split.predictions.scores[index].tolist() if labels else ()
            row = {"id": split.examples[index].key, "prediction": written}
            rows.append(row | dict(zip(probability_columns(labels), probabilities, strict=True)))
        return rows


def probability_columns(labels: Sequence[str]) -> list[str]:
    """Return the columns of the labels' probabilities: their names, unless another column has that name."""
    return [f"probability of {label}" if label in OTHER_COLUMNS else label for label in labels]


def best_label_threshold(metric: Metric, targets_M: Values, scores_M: NDArray[np.float32]) -> float:
    """Return the threshold with the best metric, on a tie the one nearest to USUAL_THRESHOLD."""
    assert metric.compute is not None
    known_M = targets_M >= 0
    targets_M, scores_M = targets_M[known_M], scores_M[known_M].astype(np.float64)
    found = np.unique(np.quantile(scores_M, np.linspace(0, 1, MAX_THRESHOLDS), method="nearest"))
    # Thresholds midway between two probabilities generalise best. Also try both ends.
    bounds = np.concatenate([[0.0], found, [1.0]])
    tried: set[float] = {USUAL_THRESHOLD, *((bounds[1:] + bounds[:-1]) / 2).tolist()}
    values = {each: metric.compute(targets_M, (scores_M >= each).astype(np.int64)) for each in tried}
    sign = 1 if metric.larger_is_better else -1
    return max(tried, key=lambda each: (sign * values[each], -abs(each - USUAL_THRESHOLD)))
