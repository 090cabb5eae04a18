"""The tensors of a checkpoint under their canonical names, the heads they make, what is wrong with them."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bertsmith.core.errors import UserError
from bertsmith.model.architecture import Architecture, Names, published_in
from bertsmith.model.encoder_config import EncoderConfig

SHOWN_NAMES = 8
WEIGHT_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BUFFERS = ("position_ids", "token_type_ids")
"""Constants that old files store among the weights."""
NORM_PARTS = {"gamma": "weight", "beta": "bias"}
"""TensorFlow's names for the parts of a LayerNorm, in files converted before 2019."""
PARALLEL_PREFIX = "module."
"""What torch's data-parallel wrappers put before every name."""


@dataclass(frozen=True, slots=True)
class CheckpointTensors:
    """The tensors of a file under the architecture's names, with its prefix."""

    tensors: dict[str, Tensor]
    architecture: Architecture
    config: EncoderConfig
    where: Path

    def names_of(self, head: str) -> set[str]:
        """The published names of a head."""
        return self.architecture.names_of_head(head, self.config)

    def heads(self, expected: Iterable[str]) -> dict[str, int]:
        """The heads whose weights are there, with their numbers of outputs; expected ones must be whole."""
        found: dict[str, int] = {}
        for head in expected:
            self._take(head, found)
            absent = self.names_of(head) - self.tensors.keys()
            # A pooler that is missing altogether is no fault: some models never had one.
            if absent and (head != "pooler" or absent < self.names_of(head)):
                self.check_complete(self.names_of(head))
        # Where heads share names (tagger, classifier), the one that stands on what is there is likelier.
        for head in sorted(self.architecture.heads, key=lambda head: not self._has_supports(head)):
            self._take(head, found)
        return found

    def check_complete(self, names: set[str]) -> None:
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
                actual = list(self.tensors[name].shape)
                if actual != size:
                    what = f"{name} is {actual} but config.json asks for {size}"
                    remedy = "config.json and the weights belong to different models"
                    raise UserError(what, where=str(self.where), remedy=remedy)
        # Query, key and value are published as three weights and computed here by one product.
        assembled = {}
        for ours, theirs in names.items():
            parts = [self._weights(name, dtype) for name in theirs]
            assembled[ours] = torch.cat(parts) if len(parts) > 1 else parts[0]
        return assembled

    def _has_supports(self, head: str) -> bool:
        supports = (self.names_of(support) for support in self.architecture.heads[head].needs)
        return all(names <= self.tensors.keys() for names in supports)

    def _take(self, head: str, found: dict[str, int]) -> None:
        names = self.names_of(head)
        taken = {name for other in found for name in self.names_of(other)}
        if head in found or not names <= self.tensors.keys() or names & taken:
            return
        output = self.architecture.heads[head].names(self.config).get("output.weight")
        if output is None:
            found[head] = 0
            return
        matrix = self.tensors[output[0]]
        # What is no matrix of some rows is rejected later, by its size.
        found[head] = int(matrix.shape[0]) if matrix.dim() == 2 and len(matrix) else 1

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


def canonical_tensors(
    tensors: Iterable[tuple[str, Tensor]], architecture: Architecture, config: EncoderConfig, where: Path
) -> CheckpointTensors:
    """The tensors with today's LayerNorm names, with the prefix, and under the first of two tied names."""
    held = dict(tensors)
    if held and all(name.startswith(PARALLEL_PREFIX) for name in held):
        held = {name.removeprefix(PARALLEL_PREFIX): tensor for name, tensor in held.items()}
    # A file of the bare encoder writes its names, and the pooler's, without the prefix.
    in_bare = published_in(architecture.encoder_names(config))
    if "pooler" in architecture.heads:
        in_bare |= architecture.names_of_head("pooler", config)
    bare = {name.removeprefix(architecture.prefix) for name in in_bare}
    renamed: dict[str, Tensor] = {}
    for name, tensor in held.items():
        modern = re.sub(r"LayerNorm\.(gamma|beta)$", lambda match: "LayerNorm." + NORM_PARTS[match[1]], name)
        # Tied weights may stand in a file twice: they become one, and must be the same.
        prefixed = architecture.prefix + modern if modern in bare else modern
        first = architecture.tied.get(prefixed, prefixed)
        if first in renamed and not _same(renamed[first], tensor):
            what = f"{name} differs from {first}, which should be the same weight"
            raise UserError(what, where=str(where), remedy="models that do not tie the two are not supported")
        renamed[first] = tensor
    return CheckpointTensors(renamed, architecture, config, where)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _listed(names: set[str]) -> str:
    shown = sorted(names)[:SHOWN_NAMES]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more
