"""Does a job that is killed again and again end exactly as one that was never disturbed?

    python bench/kill_and_resume.py pretrain --store store/ --kills 100
    python bench/kill_and_resume.py finetune --kills 50           # on sentences made up here
    python bench/kill_and_resume.py distill --store store/        # also distill-task, prune, prune-weights,
                                                                  # quantise, share, trim, export, export-all,
                                                                  # lora, seeds, search, folds, glue, look,
                                                                  # features, features-table, sweep
    python bench/kill_and_resume.py study --store store/ --kills 50  # many cells of both kinds
    python bench/kill_and_resume.py glue --store store/ --faults 40  # events of the file system that fail

Does a small job once without interruption. Then the same again with SIGKILL at random moments; after each
kill the same command is given again. Exit status 1 if anything differs.

Runs are killed while they start, between two saves and, at least three times, inside the write of a state.
Fine-tuning saves a state every five minutes and when it is asked to stop: where a write is to be hit it gets
SIGTERM first, as on a machine that is taken away. Tells where each kill hit. At the end measurements,
weights, moments and the saved position are compared bit for bit.

Other jobs are killed at any moment of their time, some of them a little after SIGTERM. Whenever one comes to
its end all its files are compared, byte for byte, and it begins anew. They are done with a small model that
is trained on the store before.

A study is killed alone or with its cells, or asked to stop. Undisturbed, its cells run one at a time, and
disturbed two at a time. Models, metrics and failures are compared, and a cell that is done must stay so.

With --faults, that many events of the file system in the job's folder (a file opened to write, a rename, an
fsync, ...) end the process or fail, in turn with EIO, ENOSPC and ESTALE. A failure must be told in one line;
the same command, given again, must end as the undisturbed one.
"""

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from same_bits import contents

from bertsmith.training.checkpoint_storage import saved_steps, step_folder
from bertsmith.training.journal import read_metrics

RECIPE = "bert-tiny"
PRETRAINING_SETTINGS = (
    *(
        "examples.stages=[{fraction=0.7, length=32, predictions=5}, "
        "{fraction=0.3, length=64, predictions=10}]",
    ),
    *(
        "batch.sequences=8",
        "examples.held_out_fraction=0.1",
        "optim.peak_lr=1e-3",
        "run.evaluation_sequences=32",
    ),
    *("run.device=cpu", "run.log_every_steps=3", "run.save_every_steps=5", "run.evaluate_every_steps=25"),
)
EXAMPLES, EXAMPLES_A_STEP = 1600, 8
FINETUNING_SETTINGS = (
    *(f"run.examples={EXAMPLES_A_STEP}", "run.device=cpu", "run.evaluations=8", "run.keep=best"),
    *("optim.peak_lr=1e-4", "text.longest=16"),
)
UNDISTURBED = Path("undisturbed") / "job"
"""Folder of a job; the disturbed one has the same name, for files may tell it."""
WRITES_TO_HIT = 3
LONGEST_START_SECONDS = 8.0
LONGEST_WAIT_INSIDE_A_WRITE_SECONDS = 0.03
LOOK_EVERY_SECONDS = 0.0005
LONGEST_WAIT_INSIDE_A_LARGE_WRITE_SECONDS = 0.4
"""Fine-tuning our own model writes a state of 130 MB."""
SHARE_ASKED_TO_STOP, LONGEST_WAIT_AFTER_ASKING_SECONDS = 0.3, 1.0
"""Of kills of jobs that are no single run."""
SHARE_WHILE_STARTING, SHARE_INSIDE_WRITES, SHARE_BEHIND_ASKED_WRITES = 0.15, 0.6, 0.5
STOPPED = 130
"""Exit status of a run that was asked to stop and has saved its state."""


