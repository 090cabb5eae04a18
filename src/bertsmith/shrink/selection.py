"""Selection of the heads and neurons to keep: the most important ones, and at least one per layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from bertsmith.core.errors import UserError
from bertsmith.model.importance import UnitImportance
from bertsmith.shrink.slicing import KeptUnits, Numbers

Widths = Literal["equal", "free"]
"""equal: each layer keeps the same number of neurons, a published shape; free: the best of all layers."""


@dataclass(frozen=True, slots=True)
class UnitCounts:
    """Numbers of heads and of neurons to keep, each over all layers together."""

    heads: int
    neurons: int
    widths: Widths


def counts_left(
    before: Sequence[KeptUnits], fractions: tuple[float, float], widths: Widths, *, done: float = 1.0
) -> UnitCounts:
    """Return the units left once `done`, from 0 to 1, of these fractions of heads and neurons is removed."""
    blocks = len(before)
    heads = _left(sum(len(units.heads) for units in before), fractions[0], done)
    neurons = _left(sum(len(units.neurons) for units in before), fractions[1], done)
    heads.check(blocks, "heads", key="heads")
    neurons.check(blocks, "neurons", key="ffn")
    return UnitCounts(heads.left, neurons.left, widths)


@dataclass(frozen=True, slots=True)
class _Left:
    left: int
    every: int
    fraction: float

    def check(self, blocks: int, noun: str, *, key: str) -> None:
        """Raise an error if a layer would lose all of its units."""
        if self.left < blocks:
            most = int(100 * (self.every - blocks) / self.every) / 100
            what = f"{self.fraction:g} would leave {self.left} of {self.every} {noun} for {blocks} layers"
            remedy = f"a layer keeps at least one: choose at most {most:g}"
            raise UserError(what, key=key, remedy=remedy)


def _left(every: int, fraction: float, done: float) -> _Left:
    return _Left(every - round(every * fraction * done), every, fraction)


def chosen_units(importance: UnitImportance, left: UnitCounts) -> list[KeptUnits]:
    """Return this many units, the most important by scores that are comparable between layers."""
    ranked = importance.normalised()
    heads = best_of_all(ranked.heads, left.heads)
    if left.widths == "free":
        neurons = best_of_all(ranked.neurons, left.neurons)
    else:
        width = _equal_width([len(scores) for scores in ranked.neurons], left.neurons)
        neurons = [_best_of(scores, min(width, len(scores))) for scores in ranked.neurons]
    return [KeptUnits(*both) for both in zip(heads, neurons, strict=True)]


def best_of_all(scores: Sequence[Tensor], count: int) -> list[Numbers]:
    """Return the best units of all blocks together; each block keeps at least its best one."""
    kept = [set(_best_of(block, 1)) for block in scores]
    others = sorted(
        (-float(score), block, number)
        for block, of_block in enumerate(scores)
        for number, score in enumerate(of_block)
        if number not in kept[block]
    )
    for _, block, number in others[: max(0, count - len(kept))]:
        kept[block].add(number)
    return [tuple(sorted(numbers)) for numbers in kept]


def _equal_width(before: Sequence[int], count: int) -> int:
    """Return the largest common width that leaves at most `count` neurons; narrower layers stay."""
    fitting = (
        width for width in range(max(before), 0, -1) if sum(min(width, each) for each in before) <= count
    )
    return next(fitting, 1)


def _best_of(scores: Tensor, count: int) -> Numbers:
    best = sorted(range(len(scores)), key=lambda number: (-float(scores[number]), number))[:count]
    return tuple(sorted(best))
