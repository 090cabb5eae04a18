"""Who may look at whom inside a sequence."""

from dataclasses import dataclass

EVERYTHING = -1
"""The window of a rule that sees the whole sequence."""


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Who may look at whom inside a sequence, and the dropout on the probabilities.

    A rule is static data that a compiled graph can be specialised on. Dropout therefore draws from torch's
    generator of the device, like every other dropout of a network: seed that, and the step is reproducible.
    """

    causal: bool = False
    window: int = EVERYTHING
    """How far each token sees to either side."""
    dropout: float = 0.0
