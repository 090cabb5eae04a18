"""Watched attention: what a study is shown, and that what it returns is used."""

import pytest
import torch

from bertsmith.model.attention.rule import AttentionRule, explain_attention
from bertsmith.model.attention.watched import WatchedAttention, groups_of
from bertsmith.packed import pack
from tests.attention_cases import of_three
from tests.tiny import TRANSFORMERS, tiny_network

BATCH = pack([[5, 6, 7], [8, 9], [10, 11, 12], [13]])


SORTED = pack([[5, 6, 7], [10, 11, 12], [8, 9], [13]])
LONG = pack([[5, 6, 7], [*range(20, 32)], [8, 9]])


@pytest.mark.parametrize(
    ("layout", "expected"),
    [(BATCH.layout, [[0, 2], [1], [3]]), (SORTED.layout, [[0, 1], [2], [3]])],
    ids=["apart", "side by side"],
)
def test_sequences_of_one_length_are_shown_together_and_as_the_plain_form_has_them(layout, expected):
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 9, 2, 4, generator=generator)
    mixed, maps = explain_attention(query, key, value, layout, AttentionRule(window=1))
    shown: dict[int, torch.Tensor] = {}
    groups = []

    def watch(layer, numbers, weights):
        assert layer == 0
        groups.append(numbers)
        shown.update(zip(numbers, weights, strict=True))
        return weights

    found = of_three(WatchedAttention(watch))(query, key, value, layout, AttentionRule(window=1))
    assert groups == expected
    torch.testing.assert_close(found, mixed)
    for number, plain in enumerate(maps):
        torch.testing.assert_close(shown[number], plain)


@pytest.mark.parametrize("rule", [AttentionRule(window=1), AttentionRule(causal=True, backwards=True)])
@pytest.mark.parametrize(
    ("layout", "expected"),
    [(BATCH.layout, [[0, 1, 2, 3]]), (SORTED.layout, [[0, 1, 2, 3]]), (LONG.layout, [[1], [0, 2]])],
    ids=["apart", "side by side", "one much longer"],
)
def test_filler_is_shown_without_attention_and_changes_nothing(layout, expected, rule):
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, int(layout.starts_S1[-1]), 2, 4, generator=generator)
    mixed, maps = explain_attention(query, key, value, layout, rule)
    groups = groups_of(layout, query.device, group_scores=40)
    shown: dict[int, torch.Tensor] = {}

    def watch(_layer, numbers, weights):
        shown.update(zip(numbers, weights, strict=True))
        return weights

    found = of_three(WatchedAttention(watch, groups))(query, key, value, layout, rule)
    assert [group.numbers for group in groups] == expected
    torch.testing.assert_close(found, mixed)
    for number, plain in enumerate(maps):
        whole = torch.zeros_like(shown[number])
        whole[:, : plain.shape[1], : plain.shape[1]] = plain
        torch.testing.assert_close(shown[number], whole)


@pytest.mark.parametrize("model_type", TRANSFORMERS)
def test_what_the_study_returns_is_used_by_every_architecture(model_type):
    network = tiny_network(model_type, heads={})
    layers = []

    def uniform(layer, _numbers, weights):
        layers.append(layer)
        return torch.full_like(weights, 1 / weights.shape[-1])

    with torch.no_grad():
        plain = network(BATCH)
        same = network.encoder.heads.watch(BATCH, lambda _layer, _numbers, weights: weights)
        changed = network.encoder.heads.watch(BATCH, uniform)
    torch.testing.assert_close(same, plain, atol=1e-5, rtol=1e-4)
    assert (changed - plain)[:3].abs().max() > 1e-6
    torch.testing.assert_close(changed[-1], plain[-1], atol=1e-5, rtol=1e-4)  # alone, it sees itself only
    assert set(layers) == set(range(network.config.layers))


@pytest.mark.parametrize("model_type", ["bert", "deberta-v2"])
def test_gradients_reach_what_was_shown(model_type):
    network, seen = tiny_network(model_type, heads={}), []

    def keep(_layer, _numbers, weights):
        seen.append(weights)
        return weights

    loss = network.encoder.heads.watch(BATCH, keep).square().sum()
    gradients = torch.autograd.grad(loss, seen)
    assert any(each.abs().max() > 0 for each in gradients)
