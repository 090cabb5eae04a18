"""LoRA (Hu et al. 2021): frozen linear layers with added low-rank products that learn.

Shapes: T packed tokens, I inputs, O outputs, R rank.

Query, key and value are one layer of ours and three of the published models: each of the three can have a
separate adapter, the one that it would have as a separate layer.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn import functional

from bertsmith.core.errors import UserError
from bertsmith.model.encoder_config import need
from bertsmith.model.kernels.elementwise import Dropout
from bertsmith.model.network import Network, published_names


@dataclass(frozen=True, slots=True)
class LoraShape:
    """Rank and scale of adapters."""

    rank: int
    alpha: float
    dropout: float = 0.0
    rank_stabilized: bool = False

    @property
    def scaling(self) -> float:
        """Factor of the low-rank product; rsLoRA divides by the root (Kalajdzievski 2023)."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


class LowRank(nn.Module):
    """An adapter: inputs through A [R, I], then through B [O, R], scaled."""

    def __init__(self, lora_A: Tensor, lora_B: Tensor, *, scaling: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.lora_A, self.lora_B = nn.Parameter(lora_A), nn.Parameter(lora_B)
        self.scaling, self.dropout = scaling, Dropout(dropout)

    def forward(self, values_TI: Tensor) -> Tensor:
        inner_TR = functional.linear(self.dropout(values_TI), self.lora_A)
        return functional.linear(inner_TR, self.lora_B) * self.scaling

    def product(self) -> Tensor:
        """Return the sum that it adds to the weights of its layer [O, I], in fp32 or better."""
        exact = torch.promote_types(self.lora_A.dtype, torch.float32)
        return self.lora_B.detach().to(exact) @ self.lora_A.detach().to(exact) * self.scaling


class LoraLinear(nn.Linear):
    """A linear layer with the original weights, and adapters of the matrices in it."""

    def __init__(self, linear: nn.Linear, stacked: int) -> None:
        nn.Module.__init__(self)  # new weights would be discarded
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.stacked = stacked
        self.adapters = nn.ModuleDict()
        """Adapters by the number of the matrix."""

    def forward(self, input: Tensor) -> Tensor:
        return self.adapted(super().forward(input), input)

    def adapted(self, frozen_TO: Tensor, values_TI: Tensor) -> Tensor:
        """Return the layer's output with its adapters, from the output without them."""
        parts = list(frozen_TO.chunk(self.stacked, dim=-1))
        for number, adapter in self.adapters.items():
            parts[int(number)] = parts[int(number)] + adapter(values_TI)
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def merged(self) -> nn.Linear:
        """Return an equivalent plain linear layer."""
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        weight_OI = self.weight.detach().to(torch.promote_types(self.weight.dtype, torch.float32), copy=True)
        for number, adapter in self.adapters.items():
            assert isinstance(adapter, LowRank), "only adapters are put there"
            weight_OI.chunk(self.stacked)[int(number)].add_(adapter.product())
        linear.weight = nn.Parameter(weight_OI.to(self.weight.dtype))
        linear.register_parameter("bias", self.bias)
        return linear


# ---- the layers of a network


@dataclass(frozen=True, slots=True)
class PublishedLayer:
    """A linear layer of a published model, and its place in our network."""

    name: str
    """Its published name."""
    ours: str
    """Our layer."""
    number: int
    """Index of the matrix in our layer."""
    stacked: int
    """Number of matrices in our layer."""

    def in_network(self, network: Network) -> LoraLinear:
        """Return our layer, converted to one that can hold adapters."""
        layer = network.get_submodule(self.ours)
        assert isinstance(layer, nn.Linear), "published_layers returns linear layers only"
        if not isinstance(layer, LoraLinear):
            layer = LoraLinear(layer, self.stacked)
            network.set_submodule(self.ours, layer)
        return layer

    def adapter_in(self, network: Network) -> LowRank | None:
        """Return its adapter, if it has one."""
        layer = network.get_submodule(self.ours)
        if not isinstance(layer, LoraLinear) or str(self.number) not in layer.adapters:
            return None
        adapter = layer.adapters[str(self.number)]
        assert isinstance(adapter, LowRank), "only adapters are put there"
        return adapter


def published_layers(network: Network) -> dict[str, PublishedLayer]:
    """Return the linear layers of a network by their published names."""
    found = {}
    for ours, theirs in published_names(network.config, dict.fromkeys(network.heads, 0)).items():
        layer, _, kind = ours.rpartition(".")
        if kind == "weight" and isinstance(network.get_submodule(layer), nn.Linear):
            for number, name in enumerate(theirs):
                published = name.removesuffix(".weight")
                found[published] = PublishedLayer(published, layer, number, len(theirs))
    return found


def targeted_layers(network: Network, targets: Sequence[str]) -> list[PublishedLayer]:
    """Return the layers of the encoder that these targets name.

    If query, key and value are published as one layer (ModernBERT), each of the three names it.
    """
    named = {f"encoder.{each.name}": each.targets for each in network.encoder.linears()}
    found = []
    for layer in published_layers(network).values():
        own = named.get(layer.ours, ())
        if {*(own if layer.stacked == 1 else own[layer.number : layer.number + 1])} & {*targets}:
            found.append(layer)
    return need(found, "linear layers that can have adapters")


def add_fresh_adapters(
    network: Network, targets: Sequence[str], shape: LoraShape, generator: torch.Generator
) -> None:
    """Give the targets adapters without an effect yet: A by Kaiming's rule, B zero, like peft."""
    for layer in targeted_layers(network, targets):
        ours = layer.in_network(network)
        if str(layer.number) in ours.adapters:  # layers that share their weights share the adapter (ALBERT)
            continue
        inputs, outputs = ours.in_features, ours.out_features // ours.stacked
        if shape.rank > min(inputs, outputs):
            what = f"is {shape.rank}, but {layer.name} has {inputs} inputs and {outputs} outputs"
            remedy = f"choose at most {min(inputs, outputs)}; 8 is usual"
            raise UserError(what, key="lora.rank", remedy=remedy)
        # Sampled in fp32 on the CPU, then moved: the same weights on any device.
        lora_A, like = torch.empty(shape.rank, inputs), ours.weight
        nn.init.kaiming_uniform_(lora_A, a=math.sqrt(5), generator=generator)
        lora_B = torch.zeros(outputs, shape.rank)
        adapter = LowRank(lora_A, lora_B, scaling=shape.scaling, dropout=shape.dropout)
        ours.adapters[str(layer.number)] = adapter.to(like.device, like.dtype)


def add_adapters(network: Network, adapters: Mapping[PublishedLayer, LowRank]) -> None:
    """Give layers their adapters."""
    for layer, adapter in adapters.items():
        layer.in_network(network).adapters[str(layer.number)] = adapter


def adapters_of(network: Network) -> Iterator[tuple[str, LowRank]]:
    """Yield the adapters of a network by the published names of their layers."""
    for name, layer in published_layers(network).items():
        if (adapter := layer.adapter_in(network)) is not None:
            yield name, adapter


def with_shared_weights(network: Network) -> Network:
    """Return a network with the weights of another; adapters added to it do not change the other."""
    tensors = chain(network.parameters(), network.buffers())
    return deepcopy(network, {id(tensor): tensor for tensor in tensors})


def merged_network(network: Network) -> Network:
    """Return an equivalent network without adapters; weights that had none are shared."""
    merged = with_shared_weights(network)
    for module in list(merged.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, LoraLinear):
                setattr(module, name, layer.merged())
    return merged
