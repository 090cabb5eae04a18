"""What a pre-training step sums up: the frame that every objective fills with its losses and metrics.

Shapes: T packed tokens, P predicted rows, S sequences, V vocabulary, C counts.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from bertsmith.data.collate import PretrainingBatch
from bertsmith.data.data_loader import StepBatches
from bertsmith.model.encoder import can_compile
from bertsmith.model.flops import PassSize, flops_per_step
from bertsmith.model.network import Network
from bertsmith.model.torch_internals import compiled_whole, mark_dynamic
from bertsmith.objectives.word_losses import word_losses


class Counts(NamedTuple):
    """How many of each kind a step has over all ranks and micro-batches: what its sums are divided by."""

    masked: float
    """Predicted tokens."""
    pairs: float
    tokens: float = 0.0
    """All of them, without filler."""

    @classmethod
    def of(cls, batches: StepBatches) -> "Counts":
        """Those of one rank's part of a step."""
        return cls(batches.masked, batches.pairs, float(batches.tokens))


class PretrainingObjective(nn.Module):
    """A network with its pre-training losses, in one forward pass, so that DDP and FSDP can wrap it."""

    sums: ClassVar[tuple[str, ...]]
    """What `forward` sums up over a micro-batch, in its order."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        self._forward: Callable[[PretrainingBatch, Tensor], tuple[Tensor, Tensor]] = self.plain
        self.compiled = False

    def networks(self) -> Mapping[str, Network]:
        """What is trained: the model, under an empty name, and others by their folder inside the model's."""
        return {"": self.network}

    def flops(self, tokens: int, sequences: int, predicted: int) -> float:
        """The operations of training on so much, by the count that every share of a chip is told by."""
        return flops_per_step(self.networks().values(), PassSize(tokens, sequences, predicted))

    def plain(self, batch: PretrainingBatch, loss_scales_C: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and the sums of a micro-batch, not compiled."""
        raise NotImplementedError

    def means(self, sums: Sequence[float], counts: Counts) -> dict[str, float]:
        """Losses and other metrics of sums and counts of all ranks; only those that there is something of."""
        raise NotImplementedError

    def compile_whole(self) -> None:
        """Compile losses and network as one graph for all batch sizes, where the encoder can be."""
        if not can_compile(self):
            return
        self._forward, self.compiled = compiled_whole(self.plain), True

    def forward(self, batch: PretrainingBatch, loss_scales_C: Tensor) -> tuple[Tensor, Tensor]:
        """This micro-batch's part of the step's loss, and its sums; `loss_scales_C` are 1 / counts."""
        if not (self.compiled and self.training):  # an evaluation is too short to be worth a second graph
            return self.plain(batch, loss_scales_C)
        mark_sizes_as_changing(batch)
        return self._forward(batch, loss_scales_C)


def mark_sizes_as_changing(batch: PretrainingBatch) -> None:
    """Tell the compiler that T, S and P differ from step to step, before it takes them for constants."""
    for name, tensor in batch.named_tensors().items():
        if name != "end_1":
            mark_dynamic(tensor)


def weighted_sums(scores_PV: Tensor, labels_P: Tensor, weights_P: Tensor) -> tuple[Tensor, Tensor]:
    """The summed negative log-likelihood of the labels and how many are the best guess, weighted."""
    losses_P, hits_P = word_losses(scores_PV, labels_P)
    return (losses_P * weights_P).sum(), (hits_P.to(weights_P.dtype) * weights_P).sum()
