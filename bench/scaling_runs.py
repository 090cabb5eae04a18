"""Pre-train a grid of sizes, budgets in tokens and amounts of text (`scaling_fit.py` fits the losses).

    python bench/scaling_runs.py run --text corpus/part-*.txt.xz --store stage/ --out runs/scaling \\
        --grid bench/scaling_grid.toml --only first --at-once 10 --minutes 9

`run` makes a store of the text (`all`) and random samples of its training documents (`half`, `small`), and
trains up to --at-once models on one device, in the order of the grid. Every budget is in steps, so that the
outcome does not depend on what shares the GPU. All models are evaluated on the same held-out documents of
`all`, which no sample contains. When the minutes are up the runs are stopped and saved; the same command
continues. Each finished run is one line of runs.jsonl, and its folder is removed.
"""

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scaling_fit import rows_of

VOCABULARY = "bertsmith-small"
SAMPLES = {"half": 30.9e6, "small": 2.77e6}
"""Tokens of the smaller stores: 134 MB and 12 MB of text."""
STOPPING_SECONDS, KILLING_SECONDS = 30, 20
"""A stopped run finishes its step and saves; a 12x768 takes seconds to do so."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the grid."""

    objective: str
    shape: str
    """Layers x width."""
    tokens: float
    """Budget, in millions."""
    text: str = "all"
    rate: float = 1.0
    """Factor of the rule's learning rate."""
    batch: float = 1.0
    """Factor of the rule's batch."""
    seed: int = 0

    @property
    def name(self) -> str:
        """The name of its folder."""
        return "-".join(f"{value:g}" if isinstance(value, float) else str(value) for value in self.values())

    def values(self) -> tuple[Any, ...]:
        """All fields."""
        return tuple(asdict(self).values())

    def settings(self) -> list[str]:
        """The settings that differ from speedrun-small. The two rules here are what the grid tests."""
        layers, width = map(int, self.shape.split("x"))
        masked = self.objective == "masked"
        # 4k tokens a step for 4 M, 16k for 16 M, 32k for 64 M, 64k for 256 M; room for the filler of a pass.
        doublings = round(0.3 + 0.6 * np.log2(max(1.0, self.tokens / 4)))
        usual = min(65_536, 4096 * 2**doublings)
        batch = round(usual * self.batch * 127 / 128)
        # Known good: 1.5e-3 at 384 and 1e-3 at 768 with 65,536 tokens; half of that for replaced tokens.
        rate = self.rate * 1.5e-3 * (384 / width) ** 0.6 * (usual / 65_536) ** 0.25 * (1 if masked else 0.5)
        steps = max(20, round(self.tokens * 1e6 / batch))
        # Compiling takes 20 to 60 seconds; a step of a few thousand tokens 3 ms a layer without it.
        compiled = steps * 0.003 * (layers + 1) * (1 if masked else 1.5) > 25
        values: dict[str, Any] = {
            "name": self.name,
            "model.layers": layers,
            "model.width": width,
            "model.heads": width // 64,
            "model.inner": 64 * round(width * 8 / 3 / 64),
            "examples.objective": self.objective,
            "examples.pairs": "full-sentences",
            "examples.single_fraction": 0,
            "batch.tokens": batch,
            "optim.peak_lr": f"{rate:.3g}",
            "run.budget": "steps",
            "run.steps": steps,
            "run.seed": self.seed,
            "run.compile": "auto" if compiled else "off",
            "run.loader_workers": 1 if self.tokens < 100 else 2,
            "run.log_every_steps": max(1, steps // 20),
            "run.evaluate_every_steps": steps,
            "run.evaluation_sequences": 512 if self.tokens > 2 else 32,
            "run.save_every_minutes": 1000,
        }
        if not masked:  # as speedrun-base
            values |= {"masking.rate": 0.2, "masking.as_mask": 0.85, "masking.as_random": 0}
            values["examples.stages"] = "[{fraction=1.0, length=128, predictions=26}]"
        return [f"{key}={value}" for key, value in values.items()]


def main() -> None:
    options = parse()
    {"run": run, "one": one}[options.verb](options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    grid = verbs.add_parser("run", help="make the stores and train what is left of the grid")
    grid.add_argument("--text", nargs="+", required=True, help="read only if --store does not exist")
    grid.add_argument("--store", type=Path, required=True, help="folder of the stores")
    grid.add_argument("--grid", type=Path, required=True)
    grid.add_argument("--only", nargs="+", help="the parts of the grid to run, in this order")
    grid.add_argument("--out", type=Path, required=True)
    grid.add_argument("--at-once", type=int, default=8)
    grid.add_argument("--minutes", type=float, default=9.0, help="stores, stopping and saving included")
    single = verbs.add_parser("one", help="train and evaluate one cell, given as JSON")
    single.add_argument("cell")
    single.add_argument("--store", type=Path, required=True)
    single.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


# ---- the grid


def run(options: argparse.Namespace) -> None:
    began = time.monotonic()
    ends = began + 60 * options.minutes - STOPPING_SECONDS
    options.out.mkdir(parents=True, exist_ok=True)
    start_mps()
    make_stores(options.text, options.store)
    print(f"stores ready after {time.monotonic() - began:.0f} s", flush=True)
    lines = options.out / "runs.jsonl"
    done = {row["name"] for row in rows_of(lines)} if lines.exists() else set()
    waiting = [cell for cell in cells_of(options.grid, options.only) if cell.name not in done]
    running: dict[str, subprocess.Popen[bytes]] = {}
    while (waiting or running) and time.monotonic() < ends:
        while waiting and len(running) < options.at_once:
            cell = waiting.pop(0)
            running[cell.name] = started(cell, options)
        for name in [name for name, process in running.items() if process.poll() is not None]:
            take_in(name, options, running.pop(name).returncode, time.monotonic() - began)
        time.sleep(0.2)
    for process in running.values():
        process.terminate()
    for name, process in running.items():
        try:
            process.wait(max(0.1, ends + KILLING_SECONDS - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
        take_in(name, options, process.wait(), time.monotonic() - began)
    print(f"{len(waiting)} runs were not begun: {' '.join(cell.name for cell in waiting)}", flush=True)


def cells_of(grid: Path, parts: list[str] | None) -> list[Cell]:
    """The cells of a grid in its order; a key with several values stands for all of them."""
    tables, cells = tomllib.loads(grid.read_text(encoding="utf-8")), dict[Cell, None]()
    for entry in itertools.chain.from_iterable(tables[part] for part in parts or tables):
        lists = {key: value if isinstance(value, list) else [value] for key, value in entry.items()}
        for values in itertools.product(*lists.values()):
            cell = Cell(**dict(zip(lists, values, strict=True)))
            factors = {"rate": float(cell.rate), "batch": float(cell.batch)}
            cells[replace(cell, tokens=float(cell.tokens), **factors)] = None
    return list(cells)


def started(cell: Cell, options: argparse.Namespace) -> "subprocess.Popen[bytes]":
    """The process of a run."""
    folder = options.out / cell.name
    folder.mkdir(exist_ok=True)
    command = [sys.executable, __file__, "one", json.dumps(asdict(cell)), "--store", options.store]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "3"}
    with (folder / "log").open("ab") as log:
        return subprocess.Popen([*command, "--out", folder], stdout=log, stderr=log, env=environment)


def take_in(name: str, options: argparse.Namespace, code: int, seconds: float) -> None:
    """Note a run that has ended: a line of runs.jsonl, or why there is none."""
    folder: Path = options.out / name
    if not (folder / "result.json").exists():
        lines = [*(folder / "log").read_text(errors="replace").splitlines(), *[""] * 3]
        told = "stopped" if code == 0 else f"failed ({code}): " + " | ".join(lines[-8:])[-600:]
        print(f"{seconds:4.0f} s  {name}: {told}", flush=True)
        return
    row = json.loads((folder / "result.json").read_text())
    with (options.out / "runs.jsonl").open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")
    shutil.rmtree(folder)
    told = f"loss {row['fixed_token_loss']:.4f}, bits/char {row['fixed_bits_per_character']:.3f}"
    told += f", found {row['found_loss']:.4f}" if "found_loss" in row else ""
    told += f", {row['steps']:,} steps in {row['seconds']:.0f} s, {row['tokens_per_second']:,.0f} tokens/s"
    print(f"{seconds:4.0f} s  {name}: {told}", flush=True)


def start_mps() -> None:
    """Let kernels of several processes run on the GPU at the same time, if this machine can."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        return
    subprocess.run([control, "-d"], check=False)
    probe = [sys.executable, "-c", "import torch; torch.zeros(1).cuda()"]
    works = subprocess.run(["timeout", "60", *probe], check=False).returncode == 0
    if not works:
        subprocess.run([control], input=b"quit\n", check=False)
    print("MPS" if works else "MPS does not work: processes take turns", flush=True)


def make_stores(text: list[str], stage: Path) -> None:
    """Tokenize the text and draw the smaller stores from its training documents."""
    from bertsmith.corpus.token_store import TokenisedDocuments, TokenStore, writing_store
    from bertsmith.data.epoch_index import split_documents

    whole = stage / "all"
    if not whole.exists():
        command = [sys.executable, "-m", "bertsmith", "corpus", *text, "--vocab", VOCABULARY, "--out", whole]
        subprocess.run(list(map(str, command)), check=True)
    store = TokenStore.open(whole)
    documents, sentences = store.document_starts, store.sentence_starts
    usable = split_documents("train", count=len(documents) - 1, held_out_fraction=0.005)
    order = np.random.default_rng(0).permutation(usable)
    sizes = sentences[documents[order + 1]] - sentences[documents[order]]
    for name, tokens in SAMPLES.items():
        if (stage / name).exists() or tokens > 0.9 * store.tokens:
            continue
        chosen = np.sort(order[: np.searchsorted(np.cumsum(sizes), tokens) + 1])
        with writing_store(stage / name, store.tokenizer()) as writer:
            for part in np.array_split(chosen, max(1, len(chosen) // 2000)):
                lengths = documents[part + 1] - documents[part]
                starts = sentences[documents[part]]
                inside = np.concatenate(
                    [np.diff(sentences[documents[d] : documents[d + 1] + 1]) for d in part]
                )
                ids = store.gather(starts, sentences[documents[part + 1]] - starts)
                writer.add(TokenisedDocuments(ids, inside, lengths))
            writer.finish(settings={"sample": name}, summary={})


# ---- one run


def one(options: argparse.Namespace) -> None:
    from quiet import Quiet

    from bertsmith.corpus.token_store import TokenStore
    from bertsmith.pretraining.pretrain import pretrain
    from bertsmith.recipe.load import load_recipe

    class Telling(Quiet):
        """Print the messages into the log."""

        def on_message(self, text: str) -> None:
            print(text, flush=True)

    cell = Cell(**json.loads(options.cell))
    recipe = load_recipe("speedrun-small", cell.settings())
    folder, store = options.out / "run", TokenStore.open(options.store / cell.text)
    result = pretrain(recipe, store=store.folder, out=folder, callback=Telling())
    if result.state != "finished":
        return
    curve, rates = [], []
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        if line["kind"] == "train":
            found = {key: round(line[key], 4) for key in ("token_loss", "replaced_loss") if key in line}
            curve.append({"tokens": line["tokens"], **found})
            rates.append(line["tokens_per_second"])
    row = {"name": cell.name, **asdict(cell), "store_tokens": store.tokens, "vocabulary": store.vocabulary}
    row |= {"passes": result.tokens / store.tokens, "batch_tokens": recipe.batch.tokens}
    row |= {"peak_lr": recipe.optim.peak_lr, "schedule": recipe.optim.schedule}
    row |= {"heads": recipe.model.heads, "inner": recipe.model.inner, "steps": result.steps}
    row |= {"tokens_seen": result.tokens, "seconds": round(result.seconds, 1), "held_out": result.held_out}
    row |= {"tokens_per_second": float(np.median(rates)), "compile": recipe.run.compile, "curve": curve}
    row |= evaluated(folder, recipe, TokenStore.open(options.store / "all"))
    (options.out / "result.part").write_text(json.dumps(row))
    (options.out / "result.part").rename(options.out / "result.json")


def evaluated(folder: Path, recipe: Any, common: Any) -> dict[str, float]:
    """The size of a finished model, and its losses on the held-out documents of the common store."""
    import math

    import torch

    from bertsmith.objectives.registry import OBJECTIVES
    from bertsmith.pretraining import fixed_evaluation
    from bertsmith.pretraining.initial_model import build_initial_model
    from bertsmith.recipe.schema import StartSection
    from bertsmith.training.distributed import start_world
    from bertsmith.training.trainer import Trainer, choose_precision

    trained = recipe.model_copy(update={"start": StartSection(model=str(folder / "model"))})
    initial, world = build_initial_model(trained, common), start_world("auto")
    objective = OBJECTIVES[recipe.examples.objective].build(initial.network, initial.other, recipe)
    objective.to(world.device)
    optimizer = torch.optim.SGD(objective.parameters())
    trainer = Trainer(objective, optimizer, world, choose_precision("auto", world.device))
    fixed_evaluation.CPU_SEQUENCES = fixed_evaluation.GPU_SEQUENCES  # runs of all machines are compared
    data = fixed_evaluation.fixed_data(common, recipe, world, micro_tokens=16_384, cache=folder / "plans")
    fixed = fixed_evaluation.fixed_set(data, world)
    found = fixed_evaluation.evaluate_fixed(trainer, fixed, stopping=lambda: False, max_seconds=math.inf)
    assert found is not None, "nobody asked to stop"
    encoder = initial.network.encoder
    weights, embedded = (
        sum(each.numel() for each in part.parameters()) for part in (encoder, encoder.embeddings)
    )
    row = {**found[0], "weights": weights, "layer_weights": weights - embedded}
    masked = round(recipe.masking.rate * 128)
    row["flops_per_token"] = objective.flops(128, 1, masked) / 128
    if recipe.examples.objective == "replaced":
        row |= detection(initial.network, fixed.batches.micros, trainer)
    return row


def detection(network: Any, micros: Any, trainer: Any) -> dict[str, float]:
    """How well a discriminator finds tokens that bertsmith-small made up: the same ones for all models.

    The generators of two runs differ, so that their own losses cannot be compared. `found_loss` is the loss
    after a scale and an offset of the scores are fitted, because a run's own generator is weaker.
    """
    import torch

    from bertsmith.inference.model_path import model_folder
    from bertsmith.model.folder.model_folder import read_model
    from bertsmith.objectives.replaced_token_detection import sample, with_tokens
    from bertsmith.training.trainer import autocast

    device = trainer.world.device
    judge = read_model(model_folder(VOCABULARY)).network.to(device).eval()
    network.eval()
    scores, labels = [], []
    with torch.no_grad(), autocast(device, trainer.precision):
        for micro in micros:
            batch = micro.to(device)
            hidden_PD = judge.encoder(batch.inputs, rows=batch["masked_rows_P"])
            words_P = sample(judge.scores_of_words(hidden_PD)[:, : judge.config.vocabulary], batch["draws_P"])
            original_T, shown_T = with_tokens(batch, batch["masked_ids_P"]), with_tokens(batch, words_P)
            inputs, end = replace(batch.inputs, tokens_T=shown_T), int(batch.end_1)
            scores_T1 = network.scores("replaced", network(inputs), inputs.layout)
            scores.append(scores_T1[:end, 0].double().cpu().numpy())
            labels.append((shown_T != original_T)[:end].cpu().numpy())
    score, label = np.concatenate(scores), np.concatenate(labels).astype(float)
    raw = float(np.mean(np.logaddexp(0, score) - label * score))
    design, fitted = np.stack([score, np.ones_like(score)], 1), np.array([1.0, 0.0])
    for _ in range(30):  # Newton's method on two numbers
        guess = 1 / (1 + np.exp(-design @ fitted))
        curvature = design.T @ (design * (guess * (1 - guess))[:, None]) + 1e-9 * np.eye(2)
        fitted += np.linalg.solve(curvature, design.T @ (label - guess))
    logits = design @ fitted
    ranks = np.empty(len(score))
    ranks[np.argsort(score)] = np.arange(1, len(score) + 1)
    ones = label.sum()
    area = (ranks[label > 0].sum() - ones * (ones + 1) / 2) / (ones * (len(label) - ones))
    calibrated = float(np.mean(np.logaddexp(0, logits) - label * logits))
    return {"found_loss": calibrated, "found_raw_loss": raw, "found_area": area, "made_up": label.mean()}


if __name__ == "__main__":
    main()
