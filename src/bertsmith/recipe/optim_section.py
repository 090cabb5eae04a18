"""The optim section of a recipe: the optimiser and its learning-rate schedule."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from bertsmith.recipe.section import Fraction, Off, Only, RuleError, Section

Algorithm = Literal["adamw", "lamb", "muon"]
"""Optimisers; training/optimizers.py, which loads torch, defines each."""
Schedule = Literal["google", "linear", "slanted", "constant", "wsd", "cosine"]
"""Learning-rate schedules, after the warm-up."""


OPTIM_ONLY = (
    Only(("optim.muon_momentum", "optim.muon_scale"), "optim.algorithm", ("muon",)),
    Only(("optim.decay_from",), "optim.schedule", ("wsd",)),
)


class OptimSection(Section):
    """The optimiser and its learning-rate schedule; the defaults are BERT's (optimization.py)."""

    algorithm: Algorithm = "adamw"
    """adamw: Adam with decoupled weight decay; lamb: LAMB (ALBERT); muon: Muon (Jordan et al. 2024) for the
    layers' matrices, with query, key and value separate, and Adam for embeddings, heads, norms and biases."""
    peak_lr: Annotated[float, Field(gt=0)] = 1e-4
    """Learning rate at the end of the warm-up; the factors below multiply it for parts of the model."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-6
    """Number added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay; not applied to biases and LayerNorms."""
    bias_correction: bool = False
    """Adam's bias correction; BERT's published code lacks it ("mostly an oversight"), RoBERTa has it."""
    clip_norm: Annotated[float, Field(gt=0)] | Off = 1.0
    """Maximum global gradient norm; larger gradients are scaled down."""
    warmup_fraction: Fraction = 0.01
    """Fraction of the run with a rising learning rate: 10,000 of 1,000,000 steps in BERT."""
    schedule: Schedule = "google"
    """After the warm-up. google: a line counted from step 0, so the rate jumps at the end of the warm-up;
    linear: a line from the end of the warm-up; slanted: linear from 1/32 of the peak and back (Howard & Ruder
    2018); constant: no decay; wsd: warm-up, stable, decay (Hu et al. 2024): flat until `decay_from`, then a
    line to 0; cosine: half a wave from the end of the warm-up to 0."""
    decay_from: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Fraction of the run, by its budget, at which the decay of schedule wsd begins."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Learning rate of each layer as a multiple of the rate of the layer above."""
    head_lr_factor: Annotated[float, Field(gt=0)] = 1.0
    """The heads' learning rate as a multiple of peak_lr."""
    embedding_lr_factor: Annotated[float, Field(gt=0)] = 1.0
    """The embeddings' learning rate as a multiple of peak_lr; a tied decoder counts as word embeddings."""
    matrix_lr_factor: Annotated[float, Field(gt=0)] = 1.0
    """The learning rate of the layers' matrices as a multiple of peak_lr: with Muon, its rate over Adam's."""
    muon_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of Muon's running mean of gradients, with Nesterov's look ahead."""
    muon_scale: Literal["original", "match_rms_adamw"] = "original"
    """Factor of Muon's orthogonal step besides the learning rate, as in torch.optim.Muon. original:
    sqrt(max(1, rows / columns)) (Jordan), with rates near 0.02; match_rms_adamw: 0.2 x sqrt(max(rows,
    columns)) (Moonlight), with rates as for Adam."""

    @model_validator(mode="after")
    def decay_begins_after_the_warm_up(self) -> "OptimSection":
        if self.schedule == "wsd" and self.decay_from < self.warmup_fraction:
            raise RuleError(
                f"optim.decay_from = {self.decay_from:g} is within the warm-up, which takes "
                f"{self.warmup_fraction:g} of the run",
                keys=("optim.decay_from", "optim.warmup_fraction"),
                remedy="begin the decay later, or shorten the warm-up",
            )
        return self
