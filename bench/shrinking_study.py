"""What shrinking a model costs (docs/shrinking.md): one model, three tasks, every way to make it smaller.

    python bench/shrinking_study.py --model MODEL --store store/ --data tasks/ --out runs/shrunk --together 8
    python bench/shrinking_study.py ... --quick       # shorter training: about 25 minutes on an H200
    python bench/shrinking_study.py ... --estimate    # says how long the rest takes, and does nothing

Students of fewer layers are trained on text for --steps, with what the teacher says and without, and one
whose layers share their weights; then they are fine-tuned. Teachers are fine-tuned, then pruned by heads,
feed-forward neurons and single weights (with each way of rewinding) and quantised. Each row is the median
over the seeds on dev and its spread, with what `bertsmith cost` measures on the CPU of models of the first
task. Writes table.md, table.json and pareto.png.

A part is a command of its own, several at a time, on a GPU where there is one. What is finished under --out
is not done again; a model that lies there no more is made again only where something is still to be made of
it. Where a command fails the others go on, and the end tells of it. --data holds glue/SST-2, glue/MRPC and
wnut17.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shrinking_table import Rows, draw, table_of

from bertsmith.pretraining.initial_model import folder_and_config

BERTSMITH = (sys.executable, "-m", "bertsmith")
LENGTH = 128
"""Tokens of a sequence that students learn from."""
WITHOUT_TEACHER = ("distill.soft_weight=0", "distill.cosine_weight=1e-6", "distill.mlm_weight=1")
"""Of a student that learns masked words alone: distilling with nothing to learn from is refused."""
EMBEDDING_WIDTH = 128
"""Of a student whose layers are shared, as in ALBERT."""
UNCOMPILED = "run.compile=off"
"""Of runs of a few hundred steps, each of which would be compiled anew."""
HEADS, SPARSITIES, REWIND = (0.2, 0.4, 0.6), (0.5, 0.7, 0.9), 0.1
RETRAINING = ("weights", "rate", "finetune")
ZEROS = "zeros"
"""The one command that prunes single weights, to all sparsities and in all ways."""
CALIBRATION_TEXTS = 512
SECONDS_TO_START = 10.0
"""Of a command, until it learns; of a measured model with everything."""
SECONDS_TO_MEASURE = 20.0


@dataclass(frozen=True, slots=True)
class StudiedTask:
    """Where a task's data lies, what it is measured by, and how long a model learns it."""

    folder: str
    metric: str
    train: str
    columns: tuple[int, ...]
    """Of the texts in the training file."""
    epochs: float
    quick_epochs: float

    def examples(self, data: Path) -> int:
        """How many there are to train on, for the estimate."""
        return len(self.texts(data))

    def texts(self, data: Path) -> list[str]:
        """The training texts, pairs with a tab: columns of a table, or words down a column."""
        file = data / self.folder / self.train
        lines = file.read_text(encoding="utf-8-sig").splitlines()
        if file.suffix == ".conll":
            sentences = "\n".join(line.split("\t")[0] for line in lines).split("\n\n")
            return [" ".join(words.split()) for words in sentences if words.split()]
        cells = [line.split("\t") for line in lines[1:]]
        return ["\t".join(row[number].strip() for number in self.columns) for row in cells]


TASKS = {
    "sst2": StudiedTask("glue/SST-2", "accuracy", "train.tsv", (0,), epochs=1.0, quick_epochs=0.5),
    "mrpc": StudiedTask("glue/MRPC", "f1", "train.tsv", (3, 4), epochs=5.0, quick_epochs=5.0),
    "wnut17": StudiedTask("wnut17", "span_f1", "wnut17train.conll", (0,), epochs=8.0, quick_epochs=6.0),
}


@dataclass(frozen=True, slots=True)
class Training:
    """How long students and tasks are trained."""

    steps: int
    """Of a student, on text."""
    sequences: int
    """A step of a student."""
    examples: int
    """A step of a task."""
    quick: bool

    def epochs(self, task: str) -> float:
        """Of fine-tuning for a task."""
        return TASKS[task].quick_epochs if self.quick else TASKS[task].epochs

    def epochs_of_pruning(self, task: str) -> float:
        """After each of the two rounds: both together are a fifth of the fine-tuning."""
        return self.epochs(task) / 10

    def settings(self, task: str, seed: int) -> list[str]:
        """Of a fine-tuning run, as options of a command."""
        chosen = (
            *(f"run.epochs={self.epochs(task):g}", f"run.examples={self.examples}", f"run.seed={seed}"),
            *("optim.peak_lr=1e-4", "run.evaluations=1", "run.keep_state=false", UNCOMPILED),
        )
        return [word for setting in chosen for word in ("--set", setting)]


