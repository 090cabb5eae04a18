"""The memory that a training step needs, by arithmetic alone.

The figures count tensors: the ones that autograd keeps of each layer (seen with saved_tensors_hooks, on a
CPU), temporary ones, and fp32 weights, gradients and moments. Shapes: D width, I inner width.
"""

import math
from dataclasses import dataclass, replace

from bertsmith.core.errors import DoesNotFit
from bertsmith.model.encoder_config import BF16, FP32, EncoderConfig, StepForm
from bertsmith.objectives.linear_cross_entropy import chunk_rows

INT64 = 8
USABLE = 0.85
"""Fraction of the free memory to plan with; the rest is for workspaces and gaps between the blocks."""
MAX_TOKENS = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLoad(StepForm):
    """Properties that determine the memory of a training step, besides its number of tokens."""

    config: EncoderConfig
    parameters: int
    """Weights in this process: all of them, or its shard under FSDP."""
    moments: int
    """Moments that the optimiser keeps of each weight."""
    predicted_fraction: float
    """Rows that are scored against the vocabulary, for each token."""
    compiled: bool = False
    generator: EncoderConfig | None = None
    """Config of the masked LM that a discriminator learns from; it then scores the predicted rows."""
    teacher: EncoderConfig | None = None
    """Config of a student's teacher, which is not trained and scores the same rows."""
    teacher_parameters: int = 0
    compared: int = 0
    """Bytes per token of the states and attention scores that are compared between student and teacher."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of one training step by purpose."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Bytes of all layers that the backward pass needs."""
    scores: int
    """Bytes of the predicted rows over the whole vocabulary, with their logarithms and gradients; or of the
    gradients alone, if they are not kept.
    """
    working: int
    """Bytes that the backward pass of one layer, or a chunk of scores, needs temporarily."""

    @property
    def total(self) -> int:
        """Total bytes: the peak, at the start of the backward pass."""
        kept = self.weights + self.gradients + self.optimizer
        return kept + self.activations + self.scores + self.working


def estimate_memory(load: TrainingLoad, tokens: int) -> MemoryEstimate:
    """Estimate the memory of a step with micro-batches of this many tokens."""
    of_generator, rows = 0, load.config.views * math.ceil(tokens * load.predicted_fraction)
    of_teacher = 0 if load.teacher is None else load.teacher.layer_bytes(load)  # `compared` is kept
    if load.generator is not None:
        smaller = replace(load, config=load.generator, generator=None)
        of_generator = tokens * (_embeddings(smaller) + load.generator.kept_bytes(load))
    return MemoryEstimate(
        # Under autocast every product keeps a half-precision copy of its weights until it is differentiated.
        weights=load.parameters * (FP32 if load.precision == "fp32" else FP32 + BF16)
        + load.teacher_parameters * FP32,
        gradients=load.parameters * FP32,
        optimizer=load.parameters * load.moments * FP32,
        activations=of_generator
        + tokens * (_embeddings(load) + load.config.kept_bytes(load) + load.compared),
        scores=_scores(load, rows),
        working=max(tokens * max(load.config.working_bytes(load), of_teacher), _chunk(load, rows)),
    )


def largest_micro_batch(load: TrainingLoad, *, free_bytes: int) -> int:
    """Return the most tokens, 2 or 3 times a power of two, that fit into the free memory in one step."""
    usable = int(free_bytes * USABLE)
    sizes = (factor << power for power in range(MAX_TOKENS.bit_length(), 0, -1) for factor in (3, 2))
    for tokens in (*(size for size in sizes if load.longest < size <= MAX_TOKENS), load.longest):
        if estimate_memory(load, tokens).total <= usable:
            return tokens
    raise _does_not_fit(load, usable)


def _does_not_fit(load: TrainingLoad, usable: int) -> DoesNotFit:
    needed, alone = estimate_memory(load, load.longest), estimate_memory(load, 0)
    if alone.total > usable:
        what = f"the model's weights, gradients and moments need {gibibytes(alone.total)}"
        remedy = 'use a smaller model (model.layers, model.width) or shard it (run.parallel = "fsdp")'
    else:
        what = f"one sequence of {load.longest} tokens needs {gibibytes(needed.total)} with the model"
        less = "" if load.recompute else "set run.recompute = true, "
        remedy = f"{less}shorten examples.stages or use a smaller model (model.layers, model.width)"
    return DoesNotFit(
        f"{what}, and {gibibytes(usable)} are available", key="batch.micro_tokens", remedy=remedy
    )


def gibibytes(count: int) -> str:
    """Format a number of bytes."""
    return f"{count / 2**30:.2f} GiB"


def _embeddings(load: TrainingLoad) -> int:
    """Return bytes per token: three ids, the sum before the LayerNorm with its two statistics, dropout."""
    return 3 * INT64 + load.config.embedding_width * (FP32 + load.dropout_mark) + 2 * FP32


def _chunked(load: TrainingLoad) -> bool:
    """True if the loss does not store scores (`objectives.linear_cross_entropy`)."""
    alone = load.generator is None and load.teacher is None
    return load.device == "cpu" and load.precision == "fp32" and alone and not load.compiled


def _gradient_of_words(load: TrainingLoad) -> int:
    return load.config.vocabulary * (load.config.embedding_width + 1) * FP32


def _scores(load: TrainingLoad, rows: int) -> int:
    """Return the bytes of the predicted rows: the head's transform, then their scores or the rest of them."""
    transform = 4 * load.config.width * FP32
    if not _chunked(load):
        return rows * (transform + _scored_row(load))
    kept = rows * (transform + load.config.embedding_width * FP32)
    return kept + load.config.views * bool(rows) * _gradient_of_words(load)


def _chunk(load: TrainingLoad, rows: int) -> int:
    """Return the temporary bytes of such a loss: a chunk of scores, or the scaled gradient of the words."""
    if not (rows and _chunked(load)):
        return 0
    vocabulary = load.config.vocabulary
    # In addition to the scores, a copy of the rows with labels that may be the best guess: at worst all.
    scores = 2 * min(rows, chunk_rows(vocabulary)) * vocabulary * FP32
    return max(scores, _gradient_of_words(load))


def _scored_row(load: TrainingLoad) -> int:
    """Return the bytes of each predicted row if all are kept: scores, their logarithms and a gradient."""
    scores = 2 * FP32 if load.precision == "fp32" else 2 * FP32 + BF16
    # For sampling: probabilities, their whole numbers, and running sums.
    scores += 0 if load.generator is None else 3 * FP32
    # The teacher's scores, both models' logarithms, and temporaries of their divergence.
    scores += 0 if load.teacher is None else 6 * FP32
    return load.config.vocabulary * scores
