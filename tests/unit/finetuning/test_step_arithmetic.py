"""What a step does to the weights: its rate, its dropout, its loss, and the update of plain AdamW."""

import itertools
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from bertsmith.core.seeds import key_of
from bertsmith.finetuning.finetune import next_step
from bertsmith.finetuning.finetuning_setup import budget_of, filling_multiple, micro_tokens
from bertsmith.model.network import new_network
from bertsmith.recipe.load import load_recipe
from bertsmith.tasks.batches import ShuffledBatches
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.task_recipe import finetuning_recipe
from bertsmith.training.distributed import ALONE
from bertsmith.training.journal import read_metrics
from bertsmith.training.trainer import Clock, GradientGuard, Progress, Trainer, training_steps
from tests.toy_tasks import write_rows
from tests.tuning import Notebook, set_up_run, toy_assignment, tune
from tests.unit.tasks.made_sets import made_set

TEN_STEPS = ("run.epochs=1", "optim.peak_lr=1e-3")


# ---- the rate of each step


@pytest.mark.parametrize(
    ("warmup_fraction", "expected"),
    [
        (0.0, {1: 1e-3, 2: 0.9e-3, 10: 0.1e-3}),
        (0.2, {1: 0.0, 2: 0.5e-3, 3: 1e-3, 4: 0.875e-3, 10: 0.125e-3}),
    ],
)
def test_the_first_step_begins_the_schedule_and_the_last_one_stands_before_its_end(
    model, tmp_path, warmup_fraction, expected
):
    notebook = Notebook()
    tune("sst2", model, tmp_path, *TEN_STEPS, f"optim.warmup_fraction={warmup_fraction}", notebook=notebook)
    rates = {line["step"]: line["learning_rate"] for line in notebook.lines}
    assert list(rates) == list(range(1, 11))
    assert {step: rates[step] for step in expected} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("step", "seconds", "rate"),
    [
        (0, 0.0, 0.0),
        (1, 20.0, 0.5e-3),
        (2, 20.0, 1e-3),
        (2, 70.0, 0.625e-3),
        (8, 70.0, 0.25e-3),
        (2, 120.0, None),
    ],
)
def test_minutes_end_a_run_before_its_steps_do_and_the_rate_follows(step, seconds, rate):
    settings = ("run.examples=5", *TEN_STEPS, "run.minutes=2", "optim.warmup_fraction=0.2")
    recipe = finetuning_recipe(task_named("sst2"), settings)
    sizes = {"examples_per_step": 5, "micro_tokens": 512, "multiple": 1}
    batches = ShuffledBatches(made_set("classify", items=50), seed=0, **sizes)
    progress = Progress(step=step, seconds=seconds, first_step_seconds=20.0 if step else 0.0)
    found = next_step(batches, recipe, budget_of(batches, recipe), progress)
    assert (found and found.learning_rate) == (rate and pytest.approx(rate))


def test_a_run_takes_one_step_however_few_its_minutes(model, tmp_path):
    notebook = Notebook()
    result = tune("sst2", model, tmp_path, *TEN_STEPS, "run.minutes=1e-6", notebook=notebook)
    assert result.finished and result.steps == 1
    assert {line["step"] for line in notebook.lines} == {1}
    assert "run.minutes ended the run after step 1 of 10" in notebook.notes
    card = (result.folder / "card.md").read_text()
    assert "0.1 epochs, 1 step of" in card and "ended the run after step 1 of 10" in card


def test_the_minutes_of_a_run_have_as_many_evaluations_as_its_steps_would(model, tmp_path, monkeypatch):
    # A clock that only steps move: the twenty-third of 80 ends the two minutes.
    seconds = itertools.count(1.0, 5.0)
    monkeypatch.setattr(Clock, "__call__", lambda _: next(seconds))
    settings = ("run.epochs=8", "run.minutes=2", "run.evaluations=4")
    result = tune("sst2", model, tmp_path, *settings)
    steps = {kind: [] for kind in ("train", "held-out")}
    for line in read_metrics(result.folder):
        steps[line["kind"]].append(line["step"])
    assert len(steps["held-out"]) == 4
    assert steps["held-out"][-1] == steps["train"][-1] == result.steps < 25


