"""Fine-tuning beside a loop of transformers at its best, interleaved; or to the end, with scores.

    python bench/finetuning_speed.py sst2 --data glue/SST-2 --shape base --vocab minilm-l6 --device cuda
    python bench/finetuning_speed.py squad --data squad/ --shape base --vocab minilm-l6 --device cuda
    python bench/finetuning_speed.py sst2 --data glue/SST-2 --model minilm-l6 --sample 1600 --device cpu
    python bench/finetuning_speed.py mrpc --data glue/MRPC --model minilm-l6 --scores --seeds 0 1 2

A round is an epoch of the same examples for either side (--sample of them, drawn at random), each in its own
batches: which few batches a side meets would decide how fast it looks. The peer is AutoModelFor... with fused
AdamW and bf16 autocast where the machine has it, on the tokens that our reader made, in batches that were
padded and put on the device before the clock started. It is tried not compiled or compiled for all shapes, on
a GPU also for each of few shapes with CUDA graphs; on a CPU with both of its forms of attention; batches are
grouped by length as the Trainer does it (groups of 50 batches, sorted), or random. The fastest of these, told
in the table, is the peer. Ours draws, packs and sends its batches inside of the clock. Compiling and
recording are outside: each side goes through three epochs before the first round.
On a CPU seconds are those of the process, all of its threads together: OMP_NUM_THREADS=1 for one core.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from finetuning_peer import Peer, PeerForm, peer_round
from quiet import Quiet
from random_model import add_model, folder_of
from rounds import (
    Results,
    Round,
    add_form,
    clock_of,
    fastest,
    in_turn,
    narrowed,
    parser_of,
    time_unit,
    wait_for,
)

from bertsmith.finetuning.assignment import Assignment
from bertsmith.finetuning.finetune import FinetuningRequest
from bertsmith.finetuning.finetuning_setup import build_trainer, filling_multiple, micro_tokens
from bertsmith.finetuning.initial_task_model import load_initial_task_model
from bertsmith.finetuning.splits import TaskSplits, encoded_split, read_splits, task_config_of
from bertsmith.model.kernels.torch_internals import has_bf16_products
from bertsmith.recipe.finetuning_schema import FinetuningRecipe
from bertsmith.tasks.batches import ShuffledBatches
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.predictions import PredictedSplit
from bertsmith.tasks.task_config import TaskConfig
from bertsmith.tasks.task_recipe import finetuning_recipe
from bertsmith.training.distributed import start_world
from bertsmith.training.job import run_job
from bertsmith.training.optimizers import learning_rate
from bertsmith.training.trainer import Progress, StepInput, finish_step, launch_step

USUAL_MODES = {"cuda": ["dynamic", "reduce-overhead"], "cpu": ["eager", "dynamic"]}
MULTIPLES = {"cuda": [32, 128], "cpu": [1, 8]}
ATTENTION = {"cuda": ["sdpa"], "cpu": ["sdpa", "eager"]}
WARM_UP_EPOCHS = 3
"""A size of step is recorded when it comes for the second time."""
SPEED_SAMPLE = 6400
"""Examples of an epoch where speed is compared: four times what the Trainer sorts by length at once."""


def main() -> None:
    options = parse()
    task = task_named(options.task)
    if options.scores and task.kind.name == "span":
        raise SystemExit("--scores: the peer's answers are not judged here, only its speed")
    splits = sampled(read_splits(task, options.data, skip_bad=True), options.sample)
    print(f"both in {precision_of(options.device)} on {options.device}", flush=True)
    results = Results(options.json, "examples", time_unit(options.device))
    with tempfile.TemporaryDirectory() as scratch:
        options.model = folder_of(options, Path(scratch))
        for examples in options.examples:
            settings = [
                f"run.device={options.device}",
                f"run.precision={precision_of(options.device)}",
                f"run.examples={examples}",
            ]
            recipe = finetuning_recipe(task, [*settings, *options.set])
            if options.scores:
                compare_scores(options, recipe, splits)
            else:
                compare_speed(options, recipe, splits, results)


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_form(parser)
    parser.add_argument("task")
    parser.add_argument("--data", type=Path, required=True)
    add_model(parser)
    parser.add_argument("--examples", type=int, nargs="+", default=[32], help="in a step")
    sample = f"so many training examples; 0 takes all, which is usual with --scores, else {SPEED_SAMPLE:,}"
    parser.add_argument("--sample", type=int, help=sample)
    parser.add_argument("--modes", nargs="+", help="of torch.compile, dynamic or eager, for the peer")
    parser.add_argument("--multiples", type=int, nargs="+", help="to which the peer's lengths are rounded up")
    parser.add_argument("--attention", nargs="+", choices=["sdpa", "eager"], help="forms of the peer's")
    parser.add_argument("--orders", nargs="+", default=["grouped", "random"], help="of the peer's batches")
    parser.add_argument("--scores", action="store_true", help="train to the end and judge")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", nargs="*", default=[], help="settings of the recipe")
    options = parser.parse_args()
    options.modes = options.modes or USUAL_MODES[options.device]
    options.multiples = options.multiples or MULTIPLES[options.device]
    options.attention = options.attention or ATTENTION[options.device]
    if options.sample is None:
        options.sample = 0 if options.scores else SPEED_SAMPLE
    return options


def precision_of(device: str) -> str:
    """bf16 where the machine computes in it; a CPU that only imitates it is many times slower."""
    fast = device == "cuda" or has_bf16_products()
    return "bf16" if fast else "fp32"


def sampled(splits: TaskSplits, count: int) -> TaskSplits:
    train = splits.splits["train"]
    if not count or count >= len(train):
        return splits
    indices = np.random.default_rng(0).permutation(len(train))[:count]
    fewer = {**splits.splits, "train": [train[index] for index in sorted(indices)]}
    return TaskSplits(splits.task, fewer, splits.labels, splits.skipped)


# ---- speed


def compare_speed(
    options: argparse.Namespace, recipe: FinetuningRecipe, splits: TaskSplits, results: Results
) -> None:
    config = task_config_of(splits, recipe)
    initial = load_initial_task_model(options.model, config, seed=0)
    encoded = encoded_split(splits.splits["train"], config, initial.tokenizer).encoded
    work = f"{options.task}, {options.model.name}, {recipe.run.examples} examples a step"
    print(f"\n{work}, {np.diff(encoded.starts_N1).mean():.0f} tokens an example", flush=True)

    def make(form: PeerForm) -> Round:
        return peer_round(Peer(options.model, recipe, config, form, seed=0), encoded)

    tried: dict[str, float] = {}
    every = itertools.product(options.modes, options.multiples, options.attention)
    forms = [PeerForm(*each) for each in every]
    # One graph of all shapes gains nothing from fewer of them.
    forms = [each for each in forms if each.mode != "dynamic" or each.multiple == options.multiples[0]]
    clock = clock_of(options.device)
    form = fastest(narrowed(forms, options.form), make, tried, clock)
    ordered = [form._replace(order=order) for order in options.orders]
    form = fastest(ordered, make, tried, clock)
    contenders = {"ours": our_steps(recipe, config, encoded, options), "peer": make(form)}
    for take, _ in itertools.product(contenders.values(), range(WARM_UP_EPOCHS)):
        take()
    results.add(work, in_turn(contenders, options.rounds, clock), form={"peer": str(form)})
    results.rows[-1]["forms_of_the_peer"] = tried
    results.write()


def our_steps(
    recipe: FinetuningRecipe, config: TaskConfig, encoded: EncodedSet, options: argparse.Namespace
) -> Round:
    world = start_world(recipe.run.device)
    initial = load_initial_task_model(options.model, config, seed=0)
    trainer, _ = build_trainer(initial, config, recipe, world)
    batches = ShuffledBatches(
        encoded,
        examples_per_step=recipe.run.examples,
        seed=0,
        micro_tokens=micro_tokens(initial.network, encoded, recipe, world),
        multiple=filling_multiple(encoded, recipe, world),
    )
    numbers = itertools.count()

    def take() -> float:
        examples = 0.0
        for number in itertools.islice(numbers, batches.steps_per_epoch):
            items = batches.step(number)
            rate = learning_rate(0.5, recipe.optim)
            step = StepInput(items.micros, (items.count,), rate, Progress(number))
            launched = launch_step(trainer, step)
            examples += items.examples
        finish_step(trainer, launched)
        wait_for(options.device)
        return examples

    return take


# ---- scores


def compare_scores(options: argparse.Namespace, recipe: FinetuningRecipe, splits: TaskSplits) -> None:
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in options.seeds:
        for name in ("ours", "grouped", "random"):
            run = ours_to_the_end if name == "ours" else peer_to_the_end
            score, seconds = run(name, seed, options, recipe, splits)
            found.setdefault(name, []).append((score, seconds))
            print(f"{options.task} seed {seed} {name}: {100 * score:.2f} in {seconds:.0f} s", flush=True)
    for name, results in found.items():
        scores = [score for score, _ in results]
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        seconds = statistics.median(seconds for _, seconds in results)
        mean = statistics.mean(scores)
        print(f"{options.task} {name}: {100 * mean:.2f} +- {100 * spread:.2f}, {seconds:.0f} s", flush=True)


def ours_to_the_end(
    name: str, seed: int, options: argparse.Namespace, recipe: FinetuningRecipe, splits: TaskSplits
) -> tuple[float, float]:
    del name
    run = recipe.run.model_copy(update={"seed": seed, "evaluations": 1})
    seeded = recipe.model_copy(update={"run": run})
    with tempfile.TemporaryDirectory() as folder:
        assignment = Assignment(splits.task, seeded, options.model, options.data, Path(folder) / "run", True)
        started = time.perf_counter()
        request = FinetuningRequest(assignment, splits)
        result = run_job(request, start_world(options.device), Quiet()).result
        seconds = time.perf_counter() - started
    return result["metrics"]["dev"][splits.task.metrics[0]], seconds


def peer_to_the_end(
    name: str, seed: int, options: argparse.Namespace, recipe: FinetuningRecipe, splits: TaskSplits
) -> tuple[float, float]:
    config = task_config_of(splits, recipe)
    tokenizer = load_initial_task_model(options.model, config, seed=0).tokenizer
    train = encoded_split(splits.splits["train"], config, tokenizer).encoded
    dev = encoded_split(splits.splits["dev"], config, tokenizer)
    peer = Peer(options.model, recipe, config, PeerForm("eager", 8, order=name), seed=seed)
    steps = -(-train.items // recipe.run.examples)
    total = int(recipe.run.epochs * steps)
    started = time.perf_counter()
    for number, batch in enumerate(itertools.islice(peer.batches(train, seed=seed), total)):
        peer.learn(batch, rate=learning_rate(number / total, recipe.optim))
    logits = peer.logits(dev.encoded)
    predictions = config.kind.predict(logits, dev.encoded, dev.examples, config.answers)
    split = PredictedSplit(dev.examples, dev.encoded, predictions)
    score = config.kind.evaluate(config.metrics, config.labels, split)[config.metrics[0]]
    return score, time.perf_counter() - started


if __name__ == "__main__":
    main()
