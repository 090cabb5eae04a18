"""Our packed encoder beside transformers' padded one: same weights, same ragged batch, interleaved rounds.

    python bench/encoder_speed.py                          # CPU, fp32, a small shape
    python bench/encoder_speed.py --device cuda --size base --precision bf16

transformers runs the batch twice: padded to its longest sequence, as a data collator does, and sorted by
length into eight smaller batches, each padded to its own longest, as careful users do. Ours is packed and not
sorted. Times are medians over interleaved rounds; a ratio is transformers' time divided by ours.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from bertsmith.model.encoder_config import EncoderConfig
from bertsmith.model.model_folder import Model, write_model
from bertsmith.model.network import Network, new_network
from bertsmith.packed import PackedBatch, pack

SORTED_BATCHES = 8
SIZES = {"small": (4, 256, 4), "minilm": (6, 384, 12), "base": (12, 768, 12), "large": (24, 1024, 16)}


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    layers, width, heads = SIZES[options.size]
    config = EncoderConfig(model_type="bert", vocabulary=30522, width=width, layers=layers, heads=heads,
                  inner=4 * width, embedding_width=width, positions=512)  # fmt: skip
    network = new_network(config, {"pooler": 0}, torch.Generator().manual_seed(0))
    peer = same_weights_in_transformers(network)
    sequences = ragged(options.sequences, options.median)
    lengths = [len(sequence) for sequence in sequences]
    share = sum(lengths) / (len(lengths) * max(lengths))
    print(f"{options.device} {options.precision}, {options.size}: {len(lengths)} sequences, "
          f"{sum(lengths)} tokens, longest {max(lengths)}, padded batch {share:.0%} full")  # fmt: skip
    for title, training in (("forward", False), ("forward + backward", True)):
        contenders = pair_of_steps(network, peer, sequences, options, training)
        report(title, measure(contenders, options))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--median", type=float, default=60, help="median length of the log-normal lengths")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="compile both")
    return parser.parse_args()


def same_weights_in_transformers(network: Network) -> torch.nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), Model(network))
        return transformers.BertModel.from_pretrained(folder, attn_implementation="sdpa")


def ragged(count: int, median: float) -> list[list[int]]:
    rng = random.Random(0)
    lengths = [min(512, max(4, round(rng.lognormvariate(0, 0.7) * median))) for _ in range(count)]
    return [[rng.randrange(1000, 30000) for _ in range(length)] for length in lengths]


def pair_of_steps(
    network: Network,
    peer: torch.nn.Module,
    sequences: list[list[int]],
    options: argparse.Namespace,
    training: bool,
) -> dict[str, Callable[[], None]]:
    batch = pack(sequences).to(options.device)
    in_order = sorted(sequences, key=len)
    share = -(-len(in_order) // SORTED_BATCHES)
    buckets = [pad(in_order[first : first + share], options) for first in range(0, len(in_order), share)]
    for module in (network, peer):
        module.to(options.device).train(training)

    def ours(batch: PackedBatch) -> torch.Tensor:
        return network.pooled(network(batch), batch.layout)

    def theirs(padded: dict[str, torch.Tensor]) -> torch.Tensor:
        return peer(**padded).pooler_output

    def theirs_sorted(buckets: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        return torch.cat([pass_through(bucket) for bucket in buckets])

    compiled = torch.compile if options.compile else lambda function: function
    pass_through = compiled(theirs)
    return {
        "ours": step_of(compiled(ours), batch, options, training),
        "padded": step_of(pass_through, pad(sequences, options), options, training),
        "sorted": step_of(theirs_sorted, buckets, options, training),
    }


def pad(sequences: list[list[int]], options: argparse.Namespace) -> dict[str, torch.Tensor]:
    longest = max(map(len, sequences))
    rows = [sequence + [0] * (longest - len(sequence)) for sequence in sequences]
    ids = torch.tensor(rows, device=options.device)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def step_of(
    function: Callable, argument: object, options: argparse.Namespace, training: bool
) -> Callable[[], None]:
    def step() -> None:
        half = options.precision == "bf16"
        with torch.set_grad_enabled(training), torch.autocast(options.device, torch.bfloat16, enabled=half):
            output = function(argument)
        if training:
            output.float().square().mean().backward()
        if options.device == "cuda":
            torch.cuda.synchronize()

    return step


def measure(contenders: dict[str, Callable[[], None]], options: argparse.Namespace) -> dict[str, list[float]]:
    for step in contenders.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, step in contenders.items():
            begin = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - begin)
    return times


def report(title: str, times: dict[str, list[float]]) -> None:
    medians = {name: statistics.median(each) * 1e3 for name, each in times.items()}
    peers = (
        f"transformers {name} {value:.1f} ms (ratio {value / medians['ours']:.2f})"
        for name, value in medians.items()
        if name != "ours"
    )
    print(f"{title}: ours {medians['ours']:.1f} ms, {', '.join(peers)}")


if __name__ == "__main__":
    main()
