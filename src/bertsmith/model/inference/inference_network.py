"""The inference network of a CPU: the same layers, with weights that are packed once or rounded to 8 bits.

Shapes: T packed tokens, R rows of them that are wanted, I inputs, O outputs, H heads, K head width, D model
width, V words, E embedding width.

Training and inference use two networks that share weights. In order: a block of four linear layers
(`inference_linear`), the networks of such blocks, and the calibration of their inputs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bertsmith.model.attention.projection import Attend, Projection
from bertsmith.model.embeddings import Embeddings
from bertsmith.model.heads import OutputHead
from bertsmith.model.inference.inference_linear import (
    FUSED,
    Activation,
    AdaptedLinear,
    FourBitLinear,
    InferenceLinear,
    Int8Linear,
    PackedLinear,
    SignedInt8Linear,
    can_pack,
    takes_4bit_products,
)
from bertsmith.model.inference.quantised_weights import (
    InputRange,
    QuantisedEmbedding,
    QuantisedLinear,
    in_steps,
    smoothed,
)
from bertsmith.model.kernels.torch_internals import ON_ARM
from bertsmith.model.lora import LoraLinear, with_shared_weights
from bertsmith.model.network import Network
from bertsmith.model.transformer.transformer import (
    Block,
    GatedFeedForward,
    PostNormBlock,
    PreNormBlock,
    SelfAttention,
    Transformer,
)
from bertsmith.packed import ALL, PackedBatch, Rows

# ---- a block of four linear layers


@dataclass(frozen=True, slots=True)
class BlockLinears:
    """The four linear layers of a block."""

    project: InferenceLinear
    output: InferenceLinear
    expand: InferenceLinear
    contract: InferenceLinear

    def in_order(self) -> tuple[InferenceLinear, ...]:
        """Return the layers in the order of `linears_of`."""
        return self.project, self.output, self.expand, self.contract


class InferenceBlock(nn.Module):
    """One layer without training; subclasses define the places of its norms."""

    def __init__(self, block: Block, linears: BlockLinears) -> None:
        super().__init__()
        self.head_width, self.rule = block.attention.head_width, block.attention.rule
        self.rotary = block.attention.rotary
        self.attention_norm, self.feed_forward_norm = block.attention_norm, block.feed_forward_norm
        feed_forward = block.feed_forward
        self.gated = isinstance(feed_forward, GatedFeedForward)
        self.activation = Activation(feed_forward.activation_name, feed_forward.activation)
        self.linears = linears

    def mixed(self, hidden_TD: Tensor, batch: PackedBatch, attend: Attend, rows: Rows) -> Tensor:
        """Return the output of the heads [R, D], before the output layer."""
        inputs = Projection(
            hidden_TD, self.linears.project, self.head_width, self.rotary, batch.positions_T, rows
        )
        return attend(inputs, batch.layout, self.rule)

    def inner(self, hidden_RD: Tensor) -> Tensor:
        """Return the input of the feed-forward's last layer [R, I]."""
        if not self.gated:
            return self.linears.expand.activated(hidden_RD, self.activation)
        inner, gate = self.linears.expand(hidden_RD).chunk(2, dim=-1)
        return self.activation.function(inner) * gate


class PostNormInferenceBlock(InferenceBlock):
    """A layer like BERT's."""

    def forward(self, hidden_TD: Tensor, batch: PackedBatch, attend: Attend, rows: Rows = ALL) -> Tensor:
        mixed_RD = self.mixed(hidden_TD, batch, attend, rows)
        hidden_RD = self.attention_norm(self.linears.output.plus(mixed_RD, hidden_TD[rows]))
        added_RD = self.linears.contract.plus(self.inner(hidden_RD), hidden_RD)
        output_RD: Tensor = self.feed_forward_norm(added_RD)
        return output_RD


class PreNormInferenceBlock(InferenceBlock):
    """A layer like ModernBERT's."""

    def __init__(self, block: PreNormBlock, linears: BlockLinears) -> None:
        super().__init__(block, linears)
        self.attention_output_norm = block.attention_output_norm
        self.feed_forward_output_norm = block.feed_forward_output_norm

    def forward(self, hidden_TD: Tensor, batch: PackedBatch, attend: Attend, rows: Rows = ALL) -> Tensor:
        mixed_RD = self.mixed(self.attention_norm(hidden_TD), batch, attend, rows)
        hidden_RD = _plus(self.linears.output, self.attention_output_norm, mixed_RD, hidden_TD[rows])
        inner_RI = self.inner(self.feed_forward_norm(hidden_RD))
        return _plus(self.linears.contract, self.feed_forward_output_norm, inner_RI, hidden_RD)


