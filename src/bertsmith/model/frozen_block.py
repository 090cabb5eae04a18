"""A network for answers on a CPU: the same layers, with weights that are packed once or rounded to 8 bits.

Shapes: T packed tokens, R of them that are wanted, I inputs, H heads, K head width, D model width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bertsmith.model.attention import Attend
from bertsmith.model.encoder import ALL, Encoder, FeedForward, PostNormBlock, Rows
from bertsmith.model.int8_linear import InputRange, linear_after_activation, smoothed_linear
from bertsmith.model.network import Network
from bertsmith.model.packed_linear import Activation, FrozenLinear, PackedLinear, can_pack
from bertsmith.packed import PackedBatch


@dataclass(frozen=True, slots=True)
class FrozenLinears:
    """The four linear layers of a block."""

    project: FrozenLinear
    output: FrozenLinear
    expand: FrozenLinear
    contract: FrozenLinear


class FrozenBlock(nn.Module):
    """One post-norm layer that cannot learn any more."""

    def __init__(self, block: PostNormBlock, linears: FrozenLinears) -> None:
        super().__init__()
        self.heads, self.rule = block.attention.heads, block.attention.rule
        self.attention_norm, self.feed_forward_norm = block.attention_norm, block.feed_forward_norm
        feed_forward = block.feed_forward
        assert isinstance(feed_forward, FeedForward), "who freezes a block looks at that"
        self.activation = Activation(feed_forward.activation_name, feed_forward.activation)
        self.linears = linears

    def forward(self, hidden_TD: Tensor, batch: PackedBatch, attend: Attend, rows: Rows = ALL) -> Tensor:
        linears = self.linears
        projected = linears.project(hidden_TD)
        query_THK, key_THK, value_THK = projected.view(len(projected), 3, self.heads, -1).unbind(1)
        mixed_THK = attend(query_THK, key_THK, value_THK, batch.layout, self.rule)
        hidden_RD = self.attention_norm(linears.output.plus(mixed_THK.flatten(1)[rows], hidden_TD[rows]))
        inner = linears.expand.activated(hidden_RD, self.activation)
        output_RD: Tensor = self.feed_forward_norm(linears.contract.plus(inner, hidden_RD))
        return output_RD


def packed_network(network: Network) -> Network:
    """The same network with packed weights where its layers and its precision allow it, else itself."""
    blocks = freezable_blocks(network)
    if not blocks or not can_pack(blocks[0].attention.project.weight.dtype):
        return network
    return _with_blocks(network, [FrozenBlock(block, packed_linears(block)) for block in blocks])


def packed_linears(block: PostNormBlock) -> FrozenLinears:
    """A block's linear layers with packed weights."""
    return FrozenLinears(*(PackedLinear(linear) for linear in linears_of(block)))


def int8_network(network: Network, batch: PackedBatch, dtype: torch.dtype) -> Network:
    """The same fp32 network with 8-bit products, calibrated on a batch; all else in another precision."""
    blocks = freezable_blocks(network)
    with _watched([linear for block in blocks for linear in linears_of(block)]) as seen, torch.no_grad():
        network(batch)
    linears = [_int8_linears(block, seen, dtype) for block in blocks]
    rest = deepcopy(network).to(dtype)  # the one that was read is what `save` writes
    frozen = [FrozenBlock(*each) for each in zip(freezable_blocks(rest), linears, strict=True)]
    return _with_blocks(rest, frozen)


def _int8_linears(
    block: PostNormBlock, seen: dict[nn.Linear, InputRange], dtype: torch.dtype
) -> FrozenLinears:
    project, output, expand, contract = linears_of(block)
    between = seen[contract].steps()
    return FrozenLinears(
        project=smoothed_linear(project, seen[project], dtype),
        output=smoothed_linear(output, seen[output], dtype),
        expand=smoothed_linear(expand, seen[expand], dtype, to=between),
        contract=linear_after_activation(contract, between, dtype),
    )


def freezable_blocks(network: Network) -> list[PostNormBlock]:
    """The blocks of a network, or none where some are of another make."""
    blocks = [each for each in network.encoder.blocks if isinstance(each, PostNormBlock)]
    plain = all(type(block.feed_forward) is FeedForward and not block.attention.rotary for block in blocks)
    return blocks if plain and len(blocks) == len(network.encoder.blocks) else []


def linears_of(block: PostNormBlock) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
    """Project, output, expand, contract."""
    attention, feed_forward = block.attention, block.feed_forward
    assert isinstance(feed_forward, FeedForward), "who freezes a block looks at that"
    return attention.project, attention.output, feed_forward.expand, feed_forward.contract


def _with_blocks(network: Network, blocks: list[FrozenBlock]) -> Network:
    encoder = network.encoder
    frozen = Encoder(
        encoder.embeddings,
        blocks,
        order=encoder.order,
        final_norm=encoder.final_norm,
        sentence=encoder.sentence,
    )
    return Network(network.shape, frozen, dict(network.heads.items())).eval()


@contextmanager
def _watched(linears: list[nn.Linear]) -> Iterator[dict[nn.Linear, InputRange]]:
    """What goes into each linear layer meanwhile; a layer that is used several times is seen as one."""
    seen: dict[nn.Linear, InputRange] = {}

    def look(linear: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(linear, nn.Linear), "only these are watched"
        values_TI = inputs[0]
        lowest, highest = float(values_TI.min()), float(values_TI.max())
        now = InputRange(lowest, highest, values_TI.abs().amax(0))
        seen[linear] = _both(seen[linear], now) if linear in seen else now

    hooks = [linear.register_forward_pre_hook(look) for linear in linears]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _both(one: InputRange, other: InputRange) -> InputRange:
    largest_I = torch.maximum(one.largest_I, other.largest_I)
    return InputRange(min(one.lowest, other.lowest), max(one.highest, other.highest), largest_I)
