"""Pre-training beside transformers at its best, interleaved, ours from a real store.

    python bench/pretraining_speed.py --store store --presets bert-base bert-large --lengths 128 512
    python bench/pretraining_speed.py --store store --presets speedrun-small --lengths 128 --dropouts 0
    python bench/pretraining_speed.py --store store --presets bert-tiny --device cpu --tokens 4096 \
        --budgets 2048 4096 --steps 2 --warm-up 2

Ours takes whole optimisation steps of the real job: batches drawn, masked and packed from the store by loader
processes, the recipe's objective, precision, clipping and optimiser. transformers takes such steps with the
same weights and fused AdamW on random ids that need no reading and no padding: its best case. It is tried
with and without a mask of ones, with cuDNN's attention, with CUDA graphs and with steps of several sizes; the
fastest of these, told in the table, is the peer. One more row gives that peer a head on masked positions
only, as ours has it: what is then left is not the head's. Real tokens are counted; the share of the chip is
bertsmith.model.flops's.
On a CPU seconds are those of the process, all of its threads together: OMP_NUM_THREADS=1 for one core.
"""

import argparse
import atexit
import itertools
import tempfile
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from pretraining_peer import Loop, PeerForm, random_batch
from quiet import Quiet
from rounds import (
    Results,
    Round,
    add_form,
    clock_of,
    fastest,
    forget,
    in_turn,
    narrowed,
    parser_of,
    time_unit,
    wait_for,
)

from bertsmith.corpus.token_store import TokenStore
from bertsmith.pretraining.hardware import peak_of
from bertsmith.pretraining.pretraining_parts import StepLoader
from bertsmith.pretraining.run_setup import Run, run_folder, set_up
from bertsmith.recipe.load import load_recipe
from bertsmith.training.callbacks import StopRequested
from bertsmith.training.distributed import start_world
from bertsmith.training.job import Start
from bertsmith.training.trainer import Clock, Progress, same_bits, training_steps

USUAL_MODES = {"cuda": ["default", "reduce-overhead"], "cpu": ["eager", "default"]}


class Case(NamedTuple):
    """One line of the table."""

    preset: str
    length: int
    dropout: float

    def __str__(self) -> str:
        return f"{self.preset}, length {self.length}, dropout {self.dropout:g}"


