"""Pre-train variants of one recipe on an equal budget, evaluate and fine-tune each alike, print one table.

    python bench/ablations.py bert-small --store store/ --data glue/ --variants tried.toml --out runs/tried

A file of variants has a name and a list of settings a line; the first is what the others are compared with:

    baseline = []
    "mask 15 %" = ["masking.rate=0.15"]
    "rate 2e-3" = ["optim.peak_lr=2e-3"]

Each variant is a process of its own. A budget in --minutes counts what a variant costs, too: all have the
whole GPU, one after the other. With --steps, as many as --together says share the GPU, for what they learn
does not depend on the clock; their tokens a second do. Loss, accuracy and bits a character are those of the
fixed held-out evaluation, which asks every recipe the same; GLUE is the mean over the seeds on dev. What is
finished under --out is not done again.
"""

import argparse
import json
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BERTSMITH = (sys.executable, "-m", "bertsmith")
FIGURES = {
    "fixed_token_loss": "loss",
    "fixed_token_accuracy": "accuracy",
    "fixed_bits_per_character": "bits/char",
}


def main() -> None:
    options = parse()
    variants = tomllib.loads(options.variants.read_text(encoding="utf-8"))
    rows: dict[str, dict[str, Any]] = {}

    def study(name: str) -> None:
        folder = options.out / name.replace("/", "-").replace(" ", "-")
        if (run := pretrained(folder, variants[name], options)) is not None:
            rows[name] = {"variant": name, **run, **fine_tuned(folder, options)}
            done = [rows[each] for each in variants if each in rows]
            (options.out / "table.md").write_text(table_of(done), encoding="utf-8")
            print(table_of([rows[name]]), flush=True)

    options.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.together) as pool:
        for future in [pool.submit(study, name) for name in variants]:
            future.result()
    print((options.out / "table.md").read_text(encoding="utf-8"), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="preset or TOML file that all variants change")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument(
        "--data", type=Path, required=True, help="the folder that holds CoLA/, SST-2/ and so on"
    )
    parser.add_argument("--variants", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=float, default=2.0)
    budget.add_argument("--steps", type=int)
    parser.add_argument("--together", type=int, default=1, help="variants at a time, with --steps")
    parser.add_argument("--tasks", default="cola,sst2")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-4, help="of fine-tuning")
    parser.add_argument("--pooling", default="mean", choices=("model", "first", "mean"), help="likewise")
    options = parser.parse_args()
    if options.together > 1 and options.steps is None:
        parser.error("--together needs --steps: minutes on a shared GPU are no equal budget")
    return options


def pretrained(folder: Path, settings: list[str], options: argparse.Namespace) -> dict[str, Any] | None:
    """How a variant's pre-training went, or nothing where it failed, which is told and is a result too."""
    command = [*BERTSMITH, "pretrain", options.recipe, "--store", options.store, "--out", folder / "run"]
    command += ["--steps", options.steps] if options.steps else ["--minutes", options.minutes]
    command += ["--json", *(word for setting in settings for word in ("--set", setting))]
    ended = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        print(f"{folder.name}: pre-training ended with exit code {ended.returncode}", flush=True)
        return None
    summary = json.loads(ended.stdout.splitlines()[-1])
    rate = summary["tokens"] / summary["seconds"]
    figures = {short: summary["held_out"].get(key) for key, short in FIGURES.items()}
    return {"steps": summary["steps"], "tokens": summary["tokens"], "tokens/s": rate, **figures}


def fine_tuned(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """The mean on dev of each task's first metric, in percent."""
    command = [*BERTSMITH, "glue", "--model", folder / "run" / "model", "--data", options.data]
    command += ["--out", folder / "glue", "--tasks", options.tasks, "--seeds", options.seeds]
    command += ["--lr", options.lr, "--set", f"head.pooling={options.pooling}", "--json"]
    ended = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, check=True)
    scores: dict[str, float] = {}
    for task, splits in json.loads(ended.stdout.splitlines()[-1])["tasks"].items():
        split, metrics = next(iter(splits.items()))
        metric, spread = next(iter(metrics.items()))
        scores[f"{task} {metric} ({split})"] = 100 * spread["mean"]
    return scores


def table_of(rows: list[dict[str, Any]]) -> str:
    """The rows as a table in Markdown."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(cell(row.get(column)) for column in columns)} |" for row in rows]
    return "\n".join(lines) + "\n"


def cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if value > 1000 else f"{value:.3f}" if value < 10 else f"{value:.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main()