def _plus(linear: InferenceLinear, norm: nn.Module, values: Tensor, residual_RD: Tensor) -> Tensor:
    """Return the outputs of a layer, normalised in a sandwich, plus the residual."""
    if isinstance(norm, nn.Identity):
        return linear.plus(values, residual_RD)
    added_RD: Tensor = norm(linear(values))
    return residual_RD + added_RD


INFERENCE_BLOCKS: dict[type[nn.Module], Callable[..., InferenceBlock]] = {
    PostNormBlock: PostNormInferenceBlock,
    PreNormBlock: PreNormInferenceBlock,
}


def convertible_blocks(network: Network) -> list[Block]:
    """Return the blocks of a network, or none if some are of another kind."""
    encoder = network.encoder
    blocks = encoder.own_blocks() if isinstance(encoder, Transformer) else []
    plain = all(type(each) in INFERENCE_BLOCKS and type(each.attention) is SelfAttention for each in blocks)
    return blocks if plain else []


def linears_of(block: Block) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
    """Return the layers project, output, expand and contract."""
    attention, feed_forward = block.attention, block.feed_forward
    return attention.project, attention.output, feed_forward.expand, feed_forward.contract


# ---- a network of such blocks


def computes_in_4_bits(network: Network) -> bool:
    """True if a CPU multiplies the 4-bit weights of all layers as 4-bit numbers."""
    linears = [linear for block in convertible_blocks(network) for linear in linears_of(block)]
    return bool(linears) and all(map(takes_4bit_products, linears))


def is_for_memory(blocks: Sequence[Block]) -> bool:
    """True if the blocks have weights of few bits that must stay small: packed ones would not."""
    linears = (linear for block in blocks for linear in linears_of(block))
    return any(isinstance(linear, QuantisedLinear) and linear.steps is None for linear in linears)


def packed_network(network: Network, over: Network | None = None) -> Network:
    """Return the network with packed weights if its layers and its precision allow it, else itself.

    Adapters are computed in addition to packed weights: the weights of `over`, the packed network of their
    base, which are then in memory once, or their own.
    """
    blocks = convertible_blocks(network)
    if computes_in_4_bits(network):
        four = ((block, BlockLinears(*map(FourBitLinear, linears_of(block)))) for block in blocks)  # type: ignore[arg-type]
        return _with_blocks(network, four)  # the word table stays small, too
    if not blocks or is_for_memory(blocks) or not can_pack(blocks[0].attention.project.weight.dtype):
        return network
    converted = []
    for number, block in enumerate(blocks):
        base = None if over is None else over.encoder.get_submodule(f"blocks.{number}")
        linears = linears_of(block)
        if isinstance(base, InferenceBlock):
            frozen = base.linears.in_order()
        else:
            frozen = tuple(map(PackedLinear, linears))
        beside = (
            AdaptedLinear(linear, packed) if isinstance(linear, LoraLinear) else packed
            for linear, packed in zip(linears, frozen, strict=True)
        )
        converted.append((block, BlockLinears(*beside)))
    return _with_real_table(_with_blocks(network, converted))


def int8_network(network: Network, weights: Sequence[QuantisedLinear], dtype: torch.dtype) -> Network:
    """Return the network with 8-bit products by these weights of its layers; the rest is in `dtype`."""
    form = SignedInt8Linear if ON_ARM else Int8Linear
    linears = []
    for first in range(0, len(weights), 4):
        project, output, expand, contract = weights[first : first + 4]
        assert contract.steps is not None, "the layer must be calibrated"
        # The expanding layer returns its activation already rounded for the last one: that saves a pass in
        # full precision over the widest values of a block.
        between = contract.steps if contract.steps.dtype == torch.uint8 else None
        linears.append(
            BlockLinears(
                project=form(project, dtype),
                output=form(output, dtype),
                expand=form(expand, dtype, to=between),
                contract=form(contract, dtype),
            )
        )
    rest = deepcopy(network).to(dtype)  # `save` writes the network that was read
    for name, head in network.heads.items():
        if isinstance(head, OutputHead):
            rest.heads[name].output = head.output
    return _with_real_table(_with_blocks(rest, zip(convertible_blocks(rest), linears, strict=True)))


