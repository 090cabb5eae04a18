"""Where the time of a pre-training step goes, by class of kernel, beside what its products reach alone.

    python bench/profile_step.py --store store --preset bert-base --length 128 --json p.json --picture p.png
    python bench/profile_step.py --store store --preset bert-tiny --length 32 --device cpu --tokens 256 \
        --steps 1 --warm-up 1

torch.profiler watches steps of the real job. On a GPU each kernel is put into a class by its name, and time
in which none ran is a gap; on a CPU it is the time of each operator without those it calls. In the same run
every matrix product of such a step, forward and backward, is timed alone in the step's precision: the
ceiling. The picture is a roofline: these products below the bandwidth that a copy reaches and the most that
the chip can do.
"""

import argparse
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pretraining_speed import Case, our_round, our_run
from rounds import Results, Round, parser_of, save, wait_for
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bertsmith.model.encoder_config import PassSize
from bertsmith.model.heads import aligned_words
from bertsmith.model.network import Network
from bertsmith.pretraining.hardware import peak_of

CLASSES = {
    # In this order: a kernel for attention is built of parts for products, and a fused one is named after all
    # that is in it.
    "attention": r"flash|fmha|attention|sdpa",
    "matmul": r"gemm|nvjet|cutlass|xmma|triton_tem_|^aten::(add|b|badd)?mm$|mkldnn_linear",
    "optimiser": r"adam|multi_tensor|foreach|lamb(?!da)|lpnorm|vector_norm",
    "loss": r"softmax|nll_loss|cross_entropy|argmax|word_losses",
    "copies to and from the GPU": r"memcpy|memset",
    "norm and elementwise": r"",
}
TIMED_PRODUCTS = 20
COPIED_NUMBERS = {"cuda": 2**30, "cpu": 2**22}
LARGE_SIDE = {"cuda": 8192, "cpu": 256}
LONGEST_KERNELS = 40


class Kernel(NamedTuple):
    """What ran, and when, in seconds."""

    name: str
    begin: float
    end: float


class Product(NamedTuple):
    """A matrix product of a step: [rows, inner] x [inner, columns]."""

    name: str
    rows: int
    inner: int
    columns: int
    count: int
    """How often a step has it."""
    turned: bool = False
    """Whether the first factor lies in memory with rows for columns, as the inputs of a layer do there."""

    @property
    def flops(self) -> float:
        """Of one of them."""
        return 2.0 * self.rows * self.inner * self.columns

    def intensity(self, bytes_of_a_number: int) -> float:
        """Operations for each byte that is read or written."""
        numbers = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        return self.flops / (bytes_of_a_number * numbers)


