"""What shrinking a model costs (docs/shrinking.md): one model, three tasks, every way to make it smaller.

    python bench/shrinking_study.py --model MODEL --store store/ --data tasks/ --out runs/shrunk --together 8

Students of fewer layers are trained on text for --steps, with what the teacher says and without, then
fine-tuned. Teachers are fine-tuned, then pruned by heads, feed-forward neurons and single weights (with each
way of rewinding) and quantised. Each row is the median over the seeds on dev and its spread. A part is a
command of its own, several at a time, on a GPU where there is one; what is finished under --out is not done
again. --data holds glue/SST-2, glue/MRPC and wnut17.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

BERTSMITH = (sys.executable, "-m", "bertsmith")
WITHOUT_TEACHER = ("distill.soft_weight=1e-6", "distill.cosine_weight=0", "distill.mlm_weight=1")
"""Of a student that learns masked words alone: distilling with nothing to learn from is refused."""
HEADS, SPARSITIES = (0.2, 0.4, 0.6), (0.5, 0.7, 0.9)
RETRAINING = ("weights", "rate", "finetune")
CALIBRATION_TEXTS = 512


@dataclass(frozen=True, slots=True)
class StudiedTask:
    """Where a task's data lies, what it is measured by, and how a model learns it."""

    folder: str
    metric: str
    settings: tuple[str, ...]
    train: str

    def settings_of(self, seed: int) -> list[str]:
        """As options of a command."""
        both = (*self.settings, f"run.seed={seed}", "run.evaluations=1", "run.keep_state=false")
        return [word for setting in both for word in ("--set", setting)]


TASKS = {
    "sst2": StudiedTask("glue/SST-2", "accuracy", ("optim.peak_lr=1e-4", "run.epochs=2"), "train.tsv"),
    "mrpc": StudiedTask("glue/MRPC", "f1", ("optim.peak_lr=1e-4", "run.epochs=5"), "train.tsv"),
    "wnut17": StudiedTask("wnut17", "span_f1", ("optim.peak_lr=1e-4", "run.epochs=8"), "wnut17train.conll"),
}


@dataclass(frozen=True, slots=True)
class Job:
    """One command: where what it says is kept, and what it is."""

    out: Path
    words: tuple[str, ...]

    def done(self) -> Any:
        """What it says at its end as JSON, from the file where it was done before."""
        said = self.out.with_name(f"{self.out.name}.said.json")
        if said.exists() and json.loads(said.read_text(encoding="utf-8"))["words"] != [*self.words]:
            raise SystemExit(f"{said} is of another command: remove it, or give another --out")
        if not said.exists():
            self.out.parent.mkdir(parents=True, exist_ok=True)
            command = [*BERTSMITH, *self.words, "--out", str(self.out), "--json"]
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            if ended.returncode:
                raise SystemExit(f"{self.out}: {ended.stderr.strip().splitlines()[-1]}")
            result = {"words": self.words, "said": json.loads(ended.stdout.splitlines()[-1])}
            said.write_text(json.dumps(result) + "\n", encoding="utf-8")
            print(self.out, flush=True)
        return json.loads(said.read_text(encoding="utf-8"))["said"]


def main() -> None:
    options = parse()
    students = {name: job.out / "model" for name, job in together(student_jobs(options), options)}
    starts = {"teacher": options.model, **students}
    tuned = dict(together(tuning_jobs(starts, options), options))
    shrunk = dict(together(shrinking_jobs(options), options))
    rows = {**finetuned_rows(tuned, options), **shrunk_rows(shrunk, options)}
    table = table_of(rows)
    (options.out / "table.md").write_text(table, encoding="utf-8")
    (options.out / "table.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--layers", nargs="+", type=int, default=[3, 6])
    parser.add_argument("--steps", type=int, default=3000, help="of a student, on text")
    parser.add_argument("--batch", type=int, default=512, help="sequences a step of a student")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--together", type=int, default=1)
    return parser.parse_args()


Named = tuple[Any, Job]


def together(jobs: Iterable[Named], options: argparse.Namespace) -> list[Named]:
    """Do them all, as many at a time as asked for."""
    listed = list(jobs)
    with ThreadPoolExecutor(options.together) as pool:
        for future in [pool.submit(job.done) for _, job in listed]:
            future.result()
    return listed


# ---- the commands


def student_jobs(options: argparse.Namespace) -> Iterable[Named]:
    """Students that learn from text, each with a teacher and without."""
    ways: dict[str, tuple[str, ...]] = {"distilled": (), "not distilled": WITHOUT_TEACHER}
    for layers in options.layers:
        for way, settings in ways.items():
            words = ["distill", "--teacher", options.model, "--layers", str(layers), "--store"]
            words += [str(options.store), "--steps", str(options.steps), "--batch", str(options.batch)]
            words += ["--max-length", "128", *(w for s in settings for w in ("--set", s))]
            name = f"{layers} layers, {way}"
            yield (
                name,
                Job(options.out / "students" / file_name(name), tuple(words)),
            )


