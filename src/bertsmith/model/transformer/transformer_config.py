"""The numbers of a Transformer: its layers with their heads, and their costs.

Shapes: D width, I inner width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from bertsmith.core.errors import UserError
from bertsmith.model.encoder_config import (
    FP32,
    OWN_TYPE,
    ConfigReader,
    EncoderConfig,
    PassSize,
    StepForm,
    need,
)

DENSE_BUFFERS = 5
"""Number of matrices of all scores in the backward pass of grouped attention with dropout."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(EncoderConfig):
    """Sizes, activation and rates; the defaults are BERT's (Devlin et al. 2018)."""

    plain_attention: ClassVar[bool] = True
    """True if attention scores are products of one query and one key (not DeBERTa's)."""
    heads: int
    inner: int
    """Width inside the feed-forward layer; the widest one if layers differ."""
    segments: int = 2
    task_types: int = 0
    """Number of ERNIE's task embeddings, or 0."""
    activation: str = "gelu"
    norm_eps: float = 1e-12
    attention_dropout: float = 0.1
    layer_heads: tuple[int, ...] = ()
    """Number of heads in each block if some were pruned; empty if each has `heads`."""
    layer_inner: tuple[int, ...] = ()
    """Width inside of each block's feed-forward if blocks differ; empty if each has `inner`."""

    @property
    def head_width(self) -> int:
        """Return the width of a head: pruning removes heads, and does not change the others."""
        return self.width // self.heads

    @property
    def blocks(self) -> int:
        """Number of blocks; fewer than layers if these share them (ALBERT)."""
        return self.layers

    def order(self) -> Sequence[int]:
        """Block of each layer."""
        return range(self.layers)

    def heads_in(self, block: int) -> int:
        """Return the number of heads of a block."""
        return self.layer_heads[block] if self.layer_heads else self.heads

    def inner_in(self, block: int) -> int:
        """Return the width inside of a block's feed-forward."""
        return self.layer_inner[block] if self.layer_inner else self.inner

    def expanded_in(self, block: int) -> int:
        """Return the number of values per token after the first product of a block's feed-forward."""
        return self.inner_in(block)

    def seen_tokens(self, length: float, layer: int) -> float:  # noqa: ARG002 - layers differ elsewhere
        """Return the number of tokens that a token of a sequence sees in a layer."""
        return length

    def shape_text(self) -> str:
        return f"{super().shape_text()}, {self.heads} heads"

    # ---- files

    def checked(self, reader: ConfigReader) -> Self:
        """Return the config with the heads and widths of each layer, if the file lists them (pruning)."""
        if self.width % self.heads:
            what = f"{self.heads} attention heads do not divide a width of {self.width}"
            raise UserError(what, where=reader.where, remedy="correct the two numbers")
        heads = reader.sizes("heads_per_layer", count=self.blocks, most=self.heads)
        inner = reader.sizes("intermediate_sizes", count=self.blocks, most=self.inner)
        return replace(super().checked(reader), layer_heads=heads, layer_inner=inner)

    def own_keys(self) -> dict[str, Any]:
        """Return the heads and widths of each layer, if they differ."""
        keys = {"heads_per_layer": list(self.layer_heads), "intermediate_sizes": list(self.layer_inner)}
        said = {key: sizes for key, sizes in keys.items() if sizes}
        return {"model_type": OWN_TYPE, "base_model_type": self.model_type, **said} if said else {}

    def own_settings(self) -> tuple[str, ...]:
        """Return names for shapes of layers that published classes lack."""
        differs = {"pruned heads": self.layer_heads, "feed-forward widths by layer": self.layer_inner}
        return tuple(name for name, sizes in differs.items() if sizes)

    def subset(self, layers: Sequence[int], *, where: str = "distill.layers") -> Self:
        """Return the config of a network with only these layers; `where` names the option for them."""
        if behind := [each for each in layers if each >= self.layers]:
            what = (
                f"the teacher has {self.layers} layers, and layer {behind[0]}, counted from 0, is not one of"
            )
            raise UserError(f"{what} them", where=where, remedy="choose fewer, or a larger teacher")

        def left(sizes: tuple[int, ...]) -> tuple[int, ...]:
            """Return these layers' sizes if pruning made them differ; one block has one for all layers."""
            return tuple(sizes[each] for each in layers) if len(sizes) == self.layers else sizes

        heads, inner = left(self.layer_heads), left(self.layer_inner)
        return replace(self, layers=len(layers), layer_heads=heads, layer_inner=inner)

    # ---- costs

    def operations(self, size: PassSize) -> float:
        length = size.tokens / max(1, size.sequences)
        found = 0.0
        for layer, block in enumerate(self.order()):
            mixed = self.heads_in(block) * self.head_width
            weights = self.width * (4 * mixed + self.expanded_in(block) + self.inner_in(block))
            found += 2 * weights + 4 * mixed * self.seen_tokens(length, layer)
        return size.tokens * found

    def kept_bytes(self, form: StepForm) -> int:
        if form.recompute:  # that keeps their inputs alone
            return self.layers * self.width * FP32
        return sum(self._kept_in(form, block) for block in self.order())

    def layer_bytes(self, form: StepForm) -> int:
        return max(self._kept_in(form, block) for block in range(self.blocks))

    def working_bytes(self, form: StepForm) -> int:
        return max(self._working_in(form, block) for block in range(self.blocks))

    def _kept_in(self, form: StepForm, block: int) -> int:
        """Return the bytes for each token that a post-norm layer keeps; our kernels on CUDA keep less.

        They keep no marks of dropout, and the norms' inputs in half precision.
        """
        width, heads = self.width, self.heads_in(block)
        # Inputs of both sub-layers (2 D), query, key, value and their mix (4 D, less if heads were pruned),
        # before and after GELU (2 I).
        products = (2 * width + 4 * heads * self.head_width + 2 * self.expanded_in(block)) * form.value
        # In fp32: both LayerNorms' inputs (2 D), means and deviations; each head's softmax denominator.
        norms = 2 * (width + 2) * FP32 + heads * FP32
        return products + norms + 2 * width * form.dropout_mark + heads * self._kept_scores(form)

    def _kept_scores(self, form: StepForm) -> int:
        """Return the bytes for each token and head of attention that keeps its probabilities."""
        if form.device != "cpu":
            return 0
        import torch

        from bertsmith.model.attention.products import products_fit

        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        kept = products_fit(form.longest, self.attention_dropout, dtypes[form.precision])
        return form.longest * (form.value + 1) if kept else 0

    def _working_in(self, form: StepForm, block: int) -> int:
        gradients = (2 * self.expanded_in(block) + 4 * self.width) * form.value
        again = self._kept_in(form, block) if form.recompute else 0
        flash = form.device == "cuda" and form.precision == "bf16"  # fp16 is for GPUs that are too old for it
        dense = DENSE_BUFFERS * self.heads_in(block) * form.longest * FP32
        return gradients + again + (0 if flash or not self.attention_dropout else dense)


def with_heads(config: EncoderConfig) -> TransformerConfig:
    """Return the config as one with attention heads; raise a UserError if it is of another kind."""
    return need(config if isinstance(config, TransformerConfig) else None, "attention heads")
