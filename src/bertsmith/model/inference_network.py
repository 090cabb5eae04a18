"""The inference network of a CPU: the same layers, with weights that are packed once or rounded to 8 bits.

Shapes: T packed tokens or rows, R of them that are wanted, I inputs, O outputs, H heads, K head width,
D model width.

What learns and what predicts are two networks over the same weights. A weight that does not change any more
can lie as oneDNN reads it fastest, and a linear layer can compute its activation or residual on the way out,
which spares a pass over the outputs. Training could use neither: the packed form has no gradient.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from bertsmith.model.attention import Attend
from bertsmith.model.encoder import (
    ALL,
    Block,
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
from bertsmith.model.lora import LoraLinear
from bertsmith.model.network import Network
from bertsmith.model.torch_internals import (
    Quantized,
    QuantizedWeight,
    has_bf16_products,
    has_onednn,
    int8_linear,
    pack_int8_weight,
    pack_linear_weight,
    packed_linear,
    packed_linear_plus,
)
from bertsmith.packed import PackedBatch

FUSED = {"gelu": ("gelu", "none"), "relu": ("relu", "")}
"""Activations that oneDNN computes on the way out, with its name for their form."""
SMOOTHING = 0.6
"""How much of the inputs' spread moves into the weights (alpha of SmoothQuant; Xiao et al. 2022)."""
MIN_MAGNITUDE = 1e-5
"""Weights and inputs that are smaller are treated as if they were this large."""


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
#
# A transformer's inputs differ much in size from each other, and one step for all would round most of them
# away. What makes them alike is divided out as they are rounded, and multiplied into the weights beforehand,
# where each output has a step of its own.


@dataclass(frozen=True, slots=True)
class Steps:
    """How real numbers become 8-bit ones: in steps of one size, counted from a zero that may be shifted."""

    size: float
    zero: int
    dtype: torch.dtype

    def quantize(self, counted: Tensor) -> Tensor:
        """Numbers counted in steps, as 8-bit ones, what is too far out clamped; they are written over."""
        # -128 is left out, so that the range is the same on both sides of 0.
        lowest, highest = (0, 255) if self.dtype == torch.uint8 else (-127, 127)
        shifted = counted.round_() if self.zero == 0 else counted.round_().add_(self.zero)
        return shifted.clamp_(lowest, highest).to(self.dtype)


@dataclass(frozen=True, slots=True)
class InputRange:
    """What calibration saw of a linear layer's inputs."""

    lowest: float
    highest: float
    largest_I: Tensor
    """Of each input, by its absolute value."""

    def steps(self) -> Steps:
        """Unsigned steps over the whole range: for what an activation gives, most of it on one side of 0."""
        # With 0 outside of the range, the shifted zero would not fit into 8 bits.
        lowest, highest = min(self.lowest, 0.0), max(self.highest, 0.0)
        size = max(highest - lowest, MIN_MAGNITUDE) / 255
        return Steps(size, round(-lowest / size), torch.uint8)

    def joined(self, other: "InputRange") -> "InputRange":
        """The range of both."""
        largest_I = torch.maximum(self.largest_I, other.largest_I)
        return InputRange(min(self.lowest, other.lowest), max(self.highest, other.highest), largest_I)


class Int8Linear:
    """A linear layer that rounds its inputs, or takes them rounded, and can give its activation rounded."""

    def __init__(
        self, weight_OI: Tensor, bias_O: Tensor | None, *, steps: Steps, per_input_I: Tensor, to: Steps | None
    ) -> None:
        """`per_input_I`: steps in a unit of each input; `to`: the steps in which an activation is given."""
        # A scale for each output costs nothing: the product is scaled when its sum is complete.
        scales_O = weight_OI.abs().amax(1).clamp(min=MIN_MAGNITUDE / 127) / 127
        whole_OI = (weight_OI / scales_O[:, None]).round().to(torch.int8)
        self._weight = QuantizedWeight(
            pack_int8_weight(whole_OI),
            scales_O,
            zeros_O=torch.zeros(len(whole_OI), dtype=torch.int32),
            bias_O=None if bias_O is None else bias_O.detach().float(),
        )
        self._steps, self._per_input_I, self._to = steps, per_input_I, to

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
        to: Steps | None = None,
    ) -> Tensor:
        steps = self._steps
        rounded = values_TI.dtype == steps.dtype
        whole_TI = values_TI if rounded else steps.quantize(values_TI * self._per_input_I)
        output = (1.0, 0, dtype) if to is None else (to.size, to.zero, to.dtype)
        inputs = Quantized(whole_TI.contiguous(), steps.size, steps.zero)
        return int8_linear(inputs, self._weight, output, activation, form)


