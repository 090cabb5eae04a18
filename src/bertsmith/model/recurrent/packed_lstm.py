"""LSTMs over packed rows: their reading order, and one that learns fast on a CPU.

torch's LSTM reads packed rows on a CPU step by step, and its backward pass fills a gradient of all rows with
zeros at each step: ten times the time of the forward pass at 128 tokens. Here the backward pass goes over the
steps once, and multiplies the gradients of all rows at the end. A GPU has cuDNN for both.

Shapes: T packed tokens, S sequences, S1 = S + 1 boundaries, N steps of the longest sequence, E width of the
inputs, H cells, G = 4H gates, W width of the states (H, or the width of the projection).
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import PackedSequence

from bertsmith.packed import Layout


@dataclass(frozen=True, slots=True)
class ReadingOrder:
    """The order of packed rows for an LSTM: the first rows of all sequences, then the second ones.

    Sequences never meet: a step computes one row of each that is long enough, the longest sequence first.
    """

    rows_T: Tensor
    """Packed row that is read at each place."""
    places_T: Tensor
    """Place at which each packed row is read: the inverse of `rows_T`."""
    sizes_N: Tensor
    """Number of rows in each step, on the CPU, because torch reads it there."""

    @classmethod
    def of(cls, layout: Layout, device: torch.device, *, backwards: bool = False) -> "ReadingOrder":
        """Return the order for this layout; waits for a GPU once."""
        starts_S1 = layout.starts_S1.cpu().long()
        lengths_S = starts_S1.diff()
        # Ranks by length keep the order the same within each group of equal length.
        ranks_S = lengths_S.argsort(descending=True, stable=True).argsort()
        steps_T = torch.arange(int(starts_S1[-1])) - starts_S1[:-1].repeat_interleave(lengths_S)
        if backwards:
            steps_T = (lengths_S - 1).repeat_interleave(lengths_S) - steps_T
        keys_T = steps_T * len(lengths_S) + ranks_S.repeat_interleave(lengths_S)
        rows_T = keys_T.argsort().to(device)
        return cls(rows_T, rows_T.argsort(), steps_T.bincount())

    def states(self, values_TE: Tensor, compute: Callable[[PackedSequence], Tensor]) -> Tensor:
        """Return the result of `compute` for the rows in reading order, in packed order."""
        return compute(PackedSequence(values_TE[self.rows_T], self.sizes_N))[self.places_T]


def lstm_states(lstm: nn.LSTM, packed: PackedSequence) -> Tensor:
    """Return the last layer's states of an LSTM of one or both directions [T, W], in reading order."""
    states_TW: Tensor = packed.data
    if states_TW.device.type != "cpu":
        # cuDNN goes backwards in training mode only; an explanation asks for gradients in evaluation mode.
        explains = torch.is_grad_enabled() and not lstm.training
        with torch.backends.cudnn.flags(enabled=False) if explains else nullcontext():
            computed_TW: Tensor = lstm(packed)[0].data
        return computed_TW
    sizes = packed.batch_sizes.tolist()
    places_T = _places_backwards(packed.batch_sizes) if lstm.bidirectional else None
    for layer in range(lstm.num_layers):
        given_TW = nn.functional.dropout(states_TW, lstm.dropout if layer else 0.0, lstm.training)
        states_TW = _direction(lstm, given_TW, sizes, f"l{layer}")
        if places_T is not None:
            back_TW = _direction(lstm, given_TW[places_T], sizes, f"l{layer}_reverse")[places_T]
            states_TW = torch.cat((states_TW, back_TW), -1)
    return states_TW


