"""The inference network of a CPU: the same layers, with weights that are packed once or rounded to 8 bits.

Shapes: T packed tokens or rows, R of them that are wanted, I inputs, O outputs, H heads, K head width,
D model width.

What learns and what predicts are two networks over the same weights. A weight that does not change any more
can lie as oneDNN reads it fastest, and a linear layer can compute its activation or residual on the way out,
which spares a pass over the outputs. Training could use neither: the packed form has no gradient.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from bertsmith.model.attention import Attend
from bertsmith.model.encoder import (
    ALL,
    Block,
    Embeddings,
    Encoder,
    FeedForward,
    GatedFeedForward,
    PostNormBlock,
    PreNormBlock,
    Rows,
    SandwichNormBlock,
    SelfAttention,
)
from bertsmith.model.heads import OutputHead
from bertsmith.model.lora import LoraLinear, with_shared_weights
from bertsmith.model.network import Network
from bertsmith.model.quantised_weights import (
    GROUP_INPUTS,
    EightBitSteps,
    InputRange,
    QuantisedEmbedding,
    QuantisedLinear,
    bits_of,
    in_steps,
    smoothed,
)
from bertsmith.model.torch_internals import (
    Quantised,
    QuantisedWeight,
    has_4bit_products,
    has_bf16_products,
    has_onednn,
    int8_linear,
    linear_4bit,
    pack_4bit_weight,
    pack_int8_weight,
    pack_linear_weight,
    packed_linear,
    packed_linear_plus,
)
from bertsmith.packed import PackedBatch

FUSED = {"gelu": ("gelu", "none"), "relu": ("relu", "")}
"""Activations that oneDNN computes on the way out, with its name for their form."""


# ---- a linear layer with packed weights


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products of this precision here."""
    if dtype == torch.bfloat16:
        return has_bf16_products()
    return dtype == torch.float32 and has_onednn()


@dataclass(frozen=True, slots=True)
class Activation:
    """What comes after a linear layer, by name and as a function."""

    name: str
    function: Callable[[Tensor], Tensor]


class InferenceLinear(Protocol):
    """What an inference block asks of a linear layer."""

    def __call__(self, values_TI: Tensor) -> Tensor:
        """The product."""
        ...

    def activated(self, values_TI: Tensor, activation: Activation) -> Tensor:
        """The product after an activation, in the form that the next layer takes."""
        ...

    def plus(self, values_TI: Tensor, residual_TO: Tensor) -> Tensor:
        """The sum of the product and a residual."""
        ...


class PackedLinear:
    """A linear layer in the precision of its weights."""

    def __init__(self, linear: nn.Linear) -> None:
        self._weight = pack_linear_weight(linear.weight.detach().contiguous())
        self._bias = None if linear.bias is None else linear.bias.detach()

    def __call__(self, values_TI: Tensor) -> Tensor:
        """The product."""
        return packed_linear(values_TI, self._weight, self._bias)

    def activated(self, values_TI: Tensor, activation: Activation) -> Tensor:
        """The product after an activation."""
        if activation.name in FUSED:
            return packed_linear(values_TI, self._weight, self._bias, *FUSED[activation.name])
        if activation.name == "relu2":
            return packed_linear(values_TI, self._weight, self._bias, *FUSED["relu"]).square_()
        return activation.function(self(values_TI))

    def plus(self, values_TI: Tensor, residual_TO: Tensor) -> Tensor:
        """The sum of the product and a residual."""
        return packed_linear_plus(values_TI, residual_TO, self._weight, self._bias)


class AdaptedLinear:
    """A linear layer with adapters beside it; those of other tasks may stand beside the same one."""

    def __init__(self, linear: LoraLinear, frozen: InferenceLinear) -> None:
        self._adapters, self.frozen = linear, frozen

    def __call__(self, values_TI: Tensor) -> Tensor:
        """The product."""
        return self._adapters.adapted(self.frozen(values_TI), values_TI)

    def activated(self, values_TI: Tensor, activation: Activation) -> Tensor:
        """The product after an activation, which has to wait for the adapters."""
        return activation.function(self(values_TI))

    def plus(self, values_TI: Tensor, residual_TO: Tensor) -> Tensor:
        """The sum of the product and a residual."""
        return self._adapters.adapted(self.frozen.plus(values_TI, residual_TO), values_TI)