@dataclass(frozen=True)
class Job:
    """The run under test: what a user would type, but for where it writes."""

    words: tuple[str, ...]
    settings: tuple[str, ...]
    out: Path
    saves_when_asked: bool = False
    """Whether it saves hardly ever of itself."""
    write_seconds: float = LONGEST_WAIT_INSIDE_A_WRITE_SECONDS
    """How long the write of a state takes, at most."""
    out_option: str = "--out"
    is_run: bool = True
    """Whether it is a single run, with a journal and states."""

    def command(self) -> list[str]:
        settings = [word for setting in self.settings for word in ("--set", setting)]
        return [sys.executable, "-m", "bertsmith", *self.words, self.out_option, str(self.out), *settings]

    def start(self, fault: str = "") -> subprocess.Popen[bytes]:
        """The command in a process group of its own, with an event that fails (fault_points)."""
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        if fault:
            path = [str(Path(__file__).parent / "fault_points"), environment.get("PYTHONPATH", "")]
            environment |= {"BERTSMITH_BENCH_FAULT": fault, "PYTHONPATH": os.pathsep.join(path)}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        return subprocess.Popen(self.command(), env=environment, start_new_session=True, **quiet)

    def half_written(self) -> dict[int, str]:
        """Files and folders that are being written, or were when the run was killed, by their inodes."""
        beside = self.out.parent.glob(f".{self.out.name}*.partial")
        found = sorted((*self.out.rglob(".*.partial"), *beside))
        return {path.stat().st_ino: os.path.relpath(path, self.out) for path in found}

    def last_step(self) -> int:
        """The last step that the journal knows."""
        return max((line["step"] for line in read_metrics(self.out)), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", choices=[*JOBS, "study"])
    parser.add_argument("--store", type=Path, help="token store; fine-tuning needs none")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--faults", type=int, default=0, help="in the place of --kills")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the moments of the kills")
    options = parser.parse_args()
    print(f"moments drawn from seed {options.seed}")
    with tempfile.TemporaryDirectory() as folder:
        if options.job == "study":
            sys.exit(kill_a_study(options, Path(folder)))
        undisturbed = JOBS[options.job](options, Path(folder))
        disturbed = replace(undisturbed, out=Path(folder) / "disturbed" / undisturbed.out.name)
        chance = random.Random(options.seed)
        if options.faults:
            sys.exit(fail_and_repeat(undisturbed, disturbed, options.faults, chance))
        kills = Kills(options.kills, finish(undisturbed), chance)
        if undisturbed.is_run:
            kill_again_and_again(disturbed, kills)
            finish(disturbed)
            differences = differing(undisturbed.out, disturbed.out)
        else:
            differences = kill_and_repeat(undisturbed, disturbed, kills)
        left = disturbed.half_written()
    for difference in differences:
        print(f"DIFFERENT: {difference}")
    print(f"half-written files left at the end: {', '.join(left.values()) or 'none'}")
    print("verdict:", "NOT THE SAME" if differences else "the same to the bit")
    sys.exit(1 if differences else 0)


# ---- jobs


def pretraining(options: argparse.Namespace, folder: Path) -> Job:
    """A small BERT of two stages of lengths."""
    words = ("pretrain", RECIPE, "--store", str(options.store), "--steps", str(options.steps))
    return Job(words, PRETRAINING_SETTINGS, folder / UNDISTURBED)


def finetuning(options: argparse.Namespace, folder: Path) -> Job:
    """Our own model, which has to tell sentences with a river from those with a king."""
    words = ("finetune", "custom", *columns(folder), "--epochs", epochs(options.steps))
    return asked_to_save(Job(words, FINETUNING_SETTINGS, folder / UNDISTURBED))


def distilling(options: argparse.Namespace, folder: Path) -> Job:
    """Half of the layers of a small model, which learn from it."""
    words: tuple[str, ...] = (
        "distill",
        "--teacher",
        str(small_model(options, folder)),
        "--layers",
        "2",
        "--store",
    )
    words += (str(options.store), "--steps", str(options.steps))
    return Job(words, PRETRAINING_SETTINGS, folder / UNDISTURBED)