def _direction(lstm: nn.LSTM, given_TW: Tensor, sizes: list[int], name: str) -> Tensor:
    """Return the states of one layer and direction of an LSTM, by the end of the names of its weights."""
    projection_WH = lstm.get_parameter(f"weight_hr_{name}") if lstm.proj_size else None
    names = (f"{each}_{name}" for each in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    input_GE, state_GW, *biases = (lstm.get_parameter(each) for each in names)
    weights = (input_GE, state_GW, biases[0] + biases[1], projection_WH)
    computed_TW: Tensor = _PackedLstm.apply(given_TW, sizes, *weights)  # type: ignore[no-untyped-call]
    return computed_TW


def _places_backwards(sizes_N: Tensor) -> Tensor:
    """Return, in reading order, the place of the row that is read instead from the end; its own inverse."""
    starts_N = sizes_N.cumsum(0) - sizes_N
    steps_T = torch.arange(len(sizes_N)).repeat_interleave(sizes_N)
    ranks_T = torch.arange(len(steps_T)) - starts_N[steps_T]
    lengths_S = ranks_T.bincount()
    return starts_N[lengths_S[ranks_T] - 1 - steps_T] + ranks_T


class _PackedLstm(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(  # noqa: PLR0913 - torch's signature, and the operands
        ctx: Any,
        inputs_TE: Tensor,
        sizes: list[int],
        input_GE: Tensor,
        state_GW: Tensor,
        bias_G: Tensor,
        projection_WH: Tensor | None,
    ) -> Tensor:
        gates_TG = torch.addmm(bias_G, inputs_TE, input_GE.t())
        tokens, width = len(gates_TG), gates_TG.shape[1] // 4
        cells_TH, hidden_TH = (gates_TG.new_empty(tokens, width) for _ in range(2))
        states_TW = hidden_TH
        if projection_WH is not None:
            states_TW = gates_TG.new_empty(tokens, len(projection_WH))
        for before, now in _steps(sizes):
            gates_G = gates_TG[now]
            if before is not None:
                gates_G.addmm_(states_TW[before], state_GW.t())
            taken, kept, fresh, shown = gates_G.chunk(4, 1)
            gates_G[:, : 2 * width].sigmoid_()
            fresh.tanh_()
            shown.sigmoid_()
            cells = torch.mul(taken, fresh, out=cells_TH[now])
            if before is not None:
                cells.addcmul_(kept, cells_TH[before])
            hidden = torch.tanh(cells, out=hidden_TH[now]).mul_(shown)
            if projection_WH is not None:
                torch.mm(hidden, projection_WH.t(), out=states_TW[now])
        ctx.sizes = sizes
        operands = (inputs_TE, input_GE, state_GW, projection_WH)
        ctx.save_for_backward(*operands, gates_TG, cells_TH, hidden_TH, states_TW)
        return states_TW

    @staticmethod
    @once_differentiable
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, to_states_TW: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs_TE, input_GE, state_GW, projection_WH, *computed = ctx.saved_tensors
        gates_TG, cells_TH, hidden_TH, states_TW = computed
        to_states_TW, to_gates_TG = to_states_TW.clone(), torch.empty_like(gates_TG)
        to_kept = None  # gradient of the cells from the following step, for sequences that continue
        for before, now in reversed(list(_steps(ctx.sizes))):
            taken, kept, fresh, shown = gates_TG[now].chunk(4, 1)
            to_taken, to_forget, to_fresh, to_shown = to_gates_TG[now].chunk(4, 1)
            to_hidden = to_states_TW[now] if projection_WH is None else to_states_TW[now] @ projection_WH
            tanh = cells_TH[now].tanh()
            torch.mul(to_hidden, tanh, out=to_shown)
            to_cells = (to_hidden * shown).mul_(1 - tanh.square_())
            if to_kept is not None:
                to_cells[: len(to_kept)] += to_kept
            torch.mul(to_cells, fresh, out=to_taken)
            torch.mul(to_cells, taken, out=to_fresh)
            if before is None:
                to_forget.zero_()
            else:
                torch.mul(to_cells, cells_TH[before], out=to_forget)
            for gradient, gate in ((to_taken, taken), (to_forget, kept), (to_shown, shown)):
                gradient.mul_(gate).mul_(1 - gate)
            to_fresh.mul_(1 - fresh.square())
            to_kept = to_cells.mul_(kept)
            if before is not None:
                to_states_TW[before].addmm_(to_gates_TG[now], state_GW)
        # For all rows at once: the products of the weights with the inputs of each step.
        read_before = [states_TW[each] for each, _ in _steps(ctx.sizes) if each is not None]
        to_state_GW = torch.zeros_like(state_GW)
        if read_before:
            torch.mm(to_gates_TG[ctx.sizes[0] :].t(), torch.cat(read_before), out=to_state_GW)
        to_projection_WH = None if projection_WH is None else to_states_TW.t() @ hidden_TH
        to_inputs = to_gates_TG @ input_GE if ctx.needs_input_grad[0] else None
        return (
            to_inputs, None, to_gates_TG.t() @ inputs_TE, to_state_GW, to_gates_TG.sum(0), to_projection_WH,
        )  # fmt: skip


def _steps(sizes: list[int]) -> Iterator[tuple[slice | None, slice]]:
    """Yield the rows of each step, and before them the rows of the same sequences in the step before."""
    yield None, slice(0, sizes[0])
    for (start, end), size in zip(pairwise(accumulate([0, *sizes])), sizes[1:], strict=False):
        yield slice(start, start + size), slice(end, end + size)
