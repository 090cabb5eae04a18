"""Fine-tuning beside a loop of transformers, on the same examples, interleaved; or to the end, with scores.

    python bench/finetuning_speed.py sst2 --data glue/SST-2 --model minilm-l6 --sample 10000
    python bench/finetuning_speed.py mrpc --data glue/MRPC --model minilm-l6 --scores --seeds 0 1 2
    python bench/finetuning_speed.py squad --data squad/ --model gte-small --device cuda

The peer is AutoModelFor... with SDPA, fused AdamW, bf16 autocast where the machine has it, and batches that
are padded to their longest sequence (a multiple of 32 on a GPU, where it is compiled once for each shape and
that time is left out): once grouped by length as the Trainer does it (groups of 50 batches, sorted), once at
random. All take the same tokens: those that our reader made.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import transformers
from quiet import Quiet
from torch import Tensor

from bertsmith.finetuning.assignment import Assignment
from bertsmith.finetuning.finetune import finetune_on
from bertsmith.finetuning.finetuning_setup import build_trainer, filling_multiple
from bertsmith.finetuning.initial_task_model import load_initial_task_model
from bertsmith.finetuning.splits import TaskSplits, encoded_split, read_splits, task_config_of
from bertsmith.model.torch_internals import has_bf16_products
from bertsmith.recipe.finetuning_schema import FinetuningRecipe
from bertsmith.tasks.batches import ShuffledBatches
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.predictions import PredictedSplit
from bertsmith.tasks.task_config import TaskConfig
from bertsmith.tasks.task_recipe import finetuning_recipe
from bertsmith.training.distributed import start_world
from bertsmith.training.optimizers import learning_rate
from bertsmith.training.trainer import Progress, StepInput, finish_step, launch_step

GROUP_BATCHES = 50
"""The Trainer's length-grouped sampler sorts within groups of so many batches."""
PEERS = {
    "classify": transformers.AutoModelForSequenceClassification,
    "regress": transformers.AutoModelForSequenceClassification,
    "span": transformers.AutoModelForQuestionAnswering,
}


def main() -> None:
    options = parse()
    task = task_named(options.task)
    settings = [f"run.device={options.device}", f"run.precision={precision_of(options.device)}", *options.set]
    print(f"both in {precision_of(options.device)} on {options.device}", flush=True)
    recipe = finetuning_recipe(task, settings)
    splits = sampled(read_splits(task, options.data, skip_bad=True), options.sample)
    if options.scores:
        compare_scores(options, recipe, splits)
    else:
        compare_speed(options, recipe, splits)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--sample", type=int, default=0, help="so many training examples; 0 takes all")
    parser.add_argument("--steps", type=int, default=20, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scores", action="store_true", help="train to the end and judge")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--peers", nargs="*", default=["grouped", "random"], choices=["grouped", "random"])
    parser.add_argument("--set", nargs="*", default=[], help="settings of the recipe")
    return parser.parse_args()


def precision_of(device: str) -> str:
    """bf16 where the machine computes in it; a CPU that only imitates it would be a hundred times slower."""
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


def compare_speed(options: argparse.Namespace, recipe: FinetuningRecipe, splits: TaskSplits) -> None:
    config = task_config_of(splits, recipe)
    initial = load_initial_task_model(options.model, config, seed=0)
    encoded = encoded_split(splits.splits["train"], config, initial.tokenizer).encoded
    rounds = {"ours": our_steps(recipe, config, encoded, options)}
    for mode in options.peers:
        rounds[mode] = peer_steps(recipe, config, encoded, mode, options)
    for take in rounds.values():
        take(min(5, options.steps))
    rates: dict[str, list[float]] = {name: [] for name in rounds}
    for _ in range(options.rounds):
        for name, take in rounds.items():
            begin_time = time.perf_counter()
            examples = take(options.steps)
            rates[name].append(examples / (time.perf_counter() - begin_time))
    middle = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        spread = f"{min(values):.1f}-{max(values):.1f}"
        print(f"{options.task} {name}: {middle[name]:.1f} examples/s ({spread})", flush=True)
    for name in options.peers:
        print(f"{options.task}: ours / {name} {middle['ours'] / middle[name]:.2f}", flush=True)


