"""How the cost of a training step and of inference grows: with length, model size and batch, time and memory.

    python bench/cost_growth.py --json cost_growth.json --picture cost_growth.png
    python bench/cost_growth.py --device cpu --tokens 512 --lengths 64 128 --sizes tiny mini --batches 1 4

Length: 128 to 8,192 tokens in steps of as many tokens, packed, by a Base-sized ModernBERT whose layers all
see everything, and by one of which two in three see 128 tokens. Size: BERTs from tiny to Large at length 128.
Batch: so many sequences of 128 tokens through a BERT-Base. A training step is the trainer's: forward,
backward, clipping, AdamW, over random tokens of which 15 % are predicted. Inference is a forward pass to the
last states. Medians; memory is the most that torch had allocated on the GPU (not measured on a CPU).
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from random_model import SHAPES, shape_config
from rounds import Results, forget, parser_of, save, wait_for

from bertsmith.data.collate import PretrainingBatch
from bertsmith.model.architectures.modernbert import ModernBertConfig
from bertsmith.model.encoder_config import EncoderConfig
from bertsmith.model.network import Network, new_network
from bertsmith.objectives.masked_language_modelling import MaskedLanguageModelling
from bertsmith.packed import pack
from bertsmith.recipe.load import load_recipe
from bertsmith.training.distributed import start_world
from bertsmith.training.optimizers import build_optimizer
from bertsmith.training.trainer import StepInput, Trainer, choose_precision, take_step

PREDICTED = 0.15
SIZES = ["tiny", "mini", "small", "medium", "base", "large"]
USUAL_LENGTH = 128
WARM_UP = 3
GIB = 2**30


class Point(NamedTuple):
    """What is measured at once."""

    growing: str
    """length, size or batch"""
    line: str
    config: EncoderConfig
    length: int
    sequences: int

    @property
    def x(self) -> float:
        """What grows."""
        weights = 12 * self.config.layers * self.config.width**2 / 1e6
        return {"length": self.length, "size": weights, "batch": self.sequences}[self.growing]


def main() -> None:
    options = parse()
    torch.set_float32_matmul_precision("high")
    results = Results(options.json, "tokens")
    for point in points(options):
        forget()
        for work, measure in (("training", training), ("inference", inference)):
            results.rows.append(measured(point, work, measure, options))
            results.write()
    draw(results.rows, options.picture)


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--picture", type=Path, default=Path("cost_growth.png"))
    parser.add_argument("--tokens", type=int, default=65_536, help="in a step, for lengths and sizes")
    parser.add_argument("--lengths", type=int, nargs="*", default=[128, 256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--sizes", nargs="*", default=SIZES, choices=list(SHAPES))
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--layers", type=int, default=12, help="of the ModernBERTs")
    return parser.parse_args()


def points(options: argparse.Namespace) -> Iterator[Point]:
    """All that is measured."""
    layers, longest = options.layers, max(options.lengths, default=USUAL_LENGTH)
    for line, step in (("all layers see everything", 1), ("two in three layers see 128 tokens", 3)):
        config = ModernBertConfig(
            model_type="modernbert",
            vocabulary=30_522,
            width=768,
            layers=layers,
            heads=12,
            inner=2048,  # twice, for the gate: as many weights as a BERT-Base
            embedding_width=768,
            positions=longest,
            dropout=0.0,
            attention_dropout=0.0,
            segments=0,
            global_layers=tuple(range(0, layers, step)),
        )
        for length in options.lengths:
            yield Point("length", line, config, length, max(1, options.tokens // length))
    for size in options.sizes:
        yield Point("size", "BERT", shape_config(size), USUAL_LENGTH, max(1, options.tokens // USUAL_LENGTH))
    for sequences in options.batches:
        yield Point("batch", "BERT-Base", shape_config("base"), USUAL_LENGTH, sequences)


def measured(point: Point, work: str, measure: Callable, options: argparse.Namespace) -> dict[str, Any]:
    """A row: milliseconds, tokens a second and memory; or why there are none."""
    tokens = point.length * point.sequences
    row = {"growing": point.growing, "line": point.line, "x": point.x, "work": work, "tokens": tokens}
    if options.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        take = measure(point, options.device)
        times = list(timed(take, options))
    except torch.OutOfMemoryError:
        print(f"{row}: out of memory", flush=True)
        return {**row, "error": "out of memory"}
    middle = statistics.median(times)
    row |= {"milliseconds": 1e3 * middle, "lowest": 1e3 * min(times), "highest": 1e3 * max(times)}
    row["tokens a second"] = tokens / middle
    row["GiB"] = torch.cuda.max_memory_allocated() / GIB if options.device == "cuda" else None
    told = f"{point.growing} {point.x:,.5g}, {point.line}, {work}: {row['milliseconds']:.1f} ms, "
    memory = "" if row["GiB"] is None else f", {row['GiB']:.2f} GiB"
    print(f"{told}{row['tokens a second']:,.0f} tokens/s{memory}", flush=True)
    return row


def timed(take: Callable[[], None], options: argparse.Namespace) -> Iterator[float]:
    """Seconds of each round after those that warm up."""
    for number in range(WARM_UP + options.rounds):
        begin = time.perf_counter()
        take()
        wait_for(options.device)
        if number >= WARM_UP:
            yield time.perf_counter() - begin


def training(point: Point, device: str) -> Callable[[], None]:
    """A step of the trainer over one micro-batch."""
    optim, world = load_recipe("bert-base").optim, start_world(device)
    objective = MaskedLanguageModelling(new(point, {"mlm": 0}), "none").to(device).train()
    if device == "cuda":
        objective.compile_whole()
    precision = choose_precision("auto", world.device)
    trainer = Trainer(objective, build_optimizer(objective, optim), world, precision, optim.clip_norm)
    micro = random_micro(point)
    step = StepInput([micro], (len(micro.masked_rows_P), 0.0, point.length * point.sequences), 1e-4)
    return lambda: take_step(trainer, step) and None


def inference(point: Point, device: str) -> Callable[[], None]:
    """A forward pass to the last states."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    network = new(point, {}).to(device, dtype).eval()
    batch = random_micro(point).inputs.to(device)

    def take() -> None:
        with torch.no_grad():
            network(batch)

    return take