def distilling_a_task(options: argparse.Namespace, folder: Path) -> Job:
    """A small model, which learns from its fine-tuned twin."""
    model, tuned = small_model(options, folder), tuned_model(options, folder)
    words: tuple[str, ...] = ("distill", "--teacher", str(tuned), "--student", str(model), "--task", "custom")
    words += ("--data", str(table(folder)), "--epochs", epochs(options.steps))
    job = asked_to_save(Job(words, FINETUNING_SETTINGS, folder / UNDISTURBED))
    return replace(job, write_seconds=LONGEST_WAIT_INSIDE_A_WRITE_SECONDS)


def pruning(options: argparse.Namespace, folder: Path, *how: str) -> Job:
    """A layer, heads and neurons of a fine-tuned model, with training in between."""
    words: tuple[str, ...] = ("prune", "--model", str(tuned_model(options, folder)))
    words += ("--data", str(table(folder)))
    words += how or ("--drop-layers", "3", "--heads", "0.4", "--ffn", "0.5", "--rounds", "2")
    words += ("--epochs", epochs(options.steps / 4))
    return Job(words, (*FINETUNING_SETTINGS, "run.keep=last"), folder / UNDISTURBED, is_run=False)


def pruning_weights(options: argparse.Namespace, folder: Path) -> Job:
    """Single weights, with each way of rewinding."""
    how = ("--method", "magnitude", "--sparsity", "0.7", "--rewind", "0.1")
    return pruning(options, folder, *how, "--retrain", "weights,rate,finetune")


def of_a_tuned_model(*words: str, out_option: str = "--out") -> Callable[[argparse.Namespace, Path], Job]:
    """A command that makes another folder of a fine-tuned model; TABLE is that of its task."""

    def make(options: argparse.Namespace, folder: Path) -> Job:
        model, data = tuned_model(options, folder), str(table(folder))
        given = (words[0], "--model", str(model), *(data if word == "TABLE" else word for word in words[1:]))
        return Job(given, (), folder / UNDISTURBED, is_run=False, out_option=out_option)

    return make


def exporting_checkpoints(options: argparse.Namespace, folder: Path) -> Job:
    """The kept checkpoints of a small model, each as a model folder."""
    words = ("checkpoint", "export", str(small_model(options, folder)), "--all")
    return Job(words, (), folder / UNDISTURBED, is_run=False)


def tuning(*words: str, task: str = "custom") -> Callable[[argparse.Namespace, Path], Job]:
    """Fine-tuning of a small model, several times or in another way."""

    def make(options: argparse.Namespace, folder: Path) -> Job:
        given = ("finetune", task, "--model", str(small_model(options, folder)), *columns(folder))
        return Job(
            (*given, "--epochs", "0.05", *words), FINETUNING_SETTINGS, folder / UNDISTURBED, is_run=False
        )

    return make


def sweeping(options: argparse.Namespace, folder: Path) -> Job:
    """Four tiny pre-training runs."""
    words = ("pretrain", RECIPE, "--store", str(options.store), "--steps", "6", "--sweep")
    words += ("optim.peak_lr=1e-3,2e-3", "--sweep", "batch.sequences=8,16")
    return Job(words, PRETRAINING_SETTINGS, folder / UNDISTURBED, is_run=False)