def our_steps(
    recipe: FinetuningRecipe, config: TaskConfig, encoded: EncodedSet, options: argparse.Namespace
) -> Callable[[int], int]:
    world = start_world(recipe.run.device)
    trainer, _ = build_trainer(load_initial_task_model(options.model, config, seed=0), config, recipe, world)
    batches = ShuffledBatches(
        encoded,
        examples_per_step=recipe.run.examples,
        seed=0,
        micro_tokens=recipe.run.micro_tokens,
        multiple=filling_multiple(encoded, recipe, world),
    )
    numbers = itertools.count()

    def take(count: int) -> int:
        examples = 0
        for number in itertools.islice(numbers, count):
            items = batches.step(number)
            rate = learning_rate(0.5, recipe.optim)
            step = StepInput(items.micros, (items.count,), rate, Progress(number))
            launched = launch_step(trainer, step)
            examples += items.examples
        finish_step(trainer, launched)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        return examples

    return take


def peer_steps(
    recipe: FinetuningRecipe, config: TaskConfig, encoded: EncodedSet, mode: str, options: argparse.Namespace
) -> Callable[[int], int]:
    peer = Peer(recipe, config, options, seed=0)
    batches = peer.batches(encoded, mode, seed=0)
    if options.device == "cuda":
        peer.compile_for(encoded)

    def take(count: int) -> int:
        examples = 0
        for batch in itertools.islice(batches, count):
            peer.learn(batch, rate=recipe.optim.peak_lr / 2)
            examples += len(batch["input_ids"])
        if options.device == "cuda":
            torch.cuda.synchronize()
        return examples

    return take


