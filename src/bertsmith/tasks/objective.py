"""What a task's step sums up: a scorer's outputs, judged by the loss of the task's kind.

Shapes: T packed tokens, S sequences, M items, P tagged words, C classes. A scorer gives [S, C] to sentence
kinds (C is 1 for a number and for an option of a choice), [T, C] to tags and [T, 2] to spans.
"""

from collections.abc import Callable, Collection
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from bertsmith.model.encoder import largest_of_rows, mean_of_rows
from bertsmith.model.network import Network
from bertsmith.packed import Layout, PackedBatch
from bertsmith.tasks.encoded import TaskBatch
from bertsmith.tasks.examples import Kind

SpanOver = Literal["all", "passage"]
Judge = Callable[[Tensor, TaskBatch], tuple[Tensor, Tensor]]
"""From a scorer's outputs to the loss of each target, and what share of it is guessed right."""


class NetworkScorer(nn.Module):
    """The outputs of one head of a network; an encoder that is frozen stays in evaluation mode."""

    def __init__(self, network: Network, head: str) -> None:
        super().__init__()
        self.network = network
        self.head = head

    def forward(self, inputs: PackedBatch) -> Tensor:
        if self.network.heads[self.head].reads == "tokens":
            return self.network.scores(self.head, self.network.encoder(inputs), inputs.layout)
        return self.network.sentence_scores(self.head, inputs)

    def train(self, mode: bool = True) -> "NetworkScorer":
        """Set the mode, but for dropout in what is not learned."""
        super().train(mode)
        learned = any(parameter.requires_grad for parameter in self.network.encoder.parameters())
        self.network.encoder.train(mode and learned)
        return self


def freeze_encoder(network: Network, *, fresh: Collection[str] = ()) -> None:
    """Keep the encoder as it is, and the pooler with it unless it is among the heads that were drawn anew."""
    network.encoder.requires_grad_(False).eval()
    if "pooler" in network.heads and "pooler" not in fresh:
        network.heads["pooler"].requires_grad_(False)


class TaskObjective(nn.Module):
    """A scorer with the loss of its task, in one forward pass."""

    def __init__(self, scorer: nn.Module, kind: Kind, *, span_over: SpanOver = "all") -> None:
        super().__init__()
        self.scorer = scorer
        self.kind = kind
        self._judge = judge_passages if kind == "span" and span_over == "passage" else JUDGES[kind]
        self._forward: Callable[[TaskBatch, Tensor], tuple[Tensor, Tensor]] = self._plain
        self.compiled = False

    def compile_whole(self) -> None:
        """Compile loss and scorer as one graph for all batch sizes; an LSTM in the scorer cannot be."""
        self._forward, self.compiled = torch.compile(self._plain, fullgraph=True), True

    def forward(self, batch: TaskBatch, shares_1: Tensor) -> tuple[Tensor, Tensor]:
        """This micro-batch's part of the step's loss, and its sums; `shares_1` is 1 / the step's count.

        The sums are the weighted losses and the weighted share of right guesses.
        """
        if not (self.compiled and self.training):  # an evaluation is too short to be worth a second graph
            return self._plain(batch, shares_1)
        mark_sizes_as_changing(batch)
        return self._forward(batch, shares_1)

    def scores(self, batch: TaskBatch) -> Tensor:
        """Logits for prediction: [M, C] averaged over windows, tag [P, C], span [T, 2], choice [S]."""
        scores = _exact(self.scorer(batch.inputs))
        if self.kind == "tag":
            return scores[batch.rows_P]
        if self.kind == "span":
            return scores
        return scores.squeeze(-1) if self.kind == "choice" else _scores_of_items(scores, batch)

    def _plain(self, batch: TaskBatch, shares_1: Tensor) -> tuple[Tensor, Tensor]:
        losses, hits = self._judge(_exact(self.scorer(batch.inputs)), batch)
        loss = (losses * batch.weights).sum()
        hit = (hits.to(batch.weights.dtype) * batch.weights).sum()
        return loss * shares_1[0], torch.stack((loss, hit.to(loss.dtype))).detach()


def mark_sizes_as_changing(batch: TaskBatch) -> None:
    """Tell the compiler that T, S, M and P differ from step to step, before it takes them for constants."""
    inputs = batch.inputs
    per_token = (inputs.tokens_T, inputs.segments_T, inputs.positions_T)
    per_sequence = (inputs.layout.starts_S1, batch.items_S, batch.passages_S2)
    for tensor in (*per_token, *per_sequence, batch.targets, batch.weights, batch.rows_P):
        if len(tensor):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)


# ---- one loss for each kind


