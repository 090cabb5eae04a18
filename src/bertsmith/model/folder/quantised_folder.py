"""Quantised weights in model folders: whole numbers under the published names, with their scales.

For a weight W there are W (int8, or two 4-bit numbers in a byte), W_scales, and for 8-bit products
W_per_input and W_input_steps (their size and their zero). config.json has our own `model_type`, because
others would take the whole numbers for weights.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bertsmith.core.errors import UserError
from bertsmith.model.architectures.registry import QUANTISED_TYPE, architecture_of
from bertsmith.model.inference.quantised_weights import (
    EightBitSteps,
    QuantisedEmbedding,
    QuantisedLayer,
    QuantisedLinear,
    bits_of,
    dequantised,
)
from bertsmith.model.network import Network, published_names

SCALES, PER_INPUT, INPUT_STEPS = "_scales", "_per_input", "_input_steps"
BROKEN = "copy the whole folder again, or quantise again"


def is_quantised(network: Network) -> bool:
    """True if a network has quantised weights: it can predict, but not learn."""
    return any(isinstance(module, QuantisedLayer) for module in network.modules())


# ---- writing


def quantised_config(config_json: dict[str, Any], network: Network) -> dict[str, Any]:
    """Return the config.json of a network, changed if its weights are quantised."""
    layers = [module for module in network.modules() if isinstance(module, QuantisedLinear)]
    if not layers:
        return config_json
    told = {
        "model_type": config_json["model_type"],
        "bits": min(bits_of(layer.whole) for layer in layers),
        "weights_only": all(layer.steps is None for layer in layers),
    }
    return {**config_json, "model_type": QUANTISED_TYPE, "quantised": told}


def stored_tensors(layer: QuantisedLayer, theirs: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the tensors of a layer to write, by the published names of its parts."""
    tensors: dict[str, Tensor] = {}
    parts = zip(theirs, layer.whole.chunk(len(theirs)), layer.scales_OG.chunk(len(theirs)), strict=True)
    for name, whole, scales in parts:
        tensors[name], tensors[name + SCALES] = whole.clone(), scales.float().clone()
        if isinstance(layer, QuantisedLinear) and layer.steps is not None:
            steps = layer.steps
            tensors[name + INPUT_STEPS] = torch.tensor([steps.size, steps.zero], dtype=torch.float64)
            if layer.per_input_I is not None:
                tensors[name + PER_INPUT] = layer.per_input_I.float().clone()
    return tensors


# ---- reading


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One published weight as a file has it."""

    whole: Tensor
    scales_OG: Tensor
    steps: EightBitSteps | None
    per_input_I: Tensor | None

    def real(self) -> Tensor:
        """Return the weight in real numbers."""
        if self.steps is None or self.per_input_I is None:
            return dequantised(self.whole, self.scales_OG)
        return dequantised(self.whole, self.scales_OG, self.per_input_I * self.steps.size)


def real_config(config_json: Mapping[str, Any], *, where: Path) -> dict[str, Any]:
    """Return the config.json of the model before it was quantised."""
    told = config_json.get("quantised")
    if not isinstance(told, dict) or not isinstance(told.get("model_type"), str):
        what = "does not name the original model"
        raise UserError(what, where=str(where / "config.json"), remedy=BROKEN)
    kept = {key: value for key, value in config_json.items() if key != "quantised"}
    return {**kept, "model_type": told["model_type"]}


def stored_and_real(
    tensors: Iterable[tuple[str, Tensor]], transposed: Callable[[str], bool], *, where: Path
) -> tuple[dict[str, StoredWeight], dict[str, Tensor]]:
    """Return the quantised weights of a file, and all of its weights as real numbers."""
    held = dict(tensors)
    names = [name.removesuffix(SCALES) for name in held if name.endswith(SCALES)]
    stored = {name: _stored(held, name, where=where) for name in names}
    beside = {name + end for name in names for end in (SCALES, PER_INPUT, INPUT_STEPS)}
    real = {name: tensor for name, tensor in held.items() if name not in beside and name not in stored}
    # whole numbers are stored in the order of multiplication: [outputs, inputs]
    for name, weight in stored.items():
        real[name] = weight.real().t() if transposed(name) else weight.real()
    return stored, real


def put_stored(network: Network, stored: Mapping[str, StoredWeight]) -> None:
    """Put the quantised weights of a file into the layers of a network, in place of the real ones."""
    prefix = architecture_of(network.config.model_type).prefix
    for ours, theirs in published_names(network.config, dict.fromkeys(network.heads, 0)).items():
        parts = [stored.get(name) or stored.get(name.removeprefix(prefix)) for name in theirs]
        layer, found = ours.removesuffix(".weight"), [part for part in parts if part is not None]
        # Layers that share a weight already have it.
        if len(found) < len(parts) or isinstance(network.get_submodule(layer), QuantisedLayer):
            continue
        network.set_submodule(layer, _layer(network.get_submodule(layer), found))


def _layer(real: nn.Module, parts: list[StoredWeight]) -> nn.Module:
    whole, scales_OG = (
        torch.cat([part.whole for part in parts]),
        torch.cat([part.scales_OG for part in parts]),
    )
    if isinstance(real, nn.Embedding):
        return QuantisedEmbedding(whole, scales_OG)
    if not isinstance(real, nn.Linear):
        return real  # the file may be rounded further than we round
    bias_O = None if real.bias is None else real.bias.detach()
    return QuantisedLinear(whole, scales_OG, bias_O, steps=parts[0].steps, per_input_I=parts[0].per_input_I)


def _stored(held: Mapping[str, Tensor], name: str, *, where: Path) -> StoredWeight:
    whole, scales, per_input, steps = (held.get(name + end) for end in ("", SCALES, PER_INPUT, INPUT_STEPS))
    if whole is None or scales is None or not _fits(whole, scales, per_input, steps):
        what = f"{name} is not whole numbers with their scales"
        raise UserError(what, where=str(where), remedy=BROKEN)
    if steps is None:
        return StoredWeight(whole, scales, None, None)
    dtype = torch.uint8 if per_input is None else torch.int8
    return StoredWeight(whole, scales, EightBitSteps(float(steps[0]), int(steps[1]), dtype), per_input)


def _fits(whole: Tensor, scales: Tensor, per_input: Tensor | None, steps: Tensor | None) -> bool:
    if whole.dtype not in (torch.int8, torch.uint8) or whole.dim() != 2 or scales.dim() != 2:
        return False
    inputs, groups = whole.shape[1] * (8 // bits_of(whole)), scales.shape[1]
    fits = len(scales) == len(whole) and groups > 0 and inputs % groups == 0 and _are_sizes(scales)
    if steps is None:
        return fits and per_input is None
    if steps.shape != (2,) or not steps.isfinite().all() or not float(steps[0]) > 0:
        return False
    fits = fits and groups == 1 and bits_of(whole) == 8 and 0 <= float(steps[1]) <= 255
    return fits and (per_input is None or (per_input.shape == (inputs,) and _are_sizes(per_input)))


def _are_sizes(values: Tensor) -> bool:
    return values.dtype == torch.float32 and bool((values.isfinite() & (values > 0)).all())
