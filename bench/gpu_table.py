"""All rows of docs/performance.md for one GPU, by one command: each benchmark with a file for its figures.

    python bench/gpu_table.py --store store --glue glue --squad squad --vocab minilm-l6 --out figures
    python bench/gpu_table.py --store store --vocab minilm-l6 --out figures --only pretraining-512 inference
    python bench/gpu_table.py --store store --vocab minilm-l6 --out figures --known

Most of the time goes into compiling forms of the peers. So the benchmarks are first run side by side with one
step each, which fills torch's cache on disk, and then one after the other, with the GPU to themselves; or
with --known only those forms are measured that won on an H200. What has its file already is left out: run it
again after an interruption. Each has a limit of time, after which it is stopped; the rows that it has written
are then in a file that ends in .part.json.
"""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
ONE_STEP = ("--steps", "1", "--warm-up", "2", "--rounds", "1")
ONE_ROUND = ("--rounds", "1")


class Job(NamedTuple):
    """A benchmark, and how long it may take."""

    name: str
    arguments: str
    """The script and what it is given."""
    minutes: float
    briefly: tuple[str, ...] = ()
    """What makes it fill the cache and no more; nothing where it would not be worth it."""
    known: str = ""
    """What narrows it to the form of the peer that won."""


def main() -> None:
    options = parse()
    possible = {job.name: job for job in jobs(options)}
    if unknown := [name for name in options.only or () if name not in possible]:
        sys.exit(f"no {', '.join(unknown)}, or no data for it; with what was given: {', '.join(possible)}")
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = [possible[name] for name in options.only or possible]
    left = [job for job in wanted if not (options.out / f"{job.name}.json").exists()]
    for job in wanted:
        if job not in left:
            say(f"{job.name}: has its file")
    if options.known:
        left = [job._replace(arguments=f"{job.arguments} {job.known}") for job in left]
    else:
        with ThreadPoolExecutor(options.at_once) as at_once:
            list(
                at_once.map(lambda job: run(job, options, job.briefly), [job for job in left if job.briefly])
            )
    sys.exit(0 if all([run(job, options) for job in left]) else 1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", type=Path, help="of bertsmith corpus; for pre-training")
    parser.add_argument("--glue", type=Path, help="a folder with SST-2; for fine-tuning")
    parser.add_argument("--squad", type=Path, help="a folder with SQuAD 1.1; for fine-tuning")
    parser.add_argument("--vocab", type=Path, help="a folder with a tokenizer; for inference and fine-tuning")
    parser.add_argument("--out", type=Path, required=True, help="a folder for figures and logs")
    parser.add_argument("--only", nargs="+", help="names of benchmarks")
    parser.add_argument("--at-once", type=int, default=3, help="that fill the cache side by side")
    parser.add_argument("--known", action="store_true", help="only the peers' forms that won on an H200")
    return parser.parse_args()


def jobs(options: argparse.Namespace) -> Iterator[Job]:
    """Those for which there is data."""
    out = shlex.quote(str(options.out))
    if options.store:
        store = shlex.quote(str(options.store))
        base, known = f"pretraining_speed.py --store {store}", "--modes default --form 'a mask of ones'"
        all_forms = f"{base} --lengths 128 --budgets 65536 32768"
        yield Job("pretraining-128", all_forms, 7, ONE_STEP, f"{known} --budgets 65536")
        longer = f"{base} --lengths 512 --budgets 65536 --modes default"
        yield Job("pretraining-512", longer, 5, ONE_STEP, known)
        large = f"{base} --presets bert-large --lengths 128 --budgets 65536 --modes default"
        yield Job("pretraining-large", large, 7, ONE_STEP, known)
        small = f"{base} --presets speedrun-small --lengths 128 --dropouts 0 --budgets 65536"
        yield Job("pretraining-small", small, 3, ONE_STEP, known)
        profile = f"profile_step.py --store {store} --preset"
        for name, preset, length in (
            ("profile-128", "bert-base", 128),
            ("profile-512", "bert-base", 512),
            ("profile-small", "speedrun-small --dropout 0", 128),
        ):
            yield Job(name, f"{profile} {preset} --length {length} --picture {out}/{name}.png", 2)
    if options.vocab:
        base = f"--shape base --vocab {shlex.quote(str(options.vocab))}"
        known = "--modes dynamic --form cuDNN --budgets 65536"
        yield Job(
            "inference", f"inference.py {base} --texts 8192 --budgets 65536 131072", 5, ONE_ROUND, known
        )
        for task, data, multiple in (
            ("sst2", options.glue and options.glue / "SST-2", 32),
            ("squad", options.squad, 128),
        ):
            arguments = f"{task} --data {shlex.quote(str(data))} {base} --examples 32 256 --rounds 3"
            known = f"--modes reduce-overhead --multiples {multiple} --orders grouped"
            if data:
                yield Job(f"finetuning-{task}", f"finetuning_speed.py {arguments}", 6, ONE_ROUND, known)
        load = "--batching on --http-processes 1 4 8 --generators 5 --clients 1500 --seconds 8"
        model = f"--device cuda --shape minilm --vocab {shlex.quote(str(options.vocab))} --route embed"
        yield Job("serving", f"serving_load.py {model} {load}", 5)
    yield Job("kernels", "kernel_speed.py --rounds 3", 6)
    yield Job("fp8-products", "fp8_products.py", 2)
    yield Job("cost-growth", f"cost_growth.py --rounds 3 --picture {out}/cost-growth.png", 12)


def run(job: Job, options: argparse.Namespace, briefly: tuple[str, ...] = ()) -> bool:
    """One benchmark to its end or limit, and whether it reached its end; what it prints goes to a log."""
    kind = "filling the cache" if briefly else "measuring"
    log = options.out / f"{job.name}{'-brief' if briefly else ''}.log"
    figures, part = options.out / f"{job.name}.json", options.out / f"{job.name}.part.json"
    script, *arguments = shlex.split(job.arguments)
    file = () if briefly else ("--json", str(part))
    command = [sys.executable, "-u", str(FOLDER / script), *arguments, *briefly, *file]
    begin = time.perf_counter()
    with log.open("w", encoding="utf-8") as written:
        # In a session of its own: its loaders have to end with it.
        process = subprocess.Popen(command, stdout=written, stderr=written, start_new_session=True)
        try:
            code = process.wait(60 * job.minutes)
            end = "done" if code == 0 else f"failed with {code}, see {log}"
        except subprocess.TimeoutExpired:
            code, end = None, f"stopped after {job.minutes:g} minutes; {part.name} has its rows"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code == 0 and not briefly:
        part.replace(figures)
    say(f"{job.name}: {kind}, {end}, {time.perf_counter() - begin:.0f} s")
    return code == 0


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


if __name__ == "__main__":
    main()