# ---- a linear layer of 8-bit products: weights by output, inputs by the range that calibration saw


class Int8Linear:
    """A linear layer that rounds its inputs, or takes them rounded, and can give its activation rounded."""

    def __init__(
        self, linear: QuantisedLinear, dtype: torch.dtype, *, to: EightBitSteps | None = None
    ) -> None:
        """`dtype`: of inputs and outputs; `to`: the steps in which an activation is given."""
        assert linear.steps is not None and bits_of(linear.whole) == 8, "it was calibrated"
        self._steps, self._to = linear.steps, to
        self._weight = QuantisedWeight(
            pack_int8_weight(linear.whole),
            linear.scales_OG[:, 0],
            zeros_O=torch.zeros(len(linear.whole), dtype=torch.int32),
            bias_O=None if linear.bias is None else linear.bias.detach().float(),
        )
        per_input_I = linear.per_input_I
        if per_input_I is None:
            per_input_I = torch.full((linear.in_features,), 1 / linear.steps.size)
        self._per_input_I = per_input_I.to(dtype)

    def __call__(self, values_TI: Tensor) -> Tensor:
        """The product."""
        return self._product(values_TI, self._per_input_I.dtype)

    def activated(self, values_TI: Tensor, activation: Activation) -> Tensor:
        """The product after an activation, rounded where it could be computed on the way out."""
        if activation.name in FUSED:
            return self._product(values_TI, self._per_input_I.dtype, *FUSED[activation.name], to=self._to)
        if activation.name == "relu2":
            return self._product(values_TI, self._per_input_I.dtype, *FUSED["relu"]).square_()
        return activation.function(self(values_TI))

    def plus(self, values_TI: Tensor, residual_TO: Tensor) -> Tensor:
        """The sum of the product and a residual."""
        return self._product(values_TI, residual_TO.dtype).add_(residual_TO)

    def _product(
        self,
        values_TI: Tensor,
        dtype: torch.dtype,
        activation: str = "none",
        form: str = "",
        *,
        to: EightBitSteps | None = None,
    ) -> Tensor:
        steps = self._steps
        rounded = values_TI.dtype == steps.dtype
        whole_TI = values_TI if rounded else steps.quantise(values_TI * self._per_input_I)
        output = (1.0, 0, dtype) if to is None else (to.size, to.zero, to.dtype)
        inputs = Quantised(whole_TI.contiguous(), steps.size, steps.zero)
        return int8_linear(inputs, self._weight, output, activation, form)


# ---- a linear layer of 4-bit weights


class FourBitLinear:
    """A linear layer whose weights stay at 4 bits; each row of inputs is rounded to 8 as it comes."""

    def __init__(self, linear: QuantisedLinear) -> None:
        self._sizes = (GROUP_INPUTS, linear.in_features, linear.out_features)
        bias_O = None if linear.bias is None else linear.bias.detach()
        self._weight = pack_4bit_weight(linear.whole, linear.scales_OG, bias_O, self._sizes)

    def __call__(self, values_TI: Tensor) -> Tensor:
        """The product."""
        return linear_4bit(values_TI.contiguous(), self._weight, self._sizes)

    def activated(self, values_TI: Tensor, activation: Activation) -> Tensor:
        """The product after an activation."""
        return activation.function(self(values_TI))

    def plus(self, values_TI: Tensor, residual_TO: Tensor) -> Tensor:
        """The sum of the product and a residual."""
        return self(values_TI).add_(residual_TO)