def main() -> None:
    options = parse()
    torch.set_float32_matmul_precision("high")
    case = Case(options.preset, options.length, options.dropout)
    with tempfile.TemporaryDirectory() as folder:
        run = our_run(case, Path(folder) / "run", options)
        take = our_round(run, options)
        seconds, tokens = step_time(take, options)
        kernels = profiled(take, options.device)
    networks, device = run.objective.networks(), options.device
    size = PassSize(tokens, max(1, tokens // options.length), int(run.recipe.masking.rate * tokens))
    dtype = torch.bfloat16 if run.machine.precision == "bf16" else torch.float32
    reached = [timed_alone(product, device, dtype) for product in all_products(networks, size)]
    alone_ms = sum(each["ms in a step"] for each in reached)
    flops = run.objective.flops(size.tokens, size.sequences, size.predicted)
    peak = peak_of(run.world.device)
    side = LARGE_SIDE[device]
    large = timed_alone(Product("large", side, side, side, 1), device, dtype)
    facts = {
        "case": str(case),
        "tokens in a step": tokens,
        "ms of a step": 1e3 * seconds,
        "TFLOP/s of a step": flops / seconds / 1e12,
        "share of the chip": peak and flops / seconds / peak,
        "ms of its products alone": alone_ms,
        "TFLOP/s of its products alone": sum(each["TFLOP in a step"] for each in reached) / alone_ms * 1e3,
        f"TFLOP/s of a product of {side:,} cubed": large["TFLOP/s"],
        "TB/s of a copy": bandwidth(device) / 1e12,
        "TFLOP/s of the chip": peak and peak / 1e12,
    }
    if not kernels:
        print("the profiler saw no kernel: no classes", flush=True)
    rows = by_class(kernels, options.steps) if kernels else []
    results = Results(options.json, "tokens", rows=rows)
    show(results.rows, facts)
    results.write(facts=facts, products=reached, kernels=longest(kernels, options.steps))
    draw(reached, facts, options.picture)


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--preset", default="bert-base")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--tokens", type=int, default=65_536, help="in a step")
    parser.add_argument("--steps", type=int, default=10, help="that are profiled")
    parser.add_argument("--warm-up", type=int, default=30, help="steps before")
    parser.add_argument("--set", nargs="*", default=[], help="settings of the recipe")
    parser.add_argument("--picture", type=Path, default=Path("roofline.png"))
    return parser.parse_args()


# ---- the step


def step_time(take: Round, options: argparse.Namespace) -> tuple[float, int]:
    """Median seconds and the tokens of a step, without the profiler."""
    seconds, tokens = [], 0.0
    for _ in range(options.rounds):
        begin = time.perf_counter()
        tokens = take()
        seconds.append((time.perf_counter() - begin) / options.steps)
    return statistics.median(seconds), int(tokens / options.steps)


def profiled(take: Round, device: str) -> list[Kernel]:
    """All kernels of a round; on a CPU operators, without those that they call, as if one after the other."""
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as watched:
        take()
    if device == "cuda":
        events = [
            each
            for each in watched.events()
            if each.device_type == DeviceType.CUDA and not each.is_user_annotation  # a name over many kernels
        ]
        return [Kernel(each.name, each.time_range.start / 1e6, each.time_range.end / 1e6) for each in events]
    return [Kernel(each.key, 0.0, each.self_cpu_time_total / 1e6) for each in watched.key_averages()]


def by_class(kernels: list[Kernel], steps: int) -> list[dict[str, Any]]:
    """Milliseconds and share of each class, and of the gaps between kernels."""
    seconds: Counter[str] = Counter({name: 0.0 for name in CLASSES})
    for kernel in kernels:
        seconds[class_of(kernel.name)] += kernel.end - kernel.begin
    seconds["gaps"] = gaps(kernels)
    # Kernels that ran beside each other count both, so that shares may come to a little more than 1.
    total = max(kernel.end for kernel in kernels) - min(kernel.begin for kernel in kernels)
    total = total if seconds["gaps"] else sum(seconds.values())
    return [
        {"class": name, "ms in a step": 1e3 * spent / steps, "share": spent / total}
        for name, spent in seconds.most_common()
    ]


def class_of(name: str) -> str:
    """The class of a kernel; the compiler's fused ones are never attention, whatever they are named after."""
    fused = name.startswith("triton_") and not name.startswith("triton_tem_")
    known = {kind: rule for kind, rule in CLASSES.items() if not (fused and kind == "attention")}
    return next(kind for kind, rule in known.items() if re.search(rule, name, re.IGNORECASE))


def gaps(kernels: list[Kernel]) -> float:
    """Seconds between the first and the last kernel in which none ran; none where all begin at once."""
    waited, busy_until = 0.0, min(kernel.begin for kernel in kernels)
    for kernel in sorted(kernels, key=lambda each: each.begin):
        waited += max(0.0, kernel.begin - busy_until)
        busy_until = max(busy_until, kernel.end)
    return waited


def longest(kernels: list[Kernel], steps: int) -> list[dict[str, Any]]:
    """The kernels that take most of a step, with their classes: to see what was put where."""
    seconds: Counter[str] = Counter()
    for kernel in kernels:
        seconds[kernel.name] += kernel.end - kernel.begin
    return [
        {"name": name[:200], "class": class_of(name), "ms in a step": 1e3 * spent / steps}
        for name, spent in seconds.most_common(LONGEST_KERNELS)
    ]


# ---- its products alone


def all_products(networks: Mapping[str, Network], size: PassSize) -> Iterator[Product]:
    """Those of every network that learns, called after it where it is not the model."""
    for name, network in networks.items():
        for product in products(network, size):
            yield product._replace(name=f"{name}: {product.name}" if name else product.name)


def products(network: Network, size: PassSize) -> Iterator[Product]:
    """Every matrix product of a step: forward, the gradient of its input, and that of its weight."""
    config, counts = network.config, Counter[tuple[str, int, int, int]]()
    width = config.width
    for block in config.order():
        mixed = config.heads_in(block) * config.head_width
        counts["query, key, value", size.tokens, width, 3 * mixed] += 1
        counts["attention's output", size.tokens, mixed, width] += 1
        counts["feed-forward, up", size.tokens, width, config.expanded_in(block)] += 1
        counts["feed-forward, down", size.tokens, config.inner_in(block), width] += 1
    if "replaced" in network.heads:
        counts["head, transform", size.tokens, width, width] += 1
    else:
        counts["head, transform", size.predicted, width, config.embedding_width] += 1
        words = aligned_words(config.vocabulary)  # as a GPU computes them
        counts["head, words", size.predicted, config.embedding_width, words] += 1
    for (name, rows, inner, columns), count in counts.items():
        yield Product(name, rows, inner, columns, count)
        yield Product(f"{name}, gradient of the input", rows, columns, inner, count)
        yield Product(f"{name}, gradient of the weight", inner, rows, columns, count, turned=True)


def timed_alone(product: Product, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """What a product reaches when nothing else runs."""
    sides = (product.inner, product.rows) if product.turned else (product.rows, product.inner)
    left = torch.randn(sides, device=device, dtype=dtype)
    left = left.T if product.turned else left
    right = torch.randn(product.inner, product.columns, device=device, dtype=dtype)
    seconds = median_seconds(lambda: left @ right, device)
    facts = {**product._asdict(), "operations a byte": product.intensity(dtype.itemsize)}
    facts |= {"TFLOP/s": product.flops / seconds / 1e12, "ms in a step": 1e3 * seconds * product.count}
    return {**facts, "TFLOP in a step": product.flops * product.count / 1e12}


def bandwidth(device: str) -> float:
    """Bytes a second that a copy inside the memory reads and writes."""
    source = torch.empty(COPIED_NUMBERS[device], dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device)


def median_seconds(work: Callable[[], object], device: str) -> float:
    """Of one of several in a row, so that starting them costs nothing; after a warm-up."""
    found = []
    for _ in range(4):
        wait_for(device)
        begin = time.perf_counter()
        for _ in range(TIMED_PRODUCTS if device == "cuda" else 1):
            work()
        wait_for(device)
        found.append((time.perf_counter() - begin) / (TIMED_PRODUCTS if device == "cuda" else 1))
    return statistics.median(found[1:])


# ---- what is shown


def show(rows: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    """The table and the facts."""
    print("\n| class | ms in a step | share |\n|---|---|---|")
    for row in rows:
        print(f"| {row['class']} | {row['ms in a step']:.2f} | {row['share']:.1%} |")
    print()
    for name, value in facts.items():
        print(f"{name}: {value:,.4g}" if isinstance(value, float) else f"{name}: {value}", flush=True)


def draw(reached: list[dict[str, Any]], facts: dict[str, Any], picture: Path) -> None:
    """The roofline."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.subplots()
    roof = facts["TFLOP/s of the chip"] or max(each["TFLOP/s"] for each in reached)
    slope = facts["TB/s of a copy"]
    axis.plot([16, roof / slope, 2048], [16 * slope, roof, roof], color="black", label="roof")
    for name in dict.fromkeys(each["name"].split(", gradient")[0] for each in reached):
        points = [each for each in reached if each["name"].split(", gradient")[0] == name]
        both = [[each[key] for each in points] for key in ("operations a byte", "TFLOP/s")]
        axis.scatter(*both, label=name, s=24)
    axis.axhline(
        facts["TFLOP/s of its products alone"], color="grey", ls="--", lw=1, label="all products alone"
    )
    axis.axhline(facts["TFLOP/s of a step"], color="red", ls="--", lw=1, label="the whole step")
    axis.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s", title=facts["case"])
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    save(figure, picture)


if __name__ == "__main__":
    main()
