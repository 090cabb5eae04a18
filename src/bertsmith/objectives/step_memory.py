"""The memory that a training step needs, by arithmetic alone.

The figures count tensors: what autograd keeps of each layer (seen with saved_tensors_hooks, on a CPU), what
stands beside it for a moment, and fp32 weights, gradients and the moments. Shapes: D width, I inner width.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from bertsmith.core.errors import UserError
from bertsmith.model.encoder_config import EncoderConfig
from bertsmith.model.product_attention import products_fit
from bertsmith.objectives.linear_cross_entropy import chunk_rows
from bertsmith.training.trainer import DTYPES, Precision

FP32, BF16, INT64 = 4, 2, 8
USABLE = 0.85
"""Fraction of the free memory to plan with; the rest is for workspaces and gaps between the blocks."""
DENSE_BUFFERS = 5
"""Matrices of all scores that grouped attention with dropout holds at once in its backward pass."""
MAX_TOKENS = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLoad:
    """What decides the memory of a training step, but for its number of tokens."""

    config: EncoderConfig
    parameters: int
    """Those that this process holds: all of them, or its shard under FSDP."""
    moments: int
    """Those that the optimiser keeps of each."""
    longest: int
    """Tokens of the longest sequence."""
    predicted_fraction: float
    """Rows that are scored against the vocabulary, for each token."""
    device: Literal["cpu", "cuda"]
    precision: Precision
    recompute: bool
    compiled: bool = False
    generator: EncoderConfig | None = None
    """Of the masked LM that a discriminator learns from, which then scores the predicted rows."""
    teacher: EncoderConfig | None = None
    """Of what a student learns from, which is not trained and scores the same rows."""
    teacher_parameters: int = 0
    compared: int = 0
    """Bytes for each token of states and attention scores that student and teacher are compared by."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of one training step by what they are for."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """What the backward pass needs of every layer."""
    scores: int
    """The predicted rows over the whole vocabulary, with their logarithms and gradients; or, where they are
    not kept, the gradients alone."""
    working: int
    """What the backward pass of one layer, or a chunk of scores, needs for a moment."""

    @property
    def total(self) -> int:
        """All of it together: the peak, at the start of the backward pass."""
        kept = self.weights + self.gradients + self.optimizer
        return kept + self.activations + self.scores + self.working


def estimate_memory(load: TrainingLoad, tokens: int) -> MemoryEstimate:
    """The memory of a step whose micro-batches hold this many tokens."""
    of_generator, rows = 0, math.ceil(tokens * load.predicted_fraction)
    if load.generator is not None:
        smaller = replace(load, config=load.generator, generator=None)
        of_generator = tokens * (_embeddings(smaller) + _kept_of_layers(smaller))
    return MemoryEstimate(
        # Under autocast every product keeps a half-precision copy of its weights until it is differentiated.
        weights=load.parameters * (FP32 if load.precision == "fp32" else FP32 + BF16)
        + load.teacher_parameters * FP32,
        gradients=load.parameters * FP32,
        optimizer=load.parameters * load.moments * FP32,
        activations=of_generator + tokens * (_embeddings(load) + _kept_of_layers(load) + load.compared),
        scores=_scores(load, rows),
        working=max(tokens * max(_working(load), _working_of_teacher(load)), _chunk(load, rows)),
    )


def largest_micro_batch(load: TrainingLoad, *, free_bytes: int) -> int:
    """The most tokens, 2 or 3 times a power of two, whose step fits what is free before the run begins."""
    usable = int(free_bytes * USABLE)
    sizes = (factor << power for power in range(MAX_TOKENS.bit_length(), 0, -1) for factor in (3, 2))
    for tokens in (*(size for size in sizes if load.longest < size <= MAX_TOKENS), load.longest):
        if estimate_memory(load, tokens).total <= usable:
            return tokens
    raise _does_not_fit(load, usable)


def _does_not_fit(load: TrainingLoad, usable: int) -> UserError:
    needed, alone = estimate_memory(load, load.longest), estimate_memory(load, 0)
    if alone.total > usable:
        what = f"the model's weights, gradients and moments need {gibibytes(alone.total)}"
        remedy = 'take a smaller model (model.layers, model.width) or share it out (run.parallel = "fsdp")'
    else:
        what = f"one sequence of {load.longest} tokens needs {gibibytes(needed.total)} with the model"
        less = "" if load.recompute else "set run.recompute = true, "
        remedy = f"{less}shorten examples.stages or take a smaller model (model.layers, model.width)"
    return UserError(
        f"{what}, and {gibibytes(usable)} may be used", where="batch.micro_tokens", remedy=remedy
    )


def gibibytes(count: int) -> str:
    """A number of bytes in words."""
    return f"{count / 2**30:.2f} GiB"


def _value(load: TrainingLoad) -> int:
    """Bytes of a number that a product gives."""
    return FP32 if load.precision == "fp32" else BF16


