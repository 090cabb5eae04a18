"""A fitted law for the final loss of a pre-training run by size, tokens, text, batch and learning rate.

The form is from Hoffmann et al. (2022). Repeated passes count less (Muennighoff et al. 2023), as do tokens in
batches above the critical size (McCandlish et al. 2018). The log of the learning rate has a quadratic
penalty. The loss of word frequencies is a smooth upper limit. The constants are printed by
`python bench/scaling_fit.py bench/scaling_runs.jsonl --law`; bench/README.md has the errors of the law.
"""

from dataclasses import dataclass, field

import numpy as np

MILLION = 1e6


@dataclass(frozen=True, slots=True)
class RunSize:
    """The numbers of a run that predict its loss; each may be an array."""

    weights: float
    """Weights of the layers, without embeddings."""
    width: float
    tokens: float
    """Tokens of training, over all passes."""
    text_tokens: float
    """Tokens of the text, each counted once."""
    batch_tokens: float
    """Tokens per step."""

    @property
    def steps(self) -> float:
        """Number of optimisation steps."""
        return self.tokens / self.batch_tokens


@dataclass(frozen=True, slots=True)
class ScalingLaw:
    """Loss = constant + size / weights^size_power + data / tokens^data_power, in millions, with a limit."""

    constant: float
    size: float
    size_power: float
    data: float
    data_power: float
    repeats: float
    """Number of passes after the first that have much worth (R* of Muennighoff et al.)."""
    critical_batch: float
    """Critical batch size after a million tokens, in tokens; with larger batches, more steps gain more."""
    critical_power: float
    """Exponent of the critical batch size as a function of the tokens."""
    bend: float
    """Range in nats of the law's bend into its limit, the loss of word frequencies."""
    rate: float
    """Best learning rate for a width of 384, 16,384 tokens per step and 1,000 steps."""
    rate_width: float
    rate_batch: float
    rate_steps: float
    rate_penalty: float
    frequencies: float = 7.03
    """Loss of word frequencies in the text of the runs, in nats; losses of other texts are proportional."""
    accuracy: tuple[float, ...] = field(default=())
    """Coefficients, constant first, of a polynomial from the loss to the fraction of right masked words."""

    def best_rate(self, size: RunSize) -> float:
        """Return the learning rate with the lowest loss."""
        of_width: float = (size.width / 384) ** -self.rate_width
        of_batch: float = (size.batch_tokens / 16_384) ** self.rate_batch
        of_steps: float = (size.steps / 1000) ** self.rate_steps
        return self.rate * of_width * of_batch * of_steps

    def loss(self, size: RunSize, rate: float | None = None) -> float:
        """Return the final loss of the fixed evaluation, in nats; by default at the best learning rate."""
        off = 0.0 if rate is None else np.log(rate / self.best_rate(size))
        of_size = self.size * (size.weights / MILLION) ** -self.size_power
        of_data = self.data * (self.useful_tokens(size) / MILLION) ** -self.data_power
        loss = self.constant + of_size + of_data + self.rate_penalty * off**2
        bend = self.bend
        return -bend * np.logaddexp(-loss / bend, -self.frequencies / bend)  # type: ignore[no-any-return]

    def useful_tokens(self, size: RunSize) -> float:
        """Return the effective tokens, discounted for repeated passes and large batches."""
        seen = np.minimum(size.tokens, size.text_tokens)
        passes_after = np.maximum(0.0, size.tokens / seen - 1)
        fresh = seen * (1 + self.repeats * -np.expm1(-passes_after / self.repeats))
        critical = self.critical_batch * (size.tokens / MILLION) ** self.critical_power
        return fresh / (1 + size.batch_tokens / critical)  # type: ignore[no-any-return]

    def words_right(self, loss: float) -> float:
        """Return the fraction of masked words that are right at this loss."""
        return float(np.polynomial.polynomial.polyval(loss, self.accuracy))


MASKED = ScalingLaw(
    constant=1.623,
    size=1.225,
    size_power=0.3047,
    data=5.389,
    data_power=0.4766,
    repeats=12.94,
    critical_batch=2471,
    critical_power=0.4878,
    bend=2.725,
    rate=0.002119,
    rate_width=0.8485,
    rate_batch=0.2183,
    rate_steps=-0.3311,
    rate_penalty=0.5902,
    accuracy=(1.25, -0.436, 0.07247, -0.00484),
)
"""The law for masked tokens at a masking rate of 0.3."""