def takes_4bit_products(linear: nn.Linear) -> bool:
    """Whether this machine has fast products for the 4-bit weights of a layer."""
    if not isinstance(linear, QuantisedLinear) or bits_of(linear.whole) != 4:
        return False
    is_grouped = linear.scales_OG.shape[1] * GROUP_INPUTS == linear.in_features
    return is_grouped and linear.dtype == torch.float32 and has_4bit_products()


# ---- a block of four such layers, and a network of such blocks


@dataclass(frozen=True, slots=True)
class BlockLinears:
    """The four linear layers of a block."""

    project: InferenceLinear
    output: InferenceLinear
    expand: InferenceLinear
    contract: InferenceLinear

    def in_order(self) -> tuple[InferenceLinear, ...]:
        """As `linears_of` gives those that they come from."""
        return self.project, self.output, self.expand, self.contract


class InferenceBlock(nn.Module):
    """One layer that cannot learn any more; where its norms stand is said by those below."""

    def __init__(self, block: Block, linears: BlockLinears) -> None:
        super().__init__()
        self.heads, self.rule = block.attention.heads, block.attention.rule
        self.rotary = block.attention.rotary
        self.attention_norm, self.feed_forward_norm = block.attention_norm, block.feed_forward_norm
        feed_forward = block.feed_forward
        assert isinstance(feed_forward, FeedForward | GatedFeedForward), "convertible_blocks gives no others"
        self.gated = isinstance(feed_forward, GatedFeedForward)
        self.activation = Activation(feed_forward.activation_name, feed_forward.activation)
        self.linears = linears

    def mixed(self, hidden_TD: Tensor, batch: PackedBatch, attend: Attend) -> Tensor:
        """What the heads attend to [T, D], in front of the output layer."""
        projected = self.linears.project(hidden_TD)
        query_THK, key_THK, value_THK = projected.view(len(projected), 3, self.heads, -1).unbind(1)
        if self.rotary is not None:
            query_THK, key_THK = self.rotary(query_THK, key_THK, batch.positions_T)
        return attend(query_THK, key_THK, value_THK, batch.layout, self.rule).flatten(1)

    def inner(self, hidden_RD: Tensor) -> Tensor:
        """What the feed-forward's last layer is given [R, I]."""
        if not self.gated:
            return self.linears.expand.activated(hidden_RD, self.activation)
        inner, gate = self.linears.expand(hidden_RD).chunk(2, dim=-1)
        return self.activation.function(inner) * gate


class PostNormInferenceBlock(InferenceBlock):
    """A layer of BERT's make."""

    def forward(self, hidden_TD: Tensor, batch: PackedBatch, attend: Attend, rows: Rows = ALL) -> Tensor:
        mixed_RD = self.mixed(hidden_TD, batch, attend)[rows]
        hidden_RD = self.attention_norm(self.linears.output.plus(mixed_RD, hidden_TD[rows]))
        added_RD = self.linears.contract.plus(self.inner(hidden_RD), hidden_RD)
        output_RD: Tensor = self.feed_forward_norm(added_RD)
        return output_RD


class PreNormInferenceBlock(InferenceBlock):
    """A layer of ModernBERT's make."""

    def forward(self, hidden_TD: Tensor, batch: PackedBatch, attend: Attend, rows: Rows = ALL) -> Tensor:
        mixed_RD = self.mixed(self.attention_norm(hidden_TD), batch, attend)[rows]
        hidden_RD = self.linears.output.plus(mixed_RD, hidden_TD[rows])
        return self.linears.contract.plus(self.inner(self.feed_forward_norm(hidden_RD)), hidden_RD)


class SandwichNormInferenceBlock(InferenceBlock):
    """A pre-norm layer that also normalises what it adds."""

    def __init__(self, block: SandwichNormBlock, linears: BlockLinears) -> None:
        super().__init__(block, linears)
        self.attention_output_norm = block.attention_output_norm
        self.feed_forward_output_norm = block.feed_forward_output_norm

    def forward(self, hidden_TD: Tensor, batch: PackedBatch, attend: Attend, rows: Rows = ALL) -> Tensor:
        mixed_RD = self.mixed(self.attention_norm(hidden_TD), batch, attend)[rows]
        hidden_RD = hidden_TD[rows] + self.attention_output_norm(self.linears.output(mixed_RD))
        inner = self.inner(self.feed_forward_norm(hidden_RD))
        output_RD: Tensor = hidden_RD + self.feed_forward_output_norm(self.linears.contract(inner))
        return output_RD