def _dropout_mark(load: TrainingLoad) -> int:
    """Bytes of what dropout keeps for each number: on a CPU its factor, on a GPU whether it stayed."""
    return _value(load) if load.device == "cpu" else 1


def _embeddings(load: TrainingLoad) -> int:
    """Bytes for each token: three ids, the sum in front of the LayerNorm with its two statistics, dropout."""
    return 3 * INT64 + load.config.embedding_width * (FP32 + _dropout_mark(load)) + 2 * FP32


def _kept_of_layers(load: TrainingLoad) -> int:
    if load.recompute:  # that keeps their inputs alone
        return load.config.layers * load.config.width * FP32
    return sum(_all_of_a_layer(load, block) for block in load.config.order())


def _all_of_a_layer(load: TrainingLoad, block: int) -> int:
    """Bytes for each token that a post-norm layer keeps; our kernels on CUDA keep less than that.

    They keep no marks of dropout, and the norms' inputs in half precision.
    """
    config, value = load.config, _value(load)
    width, heads = config.width, config.heads_in(block)
    # Inputs of both sub-layers (2 D), query, key, value and their mix (4 D, less where heads were pruned),
    # before and after GELU (2 I).
    products = (2 * width + 4 * heads * config.head_width + 2 * config.expanded_in(block)) * value
    # In fp32: both LayerNorms' inputs (2 D), means and deviations; each head's softmax denominator.
    norms = 2 * (width + 2) * FP32 + heads * FP32
    return products + norms + 2 * width * _dropout_mark(load) + heads * _kept_scores(load)


def _kept_scores(load: TrainingLoad) -> int:
    """Bytes for each token and head where attention keeps its probabilities and what dropout left of them."""
    dropout, dtype = load.config.attention_dropout, DTYPES[load.precision]
    if load.device == "cpu" and products_fit(load.longest, dropout, dtype):
        return load.longest * (_value(load) + 1)
    return 0


def _chunked(load: TrainingLoad) -> bool:
    """Whether the loss keeps no scores (`objectives.linear_cross_entropy`)."""
    alone = load.generator is None and load.teacher is None
    return load.device == "cpu" and load.precision == "fp32" and alone and not load.compiled


def _gradient_of_words(load: TrainingLoad) -> int:
    return load.config.vocabulary * (load.config.embedding_width + 1) * FP32


def _scores(load: TrainingLoad, rows: int) -> int:
    """Bytes for the predicted rows: the head's transform, then their scores or what became of them."""
    transform = 4 * load.config.width * FP32
    if not _chunked(load):
        return rows * (transform + _scored_row(load))
    return rows * (transform + load.config.embedding_width * FP32) + bool(rows) * _gradient_of_words(load)


def _chunk(load: TrainingLoad, rows: int) -> int:
    """Bytes of the scores that such a loss has for a moment, or of the words' gradient as it is scaled."""
    if not (rows and _chunked(load)):
        return 0
    vocabulary = load.config.vocabulary
    # Beside the scores, a copy of those rows whose label may be the best guess: at worst of all.
    scores = 2 * min(rows, chunk_rows(vocabulary)) * vocabulary * FP32
    return max(scores, _gradient_of_words(load))


def _scored_row(load: TrainingLoad) -> int:
    """Bytes for each predicted row where all are kept: scores, their logarithms and a gradient."""
    scores = 2 * FP32 if load.precision == "fp32" else 2 * FP32 + BF16
    # To sample from them: probabilities, these as whole numbers, and their running sums.
    scores += 0 if load.generator is None else 3 * FP32
    # The teacher's scores, both models' logarithms, and what a divergence of them takes.
    scores += 0 if load.teacher is None else 6 * FP32
    return load.config.vocabulary * scores


def _working_of_teacher(load: TrainingLoad) -> int:
    """Bytes for each token of the teacher's widest layer; what is kept of it is `compared`."""
    if load.teacher is None:
        return 0
    theirs = replace(load, config=load.teacher)
    return max(_all_of_a_layer(theirs, block) for block in range(load.teacher.blocks))


def _working(load: TrainingLoad) -> int:
    """Bytes for each token of the gradients on their way through a layer, and of a layer computed again."""
    return max(_working_in(load, block) for block in range(load.config.blocks))


def _working_in(load: TrainingLoad, block: int) -> int:
    config, heads = load.config, load.config.heads_in(block)
    gradients = (2 * config.expanded_in(block) + 4 * config.width) * _value(load)
    again = _all_of_a_layer(load, block) if load.recompute else 0
    flash = load.device == "cuda" and load.precision == "bf16"  # fp16 is for GPUs that are too old for it
    dense = 0 if flash or not config.attention_dropout else DENSE_BUFFERS * heads * load.longest * FP32
    return gradients + again + dense
