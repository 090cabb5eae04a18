"""GLUE scores of a record (docs/speedrun.md): settings chosen on a part of the training set, then dev once.

    python bench/glue_record.py choose --model runs/small/model --data glue/ --out runs/chosen
    python bench/glue_record.py score  --model runs/small/model --data glue/ --out runs/scored \\
        --chosen runs/chosen/chosen.json

`choose` keeps every tenth line of a training file for the choice, fine-tunes on the others with each setting
of the grid, and writes down the best one of each task; it does so several times, each time with other lines
kept and another seed. Of the small RTE and MRPC it keeps every fifth, so that most lines are judged once. Of
SST-2, whose training set holds sentences and their phrases, it keeps every tenth long sentence and drops what
shares words with one from the others. `score` fine-tunes on whole training sets with these,
several seeds each, and tells the median on dev and its spread; dev is seen there for the first time. Several
runs share the GPU (--together). What is finished under --out is not done again.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean, median

SENTENCE, SHARED = 15, 6
"""Words of the sentences that are kept of SST-2; so many in a row are not by chance in two texts."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """How a task is fine-tuned, all but what is chosen."""

    folder: str
    epochs: int
    seeds: int
    header: int = 1
    """Lines before the first example."""
    kept: int = 10
    """Every so manieth line of the training file is kept for the choice."""
    choice_runs: int = 2
    """How often that is done for each setting, with other lines and another seed."""
    has_phrases: bool = False
    """Whether examples are parts of others."""


TASKS = {
    "cola": Protocol("CoLA", epochs=5, seeds=5, header=0),
    "sst2": Protocol("SST-2", epochs=3, seeds=3, choice_runs=1, has_phrases=True),
    "mrpc": Protocol("MRPC", epochs=5, seeds=5, kept=5, choice_runs=4),
    "stsb": Protocol("STS-B", epochs=5, seeds=5, choice_runs=3),
    "rte": Protocol("RTE", epochs=10, seeds=5, kept=5, choice_runs=5),
}
FIRST_METRIC = {"cola": "matthews", "sst2": "accuracy", "mrpc": "f1", "stsb": "spearman", "rte": "accuracy"}
GRID = [
    f"optim.peak_lr={rate} head.pooling={pooling}"
    for rate, pooling in product(("2e-5", "5e-5", "1e-4", "2e-4"), ("first", "mean"))
]
ONCE = ("run.evaluations=1", "run.keep_state=false")
"""Dev is looked at when all is learned, and never before."""


@dataclass(frozen=True, slots=True)
class FinetuningRun:
    """One fine-tuning run: where its data lies, what it is told, where it goes."""

    task: str
    data: Path
    settings: tuple[str, ...]
    out: Path


def main() -> None:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    options.act(options, [name for name in TASKS if name in options.tasks.split(",")])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    acts: dict[str, Callable[..., None]] = {"choose": choose, "score": score}
    parts = parser.add_subparsers(required=True)
    for name, act in acts.items():
        part = parts.add_parser(name)
        part.set_defaults(act=act)
        part.add_argument("--model", type=Path, required=True)
        part.add_argument(
            "--data", type=Path, required=True, help="the folder that holds CoLA/, SST-2/ and so on"
        )
        part.add_argument("--out", type=Path, required=True)
        part.add_argument("--tasks", default=",".join(TASKS))
        part.add_argument("--together", type=int, default=1, help="runs at a time")
        if act is choose:
            part.add_argument(
                "--settings",
                nargs="+",
                default=GRID,
                metavar="'KEY=VALUE ...'",
                help=f"what is chosen from, each one argument (default: {' | '.join(GRID)})",
            )
        if act is score:
            part.add_argument("--chosen", type=Path, required=True, help="what choose wrote")
    return parser.parse_args()


def choose(options: argparse.Namespace, tasks: list[str]) -> None:
    """Write the setting of each task that does best on what was kept of its training set."""
    tried: dict[str, dict[tuple[str, ...], list[FinetuningRun]]] = {}
    for task, line in product(tasks, options.settings):
        protocol, of_task = TASKS[task], tried.setdefault(task, {})
        settings = (*line.split(), f"run.epochs={protocol.epochs}")
        for seed in range(protocol.choice_runs):
            data = kept_apart(protocol, options.data, options.out / "data" / str(seed), first=seed)
            out = options.out / task / f"{line.replace(' ', ',')}-{seed}"
            run = FinetuningRun(task, data, (*settings, f"run.seed={seed}"), out)
            of_task.setdefault(settings, []).append(run)
    scores = all_scores(
        (run for of_task in tried.values() for runs in of_task.values() for run in runs), options
    )
    chosen: dict[str, list[str]] = {}
    for task, of_task in tried.items():
        means = {settings: mean(scores[run] for run in runs) for settings, runs in of_task.items()}
        for settings, found in means.items():
            print(f"{task:5} {100 * found:6.2f}  {' '.join(settings)}")
        chosen[task] = list(max(means, key=lambda settings: means[settings]))
    path = options.out / "chosen.json"
    path.write_text(json.dumps(chosen, indent=1) + "\n", encoding="utf-8")
    print(f"{path}: {chosen}")


def kept_apart(protocol: Protocol, data: Path, out: Path, *, first: int) -> Path:
    """A task's folder whose two files are parts of the training set; `first` is the first line kept."""
    lines = (data / protocol.folder / "train.tsv").read_text(encoding="utf-8").splitlines(keepends=True)
    top, examples = lines[: protocol.header], lines[protocol.header :]
    folder = out / protocol.folder
    folder.mkdir(parents=True, exist_ok=True)
    apart = without_phrases if protocol.has_phrases else every_so_many
    kept, others = apart(examples, first, protocol.kept)
    (folder / "train.tsv").write_text("".join(top + others), encoding="utf-8")
    (folder / "dev.tsv").write_text("".join(top + kept), encoding="utf-8")
    return folder


