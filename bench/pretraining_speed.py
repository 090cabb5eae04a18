"""Pre-training beside transformers' BertForPreTraining at its best, interleaved, ours from a real store.

    python bench/pretraining_speed.py --store store/ --lengths 128 512

Ours takes whole optimisation steps of the real job: batches drawn, masked and packed from the store by loader
processes, MLM and NSP with dropout 0.1, bf16 over fp32 weights, clipping, Adam. transformers takes such steps
on batches of random ids that need no reading and no padding: its best case. It is tried with and without a
mask of ones, with steps of several sizes and with CUDA graphs; the fastest of these is the peer.
Tokens are real ones.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from bertsmith.cli.pretrain import live_line
from bertsmith.cli.terminal import LogProgress
from bertsmith.pretraining.hardware import flops_per_step, peak_of
from bertsmith.pretraining.run_setup import Request, Run, StepLoader, set_up
from bertsmith.recipe.load import load_recipe
from bertsmith.training.distributed import start_world
from bertsmith.training.trainer import Progress, same_bits, training_steps

WARM_UP_STEPS = 6
PREDICTIONS = {128: 20, 512: 77}


def main() -> None:
    options = parse()
    torch.set_float32_matmul_precision("high")
    for length in options.lengths:
        with tempfile.TemporaryDirectory() as folder:
            compare(length, Path(folder) / "run", options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--preset", default="bert-base")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument(
        "--peer-tokens", type=int, nargs="+", default=[32768, 65536], help="tokens in a step of the peer"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="steps in a round")
    parser.add_argument("--deterministic", default="auto", choices=["auto", "on", "off"])
    parser.add_argument("--alone", action="store_true", help="leave the peer out")
    return parser.parse_args()


def compare(length: int, folder: Path, options: argparse.Namespace) -> None:
    torch.compiler.reset()  # a second length would make the peer's graph a dynamic, slower one
    run = our_run(length, folder, options)
    contenders = {"ours": our_round(run, options)}
    if not options.alone:
        contenders["peer"] = best_peer(run, length, options)
    contenders["ours"](WARM_UP_STEPS)
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    waits = []
    for _ in range(options.rounds):
        for name, take_round in contenders.items():
            begin = time.perf_counter()
            tokens, waited = take_round(options.steps)
            seconds = time.perf_counter() - begin
            rates[name].append(tokens / seconds)
            if name == "ours":
                waits.append(waited / seconds)
    report(run, length, rates, waits)


def our_run(length: int, folder: Path, options: argparse.Namespace) -> Run:
    stage = f"[{{fraction = 1.0, length = {length}, predictions = {PREDICTIONS.get(length, length // 7)}}}]"
    settings = [
        f"examples.stages={stage}",
        f"batch.sequences={options.sequences}",
        f"run.device={options.device}",
        f"run.deterministic={options.deterministic}",
    ]
    recipe = load_recipe(options.preset, settings)
    run, _ = set_up(
        Request(recipe, options.store, folder), start_world(options.device), LogProgress(live_line)
    )
    return run


def our_round(run: Run, options: argparse.Namespace) -> Callable[[int], tuple[int, float]]:
    steps = training_steps(run.trainer, StepLoader(run), Progress())

    def take(count: int) -> tuple[int, float]:
        with same_bits(run.machine.deterministic):
            reports = list(itertools.islice(steps, count))
        wait_for(options.device)
        steps_taken = [report.step for report in reports]
        return sum(step.tokens for step in steps_taken), sum(step.waited_seconds for step in steps_taken)

    return take


class PeerForm(NamedTuple):
    """How the peer runs."""

    mode: str
    """Of torch.compile."""
    masked: bool
    """Whether it is given an attention mask of ones, with which SDPA may take another kernel."""
    tokens: int
    """In a step."""


def best_peer(run: Run, length: int, options: argparse.Namespace) -> Callable[[int], tuple[int, float]]:
    """The fastest of the peer's ordinary forms, warmed up."""
    modes = ("default", "reduce-overhead") if options.device == "cuda" else ("default",)
    best, best_rate = None, 0.0
    for mode, masked, tokens in itertools.product(modes, (True, False), options.peer_tokens):
        torch.compiler.reset()
        take = peer_round(run, length, PeerForm(mode, masked, tokens))
        take(WARM_UP_STEPS)
        begin = time.perf_counter()
        shown, _ = take(options.steps)
        rate = shown / (time.perf_counter() - begin)
        form = f"{mode}, {'a mask of ones' if masked else 'no mask'}, {tokens:,} tokens a step"
        print(f"length {length}: peer ({form}) {rate / 1e3:.1f}k tokens/s", flush=True)
        if rate > best_rate:
            best, best_rate = take, rate
    assert best is not None
    return best


def peer_round(run: Run, length: int, form: PeerForm) -> Callable[[int], tuple[int, float]]:
    config, device = run.objective.network.config, run.world.device.type
    theirs = transformers.BertConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=config.inner,
    )
    model = (
        transformers.BertForPreTraining._from_config(theirs, attn_implementation="sdpa").to(device).train()
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    compiled = torch.compile(model, mode=form.mode) if device == "cuda" else model
    sequences = max(1, form.tokens // length)
    ids = torch.randint(1000, config.vocabulary, (sequences, length), device=device)
    labels = ids.masked_fill(torch.rand(sequences, length, device=device) >= 0.15, -100)
    pairs = torch.randint(0, 2, (sequences,), device=device)
    batch = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "labels": labels}
    if form.masked:
        batch["attention_mask"] = torch.ones_like(ids)

    def take(count: int) -> tuple[int, float]:
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = compiled(**batch, next_sentence_label=pairs).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        wait_for(device)
        return count * ids.numel(), 0.0

    return take


def wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def report(run: Run, length: int, rates: dict[str, list[float]], waits: list[float]) -> None:
    medians = {name: statistics.median(each) for name, each in rates.items()}
    spread = {name: f"{min(each) / 1e3:.0f}-{max(each) / 1e3:.0f}" for name, each in rates.items()}
    peak = peak_of(run.world.device)
    counts = {"tokens": length, "sequences": 1, "predicted": round(0.15 * length)}
    work = flops_per_step(run.objective.networks().values(), **counts) / length
    for name, rate in medians.items():
        share = f", MFU {rate * work / peak:.1%}" if peak else ""
        print(f"length {length}: {name} {rate / 1e3:.1f}k tokens/s ({spread[name]}){share}", flush=True)
    if "peer" in medians:
        print(f"length {length}: ours / peer {medians['ours'] / medians['peer']:.2f}", flush=True)
    print(f"length {length}: waiting for input {statistics.median(waits):.2%} of the time", flush=True)


if __name__ == "__main__":
    main()