def glue(options: argparse.Namespace, folder: Path) -> Job:
    """RTE and SST-2, twice each, on the sentences of the table."""
    rows = [line.split("\t") for line in table(folder).read_text().splitlines()[1:201]]
    for name in ("RTE", "SST-2"):
        (folder / "glue" / name).mkdir(parents=True)
        for split, some in (("train", rows[:160]), ("dev", rows[160:])):
            lines = ["index\tsentence1\tsentence2\tlabel" if name == "RTE" else "sentence\tlabel"]
            for at, (text, label) in enumerate(some):
                told = ("entailment", "not_entailment") if name == "RTE" else ("0", "1")
                first = f"{at}\t{text}\t{text}" if name == "RTE" else text
                lines.append(f"{first}\t{told[label == 'king']}")
            (folder / "glue" / name / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    words = ("glue", "--model", str(small_model(options, folder)), "--data", str(folder / "glue"))
    words += ("--tasks", "rte,sst2", "--seeds", "2", "--epochs", "0.5")
    return Job(words, FINETUNING_SETTINGS, folder / UNDISTURBED, is_run=False)


def looking(options: argparse.Namespace, folder: Path) -> Job:
    """What the heads of a small model attend to."""
    text = folder / "pairs.txt"
    lines = [line.split("\t")[0] for line in table(folder).read_text().splitlines()[1:41]]
    text.write_text("\n".join(map("\t".join, zip(lines[::2], lines[1::2], strict=True))) + "\n")
    words = ("look", "surface", "--model", str(small_model(options, folder)), "--input", str(text))
    return Job(words, (), folder / UNDISTURBED, is_run=False)


def featuring(options: argparse.Namespace, folder: Path) -> Job:
    """A vector for each token of the table."""
    words = ("features", "--model", str(small_model(options, folder)), "--input", str(table(folder)))
    words += ("--text", "text", "--layers", "last", "--combine", "concat")
    return Job(words, (), folder / UNDISTURBED, is_run=False)


def feature_table(options: argparse.Namespace, folder: Path) -> Job:
    """Six ways to read the frozen layers of a small model, and fine-tuning, on words of the table."""
    place = folder / "words"
    place.mkdir()
    texts = [line.split("\t")[0] for line in table(folder).read_text().splitlines()[1:121]]
    for name, some in (("train", texts[:80]), ("valid", texts[80:100]), ("test", texts[100:])):
        tagged = [
            [f"{word} NN O {'B-LOC' if word in ('river', 'king') else 'O'}" for word in text.split()]
            for text in some
        ]
        (place / f"{name}.txt").write_text("\n\n".join(map("\n".join, tagged)) + "\n")
    words = ("features-table", "ner", "--model", str(small_model(options, folder)), "--data", str(place))
    words += ("--seeds", "1", "--epochs", "0.5")
    return Job(words, (*FINETUNING_SETTINGS, "features.width=16"), folder / UNDISTURBED, is_run=False)


JOBS: dict[str, Callable[[argparse.Namespace, Path], Job]] = {
    "pretrain": pretraining,
    "finetune": finetuning,
    "distill": distilling,
    "distill-task": distilling_a_task,
    "prune": pruning,
    "prune-weights": pruning_weights,
    "quantise": of_a_tuned_model("quantise", "--calibrate", "TABLE", "--text", "text", "--data", "TABLE"),
    "share": of_a_tuned_model("share"),
    "trim": of_a_tuned_model("trim", "--input", "TABLE", "--text", "text"),
    "export": of_a_tuned_model("export", out_option="--onnx"),
    "export-all": exporting_checkpoints,
    "lora": tuning("--set", "head.encoder=lora"),
    "seeds": tuning("--seeds", "2"),
    "search": tuning("--random", "3"),
    "folds": tuning("--folds", "2"),
    "glue": glue,
    "look": looking,
    "features": featuring,
    "features-table": feature_table,
    "sweep": sweeping,
}


def small_model(options: argparse.Namespace, folder: Path) -> Path:
    """A BERT of four layers that has seen a little text."""
    out = folder / "small"
    words = ("pretrain", RECIPE, "--store", str(options.store), "--steps", "20")
    finish(Job(words, (*PRETRAINING_SETTINGS, "model.layers=4"), out))
    return out


def tuned_model(options: argparse.Namespace, folder: Path) -> Path:
    """The same, fine-tuned on the table."""
    out, model = folder / "tuned", folder / "small"
    if not model.exists():
        small_model(options, folder)
    words = ("finetune", "custom", "--model", str(model), *columns(folder), "--epochs", "1")
    finish(Job(words, FINETUNING_SETTINGS, out))
    return out


def columns(folder: Path) -> tuple[str, ...]:
    """The table of the task, and what is in it."""
    return ("--data", str(table(folder)), "--text", "text", "--label", "label")


def table(folder: Path) -> Path:
    """Sentences with a river or a king."""
    chance, file = random.Random(0), folder / "table.tsv"
    words = ("cold", "old", "wide", "small", "red", "new", "far", "north")
    lines = ["text\tlabel"]
    for _ in range(EXAMPLES):
        label = chance.choice(("river", "king"))
        around = chance.choices(words, k=8)
        lines.append(f"the {' '.join(around[:4])} {label} {' '.join(around[4:])}\t{label}")
    file.write_text("\n".join(lines) + "\n")
    return file


def epochs(steps: float) -> str:
    """So many steps through the table, a tenth of which is the development set."""
    return f"{steps * EXAMPLES_A_STEP / (0.9 * EXAMPLES):.4f}"


def asked_to_save(job: Job) -> Job:
    return replace(job, saves_when_asked=True, write_seconds=LONGEST_WAIT_INSIDE_A_LARGE_WRITE_SECONDS)


def finish(job: Job) -> float:
    """Let the run come to its end; how many seconds that took."""
    started = time.monotonic()
    process = job.start()
    _, complaint = process.communicate()
    if process.returncode:
        sys.exit(f"{job.out.name}: exit status {process.returncode}\n{complaint.decode()}")
    seconds = time.monotonic() - started
    at = f" at step {job.last_step()}" if job.is_run else ""
    print(f"{job.out.name}: finished{at} in {seconds:.0f} s", flush=True)
    return seconds


# ---- kills


@dataclass(frozen=True)
class Kills:
    """How many, and spread over how long a run."""

    wanted: int
    run_seconds: float
    chance: random.Random

    def wait(self) -> float:
        """Seconds of learning before a kill; they add up to about half of the run."""
        return self.chance.uniform(0, self.run_seconds / self.wanted)

    def aim(self, *, must_hit_a_write: bool) -> Literal["start", "any", "write"]:
        """What the next kill is to hit."""
        drawn = 1.0 if must_hit_a_write else self.chance.random()
        if drawn < SHARE_WHILE_STARTING:
            return "start"
        return "write" if drawn > 1 - SHARE_INSIDE_WRITES else "any"


def kill_again_and_again(job: Job, kills: Kills) -> None:
    """Start and kill the run until enough kills have hit, enough of them inside the write of a state."""
    hits = hits_inside = 0
    while hits < kills.wanted or hits_inside < min(WRITES_TO_HIT, kills.wanted):
        left_before = job.half_written()
        process, started = job.start(), time.monotonic()
        must = kills.wanted - hits <= WRITES_TO_HIT - hits_inside
        await_moment(job, process, kills, kills.aim(must_hit_a_write=must))
        if not kill(process):
            print(f"         stopped in time when it was asked to, {where_it_hit(job, [])}", flush=True)
            continue
        half = [name for inode, name in job.half_written().items() if inode not in left_before]
        hits += 1
        hits_inside += any(name.startswith("checkpoints/") for name in half)
        after = f"{time.monotonic() - started:5.1f} s after the start"
        print(f"kill {hits:2}: {after}, {where_it_hit(job, half)}", flush=True)
    print(f"{hits} kills, {hits_inside} of them inside the write of a state", flush=True)


def kill_and_repeat(undisturbed: Job, job: Job, kills: Kills) -> list[str]:
    """Start and kill the job until enough kills have hit and it is finished; where it ended differently."""
    differences: list[str] = []
    hits = ends = 0
    while hits < kills.wanted or not ends:
        process, started = job.start(), time.monotonic()
        wait = kills.chance.uniform(0, 1.1 * kills.run_seconds) if hits < kills.wanted else None
        asked = kills.chance.random() < SHARE_ASKED_TO_STOP
        if wait is not None:
            await_end(process, wait)
        if wait is not None and asked:
            process.terminate()
            await_end(process, kills.chance.uniform(0, LONGEST_WAIT_AFTER_ASKING_SECONDS))
        if wait is None or process.poll() is not None:
            _, complaint = process.communicate()
            if process.returncode in (STOPPED, -signal.SIGTERM) and asked:
                continue
            # A command that was killed behind its last write has nothing left to do.
            if process.returncode and b"already exists" not in complaint:
                sys.exit(f"exit status {process.returncode} after {hits} kills\n{complaint.decode()}")
            ends += 1
            found = differing(undisturbed.out, job.out)
            print(f"         finished, differing files: {' '.join(found) or 'none'}", flush=True)
            differences += found
            shutil.rmtree(job.out)
            continue
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        hits += 1
        left = sorted(str(path.relative_to(job.out)) for path in job.out.rglob("*") if path.is_file())
        seconds = time.monotonic() - started
        after = f"kill {hits:2}: {seconds:5.1f} s after the start{', asked to stop' if asked else ''}"
        print(f"{after}, {len(left)} files are there: {' '.join(left[-3:])}", flush=True)
    print(f"{hits} kills, came to its end {ends} times", flush=True)
    return differences


def fail_and_repeat(undisturbed: Job, job: Job, faults: int, chance: random.Random) -> int:
    """Let events of the file system fail, one in each start; the exit status of this program."""
    told = undisturbed.out.with_name("events")
    process = undisturbed.start(f"{undisturbed.out}|0|none|{told}")
    _, complaint = process.communicate()
    if process.returncode:
        sys.exit(f"exit status {process.returncode}\n{complaint.decode()}")
    events = int(told.read_text())
    print(f"{events} events in the undisturbed job", flush=True)
    wrong = 0
    for at in range(faults):
        # Spread over the whole job, and each kind over it as well.
        number = 1 + int(events * (at + chance.random()) / faults)
        fault = ("kill", "EIO", "ENOSPC", "ESTALE")[at % 4]
        process = job.start(f"{job.out}|{number}|{fault}|")
        _, complaint = process.communicate()
        said = [line for line in complaint.decode().splitlines() if line.strip()]
        found = ["a traceback"] if any(line.startswith("Traceback") for line in said) else []
        if process.returncode not in ((0, -signal.SIGKILL) if fault == "kill" else (0, 1, 2)):
            found.append(f"exit status {process.returncode}")
        found += repeat_to_the_end(undisturbed, job)
        wrong += bool(found)
        last = said[-1][:160] if process.returncode > 0 else ""
        ended = f"event {number:4} {fault:6} exit {process.returncode:3}"
        print(f"{ended}  {'WRONG: ' + ', '.join(found) if found else 'same'}  {last}", flush=True)
        if found:
            print("\n".join(f"    | {line}" for line in said[-12:]), flush=True)
        shutil.rmtree(job.out, ignore_errors=True)
    print(f"verdict: {faults - wrong} of {faults} faults were told in a line and ended the same")
    return 1 if wrong else 0


def repeat_to_the_end(undisturbed: Job, job: Job) -> list[str]:
    """Give the command again, undisturbed; what is wrong then."""
    process = job.start()
    _, complaint = process.communicate()
    if process.returncode and b"already exists" not in complaint:
        return [f"then exit status {process.returncode}: {complaint.decode().splitlines()[-1:]}"]
    left = list(job.half_written().values())
    return [*differing(undisturbed.out, job.out), *(f"{name} is left" for name in left)]


def await_end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait so long, or until the process ends."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def await_moment(
    job: Job, process: subprocess.Popen[bytes], kills: Kills, aim: Literal["start", "any", "write"]
) -> None:
    """Wait for a moment of the kind that is aimed at, or for the end of the process."""
    if aim == "start":
        time.sleep(kills.chance.uniform(0, LONGEST_START_SECONDS))
        return
    known = job.last_step()
    while process.poll() is None and job.last_step() == known:  # until it has learned something new
        time.sleep(0.01)
    time.sleep(kills.wait())
    if aim == "write" and job.saves_when_asked:
        process.terminate()
        if kills.chance.random() < SHARE_BEHIND_ASKED_WRITES:  # else the run would never get on
            await_whole_state(job, process)
            return
    if aim == "write":
        while process.poll() is None and not any((job.out / "checkpoints").glob(".step-*.partial")):
            time.sleep(LOOK_EVERY_SECONDS)
        time.sleep(kills.chance.uniform(0, job.write_seconds))