# ---- what fills a step up


@pytest.mark.parametrize(("longest", "multiple"), [(12, 128), (128, 128), (129, 512)])
def test_filler_is_no_longer_than_short_texts_may_be(longest, multiple):
    texts = made_set("classify", items=50)
    longer = replace(texts, starts_N1=np.append(texts.starts_N1, texts.starts_N1[-1] + longest))
    recipe = finetuning_recipe(task_named("sst2"), ["run.examples=4096"])
    assert filling_multiple(longer, recipe, replace(ALONE, device=torch.device("cuda"))) == multiple


# ---- how much of a step is one pass


@pytest.mark.parametrize(
    ("preset", "gibibytes", "longest", "tokens"),
    [
        ("bert-base", 139, 384, 65_536),
        ("bert-base", 79, 128, 65_536),
        ("bert-base", 44, 128, 32_768),
        ("bert-base", 24, 128, 16_384),
        ("bert-large", 139, 384, 65_536),
        ("bert-large", 79, 384, 32_768),
    ],
)
def test_a_pass_has_what_half_of_the_free_memory_holds(monkeypatch, preset, gibibytes, longest, tokens):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (gibibytes * 2**30, 139 * 2**30))
    config = load_recipe(preset).model.encoder_config(30_522)
    with torch.device("meta"):
        network = new_network(config, {}, torch.Generator())
    encoded = SimpleNamespace(starts_N1=np.array([0, longest]))
    on_gpu = replace(ALONE, device=torch.device("cuda"))
    recipe = finetuning_recipe(task_named("squad"), ["run.precision=bf16"])
    assert micro_tokens(network, encoded, recipe, on_gpu) == tokens
    assert micro_tokens(network, encoded, recipe, ALONE) == 16_384
    asked = finetuning_recipe(task_named("squad"), ["run.micro_tokens=5000"])
    assert micro_tokens(network, encoded, asked, on_gpu) == 5000


# ---- the dropout of each step