def main() -> None:
    options = parse()
    torch.set_float32_matmul_precision("high")
    results, tried = Results(options.json, "tokens", time_unit(options.device)), {}
    for preset, length in itertools.product(options.presets, options.lengths):
        form = None
        for case in (Case(preset, length, dropout) for dropout in options.dropouts):
            print(f"\n{case}", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                run = our_run(case, Path(folder) / "run", options)
                if not options.alone:
                    form = best_form(run, case, form, tried.setdefault(str(case), {}), options)
                if not compared(run, case, form, results, options):
                    assert form is not None, "ours alone does not fit"
                    form = form._replace(tokens=form.tokens // 2)
                    compare(run, case, form, results, options)
            results.write(forms_of_the_peer=tried)


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_form(parser)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--presets", nargs="+", default=["bert-base"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--dropouts", type=float, nargs="+", default=[0.1, 0.0])
    parser.add_argument("--tokens", type=int, default=65_536, help="in a step of ours")
    parser.add_argument(
        "--budgets",
        type=int,
        nargs="+",
        default=[65_536, 32_768, 131_072],
        help="tokens in a step of the peer",
    )
    parser.add_argument("--modes", nargs="+", help="of torch.compile, or eager, for the peer")
    parser.add_argument("--steps", type=int, default=10, help="steps in a round")
    parser.add_argument("--warm-up", type=int, default=30, help="steps of ours before the first round")
    parser.add_argument("--set", nargs="*", default=[], help="settings of the recipe")
    parser.add_argument("--alone", action="store_true", help="leave the peer out")
    return parser.parse_args()


def our_run(case: Case, folder: Path, options: argparse.Namespace) -> Run:
    """The real job, set up."""
    preset, length, dropout = case
    rate = load_recipe(preset, options.set).masking.rate
    stage = f"[{{fraction = 1.0, length = {length}, predictions = {-int(-rate * length // 1)}}}]"
    batch = ["batch.by=sequences", f"batch.sequences={options.tokens // length}"]
    if load_recipe(preset).batch.by == "tokens":  # its steps are one pass, filler included
        batch = [f"batch.tokens={options.tokens - 512}"]
    settings = [
        f"examples.stages={stage}",
        f"model.dropout={dropout}",
        f"model.attention_dropout={dropout}",
        f"run.device={options.device}",
        *batch,
        *options.set,
    ]
    start = Start(start_world(options.device), Quiet(), Clock(), StopRequested(), saved=None)
    return set_up(load_recipe(preset, settings), TokenStore.open(options.store), run_folder(folder), start)


def best_form(
    run: Run, case: Case, known: PeerForm | None, rates: dict[str, float], options: argparse.Namespace
) -> PeerForm:
    """The fastest of the peer's ordinary forms: mode and mask at one budget, then the other budgets.

    Where another dropout was measured before, its mode and budget stay, and the mask is tried again: which
    kernel of attention SDPA takes depends on both.
    """
    modes = options.modes or USUAL_MODES[options.device]
    modes, budgets = (modes, options.budgets) if known is None else ([known.mode], [known.tokens])
    forms = [PeerForm(mode, masked, budgets[0]) for mode, masked in itertools.product(modes, (True, False))]
    if options.device == "cuda":
        forms.append(PeerForm(modes[0], False, budgets[0], cudnn=True))

    def make(form: PeerForm) -> Round:
        return peer_round(run, form, case.length, options)

    clock = clock_of(options.device)
    chosen = fastest(narrowed(forms, options.form), make, rates, clock)
    return fastest([chosen._replace(tokens=tokens) for tokens in budgets], make, rates, clock)


def compared(
    run: Run, case: Case, form: PeerForm | None, results: Results, options: argparse.Namespace
) -> bool:
    """Compare; False where memory is too small: alone the form fits, but graphs of several keep theirs.

    The error ends here: while it is handled, its traceback holds all contenders and their memory.
    """
    try:
        compare(run, case, form, results, options)
    except torch.OutOfMemoryError:
        return False
    return True


def compare(
    run: Run, case: Case, form: PeerForm | None, results: Results, options: argparse.Namespace
) -> None:
    """Ours, the peer, and the peer with our head, in turn."""
    forget()
    contenders = {"ours": our_round(run, options)}
    forms = {"ours": f"{run.recipe.optim.algorithm}, {options.tokens:,} tokens a step"}
    if form is not None:
        for name, each in (("peer", form), ("peer, masked positions", form._replace(sparse=True))):
            contenders[name], forms[name] = peer_round(run, each, case.length, options), str(each)
    for take in contenders.values():
        take()
    rates = in_turn(contenders, options.rounds, clock_of(options.device))
    peak = peak_of(run.world.device)
    work = run.objective.flops(case.length, 1, round(run.recipe.masking.rate * case.length)) / case.length
    shares = {name: f"{median(each) * work / peak:.1%}" for name, each in rates.items() if peak}
    results.add(str(case), rates, share=shares, form=forms)


def our_round(run: Run, options: argparse.Namespace) -> Round:
    """Steps of the real job, warmed up."""
    loader = StepLoader(run)
    atexit.register(loader.close)
    steps = training_steps(run.trainer, loader, Progress())

    def take(count: int = options.steps) -> float:
        with same_bits(run.machine.deterministic):
            reports = list(itertools.islice(steps, count))
        wait_for(options.device)
        return float(sum(report.step.tokens for report in reports))

    take(options.warm_up)
    return take


def peer_round(run: Run, form: PeerForm, length: int, options: argparse.Namespace) -> Round:
    """Steps of the peer, as many tokens as a round of ours has."""
    network = run.objective.network
    loop = Loop(network, form, options.device, run.machine.precision)
    batch = random_batch(network, form, length, run.recipe.masking.rate, options.device)
    steps = max(1, options.steps * options.tokens // form.tokens)
    return lambda: loop.take(steps, batch)


if __name__ == "__main__":
    main()