FULL = Training(steps=3000, sequences=512, examples=32, quick=False)
QUICK = Training(steps=1000, sequences=512, examples=32, quick=True)


# ---- commands


@dataclass(frozen=True, slots=True)
class Job:
    """One command: where what it says is kept, what it is, and what has to be there before."""

    out: Path
    words: tuple[str, ...]
    needs: "tuple[Job, ...]" = ()
    epochs: float = 0.0
    """Of fine-tuning, all of it together."""
    tokens: float = 0.0
    """That a student learns from."""
    environment: Mapping[str, str] = field(default_factory=dict)
    once: threading.Lock = field(default_factory=threading.Lock, compare=False)
    failures: list[str] = field(default_factory=list, compare=False)
    """What it said when it failed: whoever else needs it does not try it again."""

    @property
    def file(self) -> Path:
        """What it said at its end, with the command."""
        return self.out.with_name(f"{self.out.name}.said.json")

    @property
    def is_of_another_command(self) -> bool:
        return self.file.exists() and self._read()["words"] != [*self.words]

    def check(self) -> None:
        """Raise where the folder holds what another command has said."""
        if self.is_of_another_command:
            raise SystemExit(f"{self.file} is of another command: remove it, or give another --out")

    def finish(self) -> None:
        """Do it, unless it was done before."""
        with self.once:
            if not self.file.exists():
                self._do()

    def make(self) -> None:
        """See to it that its folder is there, which may have been removed since."""
        with self.once:
            if not (self.file.exists() and self.out.exists()):
                self._do()

    def said(self) -> Any:
        """What it said at its end."""
        return self._read()["said"]

    def _do(self) -> None:
        if self.failures:
            raise SystemExit(self.failures[0])
        for need in self.needs:
            need.make()
        self.out.parent.mkdir(parents=True, exist_ok=True)
        command = [*BERTSMITH, *self.words, "--out", str(self.out), "--json"]
        environment = {**os.environ, **self.environment}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode:
            self.failures.append(f"{self.out}: {(ended.stderr.strip().splitlines() or ['?'])[-1]}")
            raise SystemExit(self.failures[0])
        result = {"words": self.words, "said": json.loads(ended.stdout.splitlines()[-1])}
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(result) + "\n", encoding="utf-8")
        partial.rename(self.file)
        print(self.out, flush=True)

    def _read(self) -> Any:
        return json.loads(self.file.read_text(encoding="utf-8"))


Jobs = dict[tuple[str, str, int], Job]
"""By task, row and seed."""


def main() -> None:
    options = parse()
    study = Study(options, QUICK if options.quick else FULL)
    print(study.estimate(), flush=True)
    if options.estimate:
        return
    failed = study.finish()
    rows, costs = rows_of(study.jobs), study.costs.said()["models"]
    priced = {name: costs[str(model)]["cpu"] for name, model in study.priced().items()}
    titles = {task: f"{task}, {TASKS[task].metric.replace('_', ' ')}" for task in options.tasks}
    table = table_of(rows, priced, titles)
    (options.out / "table.md").write_text(table, encoding="utf-8")
    both = {"scores": rows, "costs": priced}
    (options.out / "table.json").write_text(json.dumps(both, indent=1) + "\n", encoding="utf-8")
    draw(rows, priced, titles, options.out / "pareto.png")
    print(table)
    if failed:
        raise SystemExit("not done, and not in the table:\n" + "\n".join(failed))


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
    parser.add_argument("--steps", type=int, help="of a student, on text: 3000, with --quick 1000")
    parser.add_argument("--batch", type=int, help="sequences a step of a student: 512")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--together", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="train everything for a shorter time")
    parser.add_argument("--estimate", action="store_true", help="say how long it takes, and end")
    parser.add_argument(
        "--tuning-speed", type=float, default=100, help="steps of fine-tuning a second, of all together"
    )
    parser.add_argument(
        "--text-speed", type=float, default=3e6, help="tokens of students a second, of all together"
    )
    return parser.parse_args()


