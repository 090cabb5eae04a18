"""What a published file holds: tensors under one spelling, the heads they make, what is wrong with them."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bertsmith.ground.errors import UserError
from bertsmith.model.member import Member, Names, published_in
from bertsmith.model.shape import Shape

SHOWN_NAMES = 8
WEIGHT_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BUFFERS = ("position_ids", "token_type_ids")
"""Constants that old files store among the weights."""
PARALLEL_PREFIX = "module."
"""What torch's data-parallel wrappers put before every name."""


@dataclass(frozen=True, slots=True)
class Published:
    """The tensors of a file under the member's names, with its prefix."""

    tensors: dict[str, Tensor]
    member: Member
    shape: Shape
    where: Path

    def names_of(self, head: str) -> set[str]:
        """The published names of a head."""
        return self.member.names_of_head(head, self.shape)

    def heads(self, expected: Iterable[str]) -> dict[str, int]:
        """The heads whose weights are there, with their numbers of outputs; expected ones must be whole."""
        found: dict[str, int] = {}
        for head in expected:
            self._take(head, found)
            absent = self.names_of(head) - self.tensors.keys()
            # A pooler that is missing altogether is no fault: some models never had one.
            if absent and (head != "pooler" or absent < self.names_of(head)):
                self.refuse_missing(self.names_of(head))
        # Where heads share names (tagger, classifier), the one that stands on what is there is likelier.
        for head in sorted(self.member.heads, key=lambda head: not self._stands(head)):
            self._take(head, found)
        return found

    def refuse_missing(self, names: set[str]) -> None:
        """Stop where the file lacks some of these weights, listing them."""
        if missing := names - self.tensors.keys():
            remedy = "the file is incomplete or of another model"
            raise UserError(f"weights are missing: {_listed(missing)}", where=str(self.where), remedy=remedy)

    def unused(self, names: Names) -> str:
        """The tensors that belong nowhere, listed; empty where there are none."""
        left = self.tensors.keys() - published_in(names)
        return _listed({name for name in left if not name.endswith(BUFFERS)})

    def assembled(
        self, names: Names, expected: Mapping[str, Tensor], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Our tensors, each of one or several published ones below each other; sizes are compared first."""
        for ours, theirs in names.items():
            size = [len(expected[ours]) // len(theirs), *expected[ours].shape[1:]]
            for name in theirs:
                self._refuse_other_size(name, size)
        return {ours: self._joined(theirs, dtype) for ours, theirs in names.items()}

    def _stands(self, head: str) -> bool:
        supports = (self.names_of(support) for support in self.member.heads[head].needs)
        return all(names <= self.tensors.keys() for names in supports)

    def _take(self, head: str, found: dict[str, int]) -> None:
        names = self.names_of(head)
        claimed = {name for other in found for name in self.names_of(other)}
        if head not in found and names <= self.tensors.keys() and not names & claimed:
            found[head] = self._outputs(head)

    def _outputs(self, head: str) -> int:
        names = self.member.heads[head].names(self.shape)
        if "output.weight" not in names:
            return 0
        matrix = self.tensors[names["output.weight"][0]]
        # What is no matrix of some rows is refused later, by its size.
        return int(matrix.shape[0]) if matrix.dim() == 2 and len(matrix) else 1

    def _refuse_other_size(self, name: str, size: list[int]) -> None:
        actual = list(self.tensors[name].shape)
        if actual != size:
            what = f"{name} is {actual} but config.json asks for {size}"
            remedy = "config.json and the weights belong to different models"
            raise UserError(what, where=str(self.where), remedy=remedy)

    def _joined(self, names: tuple[str, ...], dtype: torch.dtype) -> Tensor:
        parts = [self._weights(name, dtype) for name in names]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _weights(self, name: str, dtype: torch.dtype) -> Tensor:
        held = self.tensors[name]
        if held.dtype not in WEIGHT_TYPES:
            what = f"{name} holds {held.dtype}, not numbers of 16, 32 or 64 bits"
            raise UserError(what, where=str(self.where), remedy="export it as float32")
        weights = held.to(dtype)
        if not weights.isfinite().all():
            what = f"{name} holds NaN or infinite values"
            raise UserError(what, where=str(self.where), remedy="use an earlier checkpoint")
        return weights


def under_one_spelling(
    tensors: Iterable[tuple[str, Tensor]], member: Member, shape: Shape, where: Path
) -> Published:
    """The tensors with today's LayerNorm names, with the prefix, and under the first of two tied names."""
    held = dict(tensors)
    if held and all(name.startswith(PARALLEL_PREFIX) for name in held):
        held = {name.removeprefix(PARALLEL_PREFIX): tensor for name, tensor in held.items()}
    bare = _bare_names(member, shape)
    renamed: dict[str, Tensor] = {}
    for name, tensor in held.items():
        modern = re.sub(r"LayerNorm\.(gamma|beta)$", _modern_norm, name)
        prefixed = member.prefix + modern if modern in bare else modern
        first = member.tied.get(prefixed, prefixed)
        if first in renamed and not _same(renamed[first], tensor):
            what = f"{name} differs from {first}, which should be the same weight"
            raise UserError(what, where=str(where), remedy="models that do not tie the two are not supported")
        renamed[first] = tensor
    return Published(renamed, member, shape, where)


def _bare_names(member: Member, shape: Shape) -> set[str]:
    """The names that a file of the bare encoder writes without the prefix."""
    names = published_in(member.encoder_names(shape))
    if "pooler" in member.heads:
        names |= member.names_of_head("pooler", shape)
    return {name.removeprefix(member.prefix) for name in names}


def _modern_norm(match: re.Match[str]) -> str:
    return "LayerNorm." + {"gamma": "weight", "beta": "bias"}[match[1]]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _listed(names: set[str]) -> str:
    shown = sorted(names)[:SHOWN_NAMES]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more