def await_whole_state(job: Job, process: subprocess.Popen[bytes]) -> None:
    """Wait until a state is there that was not, or for the end of the process."""
    known = saved_steps(job.out / "checkpoints")
    while process.poll() is None and saved_steps(job.out / "checkpoints") in (known, []):
        time.sleep(LOOK_EVERY_SECONDS)


def kill(process: subprocess.Popen[bytes]) -> bool:
    """End the process at once, with all it has started; False where it had just stopped when asked to."""
    if process.poll() is not None:
        _, complaint = process.communicate()
        if process.returncode == STOPPED:
            return False
        sys.exit(f"the run ended before it could be killed: give more --steps\n{complaint.decode()}")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return True


def where_it_hit(job: Job, half_written: list[str]) -> str:
    """What the killed run left behind, in words."""
    states = saved_steps(job.out / "checkpoints")
    state = f"last whole state {states[-1]}" if states else "no state yet"
    place = f"journal at step {job.last_step()}, {state}"
    if not half_written:
        return place
    found = [job.out / name for name in half_written]
    files = [path for each in found for path in (each, *each.rglob("*")) if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 1e6
    return f"{place}, INSIDE A WRITE: {', '.join(half_written)} ({len(files)} files, {size:.1f} MB)"


# ---- studies

STUDY = """
question = "Does it matter?"
seeds = 2
finetuning_seeds = 2
[stages.model]
recipe = "{recipe}"
store = "{store}"
set = {{ {pretraining} }}
[stages.task]
task = "custom"
data = "{table}"
columns = {{ text = "text", label = "label" }}
model = "model"
set = {{ {finetuning} }}
[trials.baseline]
[trials.diverges]
"model.optim.peak_lr" = 1e35
[trials.again]
"model.name" = "again"
[trials.impossible]
"model.model.heads" = 3
"""
"""Four variants: one diverges, one is a duplicate, one has an impossible recipe."""


def kill_a_study(options: argparse.Namespace, folder: Path) -> int:
    """Kill a study again and again, all of it or its first process alone; the exit status of this program."""
    file, chance = folder / "study.toml", random.Random(options.seed)
    steps = (f"run.steps={options.steps}", 'model.type="bert"', "model.layers=2", "model.width=32")
    small = (*PRETRAINING_SETTINGS, *steps, "model.heads=2", "model.inner=64")
    values = {
        "pretraining": ", ".join(map(quoted, small)),
        "finetuning": ", ".join(
            map(quoted, (*FINETUNING_SETTINGS, f"run.epochs={epochs(options.steps / 2)}"))
        ),
    }
    given = {"recipe": RECIPE, "store": options.store.resolve(), "table": table(folder), **values}
    file.write_text(STUDY.format(**given), encoding="utf-8")
    words = ("study", "run", str(file), "--devices", "cpu", "--threads", "1", "--keep-models")
    words += ("--out", str(folder / "report"))
    alone = Job((*words, "--together", "1"), (), folder / "alone", out_option="--cells", is_run=False)
    beside = replace(alone, words=(*words, "--together", "2"), out=folder / "beside")
    seconds, wrong, known = finish(alone), list[str](), dict[Path, int]()
    for number in range(1, options.kills + 1):
        process, before = beside.start(), begun_in(beside.out)
        while process.poll() is None and begun_in(beside.out) == before:  # until something new is under way
            time.sleep(0.05)
        await_end(process, chance.uniform(0, seconds / 6))
        how = chance.choice(("all of it", "the first process alone", "asked to stop"))
        if how == "asked to stop":
            process.terminate()
        elif process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL) if how == "all of it" else process.kill()
        _, complaint = process.communicate()
        if process.returncode not in (0, STOPPED, -signal.SIGKILL):
            wrong.append(f"exit status {process.returncode}: {complaint.decode().splitlines()[-1:]}")
        done = {each: each.stat().st_mtime_ns for each in beside.out.glob("*/result.json")}
        wrong += [
            f"{each.parent.name} was made again" for each, when in known.items() if done.get(each) != when
        ]
        known = done
        begun, parts = begun_in(beside.out)
        print(f"kill {number:2}: {how}, {len(done)} cells done, {begun} begun, {parts} states", flush=True)
        if process.returncode == 0:  # all is done: from the beginning, for more kills
            wrong += differing_cells(alone.out, beside.out)
            shutil.rmtree(beside.out)
            known = {}
    finish(beside)
    wrong += differing_cells(alone.out, beside.out)
    for each in wrong:
        print(f"DIFFERENT: {each}")
    print("verdict:", "NOT THE SAME" if wrong else f"{options.kills} kills, the same to the bit")
    return 1 if wrong else 0


