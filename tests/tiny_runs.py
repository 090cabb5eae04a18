"""A tiny store of made-up sentences, recipes that fit it, and what is left of a run."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from bertsmith.core.files import read_json
from bertsmith.corpus.token_store import TokenStore
from bertsmith.objectives.pretraining_objective import PretrainingObjective
from bertsmith.pretraining.pretrain import PretrainingResult, pretrain
from bertsmith.pretraining.run_setup import Run, run_folder, set_up
from bertsmith.recipe.load import load_recipe
from bertsmith.recipe.schema import Recipe
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training import background_saving, checkpoint
from bertsmith.training.callbacks import StopRequested
from bertsmith.training.checkpoint import latest_state
from bertsmith.training.checkpoint_storage import saved_steps, step_folder
from bertsmith.training.distributed import ALONE, World
from bertsmith.training.job import Start
from bertsmith.training.journal import read_metrics
from bertsmith.training.trainer import Clock
from tests.plain_stores import write_store
from tests.tokenizer_makers import wordpiece_pieces

WHO = ["smith", "farmer", "rider", "baker", "miller", "king"]
DOES = ["heats", "hammers", "buys", "sells", "finds", "bends"]
WHAT = ["iron", "horseshoe", "bread", "flour", "crown", "nail"]
WHERE = ["near the forge", "in the village", "by the river", "at the mill", "on the hill", "behind the tower"]
WORDS = ["the", ".", *WHO, *DOES, *WHAT, *(word for place in WHERE for word in place.split())]
TINY = (
    *("model.layers=2", "model.width=32", "model.heads=2", "model.inner=64", "model.positions=64"),
    *(
        "batch.sequences=4",
        "examples.held_out_fraction=0.2",
        "optim.peak_lr=1e-3",
        "optim.warmup_fraction=0.1",
    ),
    *(
        "examples.stages=[{fraction=0.5, length=24, predictions=4}, "
        "{fraction=0.5, length=32, predictions=5}]",
    ),
    *("run.device=cpu", "run.evaluation_sequences=8", "run.evaluate_every_steps=5"),
    "run.log_every_steps=3",
)
CLOCK = {"seconds", "first_step_seconds", "tokens_per_second", "input_wait", "mfu"}
"""What the clock decides in a line of metrics."""


def tiny_tokenizer(folder: Path, *, unused: int = 0) -> Tokenizer:
    """A WordPiece tokenizer that knows the made-up sentences' words and all of their letters."""
    folder.mkdir(parents=True, exist_ok=True)
    padding, *rest = wordpiece_pieces(WORDS)
    pieces = [padding, *(f"[unused{number}]" for number in range(unused)), *rest]
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
    return Tokenizer.load(folder)


def tiny_documents(count: int = 60, *, seed: int = 0) -> list[list[str]]:
    """Documents of 3 to 7 sentences."""
    chance = np.random.default_rng(seed)
    return [[_sentence(chance) for _ in range(chance.integers(3, 8))] for _ in range(count)]


def _sentence(chance: np.random.Generator) -> str:
    who, does, what, where = (choices[chance.integers(len(choices))] for choices in (WHO, DOES, WHAT, WHERE))
    return f"the {who} {does} the {what} {where} ."


def tiny_store(folder: Path, *, tokenizer: Tokenizer | None = None, seed: int = 0) -> TokenStore:
    """A store of made-up sentences; in every second sentence two words are a phrase, in others an entity."""
    known = tokenizer or tiny_tokenizer(folder / "vocabulary")
    documents = [[_ids(known, line) for line in lines] for lines in tiny_documents(seed=seed)]
    units = [
        [
            [0, *((2, 3) if number % 2 else (4, 5)), *[0] * (len(line) - 3)]
            for number, line in enumerate(lines)
        ]
        for lines in documents
    ]
    write_store(folder / "store", documents, known, units=units)
    return TokenStore.open(folder / "store")


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    encoded = tokenizer.encode(text)
    return [number for number, part in zip(encoded.ids, encoded.sequence, strict=True) if part >= 0]


def tiny_recipe(*overrides: str, preset: str = "bert-tiny") -> Recipe:
    """A preset made tiny: 8 steps of 4 sequences, the first half of them of 24 tokens, then of 32."""
    return load_recipe(preset, [*TINY, "run.steps=8", *overrides])