def tuning_jobs(starts: Mapping[str, Any], options: argparse.Namespace) -> Iterable[Named]:
    """Each encoder, fine-tuned for each task with each seed."""
    for task, of_task in selected(options).items():
        for name, model in starts.items():
            for seed in range(options.seeds):
                words = (
                    "finetune",
                    task,
                    "--model",
                    str(model),
                    "--data",
                    str(options.data / of_task.folder),
                )
                out = tuned_folder(options, task, name, seed)
                yield (task, name, seed), Job(out, (*words, *of_task.settings_of(seed)))


def tuned_folder(options: argparse.Namespace, task: str, name: str, seed: int) -> Path:
    """Of an encoder by its name."""
    return Path(options.out / task / f"{file_name(name)}-seed-{seed}")


def file_name(name: str) -> str:
    """A name without commas and spaces."""
    return name.replace(",", "").replace(" ", "-")


def shrinking_jobs(options: argparse.Namespace) -> Iterable[Named]:
    """What is made of each fine-tuned teacher, and single weights, which go in a training of their own."""
    for task, of_task in selected(options).items():
        data = options.data / of_task.folder
        texts = calibration_texts(data / of_task.train, options.out / task / "calibration.txt")
        for seed in range(options.seeds):
            teacher, place = tuned_folder(options, task, "teacher", seed), options.out / task / f"seed-{seed}"
            pruned = (
                "prune",
                "--model",
                str(teacher),
                "--data",
                str(data),
                "--seed",
                str(seed),
                "--rounds",
                "2",
            )
            for fraction in HEADS:
                out = place / f"heads-{fraction}"
                yield (
                    (task, f"{fraction:.0%} of the heads", seed),
                    Job(out, (*pruned, "--heads", str(fraction))),
                )
            yield (task, "half of the neurons", seed), Job(place / "neurons", (*pruned, "--ffn", "0.5"))
            both = (*pruned, "--heads", "0.4", "--ffn", "0.5")
            yield (task, "40% of the heads, half of the neurons", seed), Job(place / "both", both)
            for fraction in SPARSITIES:
                sparse = ["prune", "--model", options.model, "--task", task, "--data", str(data)]
                sparse += ["--method", "magnitude", "--sparsity", str(fraction), "--rewind", "0.1"]
                sparse += ["--retrain", ",".join(RETRAINING), *of_task.settings_of(seed)]
                yield (task, f"{fraction:.0%} zeros", seed), Job(place / f"zeros-{fraction}", tuple(sparse))
            quantised = ("quantise", "--model", str(teacher), "--calibrate", str(texts), "--data", str(data))
            yield (task, "int8", seed), Job(place / "int8", quantised)


def selected(options: argparse.Namespace) -> dict[str, StudiedTask]:
    return {name: TASKS[name] for name in options.tasks}


def calibration_texts(train: Path, out: Path) -> Path:
    """The first texts of a training file, one a line: columns of a table, or words down a column."""
    lines = train.read_text(encoding="utf-8-sig").splitlines()
    if train.suffix == ".conll":
        sentences = "\n".join(line.split("\t")[0] for line in lines).split("\n\n")
        texts = [" ".join(words.split()) for words in sentences]
    else:
        texts = [max(line.split("\t"), key=len).strip() for line in lines[1:]]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join([text for text in texts if text][:CALIBRATION_TEXTS]) + "\n", encoding="utf-8")
    return out


# ---- what they came to


Rows = dict[str, dict[str, list[float]]]
"""By what was done and task: a score for each seed, in percent."""


def finetuned_rows(jobs: Mapping[Any, Job], options: argparse.Namespace) -> Rows:
    rows: Rows = {}
    for (task, name, _), job in jobs.items():
        score = job.done()["measures"]["dev"][selected(options)[task].metric]
        rows.setdefault(name, {}).setdefault(task, []).append(100 * score)
    return rows


def shrunk_rows(jobs: Mapping[Any, Job], options: argparse.Namespace) -> Rows:
    rows: Rows = {}
    for (task, name, _), job in jobs.items():
        metric, said = selected(options)[task].metric, job.done()
        for row, score in scores_of(name, said, metric).items():
            rows.setdefault(row, {}).setdefault(task, []).append(100 * score)
    return rows


def scores_of(name: str, said: Mapping[str, Any], metric: str) -> dict[str, float]:
    """The scores in what one command said: rounds of pruning, ways of training again, or a rounded model."""
    if "rounds" in said:
        last = said["rounds"][-1]
        return {name: (last["tuned"] or last["pruned"])["dev"][metric]}
    if "reports" in said:
        last_ones = [report for report in said["reports"] if report["sparsity"] > 0.01]
        return {f"{name}, {report['name']}": report["metrics"]["dev"][metric] for report in last_ones}
    return {name: said["after"][metric]}


def table_of(rows: Rows) -> str:
    tasks = list(dict.fromkeys(task for of_row in rows.values() for task in of_row))
    lines = [f"| | {' | '.join(f'{task}, {TASKS[task].metric}' for task in tasks)} |"]
    lines.append("|---" * (len(tasks) + 1) + "|")
    for name, of_row in rows.items():
        cells = [
            f"{median(of_row[task]):.1f} ({min(of_row[task]):.1f}–{max(of_row[task]):.1f})"
            if task in of_row
            else "–"
            for task in tasks
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