@dataclass(frozen=True, slots=True)
class Study:
    """All commands of a study, each after what it needs."""

    options: argparse.Namespace
    training: Training
    jobs: Jobs = field(default_factory=dict)
    """Every command with a score, in the order of the table."""
    students: dict[str, Job] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.students.update(student_jobs(self.options, self.training))
        for task in self.options.tasks:
            teachers = dict(self._tuned(task, "teacher", self.options.model))
            self.jobs.update(teachers)
            for name, student in self.students.items():
                self.jobs.update(self._tuned(task, name, student.out / "model", student))
            for (_, _, seed), teacher in teachers.items():
                self.jobs.update(shrinking_jobs(self.options, self.training, task, seed, teacher))

    def _tuned(self, task: str, name: str, model: Any, *needs: Job) -> Iterator[tuple[Any, Job]]:
        """An encoder, fine-tuned for a task with each seed."""
        data = str(self.options.data / TASKS[task].folder)
        for seed in range(self.options.seeds):
            words = ("finetune", task, "--model", str(model), "--data", data)
            out = self.options.out / task / f"{file_name(name)}-seed-{seed}"
            settings = self.training.settings(task, seed)
            yield (task, name, seed), Job(out, (*words, *settings), needs, self.training.epochs(task))

    @property
    def costs(self) -> Job:
        """What the models of the first task and seed cost on this CPU; scores come from the table."""
        task = self.options.tasks[0]
        made = self.priced()
        words = ["cost", "--task", task, "--data", str(self.options.data / TASKS[task].folder)]
        words += [
            "--seconds",
            "0.5",
            *(w for model in dict.fromkeys(made.values()) for w in ("--model", str(model))),
        ]
        needs = tuple(job for job in self._first_ones().values() if job.out in made.values())
        return Job(self.options.out / "cost", tuple(words), needs, environment={"CUDA_VISIBLE_DEVICES": ""})

    def priced(self) -> dict[str, Path]:
        """Which model says what a row costs: a student that was not distilled costs what its twin does.

        Models with zeros cost what the teacher does, and are left out; so are those that failed.
        """
        done = {name: job.out for name, job in self._first_ones().items() if job.file.exists()}
        done.pop(ZEROS, None)
        return {name: done.get(name.replace("not distilled", "distilled"), out) for name, out in done.items()}

    def _first_ones(self) -> dict[str, Job]:
        task = self.options.tasks[0]
        return {name: job for (of, name, seed), job in self.jobs.items() if (of, seed) == (task, 0)}

    def estimate(self) -> str:
        """How long what is left takes, in words."""
        left = [job for job in (*self.students.values(), *self.jobs.values()) if not job.file.exists()]
        steps = sum(self._steps(job) for job in left)
        seconds = {
            "students": sum(job.tokens for job in left) / self.options.text_speed,
            "tasks": steps / self.options.tuning_speed,
            "starting": SECONDS_TO_START * len(left) / self.options.together,
            "measuring": 0 if self.costs.file.exists() else SECONDS_TO_MEASURE * len(self._first_ones()),
        }
        parts = ", ".join(f"{name} {value / 60:.0f}" for name, value in seconds.items())
        total = f"{sum(seconds.values()) / 60:.0f} minutes"
        return f"{len(left)} commands are left: {steps:,.0f} steps of tasks, about {total} ({parts})"

    def _steps(self, job: Job) -> float:
        tasks = [task for (task, *_), each in self.jobs.items() if each is job]
        counts = (TASKS[task].examples(self.options.data) / self.training.examples for task in tasks)
        return job.epochs * sum(counts)

    def finish(self) -> list[str]:
        """Do all that is left, as many at a time as asked for; costs at the end, when nothing else runs.

        Tells what failed.
        """
        listed = [*self.students.values(), *self.jobs.values()]
        for job in listed:
            job.check()
        # What others wait for comes first, so that nobody waits for what has not begun.
        listed.sort(key=lambda job: len(job.needs))
        failed = []
        with ThreadPoolExecutor(self.options.together) as pool:
            futures = [pool.submit(job.finish) for job in listed]
            try:
                for future in futures:
                    if isinstance(error := future.exception(), SystemExit):
                        failed.append(str(error))
                    elif error is not None:
                        raise error
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        if (costs := self.costs).is_of_another_command:
            costs.file.unlink()  # of fewer models, as some had failed; what was measured stays in the folder
        costs.finish()
        return list(dict.fromkeys(failed))  # what fails for one student fails for all that needs it


def student_jobs(options: argparse.Namespace, training: Training) -> Iterator[tuple[str, Job]]:
    """Students that learn from text: of fewer layers, with a teacher and without, and of shared layers."""
    steps, sequences = options.steps or training.steps, options.batch or training.sequences
    common = ["distill", "--teacher", options.model, "--store", str(options.store)]
    common += ["--steps", str(steps), "--batch", str(sequences), "--max-length", str(LENGTH)]
    common += ["--set", "distill.rows=predicted", "--set", "run.save_every_steps=1000000"]
    tokens = float(steps * sequences * LENGTH)
    place = options.out / "students"
    ways: dict[str, tuple[str, ...]] = {"distilled": (), "not distilled": WITHOUT_TEACHER}
    for layers in options.layers:
        for way, settings in ways.items():
            words = [*common, "--layers", str(layers), *(w for s in settings for w in ("--set", s))]
            name = f"{layers} layers, {way}"
            yield name, Job(place / file_name(name), tuple(words), tokens=tokens)
    yield "shared layers, distilled", shared_job(options, place, common, tokens)


