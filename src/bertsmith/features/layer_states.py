"""Which states of an encoder are features, what they are called, and which encoder they belong to."""

import hashlib

from bertsmith.model.network import Network
from bertsmith.recipe.finetuning_schema import LayerChoice


def layer_numbers(choice: LayerChoice, layers: int) -> tuple[int, ...]:
    """The numbers of the chosen states of an encoder with so many layers; 0 are its embeddings."""
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
    """What the states of a number are called in tables."""
    return "embeddings" if number == 0 else f"layer {number}"


def encoder_hash(network: Network) -> str:
    """A hash of all that decides the states which an encoder gives for tokens."""
    digest = hashlib.sha256(repr(network.config).encode())
    for name, tensor in sorted(network.encoder.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().float().contiguous().numpy().data)
    return digest.hexdigest()
