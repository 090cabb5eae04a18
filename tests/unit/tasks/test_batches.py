"""Steps as a pure function, every example once an epoch, and batches that hold what the set holds."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.core.errors import UserError
from bertsmith.tasks.batches import ShuffledBatches, balanced_weights, ordered_batches, scores_in_order
from bertsmith.tasks.kinds.classify import CLASSIFY
from bertsmith.tasks.kinds.regress import REGRESS
from tests.unit.tasks.made_sets import KINDS, made_set


def batches_of(encoded, **changes):
    settings = {"examples_per_step": 5, "seed": 3, "micro_tokens": 64, "multiple": 1, **changes}
    return ShuffledBatches(encoded, **settings)


def tensors_of(batch):
    return batch.tensors()


def sequences_in(batch):
    """The sequences of a batch without filler, told by their first tokens."""
    firsts = batch.inputs.layout.starts_S1[:-1].long()
    return batch.inputs.tokens_T[firsts].tolist()


def items_in(step, encoded):
    of_sequence = np.repeat(np.arange(encoded.items), np.diff(encoded.items_M1))
    found = [of_sequence[sequence] for micro in step.micros for sequence in sequences_in(micro)]
    return sorted(set(found))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("multiple", [1, 16])
def test_a_step_is_the_same_whatever_was_asked_before(kind, multiple):
    encoded = made_set(kind)
    straight = [batches_of(encoded, multiple=multiple).step(number) for number in range(7)]
    other = batches_of(made_set(kind), multiple=multiple)
    for number in (6, 0, 3):
        again = other.step(number)
        assert len(again.micros) == len(straight[number].micros)
        for one, two in zip(again.micros, straight[number].micros, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(tensors_of(one), tensors_of(two), strict=True))
        assert again.count == straight[number].count


@given(
    items=st.integers(1, 40), per_step=st.integers(1, 12), budget=st.integers(12, 80), seed=st.integers(0, 99)
)
def test_an_epoch_shows_every_item_once(items, per_step, budget, seed):
    encoded = made_set("classify", seed, items=items)
    batches = batches_of(encoded, examples_per_step=per_step, micro_tokens=budget, seed=seed)
    steps = [batches.step(number) for number in range(2 * batches.steps_per_epoch)]
    for epoch in (steps[: len(steps) // 2], steps[len(steps) // 2 :]):
        shown = [item for step in epoch for item in items_in(step, encoded)]
        assert sorted(shown) == list(range(items))
        assert [step.examples for step in epoch[:-1]] == [per_step] * (len(epoch) - 1)
        assert sum(step.examples for step in epoch) == items
        assert sum(step.tokens for step in epoch) == len(encoded.tokens_T)


def test_epochs_and_seeds_have_orders_of_their_own():
    encoded = made_set("classify", items=40)
    batches = batches_of(encoded, examples_per_step=20)
    chosen = [items_in(batches.step(number), encoded) for number in (0, 2)]
    chosen.append(items_in(batches_of(encoded, examples_per_step=20, seed=4).step(0), encoded))
    assert chosen[0] != chosen[1] and chosen[0] != chosen[2] and chosen[1] != chosen[2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("multiple", [1, 16])
def test_a_batch_holds_what_the_set_holds(kind, multiple):
    encoded = made_set(kind, unlabelled=0.0)
    for micro in batches_of(encoded, multiple=multiple).step(1).micros:
        bounds = list(micro.inputs.layout.bounds())
        numbers = sequences_in(micro)[: len(bounds) - int(multiple > 1)]
        for place, number in enumerate(numbers):
            rows, own = slice(*bounds[place]), slice(*encoded.starts_N1[number : number + 2])
            assert micro.inputs.tokens_T[rows].tolist() == encoded.tokens_T[own].tolist()
            assert micro.inputs.segments_T[rows].tolist() == encoded.segments_T[own].tolist()
            assert micro.inputs.positions_T[rows].tolist() == list(range(own.stop - own.start))
        assert told_by_batch(micro, encoded) == told_by_set(numbers, encoded)


def told_by_batch(micro, encoded):
    """What is asked about each item, sequence or word, by the tokens it stands on."""
    real = micro.weights > 0
    targets = micro.targets[real].tolist()
    starts = micro.inputs.layout.starts_S1
    if encoded.unit == "word":
        return list(zip(micro.inputs.tokens_T[micro.rows_P[real]].tolist(), targets, strict=True))
    if encoded.unit == "token":
        passages = (micro.passages_S2 - starts[:-1, None])[real].tolist()
        return list(zip(passages, targets, strict=True))
    counts = torch.bincount(micro.items_S)[: len(targets)].tolist()
    return list(zip(counts, targets, strict=True))


def told_by_set(numbers, encoded):
    if encoded.unit == "word":
        owners = np.searchsorted(encoded.starts_N1, encoded.rows_P, side="right") - 1
        words = [word for number in numbers for word in np.flatnonzero(owners == number)]
        return [(encoded.tokens_T[encoded.rows_P[word]], encoded.targets[word]) for word in words]
    if encoded.unit == "token":
        return [(encoded.passages_N2[each].tolist(), encoded.targets[each].tolist()) for each in numbers]
    items = [item for item in range(encoded.items) if encoded.items_M1[item] in numbers]
    items.sort(key=lambda item: numbers.index(encoded.items_M1[item]))
    return [(np.diff(encoded.items_M1)[item], encoded.targets[item].tolist()) for item in items]


@pytest.mark.parametrize("kind", KINDS)
def test_filled_shapes_are_multiples_within_the_budget_and_filler_weighs_nothing(kind):
    encoded = made_set(kind, unlabelled=0.0)
    step = batches_of(encoded, multiple=16, examples_per_step=12).step(0)
    assert len(step.micros) > 1
    for micro in step.micros:
        tokens, starts = len(micro.inputs.tokens_T), micro.inputs.layout.starts_S1
        assert tokens % 16 == 0 and tokens <= 64 and starts[-1] == tokens and starts[-2] < tokens
        assert micro.inputs.layout.longest == 16 and micro.inputs.positions_T.max() < 12
        assert micro.weights[-1] == 0 or (kind == "tag" and len(micro.weights) % 16 == 0)
        assert micro.items_S.tolist() == sorted(micro.items_S.tolist())
    bare = batches_of(encoded, examples_per_step=12).step(0)
    assert step.count == bare.count == sum(float((micro.weights > 0).sum()) for micro in step.micros)
    assert sum(len(micro.inputs.tokens_T) for micro in bare.micros) == step.tokens


def test_an_item_above_the_budget_goes_alone_with_all_its_sequences():
    encoded = made_set("choice")
    step = batches_of(encoded, micro_tokens=16).step(0)
    assert any(len(micro.inputs.tokens_T) > 16 for micro in step.micros)
    for micro in step.micros:
        assert len(micro.targets) == 1 or len(micro.inputs.tokens_T) <= 16


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_no_label_weighs_nothing(kind):
    encoded = made_set(kind, unlabelled=1.0)
    step = batches_of(encoded).step(0)
    assert step.count == 0
    for micro in step.micros:
        assert (micro.targets == 0).all() and not micro.weights.any()


@pytest.mark.parametrize("kind", ["classify", "tag"])
def test_a_target_weighs_what_its_class_weighs(kind):
    encoded = made_set(kind, items=30)
    weights_C = np.array([0.5, 2.0, 3.0], np.float32)
    step = batches_of(encoded, class_weights_C=weights_C, examples_per_step=30).step(0)
    known = encoded.targets[encoded.targets >= 0]
    assert step.count == pytest.approx(weights_C[known].sum())
    for micro in step.micros:
        real = micro.weights > 0
        assert torch.equal(micro.weights[real], torch.from_numpy(weights_C)[micro.targets[real]])


def test_balanced_classes_weigh_the_same_in_sum():
    encoded = made_set("classify", items=50)
    weights_C = balanced_weights(CLASSIFY, encoded, 4)
    known = encoded.targets[encoded.targets >= 0]
    sums = np.bincount(known, minlength=4) * weights_C
    assert sums[:3] == pytest.approx(len(known) / 3) and weights_C[3] == 0
    assert len(set(np.bincount(known))) > 1


def test_balanced_weights_of_numbers_are_rejected():
    with pytest.raises(UserError, match="regress"):
        balanced_weights(REGRESS, made_set("regress"), 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("multiple", [1, 16])
def test_ordered_batches_go_from_long_to_short_and_back_into_order(kind, multiple):
    encoded = made_set(kind, items=20)
    found, lengths = [], []
    for batch, items in ordered_batches(encoded, micro_tokens=64, multiple=multiple):
        lengths += encoded.lengths_M()[items].tolist()
        found.append((numbered(kind, batch), items))
    assert lengths == sorted(lengths, reverse=True)
    assert scores_in_order(encoded, found).tolist() == numbered_set(encoded).tolist()


def numbered(kind, batch):
    """Scores that say what they are for: a token, or the sum of an item's tokens."""
    tokens_T = batch.inputs.tokens_T.float()
    sums_S = torch.tensor([tokens_T[start:end].sum() for start, end in batch.inputs.layout.bounds()])
    if kind == "tag":
        return tokens_T[batch.rows_P][:, None].numpy()
    if kind == "span":
        return torch.stack((tokens_T, tokens_T), -1).numpy()
    if kind == "choice":
        return sums_S.numpy()
    return torch.zeros(len(batch.targets)).index_add(0, batch.items_S, sums_S)[:, None].numpy()


