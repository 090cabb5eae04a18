"""The optim section of a recipe: the optimiser and its learning-rate schedule."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from bertsmith.recipe.section import Fraction, Off, Section

Algorithm = Literal["adamw", "lamb"]
"""Optimisers; what each is and needs stands in training/optimizers.py, which loads torch."""


class OptimSection(Section):
    """The optimiser and its learning-rate schedule; the defaults are BERT's (optimization.py)."""

    algorithm: Algorithm = "adamw"
    """Adam with decoupled weight decay, or LAMB (ALBERT)."""
    peak_lr: Annotated[float, Field(gt=0)] = 1e-4
    """Learning rate at the end of the warm-up."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-6
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled; not applied to biases and LayerNorms."""
    bias_correction: bool = False
    """BERT's published code has none ("mostly an oversight"); RoBERTa has it."""
    clip_norm: Annotated[float, Field(gt=0)] | Off = 1.0
    """Largest global gradient norm."""
    warmup_fraction: Fraction = 0.01
    """Fraction of the run with a rising learning rate: 10,000 of 1,000,000 steps in BERT."""
    schedule: Literal["google", "linear", "slanted", "constant"] = "google"
    """After the warm-up. google: a line that counts from step 0, so the rate jumps where it takes over;
    linear: a line from the end of the warm-up; slanted: linear from 1/32 of the peak and back (Howard &
    Ruder 2018); constant: no decay."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Each layer's learning rate as a multiple of the one above it."""
    head_lr_factor: Annotated[float, Field(gt=0)] = 1.0
    """The heads' learning rate as a multiple of the encoder's."""

    @field_validator("schedule", mode="before")
    @classmethod
    def read_former_value(cls, schedule: object) -> object:
        """Pre-training recipes called the linear schedule continuous."""
        return "linear" if schedule == "continuous" else schedule