INFERENCE_BLOCKS: dict[type[nn.Module], Callable[..., InferenceBlock]] = {
    PostNormBlock: PostNormInferenceBlock,
    PreNormBlock: PreNormInferenceBlock,
    SandwichNormBlock: SandwichNormInferenceBlock,
}


def convertible_blocks(network: Network) -> list[Block]:
    """The blocks of a network, or none where some are of another make."""
    blocks = [each for each in network.encoder.blocks if isinstance(each, Block)]
    plain = all(
        type(block) in INFERENCE_BLOCKS
        and isinstance(block.feed_forward, FeedForward | GatedFeedForward)
        and type(block.attention) is SelfAttention
        for block in blocks
    )
    return blocks if plain and len(blocks) == len(network.encoder.blocks) else []


def plain_blocks(network: Network) -> list[Block]:
    """The blocks of a network, whatever their attention: what they hold of weights is known of each."""
    return [each for each in network.encoder.blocks if isinstance(each, Block)]


def computes_in_4_bits(network: Network) -> bool:
    """Whether a CPU multiplies the weights of all its layers as the 4-bit ones that they are."""
    linears = [linear for block in convertible_blocks(network) for linear in linears_of(block)]
    return bool(linears) and all(map(takes_4bit_products, linears))


def packed_network(network: Network, over: Network | None = None) -> Network:
    """The same network with packed weights where its layers and its precision allow it, else itself.

    Adapters are computed beside packed weights: those of `over`, the packed network of their base, which are
    then held once, or their own.
    """
    blocks = convertible_blocks(network)
    if computes_in_4_bits(network):
        four = ((block, BlockLinears(*map(FourBitLinear, linears_of(block)))) for block in blocks)  # type: ignore[arg-type]
        return _with_blocks(network, four)  # the word table stays small, too
    if not blocks or is_for_memory(blocks) or not can_pack(blocks[0].attention.project.weight.dtype):
        return network
    converted = []
    for number, block in enumerate(blocks):
        base = None if over is None else over.encoder.blocks[number]
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


BlockWeights = tuple[QuantisedLinear, QuantisedLinear, QuantisedLinear, QuantisedLinear]
"""Project, output, expand, contract."""


def int8_network(network: Network, weights: Sequence[BlockWeights], dtype: torch.dtype) -> Network:
    """The same network with 8-bit products by the weights of each block; all else in another precision."""
    linears = []
    for project, output, expand, contract in weights:
        assert contract.steps is not None, "it was calibrated"
        # The layer in the middle gives its activation already rounded, as the last one reads it: that spares
        # the widest values of a block a pass in full precision.
        between = contract.steps if contract.steps.dtype == torch.uint8 else None
        linears.append(
            BlockLinears(
                project=Int8Linear(project, dtype),
                output=Int8Linear(output, dtype),
                expand=Int8Linear(expand, dtype, to=between),
                contract=Int8Linear(contract, dtype),
            )
        )
    rest = deepcopy(network).to(dtype)  # the one that was read is what `save` writes
    for name, head in network.heads.items():
        if isinstance(head, OutputHead):
            rest.heads[name].output = head.output
    return _with_real_table(_with_blocks(rest, zip(convertible_blocks(rest), linears, strict=True)))