def smoothed_linear(
    linear: nn.Linear, seen: InputRange, dtype: torch.dtype, *, to: Steps | None = None
) -> Int8Linear:
    """A linear layer that rounds its inputs, each by a step of its own."""
    largest_I = seen.largest_I.clamp(min=MIN_MAGNITUDE)
    weight_OI = linear.weight.detach().float()
    by_weight_I = weight_OI.abs().amax(0).clamp(min=MIN_MAGNITUDE)
    # SmoothQuant's factor of each input: it makes inputs alike without making the weights too unlike.
    alike_I = largest_I**SMOOTHING / by_weight_I ** (1 - SMOOTHING)
    steps = Steps(float((largest_I / alike_I).max()) / 127, 0, torch.int8)
    per_input_I = (1 / (alike_I * steps.size)).to(dtype)
    # The weights make up for the factors as they are applied, rounded to this precision.
    adjusted_OI = weight_OI / (per_input_I.float() * steps.size)
    return Int8Linear(adjusted_OI, linear.bias, steps=steps, per_input_I=per_input_I, to=to)


def linear_after_activation(linear: nn.Linear, steps: Steps, dtype: torch.dtype) -> Int8Linear:
    """A linear layer that takes its inputs as they were rounded after an activation."""
    # Its inputs come in one step for all: a factor for each could not be divided out behind the activation.
    per_input_I = torch.full((linear.in_features,), 1 / steps.size, dtype=dtype)
    weight_OI = linear.weight.detach().float()
    return Int8Linear(weight_OI, linear.bias, steps=steps, per_input_I=per_input_I, to=None)


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


def packed_network(network: Network, over: Network | None = None) -> Network:
    """The same network with packed weights where its layers and its precision allow it, else itself.

    Adapters are computed beside packed weights: those of `over`, the packed network of their base, which are
    then held once, or their own.
    """
    blocks = convertible_blocks(network)
    if not blocks or not can_pack(blocks[0].attention.project.weight.dtype):
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
    return _with_blocks(network, converted)


def int8_network(network: Network, batch: PackedBatch, dtype: torch.dtype) -> Network:
    """The same fp32 network with 8-bit products, calibrated on a batch; all else in another precision."""
    blocks = convertible_blocks(network)
    with _observed([linear for block in blocks for linear in linears_of(block)]) as seen, torch.no_grad():
        network(batch)
    linears = []
    for block in blocks:
        project, output, expand, contract = linears_of(block)
        between, last = None, smoothed_linear(contract, seen[contract], dtype)
        if isinstance(block.feed_forward, FeedForward) and block.feed_forward.activation_name in FUSED:
            # The layer in the middle gives its activation already rounded, as the last one reads it: that
            # spares the widest values of a block a pass in full precision.
            between = seen[contract].steps()
            last = linear_after_activation(contract, between, dtype)
        linears.append(
            BlockLinears(
                project=smoothed_linear(project, seen[project], dtype),
                output=smoothed_linear(output, seen[output], dtype),
                expand=smoothed_linear(expand, seen[expand], dtype, to=between),
                contract=last,
            )
        )
    rest = deepcopy(network).to(dtype)  # the one that was read is what `save` writes
    for name, head in network.heads.items():
        if isinstance(head, OutputHead):
            rest.heads[name].output = head.output
    return _with_blocks(rest, zip(convertible_blocks(rest), linears, strict=True))


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
