"""The Transformer: attention and blocks over embeddings; published Transformers are composed of these.

Shapes: T packed tokens, R of them that are wanted, H heads, K head width, D model width, E embedding width, S
sequences, J = 3 H K in attention, twice the inner width if one half gates the other.
"""

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bertsmith.model.attention.attend import attend, flash_fits
from bertsmith.model.attention.kept import KeptAttention
from bertsmith.model.attention.projection import Attend, Projection
from bertsmith.model.attention.rotary import Rotary
from bertsmith.model.attention.rule import AttentionRule
from bertsmith.model.attention.watched import AttentionHeads
from bertsmith.model.embeddings import Embeddings
from bertsmith.model.encoder import Depth, Encoder, NamedLinear, Sentence, Stack, Stream
from bertsmith.model.encoder_config import Direction, EncoderConfig, need
from bertsmith.model.kernels.activations import activation_function
from bertsmith.model.kernels.elementwise import Dropout
from bertsmith.model.kernels.fused_gelu import gated_gelu, linear_gelu
from bertsmith.model.kernels.residual_norm import residual_norm
from bertsmith.model.transformer.transformer_config import TransformerConfig, with_heads
from bertsmith.packed import ALL, PackedBatch, Rows


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes of one layer's attention."""

    width: int
    heads: int
    head_width: int


def attention_shape(config: TransformerConfig, block: int) -> AttentionShape:
    """Return the sizes of a block's attention."""
    return AttentionShape(config.width, config.heads_in(block), config.head_width)


class SelfAttention(nn.Module):
    """Multi-head self-attention; one product computes query, key and value."""

    def __init__(
        self, shape: AttentionShape, *, rule: AttentionRule, bias: bool = True, rotary: Rotary | None = None
    ) -> None:
        super().__init__()
        self.heads, self.head_width = shape.heads, shape.head_width
        mixed = shape.heads * shape.head_width  # the model's width, unless heads were pruned
        self.project = nn.Linear(shape.width, 3 * mixed, bias=bias)
        self.output = nn.Linear(mixed, shape.width, bias=bias)
        self.rotary = rotary
        # Dropout only in training. Both rules are static, because a compiled graph is specialised on them.
        self.training_rule, self.rule = rule, replace(rule, dropout=0.0)

    def forward(self, hidden_TD: Tensor, batch: PackedBatch, attend: Attend, rows: Rows = ALL) -> Tensor:
        output_RD: Tensor = self.output(self.mixed(hidden_TD, batch, attend, rows))
        return output_RD

    def mixed(self, hidden_TD: Tensor, batch: PackedBatch, attend: Attend, rows: Rows = ALL) -> Tensor:
        """Return the mixed values of all heads, side by side, that the output layer takes."""
        inputs = Projection(
            hidden_TD, self.project, self.head_width, self.rotary, batch.positions_T, rows, self.training
        )
        return attend(inputs, batch.layout, self.training_rule if self.training else self.rule)