def judge_classes(scores_SC: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each item's class."""
    return _cross_entropy(_scores_of_items(scores_SC, batch), batch.targets)


def judge_many_labels(scores_SC: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
    """Binary cross-entropy of each item, and the share of right decisions: means over the classes."""
    scores_MC = _scores_of_items(scores_SC, batch)
    losses_MC = functional.binary_cross_entropy_with_logits(
        scores_MC, batch.targets.to(scores_MC.dtype), reduction="none"
    )
    hits_MC = ((scores_MC.detach() > 0) == (batch.targets > 0)).to(scores_MC.dtype)
    return losses_MC.mean(-1), hits_MC.mean(-1)


def judge_numbers(scores_S1: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
    """The squared error of each item; nobody hits a number."""
    scores_M = _scores_of_items(scores_S1, batch).squeeze(-1)
    losses_M = (scores_M - batch.targets.to(scores_M.dtype)).square()
    return losses_M, torch.zeros_like(losses_M)


def judge_tags(scores_TC: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each tagged word."""
    return _cross_entropy(scores_TC[batch.rows_P], batch.targets)


def judge_choices(scores_S1: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the right one among each item's options."""
    items = _layout_of_items(batch)
    return _losses_of_rows(scores_S1, items, (items.starts_S1[:-1] + batch.targets)[:, None])


def judge_spans(scores_T2: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
    """The mean of both ends' cross-entropies over all rows of a sequence (run_squad.py); a hit needs both."""
    layout = batch.inputs.layout
    return _losses_of_rows(scores_T2, layout, layout.starts_S1[:-1, None] + batch.targets)


def judge_passages(scores_T2: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
    """As `judge_spans`, over the passage's rows and the first row, which says that there is no answer."""
    starts_S1 = batch.inputs.layout.starts_S1
    sequences_T = _segments_of_rows(scores_T2, starts_S1)
    rows_T = torch.arange(len(scores_T2), device=scores_T2.device)
    first_T, past_T = batch.passages_S2[sequences_T].unbind(-1)
    open_T = ((rows_T >= first_T) & (rows_T < past_T)) | (rows_T == starts_S1[sequences_T])
    # Not -inf, whose gradient is not a number; e to this is 0 beside any score.
    lowest = torch.finfo(scores_T2.dtype).min / 2
    return judge_spans(scores_T2.masked_fill(~open_T[:, None], lowest), batch)


JUDGES: dict[Kind, Judge] = {
    "classify": judge_classes,
    "multilabel": judge_many_labels,
    "regress": judge_numbers,
    "tag": judge_tags,
    "span": judge_spans,
    "choice": judge_choices,
}


# ---- softmax and means over rows of packed sequences


def logsumexp_of_rows(values_TC: Tensor, layout: Layout) -> Tensor:
    """The logarithm of the summed exponentials of each sequence's rows [S, C]; no sequence may be empty."""
    largest_SC = largest_of_rows(values_TC.detach(), layout)
    sequences_T = _segments_of_rows(values_TC, layout.starts_S1)
    # segment_reduce sums in a fixed order; index_add would not on CUDA.
    sums_SC = torch.segment_reduce(
        (values_TC - largest_SC[sequences_T]).exp(),
        "sum",
        offsets=layout.starts_S1.long(),
        axis=0,
        unsafe=True,
    )
    return sums_SC.log() + largest_SC


def _losses_of_rows(scores_TC: Tensor, layout: Layout, rows_SC: Tensor) -> tuple[Tensor, Tensor]:
    """The negative log-likelihood of rows among those of their sequences, a mean over C; equals are hits."""
    right_SC = scores_TC[rows_SC, torch.arange(scores_TC.shape[1], device=scores_TC.device)]
    losses_SC = logsumexp_of_rows(scores_TC, layout) - right_SC
    hits_SC = right_SC.detach() >= largest_of_rows(scores_TC.detach(), layout)
    return losses_SC.mean(-1), hits_SC.all(-1)


def _cross_entropy(scores_PC: Tensor, targets_P: Tensor) -> tuple[Tensor, Tensor]:
    losses_P = functional.cross_entropy(scores_PC, targets_P, reduction="none")
    return losses_P, scores_PC.detach().argmax(-1) == targets_P


def _segments_of_rows(values_TC: Tensor, starts_S1: Tensor) -> Tensor:
    """The sequence of each row [T]."""
    rows_T = torch.arange(values_TC.shape[0], dtype=starts_S1.dtype, device=starts_S1.device)
    # Not in starts_S1[1:]: for CUDA, torch 2.11 compiles a search that begins at the view's storage.
    return torch.searchsorted(starts_S1, rows_T, right=True) - 1


def _layout_of_items(batch: TaskBatch) -> Layout:
    """Where each item's sequences start among those of the batch, as if sequences were rows."""
    numbers_M1 = torch.arange(batch.targets.shape[0] + 1, device=batch.items_S.device)
    return Layout(torch.searchsorted(batch.items_S, numbers_M1), longest=0)


def _scores_of_items(scores_SC: Tensor, batch: TaskBatch) -> Tensor:
    """The mean scores over an item's windows [M, C]."""
    return mean_of_rows(scores_SC, _layout_of_items(batch))


def _exact(scores: Tensor) -> Tensor:
    """Scores in fp32 or better, for eight bits are not enough for a softmax."""
    return scores if scores.dtype == torch.float64 else scores.float()
