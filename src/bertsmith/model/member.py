"""What a member of the family says of itself: its config, its parts, the names of its published weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from bertsmith.model.encoder import Encoder
from bertsmith.model.initial import InitialRule
from bertsmith.model.settings import Settings
from bertsmith.model.shape import Shape

Names = dict[str, tuple[str, ...]]
"""Our parameter name -> the published names whose tensors, one below the other, make it up."""


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """One head of a member: how to build it, and the published names of its weights."""

    build: Callable[[Shape, int], nn.Module]
    """From the shape and the number of outputs (ignored where the head fixes it)."""
    names: Callable[[Shape], Names]
    needs: tuple[str, ...] = ()
    """Other heads it stands on."""


@dataclass(frozen=True, slots=True)
class Member:
    """A member of the family."""

    model_type: str
    read_shape: Callable[[Settings], Shape]
    write_config: Callable[[Shape], dict[str, Any]]
    build_encoder: Callable[[Shape], Encoder]
    encoder_names: Callable[[Shape], Names]
    """Relative to the prefix."""
    prefix: str
    """What stands before encoder weights in a file that also has heads."""
    heads: Mapping[str, HeadPlan]
    architectures: Mapping[str, tuple[str, ...]]
    """The published class -> the heads it holds, richest first."""
    initial: Callable[[Shape], InitialRule]
    tied: Mapping[str, str]
    """Published second names of a weight -> its first name."""
    next_label: int = 0
    """Which output of the next-sentence head says that B follows A: 0 in BERT, 1 in ERNIE."""

    def names_of_head(self, head: str, shape: Shape) -> set[str]:
        """All published names of a head's weights."""
        return published_in(self.heads[head].names(shape))


def published_in(names: Names) -> set[str]:
    """All published names among these."""
    return {name for theirs in names.values() for name in theirs}


def pair_of(ours: str, *theirs: str, bias: bool = True) -> Names:
    """The names of a layer's weight and bias."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return {f"{ours}.{kind}": tuple(f"{name}.{kind}" for name in theirs) for kind in kinds}


def always(names: Names) -> Callable[[Shape], Names]:
    """Names that do not depend on the shape."""
    return lambda _shape: names


def constant_std(shape: Shape) -> InitialRule:
    """Truncated normal with one standard deviation for all matrices, as published for BERT."""
    return InitialRule(std=lambda _name: shape.initial_std)


def with_prefix(names: Names, prefix: str) -> Names:
    """The same names with a prefix before the published ones."""
    return {ours: tuple(prefix + name for name in theirs) for ours, theirs in names.items()}
