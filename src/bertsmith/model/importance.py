"""Importance of each head and each feed-forward neuron to a loss: the gradient of a gate on its output.

Michel et al. 2019, "Are Sixteen Heads Really Better than One?": a head's output is multiplied by a gate of 1,
and its importance is the expectation over the data of the absolute derivative of the loss by that gate. One
backward pass is enough for all heads. A gate on each neuron measures the feed-forward in the same way.

Shapes: S sequences, R rows that a layer continues with, H heads, K head width, I inner width.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bertsmith.model.network import Network
from bertsmith.model.transformer.transformer import Block, as_transformer
from bertsmith.packed import ALL, Layout, PackedBatch


@dataclass(frozen=True, slots=True)
class UnitImportance:
    """The importance of each head [H] and each neuron [I] of every block, in float64 on the CPU."""

    heads: tuple[Tensor, ...]
    neurons: tuple[Tensor, ...]

    def normalised(self) -> "UnitImportance":
        """Divide each block's values by their l2 norm, as published, so that layers are comparable."""
        return UnitImportance(_normalised(self.heads), _normalised(self.neurons))


def _normalised(blocks: Sequence[Tensor]) -> tuple[Tensor, ...]:
    # The gradients of an unused block are all 0 and have no direction.
    return tuple(values / max(float(values.norm()), torch.finfo(values.dtype).tiny) for values in blocks)


@dataclass(slots=True)
class _GatesOfBlock:
    """The gates of one block during a forward pass: one per sequence, so that examples do not cancel out."""

    sequence_R: Tensor | None = None
    heads_SH: Tensor | None = None
    neurons_SI: Tensor | None = None


@dataclass(slots=True)
class ImportanceGates:
    """The gates of a network's blocks, and the sums of their gradients."""

    network: Network
    blocks: list[_GatesOfBlock] = field(default_factory=list)
    sums: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    sequences: int = 0

    def collect(self, loss: Tensor) -> None:
        """Add the absolute gradients of this loss, a sum over the sequences that passed last."""
        gates = [gate for block in self.blocks for gate in (block.heads_SH, block.neurons_SI)]
        used = [gate for gate in gates if gate is not None]
        assert len(used) == len(gates), "every block has run"
        found = torch.autograd.grad(loss, used)
        for sums, heads_SH, neurons_SI in zip(self.sums, found[::2], found[1::2], strict=True):
            sums[0].add_(heads_SH.abs().sum(0).double().cpu())
            sums[1].add_(neurons_SI.abs().sum(0).double().cpu())
        self.sequences += len(found[0])
        for block in self.blocks:
            block.heads_SH = block.neurons_SI = None

    def importance(self) -> UnitImportance:
        """Return the mean over all sequences."""
        count = max(1, self.sequences)
        return UnitImportance(
            tuple(heads / count for heads, _ in self.sums), tuple(inner / count for _, inner in self.sums)
        )


@contextmanager
def importance_gates(network: Network) -> Iterator[ImportanceGates]:
    """Inside, put gates on every block: compute a loss, `collect` it, and so on over the data.

    Layers that share a block share its gates (ALBERT), and their importance.
    """
    gates = ImportanceGates(network)
    hooks = []
    for block in as_transformer(network.encoder, "attention heads").own_blocks():
        hooks += _gate_block(block, gates)
    try:
        yield gates
    finally:
        for hook in hooks:
            hook.remove()


def _gate_block(block: Block, gates: ImportanceGates) -> list[Any]:
    state, heads = _GatesOfBlock(), block.attention.heads
    feed_forward = block.feed_forward
    inner = feed_forward.contract.in_features
    gates.blocks.append(state)
    gates.sums.append((torch.zeros(heads).double(), torch.zeros(inner).double()))

    def begin(_: Any, args: tuple[Any, ...]) -> None:
        hidden_TD, batch, rows = args[0], args[1], args[3] if len(args) > 3 else ALL
        assert isinstance(batch, PackedBatch), "a block's second argument"
        state.sequence_R = sequence_of_rows(batch.layout, len(hidden_TD))[rows]
        if state.heads_SH is None or state.neurons_SI is None:  # a later layer of a shared block reuses them
            state.heads_SH = hidden_TD.new_ones(batch.layout.sequences, heads).requires_grad_()
            state.neurons_SI = hidden_TD.new_ones(batch.layout.sequences, inner).requires_grad_()

    def gate_heads(_: Any, args: tuple[Tensor]) -> Tensor:
        assert state.heads_SH is not None, "`begin` ran"
        mixed_RHK = args[0].view(len(args[0]), heads, -1)
        return (mixed_RHK * state.heads_SH[state.sequence_R].unsqueeze(-1)).flatten(1)

    def gate_neurons(_: Any, args: tuple[Tensor]) -> Tensor:
        assert state.neurons_SI is not None, "`begin` ran"
        return args[0] * state.neurons_SI[state.sequence_R]

    return [
        block.register_forward_pre_hook(begin),
        block.attention.output.register_forward_pre_hook(gate_heads),
        feed_forward.contract.register_forward_pre_hook(gate_neurons),
    ]


def sequence_of_rows(layout: Layout, rows: int) -> Tensor:
    """Return the number of the sequence of each packed row [T]."""
    every_T = torch.arange(rows, device=layout.starts_S1.device)
    return torch.searchsorted(layout.starts_S1[1:].long(), every_T, right=True)
