"""Held-out results: which examples, how they are summed up, and what frequencies alone would give."""

import math

import numpy as np
import pytest
import torch

from bertsmith.examples.feed import Feed
from bertsmith.examples.view import sequences_of
from bertsmith.objectives.pretraining import Counts, PretrainingObjective
from bertsmith.pretraining.evaluation import evaluate, held_out_batches, means_of, unigram_entropy
from bertsmith.pretraining.setup import exam_recipe
from bertsmith.pretraining.start import begin
from bertsmith.recipe.schema import OptimSection, Recipe
from bertsmith.training.optimizers import build_optimizer
from bertsmith.training.parallel import ALONE
from bertsmith.training.steps import Caution, Learner
from tests.tiny_runs import tiny_recipe


def exam(store, cache, *, recipe: Recipe | None = None, rank: int = 0, world: int = 1) -> Feed:
    """Held-out examples in steps of 8 sequences, or in those of a recipe."""
    chosen = recipe or tiny_recipe("batch.sequences=8")
    choices = {"rank": rank, "world": world, "split": "held-out"}
    return Feed(store, chosen, micro_tokens=256, multiple=8, cache=cache, **choices)


def learner_of(store) -> Learner:
    objective = PretrainingObjective(begin(tiny_recipe(), store).network.train(), "nsp")
    return Learner(
        objective, build_optimizer(objective, OptimSection()), ALONE, "fp32", "off", Caution("off")
    )


def shown(batches) -> list[tuple[int, ...]]:
    return sorted(tuple(sequence.tokens) for step in batches for sequence in sequences_of(step))


def test_as_many_sequences_as_asked_for_in_whole_steps(store, tmp_path):
    assert sum(step.sequences for step in held_out_batches(exam(store, tmp_path), 0, 9)) == 16


def test_no_more_than_there_are(store, tmp_path):
    everything = held_out_batches(exam(store, tmp_path), 0, 10**6)
    plan = exam(store, tmp_path).plan(0)
    assert sum(step.sequences for step in everything) == len(plan.epoch(0).index)


def test_seed_and_batch_do_not_change_what_a_run_is_judged_by(store, tmp_path):
    settings = [(), ("run.seed=9", "batch.sequences=3"), ("batch.by=tokens", "batch.tokens=99")]
    found = [
        held_out_batches(exam(store, tmp_path, recipe=exam_recipe(tiny_recipe(*each), ALONE)), 0, 1)
        for each in settings
    ]
    assert shown(found[0]) == shown(found[1]) == shown(found[2])


def test_ranks_share_the_sequences_and_take_as_many_steps_each(store, tmp_path):
    alone = held_out_batches(exam(store, tmp_path), 0, 10**6)
    ranks = [held_out_batches(exam(store, tmp_path, rank=rank, world=3), 0, 10**6) for rank in range(3)]
    assert sorted(each for rank in ranks for each in shown(rank)) == shown(alone)
    assert len({tuple(len(step.micros) for step in rank) for rank in ranks}) == 1


def test_an_evaluation_leaves_nothing_behind(store, tmp_path):
    learner, batches = learner_of(store), held_out_batches(exam(store, tmp_path), 0, 8)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first, second = evaluate(learner, batches), evaluate(learner, batches)
    assert first == second  # no dropout
    assert torch.equal(torch.rand(1), expected)
    assert learner.objective.training
    assert all(parameter.grad is None for parameter in learner.parameters())


def test_results_are_means_over_all_sequences(store, tmp_path):
    learner, batches = learner_of(store), held_out_batches(exam(store, tmp_path), 0, 24)
    assert len(batches) == 3
    parts = [evaluate(learner, [step]) for step in batches]
    masked = [step.masked for step in batches]
    mean = sum(part["mlm_loss"] * count for part, count in zip(parts, masked, strict=True)) / sum(masked)
    whole = evaluate(learner, batches)
    assert whole["mlm_loss"] == pytest.approx(mean, rel=1e-6)
    assert whole["loss"] == whole["mlm_loss"] + whole["pair_loss"]
    assert whole["mlm_loss"] == pytest.approx(math.log(store.vocabulary), abs=0.1)  # it knows nothing yet


def test_sums_become_means_and_pairs_only_where_there_are_any():
    assert means_of(ALONE, [6.0, 1.0, 1.0, 2.0], Counts(4.0, 2.0)) == {
        **{"loss": 2.0, "mlm_loss": 1.5, "mlm_accuracy": 0.25},
        **{"pair_loss": 0.5, "pair_accuracy": 1.0},
    }
    assert set(means_of(ALONE, [6.0, 1.0, 0.0, 0.0], Counts(4.0, 0.0))) == {
        "loss",
        "mlm_loss",
        "mlm_accuracy",
    }
    nothing = means_of(ALONE, [0.0] * 4, Counts(0.0, 0.0))
    assert list(nothing) == ["loss"] and math.isnan(nothing["loss"])


def test_the_unigram_entropy_is_that_of_the_frequencies():
    assert unigram_entropy(np.array([0, 5, 5, 0, 5, 5])) == pytest.approx(math.log(4))
    assert unigram_entropy(np.array([0, 7])) == 0.0
    assert unigram_entropy(np.array([1, 3])) == pytest.approx(0.25 * math.log(4) + 0.75 * math.log(4 / 3))