@contextmanager
def without_pictures() -> Iterator[None]:
    """As where matplotlib and TensorBoard are not installed: they take most of a tiny run's time."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("matplotlib.figure", "torch.utils.tensorboard"):
            patch.setitem(sys.modules, name, None)
        yield


@dataclass
class Listener:
    """Who is told how a run goes, and remembers it."""

    notes: list[str] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    alerts: list[str] = field(default_factory=list)
    progress: list[float] = field(default_factory=list)
    deadlines: list[tuple[float, float]] = field(default_factory=list)

    def on_message(self, text: str) -> None:
        self.notes.append(text)

    def on_step(self, progress: float, values: dict[str, Any]) -> None:
        self.lines.append({"progress": progress, **values})

    def on_progress(self, progress: float) -> None:
        self.progress.append(progress)

    def on_deadline(self, seconds: float, total: float) -> None:
        self.deadlines.append((seconds, total))

    def on_signal(self, text: str) -> None:
        self.alerts.append(text)


def run_tiny(
    store: TokenStore, out: Path, *overrides: str, listener: Listener | None = None
) -> PretrainingResult:
    """A tiny run from its start to its end, or on from where it was stopped."""
    return pretrain(tiny_recipe(*overrides), store=store.folder, out=out, callback=listener or Listener())


def set_up_tiny(store: TokenStore, out: Path, *overrides: str, world: World = ALONE) -> Run:
    """A tiny run before its first step, without its tensors if it resumes."""
    folder = run_folder(out)
    saved = latest_state(folder.checkpoints)
    clock = Clock(before=saved.state.seconds if saved else 0.0)
    return set_up(
        tiny_recipe(*overrides), store, folder, Start(world, Listener(), clock, StopRequested(), saved)
    )


def ask_to_stop() -> None:
    """What a cluster does to a run it wants to move: the run finishes its step, then it stops."""
    os.kill(os.getpid(), signal.SIGTERM)


@dataclass
class BeforeSteps:
    """While it is open, `act(objective, step)` happens before each training step of a run in this process.

    A forward pass with gradients is a step: tiny runs have one micro-batch each.
    """

    act: Callable[[Any, int], None]
    step: int = 0
    """Steps seen so far."""
    objective: type[nn.Module] = PretrainingObjective
    """What learns."""

    def __enter__(self) -> "BeforeSteps":
        self.hook = nn.modules.module.register_module_forward_pre_hook(self._seen)
        return self

    def __exit__(self, *_: object) -> None:
        self.hook.remove()

    def _seen(self, module: nn.Module, _: object) -> None:
        if isinstance(module, self.objective) and torch.is_grad_enabled():
            self.act(module, self.step)
            self.step += 1


def stop_at(step: int) -> BeforeSteps:
    """While it is open, a run that starts in this process is asked to stop during this step of its start."""

    def act(_: PretrainingObjective, seen: int) -> None:
        if seen == step:
            ask_to_stop()

    return BeforeSteps(act)


def metrics_of(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """The lines of a run's journal of these kinds, without what the clock decides."""
    return [
        {key: value for key, value in line.items() if key not in CLOCK}
        for line in read_metrics(run)
        if line["kind"] in (kinds or ("train", "held-out"))
    ]


def last_scalars(run: Path) -> dict[str, Any]:
    """What the newest saved state of a run remembers beside its tensors, without what the clock decides."""
    folder = step_folder(run / "checkpoints", saved_steps(run / "checkpoints")[-1])
    scalars = read_json(folder / "state.json", remedy="")["scalars"]
    for key in ("position", "window"):
        scalars[key] = {
            name: scalars[key][name] for name in scalars[key].keys() - CLOCK - {"since", "waited"}
        }
    return scalars


@contextmanager
def saving_threads() -> Iterator[list[str]]:
    """While it is open, which kind of thread saves each state of a run, beside its steps or "MainThread"."""
    threads: list[str] = []
    save = checkpoint.save_state

    def seen(*operands: Any) -> None:
        threads.append(threading.current_thread().name.split("_")[0])
        save(*operands)

    with pytest.MonkeyPatch.context() as patch:
        for module in (background_saving, checkpoint):
            patch.setattr(module, "save_state", seen)
        yield threads


def sentence_ids(store: TokenStore) -> Tensor:
    """A sentence in the words of the store [1, T]."""
    return torch.tensor([store.tokenizer().encode("the smith heats the iron near the forge .").ids])


def last_state(run: Path) -> dict[str, Tensor]:
    """Weights and moments of the newest saved state of a run that had one process."""
    return state_of(run, saved_steps(run / "checkpoints")[-1])


def state_of(run: Path, step: int) -> dict[str, Tensor]:
    """Weights and moments of a saved state of a run that had one process."""
    folder = step_folder(run / "checkpoints", step)
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def differing(ones: dict[str, Tensor], others: dict[str, Tensor]) -> Sequence[str]:
    """The names of tensors that are not the same to the bit."""
    names = ones.keys() | others.keys()
    return sorted(
        name
        for name in names
        if name not in ones or name not in others or not torch.equal(ones[name], others[name])
    )
