"""Tiny networks whose weights are far from initial ones: nothing hides behind zero biases and unit norms."""

import torch

from bertsmith.model.network import Network
from tests.tiny import tiny_network


def lively_network(model_type: str, heads: dict[str, int], seed: int = 3) -> Network:
    """A network of random weights, in evaluation mode."""
    network, stream = tiny_network(model_type, heads), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.normal_(centre, 0.15, generator=stream)
    return network