def numbered_set(encoded):
    tokens_T = encoded.tokens_T.astype(np.float32)
    sums_N = np.add.reduceat(tokens_T, encoded.starts_N1[:-1])
    if encoded.unit == "word":
        return tokens_T[encoded.rows_P][:, None]
    if encoded.unit == "token":
        return np.stack((tokens_T, tokens_T), -1)
    return sums_N if encoded.unit == "sequence" else np.add.reduceat(sums_N, encoded.items_M1[:-1])[:, None]


@pytest.mark.parametrize("multiple", [1, 16])
def test_states_of_a_frozen_encoder_stand_where_their_tokens_do(multiple):
    plain = made_set("tag")
    states = np.random.default_rng(0).random((2, len(plain.tokens_T), 3), np.float32)
    states[:, :, 0] = plain.tokens_T
    encoded = replace(plain, states_L=tuple(states))
    for micro in batches_of(encoded, multiple=multiple).step(0).micros:
        real = int(micro.inputs.layout.starts_S1[-2 if multiple > 1 else -1])
        assert micro.states_LTD.shape == (2, len(micro.inputs.tokens_T), 3)
        assert torch.equal(micro.states_LTD[:, :real, 0].long(), micro.inputs.tokens_T[:real].expand(2, -1))
        assert not micro.states_LTD[:, real:].any()
