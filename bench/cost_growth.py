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
from bertsmith.model.network import Network, new_network
from bertsmith.model.transformer.transformer_config import TransformerConfig
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
COLUMNS = [
    "growing",
    "x",
    "line",
    "work",
    "tokens",
    "milliseconds",
    "lowest",
    "highest",
    "tokens a second",
    "GiB",
]


class Point(NamedTuple):
    """What is measured at once."""

    x: float
    """What grows."""
    length: int
    sequences: int

    @property
    def tokens(self) -> int:
        """In a step."""
        return self.length * self.sequences


class Line(NamedTuple):
    """What one network is measured with."""

    growing: str
    """length, size or batch"""
    name: str
    config: TransformerConfig
    points: list[Point]


Take = Callable[[PretrainingBatch], object]


def main() -> None:
    options = parse()
    torch.set_float32_matmul_precision("high")
    results = Results(options.json, "tokens")
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    for line in (each for each in lines(options) if each.points):
        for work, prepare in (("training", training), ("inference", inference)):
            forget()
            take = prepare(line.config, options.device)
            for point in line.points:
                row = measured(take, random_micro(line.config, point), point, options)
                results.rows.append({"growing": line.growing, "line": line.name, "work": work, **row})
                results.write()
                show(results.rows[-1])
            take = None  # its memory is wanted
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


def lines(options: argparse.Namespace) -> Iterator[Line]:
    """All that is measured."""
    by_length = [Point(each, each, max(1, options.tokens // each)) for each in options.lengths]
    for name, step in (("all layers see everything", 1), ("two in three layers see 128 tokens", 3)):
        config = ModernBertConfig(
            model_type="modernbert",
            vocabulary=30_522,
            width=768,
            layers=options.layers,
            heads=12,
            inner=2048,  # twice, for the gate: as many weights as a BERT-Base
            embedding_width=768,
            positions=max(options.lengths, default=USUAL_LENGTH),
            dropout=0.0,
            attention_dropout=0.0,
            segments=0,
            global_layers=tuple(range(0, options.layers, step)),
        )
        yield Line("length", name, config, by_length)
    for size in options.sizes:
        config = shape_config(size)
        weights = 12 * config.layers * config.width**2 / 1e6
        point = Point(weights, USUAL_LENGTH, max(1, options.tokens // USUAL_LENGTH))
        yield Line("size", "BERT", config, [point])
    by_batch = [Point(each, USUAL_LENGTH, each) for each in options.batches]
    yield Line("batch", "BERT-Base", shape_config("base"), by_batch)


def measured(
    take: Take, micro: PretrainingBatch, point: Point, options: argparse.Namespace
) -> dict[str, Any]:
    """Milliseconds, tokens a second and memory; or why there are none."""
    row: dict[str, Any] = {"x": point.x, "tokens": point.tokens}
    if options.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        times = list(timed(lambda: take(micro), options))
    except torch.OutOfMemoryError:
        return {**row, "error": "out of memory"}
    middle = statistics.median(times)
    row |= {"milliseconds": 1e3 * middle, "lowest": 1e3 * min(times), "highest": 1e3 * max(times)}
    row["tokens a second"] = point.tokens / middle
    row["GiB"] = torch.cuda.max_memory_allocated() / GIB if options.device == "cuda" else None
    return row


def timed(take: Callable[[], object], options: argparse.Namespace) -> Iterator[float]:
    """Seconds of each round after those that warm up."""
    for number in range(WARM_UP + options.rounds):
        begin = time.perf_counter()
        take()
        wait_for(options.device)
        if number >= WARM_UP:
            yield time.perf_counter() - begin


def training(config: TransformerConfig, device: str) -> Take:
    """What takes a step of the trainer over one micro-batch."""
    optim, world = load_recipe("bert-base").optim, start_world(device)
    objective = MaskedLanguageModelling(new(config, {"mlm": 0}), "none").to(device).train()
    if device == "cuda":
        objective.compile_whole()
    precision = choose_precision("auto", world.device)
    trainer = Trainer(objective, build_optimizer(objective, optim), world, precision, optim.clip_norm)

    def take(micro: PretrainingBatch) -> None:
        counts = (float(len(micro["masked_rows_P"])), 0.0, float(len(micro.inputs.tokens_T)))
        take_step(trainer, StepInput([micro], counts, 1e-4))

    return take


def inference(config: TransformerConfig, device: str) -> Take:
    """What passes a batch forward, to its last states."""
    network = new(config, {}).to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()

    def take(micro: PretrainingBatch) -> None:
        with torch.no_grad():
            network(micro.inputs.to(device))

    return take


def new(config: TransformerConfig, heads: dict[str, int]) -> Network:
    return new_network(config, heads, torch.Generator().manual_seed(0))


def random_micro(config: TransformerConfig, point: Point) -> PretrainingBatch:
    """Sequences of one length, of which some tokens are predicted."""
    stream = torch.Generator().manual_seed(1)
    ids = torch.randint(5, config.vocabulary, (point.sequences, point.length), generator=stream)
    inputs = pack(ids.tolist())
    predicted = max(1, int(PREDICTED * point.tokens))
    rows_P = torch.randperm(point.tokens, generator=stream)[:predicted].sort().values
    return PretrainingBatch(
        inputs,
        end_1=torch.tensor([point.tokens]),
        fields={
            "masked_rows_P": rows_P,
            "masked_ids_P": inputs.tokens_T[rows_P],
            "masked_weights_P": torch.ones(len(rows_P)),
            "pair_labels_S": torch.zeros(point.sequences, dtype=torch.long),
            "pair_weights_S": torch.zeros(point.sequences),
        },
    )


def show(row: dict[str, Any]) -> None:
    """A line of the table; an error stands in the place of the time."""
    cells = [row.get(column, row.get("error", "")) for column in COLUMNS]
    texts = [
        f"{cell:,.5g}" if isinstance(cell, float) else "" if cell is None else str(cell) for cell in cells
    ]
    print(f"| {' | '.join(texts)} |", flush=True)


def draw(rows: list[dict[str, Any]], picture: Path) -> None:
    """Time above, memory below, a column for each of what grows."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

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
            ticks = sorted({row["x"] for row in shown})
            axis.set_xticks(ticks, [f"{tick:,.{int(tick < 10)}f}" for tick in ticks])
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
            for scale in (axis.xaxis, axis.yaxis):
                scale.set_minor_locator(NullLocator())
            axis.grid(alpha=0.3)
            if shown:
                axis.legend(fontsize=7)
    save(figure, picture)


if __name__ == "__main__":
    main()
