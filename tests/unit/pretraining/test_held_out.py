"""Held-out results: which examples, how they are summed up, and what frequencies alone would give."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from bertsmith.data.batch_inspection import sequences_of
from bertsmith.data.collate import PAIR_FIELDS, WORD_FIELDS, Multiples, counts_of
from bertsmith.data.data_loader import PretrainingDataset, StepBatches, StepIndex
from bertsmith.objectives.masked_language_modelling import MaskedLanguageModelling
from bertsmith.pretraining.hardware import Machine, fit_machine
from bertsmith.pretraining.held_out import HeldOutSet, evaluate, held_out_set, unigram_entropy
from bertsmith.pretraining.initial_model import build_initial_model
from bertsmith.pretraining.run_setup import held_out_recipe
from bertsmith.recipe.optim_section import OptimSection
from bertsmith.recipe.schema import Recipe
from bertsmith.training.distributed import ALONE
from bertsmith.training.optimizers import build_optimizer
from bertsmith.training.trainer import GradientGuard, Trainer
from tests.tiny_runs import tiny_recipe


def machine_of(store, recipe: Recipe) -> Machine:
    return fit_machine(recipe, build_initial_model(recipe, store).network, ALONE)


def held_out_data(store, cache, *overrides: str, rank: int = 0, world: int = 1) -> PretrainingDataset:
    """What a run with these settings is judged by."""
    recipe = tiny_recipe(*overrides)
    choices = {
        "rank": rank,
        "world": world,
        "split": "held-out",
        "micro_tokens": 256,
        "multiples": Multiples(8, 8),
    }
    return PretrainingDataset(
        store, held_out_recipe(recipe, machine_of(store, recipe)), cache=cache, **choices
    )


def held_out(store, cache, *overrides: str) -> HeldOutSet:
    return held_out_set(held_out_data(store, cache, *overrides), 0, ALONE)


def trainer_of(store) -> Trainer:
    objective = MaskedLanguageModelling(build_initial_model(tiny_recipe(), store).network.train(), "nsp")
    return Trainer(
        objective, build_optimizer(objective, OptimSection()), ALONE, "fp32", "off", GradientGuard("off")
    )


def shown(batches: StepBatches) -> list[tuple[int, ...]]:
    return sorted(tuple(sequence.tokens) for sequence in sequences_of(batches))


def test_as_many_sequences_as_asked_for(store, tmp_path):
    found = held_out(store, tmp_path, "run.evaluation_sequences=9")
    assert (found.sequences, len(shown(found.batches))) == (9, 9)


def test_no_more_than_there_are(store, tmp_path):
    found = held_out(store, tmp_path, "run.evaluation_sequences=1_000_000")
    index = held_out_data(store, tmp_path, "run.evaluation_sequences=1_000_000").stage_index(0)
    assert found.sequences == len(shown(found.batches)) == len(index.epoch(0).examples) > 9


def test_a_larger_set_holds_the_smaller_one(store, tmp_path):
    small, large = (held_out(store, tmp_path, f"run.evaluation_sequences={count}") for count in (5, 9))
    assert set(shown(small.batches)) < set(shown(large.batches))


def test_seed_and_batch_do_not_change_what_a_run_is_evaluated_by(store, tmp_path):
    settings = [(), ("run.seed=9", "batch.sequences=3"), ("batch.by=tokens", "batch.tokens=99")]
    found = [shown(held_out(store, tmp_path, *each).batches) for each in settings]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("asked", [1, 8, 10**6])
def test_ranks_share_the_same_sequences_in_as_many_passes_each(store, tmp_path, asked):
    setting = f"run.evaluation_sequences={asked}"
    alone = held_out(store, tmp_path, setting).batches
    ranks = [
        held_out_data(store, tmp_path, setting, rank=rank, world=3)[StepIndex(0, 0)] for rank in range(3)
    ]
    assert sorted(each for rank in ranks for each in shown(rank)) == shown(alone)
    assert len({len(rank.micros) for rank in ranks}) == 1


def test_the_commoner_answer_is_that_of_more_pairs(store, tmp_path):
    found = held_out(store, tmp_path, "run.evaluation_sequences=15")
    labels = [label for micro in found.batches.micros for label in micro["pair_labels_S"][:-1].tolist()]
    assert len(labels) == 15
    level = evaluate(trainer_of(store), found)[0]["pair_majority"]
    assert level == max(sum(labels), 15 - sum(labels)) / 15 > 0.5
    single = held_out(store, tmp_path, "examples.pairs=none", "run.evaluation_sequences=20")
    assert "pair_majority" not in evaluate(trainer_of(store), single)[0]


def test_an_evaluation_leaves_nothing_behind(store, tmp_path):
    trainer, batches = trainer_of(store), held_out(store, tmp_path)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first, second = (evaluate(trainer, batches)[0] for _ in range(2))
    assert first == second  # no dropout
    assert torch.equal(torch.rand(1), expected)
    assert trainer.objective.training
    assert all(parameter.grad is None for parameter in trainer.parameters())


def test_results_are_means_over_all_sequences(store, tmp_path):
    trainer, given = trainer_of(store), held_out(store, tmp_path, "run.evaluation_sequences=24")
    micros, fields = given.batches.micros, WORD_FIELDS + PAIR_FIELDS
    assert len(micros) > 2
    masked = [float(micro["masked_weights_P"].sum()) for micro in micros]
    parts = [
        evaluate(
            trainer,
            replace(
                given, batches=replace(given.batches, micros=(micro,), counts=counts_of([micro], fields))
            ),
        )[0]
        for micro in micros
    ]
    mean = sum(part["token_loss"] * count for part, count in zip(parts, masked, strict=True)) / sum(masked)
    whole, evaluated = evaluate(trainer, given)
    assert evaluated is given
    assert whole["token_loss"] == pytest.approx(mean, rel=1e-6)
    assert whole["sequences"] == 24
    assert whole["loss"] == whole["token_loss"] + whole["pair_loss"]
    assert whole["perplexity"] == pytest.approx(math.exp(whole["token_loss"]))
    assert whole["token_loss"] == pytest.approx(math.log(store.vocabulary), abs=0.1)  # it knows nothing yet


def test_an_evaluation_that_takes_too_long_goes_on_with_fewer_sequences(store, tmp_path):
    trainer, given = trainer_of(store), held_out(store, tmp_path, "run.evaluation_sequences=24")
    first, fewer = evaluate(trainer, given, max_seconds=0.0)
    assert len(fewer.batches.micros) == 1 < len(given.batches.micros)
    assert first["sequences"] == fewer.sequences == len(shown(fewer.batches)) < 24
    assert (
        fewer.batches.counts["tokens"] == sum(map(len, shown(fewer.batches))) < given.batches.counts["tokens"]
    )
    assert evaluate(trainer, fewer) == (first, fewer)  # from now on the same ones
    alone = replace(given.batches, micros=given.batches.micros[:1], counts=fewer.batches.counts)
    same = evaluate(trainer, replace(given, batches=alone))[0]
    assert first["token_loss"] == same["token_loss"]


def test_a_wish_to_stop_breaks_an_evaluation_off(store, tmp_path):
    trainer, given = trainer_of(store), held_out(store, tmp_path, "run.evaluation_sequences=24")
    passes = []
    trainer.objective.register_forward_hook(lambda *_: passes.append(len(passes)))
    assert evaluate(trainer, given, stopping=lambda: len(passes) == 2) is None
    assert len(passes) == 2 < len(given.batches.micros)
    assert trainer.objective.training


def test_sums_become_means_and_pairs_only_where_there_are_any(store):
    declared = trainer_of(store).objective.declared
    assert (declared.counts, declared.sums[:2]) == (("masked", "pairs"), ("token_loss", "pair_loss"))
    sums = dict(zip(declared.sums, (6.0, 1.0, 1.0, 2.0), strict=True))
    words = {"token_loss": 1.5, "token_accuracy": 0.25}
    found = declared.means({**sums, "masked": 4.0, "pairs": 2.0})
    assert found == {"loss": 2.0, **words, "pair_loss": 0.5, "pair_accuracy": 1.0}
    assert declared.means({**sums, "masked": 4.0, "pairs": 0.0}) == {"loss": 1.5, **words}
    evaluated = declared.means(
        {"token_loss": 9e9, "token_hits": 0.0, "masked": 1.0, "pairs": 0.0, "sequences": 3}
    )
    assert math.isfinite(evaluated["perplexity"]) and evaluated["sequences"] == 3
    nothing = declared.means({**sums, "masked": 0.0, "pairs": 0.0})
    assert list(nothing) == ["loss"] and math.isnan(nothing["loss"])


def test_the_unigram_entropy_is_that_of_the_frequencies():
    assert unigram_entropy(np.array([0, 5, 5, 0, 5, 5]), 0.0) == pytest.approx(math.log(4))
    assert unigram_entropy(np.array([0, 7]), 0.7) == 0.0
    assert unigram_entropy(np.array([1, 3]), 0.0) == pytest.approx(
        0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    )
    # Masked with the weight n^-0.5, one of count 9 is predicted three times as often as one of count 1.
    assert unigram_entropy(np.array([1, 9]), 0.5) == unigram_entropy(np.array([1, 3]), 0.0)
    assert unigram_entropy(np.array([1, 9]), 1.0) == pytest.approx(math.log(2))
