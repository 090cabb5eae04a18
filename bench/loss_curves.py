"""What is fast in a training step beside what it stands for, over a run: does it learn the same?

    OMP_NUM_THREADS=1 python bench/loss_curves.py --store store --steps 500
    python bench/loss_curves.py --store store --steps 500 --device cuda --preset bert-base \\
        --set batch.sequences=256 optim.peak_lr=2e-4

A model learns three times from the same store: fast, plainly with the same seed, and fast with another seed,
for the noise that is between any two runs. Plain is, on a CPU, the loss of words that keeps all scores
(objectives/linear_cross_entropy.py does not); on a GPU, torch's own operators in the place of our Triton
kernels. Told are the differences of the logged losses (each the mean of ten steps), and of the loss on
held-out documents at the end.
"""

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
from quiet import Quiet
from rounds import forget
from torch import Tensor

from bertsmith.model.kernels import triton_ready
from bertsmith.model.network import Network
from bertsmith.objectives import masked_language_modelling
from bertsmith.objectives.pretraining_objective import weighted_sums
from bertsmith.pretraining.pretrain import pretrain
from bertsmith.recipe.load import load_recipe

STAGES = "[{fraction = 1.0, length = 128, predictions = 20}]"


def main() -> None:
    options = parse()
    fast = curve_of(options, seed=0)
    with plain_parts():
        plain = curve_of(options, seed=0)
    other = curve_of(options, seed=1)
    for name, curve in (("plain, the same seed", plain), ("fast, another seed", other)):
        apart = np.abs(np.array(curve) - np.array(fast))
        most, end, held_out = apart[:-1].max(), apart[-2], apart[-1]
        print(f"fast beside {name}: at most {most:.2g} apart, in the end {end:.2g}, held out {held_out:.2g}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--preset", default="bert-tiny")
    parser.add_argument("--set", nargs="*", default=[], help="settings of the recipe")
    return parser.parse_args()


@contextlib.contextmanager
def plain_parts() -> Iterator[None]:
    """Inside, a masked LM learns from scores that are all kept, and without kernels of our own."""

    def sums(network: Network, hidden_PD: Tensor, labels_P: Tensor, weights_P: Tensor) -> tuple[Tensor, ...]:
        return weighted_sums(network.scores_of_words(hidden_PD), labels_P, weights_P)

    plain_loss = mock.patch.object(masked_language_modelling, "word_sums", sums)
    with plain_loss, mock.patch.object(triton_ready, "COMPILES", False):
        yield


def curve_of(options: argparse.Namespace, *, seed: int) -> list[float]:
    """The losses that a run logs, and behind them the one on held-out documents."""
    settings = [
        f"examples.stages={STAGES}",
        "batch.sequences=16",
        "optim.peak_lr=1e-3",
        f"run.device={options.device}",
        f"run.steps={options.steps}",
        f"run.seed={seed}",
        *options.set,
    ]
    forget()  # compiled code has the choice of kernels in it
    begin = time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        result = pretrain(
            load_recipe(options.preset, settings), store=options.store, out=folder, callback=Quiet()
        )
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["token_loss"] for line in lines if line["kind"] == "train"]
    held_out = result.held_out["token_loss"]
    print(f"seed {seed}: {losses[0]:.4f} to {losses[-1]:.4f}, held out {held_out:.4f}", end="")
    print(f", {time.process_time() - begin:.0f} CPU-seconds", flush=True)
    return [*losses, held_out]


if __name__ == "__main__":
    main()
