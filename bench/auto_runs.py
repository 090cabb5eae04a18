"""Run `pretrain auto` and what it is compared with, each for the same minutes, and print a table.

    python bench/auto_runs.py run --store store --minutes 4 --out runs/auto --ways auto bert-tiny 4x192-1016
    taskset -c 0,1 python bench/auto_runs.py run ... --device cpu
    python bench/auto_runs.py table runs/auto/runs.jsonl

A way is `auto`, a preset or recipe file, or a shape with the tokens of a step (`4x192-1016`): auto with
both given, which chooses the rest; `4x192-1016-6e-3` names the learning rate, too. A searcher would try
those. Finished runs are lines of runs.jsonl and are not run again; their folders stay with --keep.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

SHAPE = re.compile(r"(\d+)x(\d+)-(\d+)(?:-(.+))?")
EXPECTED = re.compile(r"expected at the end: (.*)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    runs = verbs.add_parser("run", help="run the ways that are not finished")
    runs.add_argument("--store", type=Path, required=True)
    runs.add_argument("--minutes", type=float, required=True)
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--ways", nargs="+", required=True)
    runs.add_argument("--device", default="auto")
    runs.add_argument("--seed", type=int, default=0)
    runs.add_argument("--keep", action="store_true")
    table = verbs.add_parser("table", help="the table of the finished runs")
    table.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    if options.verb == "table":
        print_table(options.files)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    lines = options.out / "runs.jsonl"
    done = {row["name"] for row in rows_of(lines) if "error" not in row} if lines.exists() else set()
    for way in options.ways:
        name = f"{options.store.name}-{options.minutes:g}-{way.replace('/', '_')}-{options.seed}"
        if name not in done:
            row = {"name": name, "way": way, "text": options.store.name, "minutes": options.minutes}
            row |= finished(way, options.out / name, options)
            with lines.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(told(row), flush=True)


def finished(way: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One run of the command, and what it came to."""
    shutil.rmtree(folder, ignore_errors=True)
    given = SHAPE.fullmatch(way)
    command = [sys.executable, "-m", "bertsmith", "pretrain", "auto" if given else way]
    settings = [f"run.seed={options.seed}", f"run.device={options.device}", f"run.minutes={options.minutes}"]
    settings += ["run.budget=minutes"]
    if given:
        layers, width, batch, rate = given.groups()
        settings += [f"model.layers={layers}", f"model.width={width}", f"batch.tokens={batch}"]
        settings += [f"optim.peak_lr={rate}"] if rate else []
    command += ["--store", str(options.store), "--out", str(folder)]
    began = time.monotonic()
    with (options.out / f"{folder.name}.log").open("w", encoding="utf-8") as log:
        command += [part for each in settings for part in ("--set", each)]
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    printed = (options.out / f"{folder.name}.log").read_text(encoding="utf-8")
    if code:
        return {"error": printed[-600:]}
    rows = [json.loads(each) for each in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["kind"] == "held-out"][-1]
    steps = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
    expected = EXPECTED.search(printed)
    found = {
        "seconds": round(time.monotonic() - began, 1),
        "steps": last["step"],
        "tokens": last["tokens"],
        "tokens_per_second": steps[len(steps) // 2] if steps else None,
        "expected": expected.group(1) if expected else "",
        "auto": [line for line in printed.splitlines() if line.startswith(("auto:", "  speed", "  why"))],
        **{key: value for key, value in last.items() if key.startswith("fixed_")},
    }
    recipe = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))
    found |= {key: recipe["model"][key] for key in ("layers", "width")}
    found |= {"batch_tokens": recipe["batch"].get("tokens"), "peak_lr": recipe["optim"]["peak_lr"]}
    if not options.keep:
        shutil.rmtree(folder)
    return found


def rows_of(*files: Path) -> list[dict[str, Any]]:
    """The finished runs."""
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def told(row: dict[str, Any]) -> str:
    """A line of the table."""
    if "error" in row:
        return f"| {row['name']} | failed: {row['error']!r} |"
    cells = [row["text"], f"{row['minutes']:g}", row["way"], f"{row['steps']:,}", f"{row['tokens']:,}"]
    cells += [f"{row['fixed_token_accuracy']:.1%}", row["expected"], f"{row['fixed_token_loss']:.3f}"]
    return f"| {' | '.join(cells)} | {row['fixed_bits_per_character']:.3f} |"


def print_table(files: list[Path]) -> None:
    """All finished runs, the lowest bits a character of each text and budget first."""
    print("| text | minutes | way | steps | tokens | words right | expected | loss | bits/character |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows = rows_of(*files)
    good = [row for row in rows if "error" not in row]
    good.sort(key=lambda row: (row["text"], row["minutes"], row["fixed_bits_per_character"]))
    for row in [*good, *(row for row in rows if "error" in row)]:
        print(told(row))


if __name__ == "__main__":
    main()