class Drawing(nn.Module):
    """An objective that keeps what it draws, as a dropout would."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.draws = []

    def forward(self, batch, loss_scales_1):
        self.draws.append(torch.rand(()).item())
        loss = self.weight.sum() * loss_scales_1[0]
        return loss, loss.detach()[None]


def draws_of_four_steps(seed, first=0):
    """What is drawn in the steps from `first` on."""
    objective = Drawing()
    trainer = Trainer(
        objective,
        torch.optim.AdamW(objective.parameters()),
        ALONE,
        "fp32",
        1.0,
        GradientGuard("off"),
        seed=seed,
    )
    settings = {"examples_per_step": 3, "seed": seed, "micro_tokens": 10_000, "multiple": 1}
    batches = ShuffledBatches(made_set("classify", items=12), **settings)
    recipe = finetuning_recipe(task_named("sst2"), ["run.epochs=1", f"run.seed={seed}"])
    step = partial(next_step, batches, recipe, budget_of(batches, recipe))
    assert list(training_steps(trainer, step, Progress(first)))
    return objective.draws


def drawn(seed, step):
    return torch.rand((), generator=torch.Generator().manual_seed(key_of(seed, "dropout", step, 0))).item()


@pytest.mark.parametrize("seed", [0, 7])
def test_each_step_drops_by_its_own_number_whatever_was_drawn_before(seed):
    expected = [drawn(seed, step) for step in range(4)]
    assert len(set(expected)) == 4
    assert draws_of_four_steps(seed) == expected
    assert draws_of_four_steps(seed, first=2) == expected[2:]


# ---- three steps against plain torch

PEAK, CLIP, EPS, BETAS = 1e-2, 0.05, 1e-3, (0.8, 0.95)
THREE_STEPS = (
    *("run.epochs=1", "run.examples=14", "run.micro_tokens=40", "optim.warmup_fraction=0"),
    *(f"optim.peak_lr={PEAK}", f"optim.clip_norm={CLIP}", f"optim.eps={EPS}"),
    *(f"optim.beta1={BETAS[0]}", f"optim.beta2={BETAS[1]}", "optim.weight_decay=0.1"),
)
"""Settings far from the defaults, so that none of them can be left out unnoticed."""


def lopsided_sst2(folder):
    """Forty sentences, a quarter of them positive, in steps of 14, 14 and 12."""
    rows = [[f"the cat {number}", int(number % 4 == 0)] for number in range(40)]
    write_rows(folder / "train.tsv", [["sentence", "label"], *rows])
    return torch.tensor([40 / 2 / 30, 40 / 2 / 10])


def lopsided_wnut17(folder):
    """Forty sentences of one to five words, the last of which is a place."""
    lengths = [1 + number % 5 for number in range(40)]
    blocks = ["the\tO\n" * (length - 1) + "london\tB-location\n" for length in lengths]
    (folder / "wnut17train.conll").write_text("\n".join(blocks))
    words, weights = sum(lengths), torch.zeros(13)
    weights[task_named("wnut17").labels.index("O")] = words / 2 / (words - 40)
    weights[task_named("wnut17").labels.index("B-location")] = words / 2 / 40
    return weights


def plain_loss(scorer, micros, kind, weights_C):
    """The mean over all targets of a step, however they were packed, each with the weight of its class."""
    scores = [scorer(micro.inputs) for micro in micros]
    if kind == "tag":
        scores = [each[micro.rows_P] for each, micro in zip(scores, micros, strict=True)]
    targets = torch.cat([micro.targets for micro in micros])
    return functional.cross_entropy(torch.cat(scores), targets, weight=weights_C)


def plain_adamw(scorer):
    matrices = [each for each in scorer.parameters() if each.dim() > 1]
    vectors = [each for each in scorer.parameters() if each.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK, betas=BETAS, eps=EPS)


@pytest.mark.parametrize("balance", ["equal", "balanced"])
@pytest.mark.parametrize(
    ("name", "kind", "write"), [("sst2", "classify", lopsided_sst2), ("wnut17", "tag", lopsided_wnut17)]
)
def test_three_steps_are_those_of_plain_adamw_with_clipping(model, tmp_path, name, kind, write, balance):
    assignment = toy_assignment(name, model, tmp_path, *THREE_STEPS, f"head.class_weights={balance}")
    weights_C = write(assignment.data) if balance == "balanced" else write(assignment.data).fill_(1.0)
    run = set_up_run(assignment)
    run.trainer.objective.eval()  # no dropout
    scorer = deepcopy(run.trainer.objective.scorer)
    optimizer, norms = plain_adamw(scorer), []
    step = partial(next_step, run.batches, run.recipe, run.budget)
    steps = training_steps(run.trainer, step, Progress())
    for number, report in enumerate(steps):
        micros = report.step.micros
        assert len(micros) > 1
        optimizer.zero_grad()
        loss = plain_loss(scorer, micros, kind, weights_C)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(scorer.parameters(), CLIP).item())
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = PEAK * (3 - number) / 3
        optimizer.step()
        assert report.gradient_norm == pytest.approx(norms[-1], rel=1e-3)
        assert report.sums[0] / report.step.counts[0] == pytest.approx(loss.item(), rel=1e-4)
    assert len(norms) == 3 and max(norms) > 2 * CLIP
    for (parameter, ours), theirs in zip(
        run.trainer.objective.scorer.named_parameters(), scorer.parameters(), strict=True
    ):
        assert (ours - theirs).abs().max() < 1e-3 * PEAK, parameter
