"""The states of an encoder that can be features: their numbers, their names, and a hash of the encoder."""

import hashlib

from torch import nn

from bertsmith.model.encoder_config import EncoderConfig
from bertsmith.model.network import Network
from bertsmith.recipe.finetuning_schema import LayerChoice


def layer_numbers(choice: LayerChoice, layers: int) -> tuple[int, ...]:
    """Return the numbers of the chosen states of an encoder with this many layers; 0 means the embeddings."""
    every = tuple(range(layers + 1))
    chosen = {
        "embeddings": every[:1],
        "second-to-last": every[-2:-1],
        "last": every[-1:],
        "last4": every[1:][-4:],
        "all": every[1:],
        "all-and-embeddings": every,
    }
    return chosen[choice]


def layer_name(number: int) -> str:
    """Return the name of a state in tables."""
    return "embeddings" if number == 0 else f"layer {number}"


def encoder_hash(network: Network) -> str:
    """Return a hash of everything that determines an encoder's states for tokens."""
    return weights_hash(network.config, network.encoder)


def weights_hash(config: EncoderConfig, module: nn.Module) -> str:
    """Return a hash of a config and of all weights of a module."""
    digest = hashlib.sha256(repr(config).encode())
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().float().contiguous().numpy().data)
    return digest.hexdigest()