class Peer:
    """A plain training loop over a model of transformers."""

    def __init__(
        self, recipe: FinetuningRecipe, config: TaskConfig, options: argparse.Namespace, *, seed: int
    ) -> None:
        torch.manual_seed(seed)
        self.recipe, self.config, self.device = recipe, config, options.device
        labels = {} if config.kind.name == "span" else {"num_labels": config.outputs}
        self.model = PEERS[config.kind.name].from_pretrained(
            options.model, dtype=torch.float32, attn_implementation="sdpa", **labels
        )
        self.model.to(self.device).train()
        optim = recipe.optim
        decayed = [each for each in self.model.parameters() if each.dim() > 1]
        exempt = [each for each in self.model.parameters() if each.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": optim.weight_decay},
            {"params": exempt, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=optim.peak_lr, eps=optim.eps, fused=True)
        self.forward = self.model
        self.multiple = 32 if self.device == "cuda" else 8

    def compile_for(self, encoded: EncodedSet) -> None:
        """Compile once for each shape; the time for it is not measured."""
        self.forward = torch.compile(self.model, dynamic=False)
        torch.compiler.config.recompile_limit = 64
        lengths = np.diff(encoded.starts_N1)
        widths = sorted({rounded(int(length), self.multiple) for length in lengths})
        for width in widths:
            items = np.flatnonzero(lengths <= width)[: self.recipe.run.examples]
            batch = self.padded(encoded, np.resize(items, self.recipe.run.examples), width)
            self.learn(batch, rate=0.0)

    def batches(self, encoded: EncodedSet, mode: str, *, seed: int) -> Iterator[dict[str, Tensor]]:
        """Padded batches without end."""
        for epoch in itertools.count():
            yield from self.epoch(encoded, mode, seed=1000 * seed + epoch)

    def epoch(self, encoded: EncodedSet, mode: str, *, seed: int) -> Iterator[dict[str, Tensor]]:
        """One pass through the examples."""
        lengths = np.diff(encoded.starts_N1)
        chance = np.random.default_rng(seed)
        order = chance.permutation(encoded.items)
        size = self.recipe.run.examples
        if mode == "grouped":
            groups = [
                order[first : first + GROUP_BATCHES * size]
                for first in range(0, len(order), GROUP_BATCHES * size)
            ]
            order = np.concatenate([group[np.argsort(-lengths[group], kind="stable")] for group in groups])
        # In any order, so that a round of a few batches meets long and short ones alike.
        for first in chance.permutation(range(0, len(order), size)):
            items = order[first : first + size]
            yield self.padded(encoded, items, rounded(int(lengths[items].max()), self.multiple))

    def padded(self, encoded: EncodedSet, items: np.ndarray, width: int) -> dict[str, Tensor]:
        """Some items as a padded batch."""
        shape = (len(items), width)
        ids, segments, mask = (np.zeros(shape, np.int64) for _ in range(3))
        for row, item in enumerate(items):
            begin_row, end_row = encoded.starts_N1[item], encoded.starts_N1[item + 1]
            ids[row, : end_row - begin_row] = encoded.tokens_T[begin_row:end_row]
            segments[row, : end_row - begin_row] = encoded.segments_T[begin_row:end_row]
            mask[row, : end_row - begin_row] = 1
        batch = {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask}
        targets = encoded.targets[items]
        if self.config.kind.name == "span":
            batch |= {"start_positions": targets[:, 0], "end_positions": targets[:, 1]}
        else:
            batch["labels"] = targets
        return {name: torch.from_numpy(values).to(self.device) for name, values in batch.items()}

    def learn(self, batch: dict[str, Tensor], *, rate: float) -> None:
        """One step."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.recipe.run.precision == "bf16"):
            loss = self.forward(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def logits(self, encoded: EncodedSet) -> np.ndarray:
        """The scores of a split, in order."""
        self.model.eval()
        found = []
        half = torch.autocast(self.device, torch.bfloat16, enabled=self.recipe.run.precision == "bf16")
        with torch.no_grad(), half:
            for first in range(0, encoded.items, 64):
                items = np.arange(first, min(first + 64, encoded.items))
                width = rounded(int(np.diff(encoded.starts_N1)[items].max()), self.multiple)
                batch = self.padded(encoded, items, width)
                batch.pop("labels")
                found.append(self.model(**batch).logits.float().cpu().numpy())
        self.model.train()
        return np.concatenate(found)


def rounded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


# ---- scores


def compare_scores(options: argparse.Namespace, recipe: FinetuningRecipe, splits: TaskSplits) -> None:
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in options.seeds:
        for name in ("ours", *options.peers):
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
        result = finetune_on(splits, assignment, start_world(options.device), Quiet())
        seconds = time.perf_counter() - started
    return result.metrics["dev"][splits.task.metrics[0]], seconds


def peer_to_the_end(
    name: str, seed: int, options: argparse.Namespace, recipe: FinetuningRecipe, splits: TaskSplits
) -> tuple[float, float]:
    config = task_config_of(splits, recipe)
    tokenizer = load_initial_task_model(options.model, config, seed=0).tokenizer
    train = encoded_split(splits.splits["train"], config, tokenizer).encoded
    dev = encoded_split(splits.splits["dev"], config, tokenizer)
    peer = Peer(recipe, config, options, seed=seed)
    steps = -(-train.items // recipe.run.examples)
    total = int(recipe.run.epochs * steps)
    started = time.perf_counter()
    for number, batch in enumerate(itertools.islice(peer.batches(train, name, seed=seed), total)):
        peer.learn(batch, rate=learning_rate(number / total, recipe.optim))
    logits = peer.logits(dev.encoded)
    predictions = config.kind.predict(logits, dev.encoded, dev.examples, config.answers)
    split = PredictedSplit(dev.examples, dev.encoded, predictions)
    score = config.kind.evaluate(config.metrics, config.labels, split)[config.metrics[0]]
    return score, time.perf_counter() - started


if __name__ == "__main__":
    main()
