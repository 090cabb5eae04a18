"""How many operations a network takes: the one count behind every share of a chip's speed that is told.

A weight of a product costs a token 2 operations forward and twice as many backward; attention costs
4 x width for each pair of tokens, scores and mix together. Embeddings, norms and the small heads on
sentences are left out. All layers count for all tokens: that ours computes most of the last layer at
predicted rows only makes it faster, not its work larger, and a peer that computes all of it is measured by
the same number.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from bertsmith.model.encoder_config import EncoderConfig
from bertsmith.model.network import Network


@dataclass(frozen=True, slots=True)
class PassSize:
    """What goes through a network at once."""

    tokens: int
    sequences: int
    """As long as each other: attention costs the square of a length."""
    predicted: int = 0
    """Tokens whose words are scored."""


def layer_flops(config: EncoderConfig, size: PassSize) -> float:
    """The operations of all layers in a forward pass."""
    length = size.tokens / max(1, size.sequences)
    found = 0.0
    for layer, block in enumerate(config.order()):
        mixed = config.heads_in(block) * config.head_width
        weights = config.width * (4 * mixed + config.expanded_in(block) + config.inner_in(block))
        found += 2 * weights + 4 * mixed * config.seen_tokens(length, layer)
    return size.tokens * found


def forward_flops(network: Network, size: PassSize) -> float:
    """The operations of a forward pass, with the head on predicted words."""
    config, width = network.config, network.config.width
    if "replaced" in network.heads:  # it judges every token, and scores no words
        head = (width**2 + width) * size.tokens
    else:
        head = (width + config.vocabulary) * config.embedding_width * size.predicted
    return layer_flops(config, size) + 2 * head


def flops_per_step(trained: Iterable[Network], size: PassSize, *, teacher: Network | None = None) -> float:
    """The operations of a training step; a teacher runs forward only, and recomputation is not counted."""
    asked = 0.0 if teacher is None else forward_flops(teacher, size)
    return 3 * sum(forward_flops(network, size) for network in trained) + asked
