"""Count the floating-point operations of a network. Every utilisation figure (MFU) uses this count.

A weight of a product costs a token 2 operations forward and twice as many backward; attention costs
4 x width for each pair of tokens, scores and mix together. Embeddings, norms and the small heads on
sentences are left out. All layers count for all tokens: that ours computes most of the last layer at
predicted rows only makes it faster, not its work larger, and a peer that computes all of it is measured by
the same number.
"""

from collections.abc import Iterable

from bertsmith.model.encoder_config import PassSize
from bertsmith.model.network import Network


def forward_flops(network: Network, size: PassSize) -> float:
    """Return the operations of a forward pass, with the head on predicted words."""
    config, width = network.config, network.config.width
    if "replaced" in network.heads:  # it judges every token, without scoring words
        head = (width**2 + width) * size.tokens
    else:
        head = config.word_products() * size.predicted
    return config.operations(size) + 2 * head


def flops_per_step(trained: Iterable[Network], size: PassSize, *, teacher: Network | None = None) -> float:
    """Return the operations of a training step; a teacher runs forward only, recomputation is not counted."""
    asked = 0.0 if teacher is None else forward_flops(teacher, size)
    return 3 * sum(forward_flops(network, size) for network in trained) + asked