def shared_job(options: argparse.Namespace, place: Path, common: Sequence[str], tokens: float) -> Job:
    """An ALBERT that learns from the model: made of its weights where it is a BERT, else of its size."""
    config = folder_and_config(options.model, option="--model")[1]
    out = place / "shared"
    if config.model_type == "bert":
        words = ("share", "--model", options.model)
        made = Job(place / "albert", words)
        return Job(out, (*common, "--student", str(made.out)), (made,), tokens=tokens)
    shape = {"layers": config.layers, "width": config.width, "heads": config.heads, "inner": 4 * config.width}
    shape |= {"positions": config.positions, "embedding_width": min(EMBEDDING_WIDTH, config.width // 2)}
    settings = [word for key, value in shape.items() for word in ("--set", f"model.{key}={value}")]
    return Job(out, (*common, "--student", "albert-base", *settings), tokens=tokens)


def shrinking_jobs(
    options: argparse.Namespace, training: Training, task: str, seed: int, teacher: Job
) -> Iterator[tuple[tuple[str, str, int], Job]]:
    """What is made of a fine-tuned teacher, and single weights, which go in a training of their own."""
    data, place = str(options.data / TASKS[task].folder), options.out / task / f"seed-{seed}"
    epochs = training.epochs_of_pruning(task)
    pruned = ["prune", "--model", str(teacher.out), "--data", data, "--seed", str(seed), "--rounds", "2"]
    pruned += ["--epochs", f"{epochs:g}", "--lr", "1e-4", "--set", f"run.examples={training.examples}"]
    pruned += ["--set", UNCOMPILED]
    removals: dict[str, tuple[str, ...]] = {
        f"{part:.0%} of the heads": ("--heads", str(part)) for part in HEADS
    }
    removals["half of the neurons"] = ("--ffn", "0.5")
    removals["40% of the heads, half of the neurons"] = ("--heads", "0.4", "--ffn", "0.5")
    for name, words in removals.items():
        job = Job(place / file_name(name), (*pruned, *words), (teacher,), epochs=2 * epochs)
        yield (task, name, seed), job
    sparse = ["prune", "--model", options.model, "--task", task, "--data", data, "--method", "magnitude"]
    sparse += ["--sparsity", ",".join(map(str, SPARSITIES)), "--rewind", str(REWIND)]
    sparse += ["--retrain", ",".join(RETRAINING), *training.settings(task, seed)]
    trainings = 1 + len(SPARSITIES) * len(RETRAINING) * (1 - REWIND)
    job = Job(place / ZEROS, tuple(sparse), epochs=trainings * training.epochs(task))
    yield (task, ZEROS, seed), job
    texts = calibration_texts(task, options)
    rounded = ("quantise", "--model", str(teacher.out), "--calibrate", str(texts), "--data", data)
    yield (task, "int8", seed), Job(place / "int8", rounded, (teacher,))


def calibration_texts(task: str, options: argparse.Namespace) -> Path:
    """The first texts of a training file, one per line."""
    out = Path(options.out / task / "calibration.txt")
    out.parent.mkdir(parents=True, exist_ok=True)
    texts = TASKS[task].texts(options.data)[:CALIBRATION_TEXTS]
    out.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return out


def file_name(name: str) -> str:
    """A name without commas and spaces."""
    return name.replace(",", "").replace(" ", "-").replace("%", "")


# ---- what they came to


def rows_of(jobs: Jobs) -> Rows:
    """Every score, rows in the order in which they were asked for."""
    rows: Rows = {}
    for (task, name, _), job in jobs.items():
        if not job.file.exists():
            continue
        for row, score in scores_of(name, job.said(), TASKS[task].metric).items():
            rows.setdefault(row, {}).setdefault(task, []).append(100 * score)
    return rows


def scores_of(name: str, said: Any, metric: str) -> dict[str, float]:
    """The scores in what a command said: a run, rounds of pruning, trainings of zeros, or a rounded model."""
    if isinstance(said, list):
        # The first report is of the whole model.
        return {
            f"{part:.0%} {name}, {report['name'].partition('-')[0]}": report["metrics"]["dev"][metric]
            for part, result in zip(SPARSITIES, said, strict=True)
            for report in result["reports"][1:]
        }
    if "measures" in said:
        return {name: said["measures"]["dev"][metric]}
    if "rounds" in said:
        last = said["rounds"][-1]
        return {name: (last["tuned"] or last["pruned"])["dev"][metric]}
    return {name: said["after"][metric]}


if __name__ == "__main__":
    main()
