"""From the examples of a step to what the model sees and what it must say about it.

Shapes: X tokens of text, T all tokens, N spans of text, S sequences, P predicted tokens.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bertsmith.examples.masking import Masker, coded_units
from bertsmith.examples.masking_units import Text
from bertsmith.examples.micro import Targets
from bertsmith.examples.pairs import Numbers
from bertsmith.examples.plan import StagePlan, StepExamples
from bertsmith.examples.sequences import Rows, Spans, lay_out


@dataclass(frozen=True)
class Assembly:
    """Lays out the sequences of a stage and finds their targets."""

    plan: StagePlan
    masker: Masker | None
    """None where the objective is one-sided and nothing is masked."""

    def assemble(self, examples: StepExamples, *, progress: float) -> tuple[Rows, Targets]:
        """The sequences of these examples and their targets."""
        rows, text = self.lay_out(examples)
        rows_P, ids_P = self._predicted(rows, text, progress)
        is_pair = self.plan.source.recipe.examples.pairs in ("nsp", "sop")
        labels_S = examples.index.label.astype(np.int64)
        return rows, Targets(rows_P, ids_P, labels_S, pair_weight=float(is_pair))

    def lay_out(self, examples: StepExamples) -> tuple[Rows, Text]:
        """The sequences of these examples as they are before masking, and their text alone."""
        source = self.plan.source
        spans = self.plan.spans(examples)
        text_X = source.store.gather(spans.starts_N, spans.lengths_N)
        rows = lay_out(text_X, spans, source.template)
        if source.recipe.model.segments < 2:  # RoBERTa and DistilBERT know one segment, whatever is tokenized
            rows.segments_T[:] = 0
        return rows, self._text(text_X, spans, rows, examples)

    def _predicted(self, rows: Rows, text: Text, progress: float) -> tuple[Numbers, Numbers]:
        """The rows to predict and the ids that belong there; the rows show what the model is to see."""
        objective = self.plan.source.recipe.examples.objective
        if self.masker is None:
            assert objective != "masked"
            return neighbours(rows, objective)
        masks = self.masker.masks(text, progress=progress)
        rows_P = rows.text_rows_X[masks.places_P]
        rows.tokens_T[rows_P] = masks.shown_P
        return rows_P, text.tokens_X[masks.places_P]

    def _text(self, text_X: Numbers, spans: Spans, rows: Rows, examples: StepExamples) -> Text:
        codes_X, next_codes_N = self._codes(spans)
        return Text(
            tokens_X=text_X,
            span_lengths_N=spans.lengths_N,
            lengths_S=rows.text_lengths_S,
            whole_lengths_S=np.diff(rows.starts_S1),
            keys_S=self.plan.keys("mask", examples),
            codes_X=codes_X,
            next_codes_N=next_codes_N,
        )

    def _codes(self, spans: Spans) -> tuple[NDArray[np.uint8] | None, NDArray[np.uint8] | None]:
        """The unit codes of the spans, and of the token behind each: if a unit goes on there, it was cut."""
        if self.masker is None or not coded_units(self.masker.masking):
            return None, None
        store = self.plan.source.store
        codes_X = store.gather_units(spans.starts_N, spans.lengths_N)
        behind_N = spans.starts_N + spans.lengths_N
        exists_N = (behind_N < store.tokens).astype(np.int64)
        next_codes_N = np.zeros(len(behind_N), np.uint8)
        next_codes_N[exists_N == 1] = store.gather_units(behind_N, exists_N)
        return codes_X, next_codes_N


def neighbours(rows: Rows, objective: Literal["left-to-right", "right-to-left"]) -> tuple[Numbers, Numbers]:
    """The rows that have a neighbour on the side that is predicted, and the neighbour's id."""
    has_neighbour_T = np.ones(len(rows.tokens_T), np.bool_)
    if objective == "left-to-right":
        has_neighbour_T[rows.starts_S1[1:] - 1] = False
        step = 1
    else:
        has_neighbour_T[rows.starts_S1[:-1]] = False
        step = -1
    rows_P = np.flatnonzero(has_neighbour_T)
    return rows_P, rows.tokens_T[rows_P + step]