class FeedForward(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(
        self, width: int, inner: int, activation: str, *, bias: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.expand = nn.Linear(width, inner, bias=bias)
        self.contract = nn.Linear(inner, width, bias=bias)
        # BERT does not have one here.
        self.dropout = Dropout(dropout) if dropout else nn.Identity()
        self.activation_name, self.activation = activation, activation_function(activation)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        output_TD: Tensor = self.contract(self.inner(hidden_TD))
        return output_TD

    def inner(self, hidden_TD: Tensor) -> Tensor:
        """Return the input of the second layer."""
        if self.activation_name == "gelu":
            inner_TI = linear_gelu(hidden_TD, self.expand)
        else:
            inner_TI = self.activation(self.expand(hidden_TD))
        dropped_TI: Tensor = self.dropout(inner_TI)
        return dropped_TI


class GatedFeedForward(nn.Module):
    """A feed-forward layer with one inner half gated by the other (GeGLU; Shazeer 2020)."""

    def __init__(self, width: int, inner: int, activation: str, *, bias: bool, dropout: float) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 2 * inner, bias=bias)
        self.contract = nn.Linear(inner, width, bias=bias)
        self.dropout = Dropout(dropout)
        self.activation_name, self.activation = activation, activation_function(activation)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        halves_TJ = self.expand(hidden_TD)
        if self.activation_name == "gelu":
            gated_TI = gated_gelu(halves_TJ)
        else:
            inner_TI, gate_TI = halves_TJ.chunk(2, dim=-1)
            gated_TI = self.activation(inner_TI) * gate_TI
        output_TD: Tensor = self.contract(self.dropout(gated_TI))
        return output_TD


@dataclass(frozen=True, slots=True)
class Norms:
    """The normalisations of a block."""

    attention: nn.Module
    feed_forward: nn.Module
    attention_output: nn.Module | None = None
    """Norm of the output of attention, in a pre-norm sandwich (CogView; Ding et al. 2021)."""
    feed_forward_output: nn.Module | None = None


class Block(nn.Module):
    """The parts of one layer; subclasses differ in the places of the norms."""

    def __init__(
        self,
        attention: SelfAttention,
        feed_forward: FeedForward | GatedFeedForward,
        norms: Norms,
        *,
        dropout: float,
        feed_forward_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward
        self.attention_norm, self.feed_forward_norm = norms.attention, norms.feed_forward
        self.dropout = Dropout(dropout)
        # On the feed-forward's output: GPT-2 has it in a pre-norm block, ModernBERT does not.
        self.feed_forward_dropout = Dropout(feed_forward_dropout) if feed_forward_dropout else nn.Identity()
        self.attention_output_norm = norms.attention_output or nn.Identity()
        self.feed_forward_output_norm = norms.feed_forward_output or nn.Identity()


class PostNormBlock(Block):
    """One layer as published for BERT: LayerNorm after each residual sum, so warm-up is needed for Large.

    It does not call its sub-layers as modules, because the norm's kernel takes part in their last products:
    put hooks on the block or on a linear layer.
    """

    def forward(self, hidden_TD: Tensor, batch: PackedBatch, attend: Attend, rows: Rows = ALL) -> Tensor:
        attention, feed_forward = self.attention, self.feed_forward
        assert isinstance(feed_forward, FeedForward), "post-norm blocks only have a plain FeedForward"
        mixed_RJ = attention.mixed(hidden_TD, batch, attend, rows)
        hidden_RD = residual_norm(
            hidden_TD[rows], mixed_RJ, attention.output, self.attention_norm, self.dropout
        )
        inner_RI = feed_forward.inner(hidden_RD)
        return residual_norm(hidden_RD, inner_RI, feed_forward.contract, self.feed_forward_norm, self.dropout)


class PreNormBlock(Block):
    """One layer with LayerNorm before each sub-layer, so that the residual path stays clean (ModernBERT).

    In a sandwich, the output of each sub-layer is normalised, too.
    """

    def forward(self, hidden_TD: Tensor, batch: PackedBatch, attend: Attend, rows: Rows = ALL) -> Tensor:
        attended_RD = self.attention(self.attention_norm(hidden_TD), batch, attend, rows)
        residual_RD = hidden_TD[rows]
        if isinstance(self.attention_output_norm, nn.Identity):
            residual_RD = as_narrow(residual_RD, attended_RD)
        hidden_RD = residual_RD + self.dropout(self.attention_output_norm(attended_RD))
        fed_RD = self.feed_forward(self.feed_forward_norm(hidden_RD))
        output_RD: Tensor = hidden_RD + self.feed_forward_dropout(self.feed_forward_output_norm(fed_RD))
        return output_RD


def as_narrow(residual_RD: Tensor, branch_RD: Tensor) -> Tensor:
    """Return the residual in bf16 if the branch is bf16, as under autocast.

    The embeddings' norm gives fp32 there, and so would every later sum: a good part of a step's memory
    traffic. With fp16 residuals stay fp32: residual sums without a norm may exceed the range of fp16.
    """
    return residual_RD.to(torch.bfloat16) if branch_RD.dtype == torch.bfloat16 else residual_RD


class Transformer(Encoder):
    """Embeddings and a stack of blocks over packed tokens."""

    def __init__(
        self,
        embeddings: Embeddings,
        blocks: Sequence[nn.Module],
        *,
        order: Sequence[int],
        final_norm: nn.Module | None = None,
        sentence: Sentence = "first",
    ) -> None:
        super().__init__(sentence)
        self.embeddings = embeddings
        self.blocks = nn.ModuleList(blocks)
        # Block of each layer: 0, 1, 2, ... unless layers share one (ALBERT).
        self.order = tuple(order)
        self.final_norm = nn.Identity() if final_norm is None else final_norm

    def forward(self, batch: PackedBatch, *, rows: Rows = ALL) -> Tensor:
        """Return the last layer's states of the requested rows [R, D]; other rows skip most of that layer."""
        return self._last_states(batch, attend, rows)

    def hidden_states(self, batch: PackedBatch) -> list[Tensor]:
        """Return the states [T, D] after the embeddings and each layer; the last is `forward`'s result."""
        return self._hidden_states(batch, attend)

    @property
    def heads(self) -> AttentionHeads:
        """The attention heads of its layers."""
        return AttentionHeads(self.order, self._last_states, self._hidden_states)

    def _last_states(self, batch: PackedBatch, attend: Attend, rows: Rows) -> Tensor:
        hidden_TD = self.embeddings(batch)
        for layer, number in enumerate(self.order, start=1):
            wanted = rows if layer == len(self.order) else ALL
            hidden_TD = self._layer(number, hidden_TD, batch, attend, wanted)
        return self.after(hidden_TD)

    def _hidden_states(self, batch: PackedBatch, attend: Attend) -> list[Tensor]:
        states = [self.embeddings(batch)]
        for number in self.order:
            states.append(self._layer(number, states[-1], batch, attend, ALL))
        return [*states[:-1], self.after(states[-1])]

    def _layer(
        self, number: int, hidden_TD: Tensor, batch: PackedBatch, attend: Attend, rows: Rows
    ) -> Tensor:
        inputs = (hidden_TD, batch, attend, rows)
        states_RD: Tensor
        if self.recompute and self.training:
            states_RD = checkpoint(self.blocks[number], *inputs, use_reentrant=False)
        else:
            states_RD = self.blocks[number](*inputs)
        return states_RD

    def look(self, direction: Direction) -> None:
        """Let each token see both sides or one only, in training and afterwards."""
        if direction == "two-directions":  # its states do not have halves that see one side each
            super().look(direction)
        causal, backwards = direction != "both", direction == "right-to-left"
        for part in [each for each in self.modules() if isinstance(each, SelfAttention)]:
            part.training_rule = replace(part.training_rule, causal=causal, backwards=backwards)
            part.rule = replace(part.rule, causal=causal, backwards=backwards)
        # From left to right the first row sees no text, and a head on it would be a constant: use the last.
        if direction == "left-to-right" and self.sentence == "first":
            self.sentence = "last"
        elif self.direction == "left-to-right" != direction and self.sentence == "last":
            self.sentence = "first"
        self.direction = direction

    def stream(self) -> Stream | None:
        """Return a reader that keeps keys and values, if tokens see only earlier ones."""
        if self.direction != "left-to-right":
            return None
        kept = KeptAttention(self.layers)
        return lambda batch: self._last_states(batch, kept, ALL)

    # ---- its parts

    def own_blocks(self) -> list[Block]:
        """Return the trainable blocks, each once: not the blocks of an inference network."""
        return [block for block in self.blocks if isinstance(block, Block)]

    @property
    def input(self) -> Embeddings:
        return self.embeddings

    @property
    def words(self) -> nn.Embedding:
        return self.embeddings.words

    def put_words(self, table: nn.Embedding) -> None:
        self.embeddings.words = table

    def share_tables(self, other: Encoder) -> None:
        """Use all tables of another Transformer, and their norm.

        The widening layers stay separate, because the widths differ.
        """
        assert isinstance(other, Transformer)
        ours, theirs = self.embeddings, other.embeddings
        ours.words, ours.added, ours.norm = theirs.words, theirs.added, theirs.norm

    @property
    def layers(self) -> int:
        return len(self.order)

    @property
    def shares_layers(self) -> bool:
        """True if layers share blocks, or parts of them."""
        used = sum(len(list(self.blocks[number].parameters())) for number in self.order)
        return used != len(list(self.blocks.parameters()))

    def keep_layers(self, kept: Sequence[int], config: EncoderConfig) -> None:
        """Drop all other layers; each has a separate block unless layers share them (ALBERT)."""
        if len(self.blocks) == len(self.order):
            uses = Counter(part for block in self.blocks for part in block.modules())
            common = [*self.depths()[-1].also, *(part for part in uses if uses[part] > 1)]
            shared = {id(part): part for part in common}  # a copy of a block shares them, too
            self.blocks = nn.ModuleList(
                deepcopy(self.blocks[layer], {**shared}) if layer in kept[:at] else self.blocks[layer]
                for at, layer in enumerate(kept)
            )
        self.order = tuple(with_heads(config).order())

    def recordable(self, device: torch.device) -> bool:
        """True if flash attention takes its heads: other kernels read lengths on the CPU."""
        return all(flash_fits(block.attention.head_width, device) for block in self.own_blocks())

    def after(self, states_TD: Tensor) -> Tensor:
        """Return these states as a head reads them: pre-norm layers leave them unnormalised."""
        final_TD: Tensor = self.final_norm(states_TD)
        return final_TD

    def depths(self) -> list[Depth]:
        """Return the final norm with the last block, the other blocks, then tables and relative positions."""
        last, *lower = reversed(self.blocks)
        others = (self.blocks, self.final_norm, self.embeddings)
        shared = tuple(part for part in self.children() if part not in others)
        return [Depth(last, (self.final_norm,)), *map(Depth, lower), Depth(self.embeddings, shared)]

    def matrices(self) -> dict[nn.Parameter, Stack]:
        """Return the matrices of its blocks; query, key and value are one, and so are a gate and values."""
        stacked = {block.attention.project.weight: Stack(3, 3) for block in self.own_blocks()}
        layers = (block.feed_forward for block in self.own_blocks())
        stacked |= {each.expand.weight: Stack(2, 1) for each in layers if isinstance(each, GatedFeedForward)}
        parameters = (each for each in self.blocks.parameters() if each.dim() == 2)
        return {each: stacked.get(each, Stack()) for each in parameters}

    def linears(self) -> list[NamedLinear]:
        """Return the four linear layers of each block."""
        found = []
        for number, block in enumerate(self.own_blocks()):
            attention, layer, name = block.attention, block.feed_forward, f"blocks.{number}"
            between = layer.activation_name if isinstance(layer, FeedForward) else ""
            found += [
                NamedLinear(f"{name}.attention.project", attention.project, ("query", "key", "value")),
                NamedLinear(f"{name}.attention.output", attention.output, ("output",)),
                NamedLinear(f"{name}.feed_forward.expand", layer.expand, ("feed-forward",)),
                NamedLinear(f"{name}.feed_forward.contract", layer.contract, ("feed-forward",), between),
            ]
        return found


def as_transformer(encoder: Encoder, what: str) -> Transformer:
    """Return the encoder as a Transformer; raise a UserError that another kind has none of this."""
    return need(encoder if isinstance(encoder, Transformer) else None, what)