def every_so_many(examples: list[str], first: int, distance: int) -> tuple[list[str], list[str]]:
    """What is kept, and what is trained on."""
    others = [line for number, line in enumerate(examples) if number % distance != first]
    return examples[first::distance], others


def without_phrases(examples: list[str], first: int, distance: int) -> tuple[list[str], list[str]]:
    """The same of sentences and their phrases: nothing is trained on that is a part of what is kept."""
    texts = [line.rsplit("\t", 1)[0].split() for line in examples]
    is_long = [number for number, words in enumerate(texts) if len(words) >= SENTENCE and words[-1] == "."]
    kept = is_long[first::distance]
    phrases = {
        run for number in kept for length in range(1, SHARED + 1) for run in runs_of(texts[number], length)
    }
    others = [
        line
        for line, words in zip(examples, texts, strict=True)
        if phrases.isdisjoint(runs_of(words, min(len(words), SHARED)))
    ]
    return [examples[number] for number in kept], others


def runs_of(words: list[str], length: int) -> set[tuple[str, ...]]:
    """All runs of so many words."""
    return {tuple(words[start : start + length]) for start in range(len(words) - length + 1)}


def score(options: argparse.Namespace, tasks: list[str]) -> None:
    """Print the median over the seeds and the spread on dev, and the mean over the tasks."""
    chosen = json.loads(options.chosen.read_text(encoding="utf-8"))
    runs = []
    for task in tasks:
        for seed in range(TASKS[task].seeds):
            settings = (*chosen[task], f"run.seed={seed}")
            data = options.data / TASKS[task].folder
            runs.append(FinetuningRun(task, data, settings, options.out / task / str(seed)))
    scores = all_scores(runs, options)
    medians = []
    print("| task | metric | median | lowest | highest | seeds | settings |\n|---|---|---|---|---|---|---|")
    for task in tasks:
        of_task = [100 * scores[run] for run in runs if run.task == task]
        medians.append(median(of_task))
        spread = f"{medians[-1]:.1f} | {min(of_task):.1f} | {max(of_task):.1f} | {len(of_task)}"
        print(f"| {task} | {FIRST_METRIC[task]} | {spread} | {' '.join(chosen[task])} |")
    print(f"| mean | | **{mean(medians):.1f}** | | | | |")


def all_scores(runs: Iterable[FinetuningRun], options: argparse.Namespace) -> dict[FinetuningRun, float]:
    """The first metric of each run on its dev, as many runs at a time as asked for."""

    def scored(run: FinetuningRun) -> float:
        command = [sys.executable, "-m", "bertsmith", "finetune", run.task, "--model", str(options.model)]
        command += ["--data", str(run.data), "--out", str(run.out), "--json"]
        command += [word for setting in (*run.settings, *ONCE) for word in ("--set", setting)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(f"{run.out}: {ended.stderr.strip().splitlines()[-1]}")
        metrics = json.loads(ended.stdout.splitlines()[-1])["measures"]["dev"]
        print(f"{run.out}: {metrics}", file=sys.stderr, flush=True)
        return float(metrics[FIRST_METRIC[run.task]])

    # The largest first: one that begins last is waited for alone.
    ordered = sorted(runs, key=lambda run: -(run.data / "train.tsv").stat().st_size)
    with ThreadPoolExecutor(options.together) as pool:
        return dict(zip(ordered, pool.map(scored, ordered), strict=True))


if __name__ == "__main__":
    main()