def real_network(network: Network) -> Network:
    """Return the network with real weights in place of calibrated ones, for devices without such products."""
    if not stored_weights(network):
        return network
    real = with_shared_weights(network)
    real.encoder.put_linears(_real(each.linear) for each in real.encoder.linears())
    if isinstance(real.encoder.words, QuantisedEmbedding):
        real.encoder.put_words(_real_table(real.encoder.words))
    return real.eval()


def _real(linear: nn.Linear) -> nn.Linear:
    """Return an equivalent plain layer; layers that share a weight each get a separate one."""
    weight_OI = linear.weight
    plain = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    plain.weight = nn.Parameter(weight_OI, requires_grad=False)
    plain.register_parameter("bias", linear.bias)
    return plain


def _with_blocks(network: Network, layers: Iterable[tuple[Block, BlockLinears]]) -> Network:
    encoder = network.encoder
    assert isinstance(encoder, Transformer), "other encoders do not have blocks"
    converted = Transformer(
        encoder.embeddings,
        [INFERENCE_BLOCKS[type(block)](block, linears) for block, linears in layers],
        order=encoder.order,
        final_norm=encoder.final_norm,
        sentence=encoder.sentence,
    )
    converted.direction = encoder.direction
    return Network(network.config, converted, dict(network.heads.items())).eval()


def _with_real_table(network: Network) -> Network:
    """Return the network with a word table of real numbers."""
    encoder = network.encoder
    assert isinstance(encoder, Transformer), "other encoders do not have blocks"
    if isinstance(encoder.words, QuantisedEmbedding):
        embeddings, table = encoder.embeddings, _real_table(encoder.words)
        widen = embeddings.widen if isinstance(embeddings.widen, nn.Linear) else None
        added, norm, dropout = dict(embeddings.added.items()), embeddings.norm, embeddings.dropout.p
        # New heads: the heads of the network that was read do not change.
        encoder.embeddings = Embeddings(table, added, norm=norm, dropout=dropout, widen=widen)  # type: ignore[arg-type]
    return network.eval()


def _real_table(words: QuantisedEmbedding) -> nn.Embedding:
    """Return a table of real numbers: 8-bit ones would be scaled at each look-up."""
    weight_VE = words.weight
    return nn.Embedding(len(weight_VE), weight_VE.shape[1], _weight=weight_VE)


# ---- the weights of a network for 8-bit products


def calibrated(network: Network, batches: Iterable[PackedBatch]) -> list[QuantisedLinear]:
    """Return the weights of its linear layers for 8-bit products, by their inputs in these batches."""
    layers = network.encoder.linears()
    with _observed([each.linear for each in layers]) as seen, torch.no_grad():
        for batch in batches:
            network(batch)
    return [
        in_steps(each.linear, seen[each.linear].steps())
        if each.activation in FUSED
        else smoothed(each.linear, seen[each.linear])
        for each in layers
    ]


@contextmanager
def _observed(linears: list[nn.Linear]) -> Iterator[dict[nn.Linear, InputRange]]:
    """Inside, record the inputs of each linear layer; layers that run several times count as one (ALBERT)."""
    seen: dict[nn.Linear, InputRange] = {}

    def observe(linear: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(linear, nn.Linear), "only these are observed"
        values_TI = inputs[0]
        lowest, highest = float(values_TI.min()), float(values_TI.max())
        now = InputRange(lowest, highest, values_TI.abs().amax(0))
        seen[linear] = seen[linear].joined(now) if linear in seen else now

    hooks = [linear.register_forward_pre_hook(observe) for linear in linears]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def stored_weights(network: Network) -> list[QuantisedLinear]:
    """Return the weights of its linear layers that were calibrated before; none if some were not."""
    layers = [each.linear for each in network.encoder.linears()]
    found = [each for each in layers if isinstance(each, QuantisedLinear) and each.steps is not None]
    return found if len(found) == len(layers) else []
