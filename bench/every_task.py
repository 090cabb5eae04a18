"""Fine-tune on every task of a folder, with settings fixed beforehand, and print one table.

    python bench/every_task.py --data tasks/ --model gte-small --out runs/all --seeds 0 1 2
    python bench/every_task.py --data tasks/ --model gte-small --out runs/all --seeds 1 --only sst2 squad

What is finished under --out is not done again, so several processes can share the seeds, and a last call
with all of them prints the table: the mean over the seeds and their spread, the seconds, and for MRPC and
SQuAD the ensemble of all seeds beside its members.
"""

import argparse
import statistics
import time
from pathlib import Path

from quiet import Quiet

from bertsmith.finetuning.assignment import Assignment
from bertsmith.finetuning.finetune import FinetuningResult, finetune
from bertsmith.finetuning.predict import Reading, predict_labelled
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.task_recipe import finetuning_recipe

FOLDERS = {
    "cola": "glue/CoLA",
    "sst2": "glue/SST-2",
    "mrpc": "glue/MRPC",
    "stsb": "glue/STS-B",
    "qqp": "glue/QQP",
    "rte": "glue/RTE",
    "wnli": "glue/WNLI",
    "squad": "squad",
    "squad2": "squad",
    "race": "race",
    "arct": "arct",
    "wnut17": "wnut17",
    "pos": "ud",
}
ALL = ("optim.peak_lr=5e-5", "run.examples=32", "run.evaluations=1")
EPOCHS = {"sst2": 3, "qqp": 3, "squad": 3, "squad2": 3, "race": 3, "wnli": 3, "pos": 5}
"""Of the large sets, and of WNLI, from which nothing can be learned; small sets get more."""
SMALL_SET_EPOCHS = 10
ENSEMBLES = ("mrpc", "squad")


def main() -> None:
    options = parse()
    tasks = options.only or [name for name, folder in FOLDERS.items() if (options.data / folder).is_dir()]
    started = time.perf_counter()
    results = {name: [tuned(name, seed, options) for seed in options.seeds] for name in tasks}
    print_table(results)
    print(f"this call took {(time.perf_counter() - started) / 60:.1f} minutes", flush=True)
    if len(options.seeds) > 1:
        for name in [name for name in ENSEMBLES if name in tasks]:
            print_ensemble(name, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="*", default=[], choices=list(FOLDERS))
    parser.add_argument("--set", nargs="*", default=[], help="settings for all, such as run.epochs=0.1")
    return parser.parse_args()


def tuned(name: str, seed: int, options: argparse.Namespace) -> FinetuningResult:
    task = task_named(name)
    epochs = EPOCHS.get(name, SMALL_SET_EPOCHS)
    settings = [*ALL, f"run.epochs={epochs}", f"run.seed={seed}", *options.set]
    recipe = finetuning_recipe(task, settings)
    data = options.data / FOLDERS[name]
    assignment = Assignment(task, recipe, options.model, data, run_folder(name, seed, options), True)
    started = time.perf_counter()
    result = finetune(assignment, Quiet())
    metrics = {metric: round(100 * value, 2) for metric, value in next(iter(result.metrics.values())).items()}
    wall = time.perf_counter() - started
    rate = result.examples * recipe.run.epochs / result.seconds
    print(
        f"{name} seed {seed}: {metrics} in {wall:.0f} s, {result.steps} steps, {rate:.0f} examples/s",
        flush=True,
    )
    return result


def run_folder(name: str, seed: int, options: argparse.Namespace) -> Path:
    return Path(options.out / name / f"seed-{seed}")


def print_table(results: dict[str, list[FinetuningResult]]) -> None:
    print(f"\n| {'task':8} | {'split':6} | {'measure':18} | mean  | spread | seconds a run |")
    print("|---|---|---|---|---|---|")
    for name, runs in results.items():
        for split, metrics in runs[0].metrics.items():
            for metric in [each for each in task_named(name).metrics if each in metrics]:
                values = [100 * run.metrics[split][metric] for run in runs]
                spread = statistics.stdev(values) if len(values) > 1 else 0.0
                seconds = statistics.mean(run.seconds for run in runs)
                print(
                    f"| {name:8} | {split:6} | {metric:18} | {statistics.mean(values):5.2f} | {spread:6.2f} "
                    f"| {seconds:13.0f} |",
                    flush=True,
                )


def print_ensemble(name: str, options: argparse.Namespace) -> None:
    data = options.data / FOLDERS[name]
    folders = [run_folder(name, seed, options) for seed in options.seeds]
    for title, members in [*((folder.name, [folder]) for folder in folders), ("ensemble", folders)]:
        metrics = predict_labelled(members, data, reading=Reading(skip_bad=True)).metrics()
        chosen = {metric: round(100 * metrics[metric], 2) for metric in task_named(name).metrics}
        print(f"{name} {title}: {chosen}", flush=True)


if __name__ == "__main__":
    main()