def new(point: Point, heads: dict[str, int]) -> Network:
    return new_network(point.config, heads, torch.Generator().manual_seed(0))


def random_micro(point: Point) -> PretrainingBatch:
    """Sequences of one length, of which some tokens are predicted."""
    stream = torch.Generator().manual_seed(1)
    shape, tokens = (point.sequences, point.length), point.sequences * point.length
    inputs = pack(torch.randint(5, point.config.vocabulary, shape, generator=stream).tolist())
    rows_P = torch.randperm(tokens, generator=stream)[: max(1, int(PREDICTED * tokens))].sort().values
    return PretrainingBatch(
        inputs,
        masked_rows_P=rows_P,
        masked_ids_P=inputs.tokens_T[rows_P],
        masked_weights_P=torch.ones(len(rows_P)),
        pair_labels_S=torch.zeros(point.sequences, dtype=torch.long),
        pair_weights_S=torch.zeros(point.sequences),
        end_1=torch.tensor([tokens]),
    )


def draw(rows: list[dict[str, Any]], picture: Path) -> None:
    """Time above, memory below, a column for each of what grows."""
    from matplotlib.figure import Figure

    labels = {"length": "tokens of a sequence", "size": "million weights in layers", "batch": "sequences"}
    values = {"milliseconds": "ms", "GiB": "GiB on the GPU"}
    growing = [name for name in labels if any(row["growing"] == name for row in rows)]
    figure = Figure(figsize=(4.5 * len(growing), 7), layout="constrained")
    axes = figure.subplots(len(values), len(growing), squeeze=False)
    for column, name in enumerate(growing):
        for value, axis in zip(values, axes[:, column], strict=True):
            shown = [row for row in rows if row["growing"] == name and row.get(value) is not None]
            for line, work in sorted({(row["line"], row["work"]) for row in shown}):
                both = [(row["x"], row[value]) for row in shown if (row["line"], row["work"]) == (line, work)]
                axis.plot(*zip(*both, strict=True), marker="o", label=f"{work}, {line}")
            axis.set(xscale="log", yscale="log", xlabel=labels[name], ylabel=values[value])
            axis.grid(alpha=0.3)
            if shown:
                axis.legend(fontsize=7)
    save(figure, picture)


if __name__ == "__main__":
    main()
