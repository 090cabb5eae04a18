"""What removing heads and feed-forward neurons gains on a CPU.

    python bench/pruning_speed.py                                  # a BERT-Base of random weights
    python bench/pruning_speed.py --model models/minilm-l6 --heads 0.4 --ffn 0.5

Both networks are packed as `bertsmith.load` has them, and take turns on the same batch; the ratio is that of
the medians of CPU time, which other programs change less than time on the clock. Which heads go does not
matter to the speed: the first ones of each layer do.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from random_model import shape_config

from bertsmith.model.folder.model_folder import read_model
from bertsmith.model.importance import UnitImportance
from bertsmith.model.inference.inference_network import packed_network
from bertsmith.model.network import Network, new_network
from bertsmith.packed import PackedBatch, pack
from bertsmith.shrink.selection import chosen_units, counts_left
from bertsmith.shrink.slicing import all_units, pruned_network


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    if options.model is None:
        whole = new_network(shape_config("base"), {}, torch.Generator().manual_seed(0)).eval()
    else:
        whole = read_model(options.model).network
    pruned = without_units(whole, (options.heads, options.ffn))
    stream = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, whole.config.vocabulary, (options.texts, options.length), generator=stream)
    batch = pack(tokens.tolist())
    networks = {"whole": packed_network(whole), "pruned": packed_network(pruned)}
    seconds = taking_turns(networks, batch, options.turns)
    for name, network in (("whole", whole), ("pruned", pruned)):
        weights = sum(each.numel() for each in network.encoder.blocks.parameters())
        heads = sum(len(units.heads) for units in all_units(network))
        print(f"{name:7} {heads:4} heads, {weights:12,} weights in layers, {1e3 * seconds[name]:9.1f} ms CPU")
    ratio = seconds["whole"] / seconds["pruned"]
    print(f"pruned is {ratio:.2f} times as fast, {options.texts} texts of {options.length} tokens")


def without_units(network: Network, fractions: tuple[float, float]) -> Network:
    """The network without these fractions of heads and neurons."""
    units = all_units(network)
    importance = UnitImportance(
        tuple(torch.arange(1.0, 1 + len(each.heads)) for each in units),
        tuple(torch.arange(1.0, 1 + len(each.neurons)) for each in units),
    )
    return pruned_network(network, chosen_units(importance, counts_left(units, fractions, "equal"))).eval()


def taking_turns(networks: dict[str, Network], batch: PackedBatch, turns: int) -> dict[str, float]:
    """The median CPU seconds of each network."""
    found: dict[str, list[float]] = {name: [] for name in networks}
    with torch.inference_mode():
        for turn in range(turns + 1):
            for name, network in networks.items():
                begin = time.process_time()
                network(batch)
                if turn:  # the first one warms up
                    found[name].append(time.process_time() - begin)
    return {name: statistics.median(each) for name, each in found.items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a model folder; else a BERT-Base of random weights")
    parser.add_argument("--heads", type=float, default=0.4)
    parser.add_argument("--ffn", type=float, default=0.5)
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
