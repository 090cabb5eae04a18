"""A scorer may give its scores in half precision: losses and logits are fp32 all the same."""

import pytest
import torch
from torch import nn

from bertsmith.model.encoder import mean_of_rows
from bertsmith.tasks.batches import ShuffledBatches
from bertsmith.tasks.kinds.registry import KINDS as BY_NAME
from bertsmith.tasks.objective import TaskObjective
from tests.unit.tasks.made_sets import CLASSES, KINDS, WORDS, made_set

OUTPUTS = {"span": 2, "regress": 1, "choice": 1}


class RoundedScorer(nn.Module):
    """Scores that eight bits can hold, given in the wanted type."""

    def __init__(self, kind, dtype):
        super().__init__()
        self.kind, self.dtype = kind, dtype
        stream = torch.Generator().manual_seed(1)
        scores = torch.randn(WORDS, OUTPUTS.get(kind, CLASSES), generator=stream) * 2
        self.table = nn.Parameter(scores)

    def forward(self, inputs):
        scores_TC = self.table[inputs.tokens_T]
        if self.kind not in ("tag", "span"):
            scores_TC = mean_of_rows(scores_TC, inputs.layout)
        return scores_TC.bfloat16().to(self.dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_rounded_scores_are_not_rounded_again(kind):
    encoded = made_set(kind)
    settings = {"examples_per_step": encoded.items, "seed": 0, "micro_tokens": 10_000, "multiple": 1}
    (batch,) = ShuffledBatches(encoded, **settings).step(0).micros
    rounded, exact = (
        TaskObjective(RoundedScorer(kind, dtype), BY_NAME[kind]) for dtype in (torch.bfloat16, torch.float32)
    )
    assert rounded.scorer(batch.inputs).dtype == torch.bfloat16
    (loss, sums), (exact_loss, exact_sums) = (each(batch, torch.ones(1)) for each in (rounded, exact))
    assert loss.dtype == sums.dtype == torch.float32
    assert torch.equal(loss, exact_loss) and torch.equal(sums, exact_sums)
    assert rounded.scores(batch).dtype == torch.float32
    assert torch.equal(rounded.scores(batch), exact.scores(batch))