def quoted(setting: str) -> str:
    """A setting as a line of TOML with its key in quotes."""
    key, _, value = setting.partition("=")
    is_word = re.fullmatch(r"[a-z_-]+", value) and value not in ("true", "false")
    return f'"{key}" = "{value}"' if is_word else f'"{key}" = {value}'


def begun_in(cells: Path) -> tuple[int, int]:
    """How many cells have begun, and how many states there are."""
    return len(list(cells.glob("*/run"))), len(list(cells.glob("*/run/checkpoints/step-*")))


def differing_cells(one: Path, other: Path) -> list[str]:
    """Cells of two studies that differ: in their models, predictions, metrics, or in what they are."""
    names = sorted({each.name for place in (one, other) for each in place.iterdir()})
    models = sum(len(list(place.glob("*/run/model/model.safetensors"))) for place in (one, other))
    print(f"comparing {len(names)} cells with {models} models")
    return [name for name in names if lasting_of_cell(one / name) != lasting_of_cell(other / name)]


def lasting_of_cell(cell: Path) -> dict[str, str]:
    """The hashes of what a cell came to, without who worked beside it.

    Of failures only that they are there: the step at which a run diverged depends on where it was stopped.
    """
    kept = ("cell.json", "result.json", "run/model/model.safetensors", "run/predictions-")
    found = {name: each for name, each in contents(cell).items() if name.startswith(kept)}
    return found | ({"failure": ""} if (cell / "failure.json").exists() else {})


# ---- comparison


def differing(one: Path, other: Path) -> list[str]:
    """Files of two jobs that differ in more than what the clock decides, and lines of their journals."""
    ones, others = (lasting(each) for each in (one, other))
    print(f"comparing {len(ones)} and {len(others)} files and lines")
    return sorted(name for name in ones.keys() | others.keys() if ones.get(name) != others.get(name))


def lasting(folder: Path) -> dict[str, str]:
    """The hashes of what a job leaves; of its states of the last, for kills decide which others there are."""
    steps = saved_steps(folder / "checkpoints")
    last = f"checkpoints/{step_folder(folder, steps[-1]).name}/" if steps else ""
    found = contents(folder, events=False)
    return {
        name: each
        for name, each in found.items()
        if not name.startswith("checkpoints/") or name.startswith(last)
    }


if __name__ == "__main__":
    main()
