"""A network of some layers of another one: the initial student (DistilBERT; Sanh et al. 2019)."""

from collections.abc import Sequence
from copy import deepcopy

from bertsmith.model.embeddings import PositionTable
from bertsmith.model.encoder_config import EncoderConfig
from bertsmith.model.network import Network


def evenly_spaced(layers: int, wanted: int) -> tuple[int, ...]:
    """Return `wanted` of these layers, from the first to the last: of 12 layers, 6 are 0, 2, 4, 7, 9 and 11.

    These are the six of DistilBERT's script (extract_distilbert.py).
    """
    if wanted == 1:
        return (0,)
    return tuple(int(number * (layers - 1) / (wanted - 1) + 0.5) for number in range(wanted))


def network_of_layers(source: Network, layers: Sequence[int], config: EncoderConfig) -> Network:
    """Return a network of this config with these layers of another one, its embeddings and its MLM head.

    `without_segments` drops the first segment's vector, so it is added to every position's: with one segment
    both networks have the same embeddings.
    """
    encoder = deepcopy(source.encoder)
    encoder.keep_layers(layers, config)
    if not config.segments and encoder.input is not None:
        encoder.input.fold_segment()
    heads = {name: deepcopy(head) for name, head in source.heads.items() if name == "mlm"}
    return Network(config, encoder, heads).eval()


def freeze_positions(network: Network) -> bool:
    """Freeze the position table; return True if there is one."""
    tables = [each for each in network.encoder.modules() if isinstance(each, PositionTable)]
    for table in tables:
        table.requires_grad_(False)
    return bool(tables)
