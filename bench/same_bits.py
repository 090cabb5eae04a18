"""Do two versions of the code train to the same bits?

    git worktree add ../before COMMIT
    OMP_NUM_THREADS=1 python bench/same_bits.py ../before .
    python bench/same_bits.py . . --only lora       # one version twice: the comparison itself

Runs tiny jobs by the command line of each checkout: pre-training (every objective, both budgets, averaged
weights, a stop and a resume, two processes), fine-tuning (every kind of task, best weights with patience,
adapters, frozen encoders, lengthening), distillation and both prunings. The inputs are made once, by the
tests of the second checkout. All files of the two runs are compared: tensors bit for bit, JSON and text
without the values that the clock decides. The exit status is 1 if anything differs. Bits depend on the
machine and the number of threads, so no hash is stored.
"""

import argparse
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

CLOCK = re.compile(r"seconds|per_second|since|wait|mfu|time|date|machine|memory|peak_bytes|source")
"""Keys of JSON whose values the clock, the machine or the code itself decides."""
CLOCKED_TEXT = re.compile(r".*(seconds|minutes|tokens/s|examples/s|memory|source|\d:\d\d).*", re.IGNORECASE)
SKIPPED = {".png", ".html", ".log"}
OF_THE_CODE = {"source.sha256", "model.sha256", "versions.json", "checksums.json", ".lock", "lock"}
"""Files that say which code ran, and hashes of whole files, whose contents are compared themselves."""
STAGES = "[{fraction=0.5, length=24, predictions=4}, {fraction=0.5, length=32, predictions=5}]"
PRETRAINING = (
    *("model.layers=2", "model.width=32", "model.heads=2", "model.inner=64", "model.positions=64"),
    *(
        "batch.sequences=4",
        "examples.held_out_fraction=0.2",
        "optim.peak_lr=1e-3",
        f"examples.stages={STAGES}",
    ),
    *("run.device=cpu", "run.evaluation_sequences=8", "run.evaluate_every_steps=5", "run.steps=8"),
    *("optim.warmup_fraction=0.1", "run.log_every_steps=3"),
)
ONE_SENTENCE = "examples.pairs=full-sentences"
ELECTRA = (
    *("model.type=electra", "model.embedding_width=16", "examples.objective=replaced", "examples.pairs=none"),
    *("replaced.generator_size=0.5", "masking.as_mask=0.85", "masking.as_random=0"),
)
DISTILLED = (
    *("examples.objective=distilled", "examples.pairs=doc-sentences", "distill.layers=[0, 1]"),
    *("distill.teacher={place}/mlm/model", "distill.hidden_weight=1", "distill.attention_weight=1"),
)
OF_PRETRAINING: dict[str, tuple[str, ...]] = {
    "mlm": ("examples.pairs=doc-sentences",),
    "mlm-nsp": (),
    "tokens": ("run.budget=tokens", "run.tokens=900", "batch.tokens=96", ONE_SENTENCE),
    "averaged": ("run.average_from=0.5",),
    "left-to-right": ("examples.objective=left-to-right", ONE_SENTENCE),
    "right-to-left": ("examples.objective=right-to-left", ONE_SENTENCE),
    "electra": ELECTRA,
    "albert": ("model.type=albert", "model.embedding_width=16", "examples.pairs=sop"),
    "modernbert-muon": (
        *("model.type=modernbert", "model.segments=0", "model.norm_eps=1e-5", "model.local_attention=8"),
        *(ONE_SENTENCE, "optim.algorithm=muon"),
    ),
    "distilled": DISTILLED,
}
FINETUNING = (
    *("optim.peak_lr=2e-3", "run.epochs=1", "run.examples=16", "run.evaluations=2", "text.longest=64"),
    *("text.step=32", "text.longest_question=16", "run.device=cpu"),
)
BEST = ("run.keep=best", "run.patience=1", "run.evaluations=5")
OF_FINETUNING: dict[str, tuple[str, ...]] = {
    "sst2": (),
    "rte": BEST,
    "stsb": (),
    "wnut17": (),
    "squad": (),
    "squad2": (),
    "swag": (),
    "sst2 lora": ("head.encoder=lora",),
    "sst2 frozen-linear": ("head.encoder=frozen-linear",),
    "sst2 frozen-features": ("head.encoder=frozen-features",),
    "sst2 solved": ("head.weights=solved",),
    "sst2 taught": ("distill.teachers=['{place}/sst2/model']",),
}
Step = tuple[int, list[str]]
"""Stop in this step (0: never), and the words of the command."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--only", default="", help="cases whose name has this part, and what they need")
    parser.add_argument("--keep", type=Path, help="work here; keep the runs, and take those that are there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        work = (options.keep or Path(made)).resolve()
        inputs = work / "inputs"
        if not inputs.exists():
            child(options.after, "make", str(inputs))
        places = []
        for name, checkout in (("before", options.before), ("after", options.after)):
            places.append(work / name)
            if not places[-1].exists():
                child(checkout, "jobs", str(inputs), str(places[-1]), options.only)
        sys.exit(compare(*places))


def child(checkout: Path, *words: str) -> None:
    """Run a part of this file with the code of a checkout."""
    root = checkout.resolve()
    path = os.pathsep.join(map(str, (root / "src", root)))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "BERTSMITH_SAME_BITS": "1"}
    subprocess.run([sys.executable, Path(__file__).resolve(), *words], check=True, env=environment, cwd=root)


# ---- with the code of one checkout


def make(inputs: Path) -> None:
    """Make a store, a model and the data of tasks, small enough for seconds."""
    from tests.tiny_runs import tiny_store
    from tests.toy_folder import write_toy_folder
    from tests.toy_tasks import TOYS

    inputs.mkdir(parents=True)
    tiny_store(inputs)
    write_toy_folder(inputs / "model")
    for name in dict.fromkeys(each.partition(" ")[0] for each in OF_FINETUNING):
        TOYS[name](inputs / name)


def cases(inputs: Path, place: Path) -> dict[str, list[Step]]:
    """The commands of each job, in an order in which inputs come before what needs them."""

    def settings(values: tuple[str, ...]) -> list[str]:
        return [part for each in values for part in ("--set", each.replace("{place}", str(place)))]

    def pretrain(name: str, *more: str) -> list[str]:
        words = ["pretrain", "bert-tiny", "--store", str(inputs / "store"), "--out", str(place / name)]
        return [*words, *settings((*PRETRAINING, *more))]

    def finetune(name: str, *more: str) -> list[str]:
        task = name.partition(" ")[0]
        words = ["finetune", task, "--model", str(inputs / "model"), "--data", str(inputs / task)]
        return [*words, "--out", str(place / name), *settings((*FINETUNING, *more))]

    def prune(name: str, *more: str) -> list[str]:
        words = ["prune", "--data", str(inputs / "sst2"), "--out", str(place / name), *more]
        return [*words, *settings(("run.device=cpu", "run.examples=16"))]

    found = {name: [(0, pretrain(name, *more))] for name, more in OF_PRETRAINING.items()}
    stopped = pretrain("pretrain stopped")
    found["pretrain stopped"] = [(5, stopped), (0, stopped)]
    found |= {name: [(0, finetune(name, *more))] for name, more in OF_FINETUNING.items()}
    stopped = finetune("rte stopped", *BEST)
    found["rte stopped"] = [(4, stopped), (0, stopped)]
    longer = [finetune("sst2 longer"), finetune("sst2 longer", "run.epochs=2")]
    found["sst2 longer"] = [(0, each) for each in longer]
    tuned, fresh = str(place / "sst2"), str(inputs / "model")
    found["prune heads"] = [
        (0, prune("prune heads", "--model", tuned, "--heads", "0.5", "--ffn", "0.5", "--rounds", "2"))
    ]
    magnitude = ("--model", fresh, "--task", "sst2", "--method", "magnitude", "--sparsity", "0.7")
    found["prune weights"] = [(0, prune("prune weights", *magnitude, "--epochs", "1"))]
    rewound = ("--rewind", "0.2", "--retrain", "weights,rate,finetune", "--rounds", "2", "--epochs", "0.5")
    found["prune rewound"] = [(0, prune("prune rewound", *magnitude, *rewound))]
    found["two processes"] = [(-2, pretrain("two processes"))]
    return found


def jobs(inputs: Path, place: Path, only: str) -> None:
    """Run the cases, each in this process but for those of several."""
    import torch

    from bertsmith.cli.app import main as command_line

    torch.set_num_threads(1)
    for module in ("matplotlib.figure", "torch.utils.tensorboard"):  # pictures take most of a tiny run's time
        sys.modules[module] = None  # type: ignore[assignment]
    needed = {"prune heads": {"sst2"}, "sst2 taught": {"sst2"}, "distilled": {"mlm"}}
    every = cases(inputs, place)
    chosen = {name for name in every if only in name}
    chosen |= {each for name in chosen for each in needed.get(name, ())}
    backward = torch.Tensor.backward
    for name in (each for each in every if each in chosen):
        for stop, words in every[name]:
            print(f"{place.name}: {name}", flush=True)
            if stop < 0:
                torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(-stop), "-m", "bertsmith"]
                subprocess.run([sys.executable, *torchrun, *words], check=True, capture_output=True)
                continue
            steps = iter(range(1, 1_000_000))

            def counted(*given: Any, stop: int = stop, steps: Iterator[int] = steps, **named: Any) -> None:
                if next(steps) == stop:
                    os.kill(os.getpid(), signal.SIGTERM)
                backward(*given, **named)  # type: ignore[no-untyped-call]

            torch.Tensor.backward = counted  # type: ignore[method-assign]
            sys.argv, told = ["bertsmith", *words], io.StringIO()
            try:
                with redirect_stdout(told), redirect_stderr(told):
                    command_line()
            except SystemExit as error:
                if error.code and not stop:
                    sys.exit(f"{' '.join(words)}\n{told.getvalue()[-2000:]}")
            torch.Tensor.backward = backward  # type: ignore[method-assign]


# ---- the comparison


def compare(before: Path, after: Path) -> int:
    """Print each case with the files that differ; return the exit status."""
    wrong = 0
    for folder in sorted({each.name for place in (before, after) for each in place.iterdir()}):
        old, new = (contents(place / folder) for place in (before, after))
        differing = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
        wrong += bool(differing)
        print(
            f"{folder:<22} {len(new):3} values",
            f"differ: {', '.join(differing[:8])}" if differing else "equal",
        )
    return int(bool(wrong))


def contents(folder: Path, *, events: bool = True) -> dict[str, str]:
    """A hash of every file of a job, of JSON by its lines, without what the clock decides."""
    found = {}
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        if file.suffix in SKIPPED or file.name in OF_THE_CODE or "tfevents" in file.name:
            continue
        name = str(file.relative_to(folder))
        if file.suffix in {".json", ".jsonl"}:
            text = file.read_text(encoding="utf-8").replace(str(folder.parent), "")
            parts = text.splitlines() if file.suffix == ".jsonl" else [text]
            parts = [part for part in parts if events or '"kind": "event"' not in part]
            for number, part in enumerate(parts):
                value = json.dumps(without_clock(json.loads(part)), sort_keys=True)
                found[f"{name}:{number}"] = hashlib.sha256(value.encode()).hexdigest()
            continue
        content = file.read_bytes()
        if file.suffix in {".md", ".toml", ".txt"}:
            lines = content.decode().replace(str(folder.parent), "").splitlines()
            content = "\n".join(line for line in lines if not CLOCKED_TEXT.match(line)).encode()
        found[name] = hashlib.sha256(content).hexdigest()
    return found


def without_clock(value: Any) -> Any:
    """JSON without the keys that the clock decides."""
    if isinstance(value, dict):
        return {key: without_clock(each) for key, each in value.items() if not CLOCK.search(key)}
    return [without_clock(each) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    if "BERTSMITH_SAME_BITS" in os.environ:
        part, *paths = sys.argv[1:]
        if part == "make":
            make(Path(paths[0]))
        else:
            jobs(Path(paths[0]), Path(paths[1]), paths[2])
    else:
        main()