def calibrated(network: Network, batches: Iterable[PackedBatch]) -> list[BlockWeights]:
    """The weights of each block for 8-bit products, by the inputs that its layers have in these batches."""
    blocks = plain_blocks(network)
    with _observed([linear for block in blocks for linear in linears_of(block)]) as seen, torch.no_grad():
        for batch in batches:
            network(batch)
    found = []
    for block in blocks:
        project, output, expand, contract = linears_of(block)
        fused = isinstance(block.feed_forward, FeedForward) and block.feed_forward.activation_name in FUSED
        last = in_steps(contract, seen[contract].steps()) if fused else smoothed(contract, seen[contract])
        first, second, third = (smoothed(linear, seen[linear]) for linear in (project, output, expand))
        found.append((first, second, third, last))
    return found


def stored_weights(network: Network) -> list[BlockWeights]:
    """The weights of each block that were calibrated before; none where some were not."""
    found = []
    for block in plain_blocks(network):
        linears = linears_of(block)
        if not all(isinstance(linear, QuantisedLinear) and linear.steps is not None for linear in linears):
            return []
        found.append(cast("BlockWeights", linears))
    return found


def real_network(network: Network) -> Network:
    """The network with real weights in place of calibrated ones, for devices without such products."""
    if not stored_weights(network):
        return network
    real = with_shared_weights(network)
    for block in plain_blocks(real):
        put_weights(block, tuple(map(_real, linears_of(block))))
    return _with_real_table(real)


def _real(linear: nn.Linear) -> nn.Linear:
    """A plain layer that gives the same; of layers that share a weight, each is given its own."""
    weight_OI = linear.weight
    plain = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    plain.weight = nn.Parameter(weight_OI, requires_grad=False)
    plain.register_parameter("bias", linear.bias)
    return plain


def is_for_memory(blocks: Sequence[Block]) -> bool:
    """Whether they hold weights of few bits that are to stay small: packed ones would not be."""
    linears = (linear for block in blocks for linear in linears_of(block))
    return any(isinstance(linear, QuantisedLinear) and linear.steps is None for linear in linears)


def put_weights(block: Block, weights: tuple[nn.Linear, ...]) -> None:
    """Let a block hold other layers: project, output, expand, contract."""
    feed_forward = block.feed_forward
    assert isinstance(feed_forward, FeedForward | GatedFeedForward), "linears_of takes no others"
    block.attention.project, block.attention.output, feed_forward.expand, feed_forward.contract = weights


def linears_of(block: Block) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
    """Project, output, expand, contract."""
    attention, feed_forward = block.attention, block.feed_forward
    assert isinstance(feed_forward, FeedForward | GatedFeedForward), "convertible_blocks gives no others"
    return attention.project, attention.output, feed_forward.expand, feed_forward.contract


def _with_blocks(network: Network, layers: Iterable[tuple[Block, BlockLinears]]) -> Network:
    encoder = network.encoder
    converted = Encoder(
        encoder.embeddings,
        [INFERENCE_BLOCKS[type(block)](block, linears) for block, linears in layers],
        order=encoder.order,
        final_norm=encoder.final_norm,
        sentence=encoder.sentence,
    )
    return Network(network.config, converted, dict(network.heads.items())).eval()


def _with_real_table(network: Network) -> Network:
    """The network, whose word table now holds real numbers: 8-bit ones would be scaled at each look-up."""
    embeddings = network.encoder.embeddings
    if isinstance(embeddings.words, QuantisedEmbedding):
        weight_VE = embeddings.words.weight
        table = nn.Embedding(len(weight_VE), weight_VE.shape[1], _weight=weight_VE)
        widen = embeddings.widen if isinstance(embeddings.widen, nn.Linear) else None
        added, norm, dropout = dict(embeddings.added.items()), embeddings.norm, embeddings.dropout.p
        # Others of its own: those of the network that was read stay as they are.
        network.encoder.embeddings = Embeddings(table, added, norm=norm, dropout=dropout, widen=widen)  # type: ignore[arg-type]
    return network.eval()


@contextmanager
def _observed(linears: list[nn.Linear]) -> Iterator[dict[nn.Linear, InputRange]]:
    """The inputs of each linear layer meanwhile; a layer that runs several times is seen as one (ALBERT)."""
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
