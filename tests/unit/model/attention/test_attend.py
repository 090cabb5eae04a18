import numpy as np
import pytest
import torch
from torch import library

from bertsmith.model.attention.attend import KERNELS
from bertsmith.model.attention.grouped import cheapest_edges
from bertsmith.model.attention.products import products_take
from bertsmith.model.attention.rule import AttentionRule, explain_attention, reference_attention
from tests.attention_cases import (
    LENGTHS,
    RULES,
    explicit_attention,
    kept_probabilities,
    layout_of,
    of_three,
    of_vectors,
    operands,
    sequences_agree_by_chance,
)


@pytest.fixture(params=["products", "grouped"])
def form(request):
    return of_three(KERNELS[request.param].attend)


every_rule = pytest.mark.parametrize("rule", RULES, ids=str)


@every_rule
def test_each_form_equals_the_reference_forward_and_backward_in_float64(form, rule):
    layout = layout_of(LENGTHS)
    projected, (query, key, value) = operands(sum(LENGTHS), dtype=torch.float64)
    upstream = torch.randn(query.shape, dtype=torch.float64)
    fast, plain = (each(query, key, value, layout, rule) for each in (form, reference_attention))
    (fast_gradient,) = torch.autograd.grad(fast, projected, upstream, retain_graph=True)
    (plain_gradient,) = torch.autograd.grad(plain, projected, upstream)
    assert torch.allclose(fast, plain, atol=1e-13, rtol=0)
    assert torch.allclose(fast_gradient, plain_gradient, atol=1e-12, rtol=0)


@every_rule
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_each_form_keeps_the_precision_of_its_operands(form, rule, dtype, tolerance):
    layout = layout_of(LENGTHS)
    _, (query, key, value) = operands(sum(LENGTHS), dtype=dtype)
    fast = form(query, key, value, layout, rule)
    exact = reference_attention(query.double(), key.double(), value.double(), layout, rule)
    assert fast.dtype == dtype
    assert (fast.double() - exact).abs().max() < tolerance


@pytest.mark.parametrize("rule", [*RULES, AttentionRule(dropout=0.3), AttentionRule(True, 1, 0.3)], ids=str)
def test_the_gradient_is_the_derivative_of_the_forward_pass(form, rule, full):
    layout = layout_of([3, 5, 3, 1])  # few, as at full counts every output is checked by every input

    def attend(query, key, value):
        torch.manual_seed(11)
        return form(query, key, value, layout, rule)

    operand = [torch.randn(12, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(attend, operand, fast_mode=not full)  # along random directions if fast


def test_sequences_of_no_tokens_that_pad_the_layout_change_nothing(form):
    _, (query, key, value) = operands(38)
    short = form(query, key, value, layout_of([7, 31]), AttentionRule())
    padded = form(query, key, value, layout_of([7, 31, 0, 0, 0]), AttentionRule())
    assert torch.equal(short, padded)


def test_a_layout_that_leaves_rows_out_is_a_mistake_of_ours(form):
    _, (query, key, value) = operands(40)
    with pytest.raises(AssertionError, match="the layout covers 38 of 40 rows"):
        form(query, key, value, layout_of([7, 31]), AttentionRule())


def test_not_a_number_in_one_sequence_stays_there(form):
    layout = layout_of(LENGTHS)
    _, (query, key, value) = operands(sum(LENGTHS))
    clean = form(query, key, value, layout, AttentionRule())
    poison = torch.zeros_like(value)
    poison[7:38] = float("nan")
    poisoned = form(query + poison, key + poison, value + poison, layout, AttentionRule())
    assert poisoned[7:38].isnan().all()
    assert torch.equal(poisoned[:7], clean[:7]) and torch.equal(poisoned[38:], clean[38:])


def test_dropout_drops_its_fraction_and_scales_what_it_keeps(form):
    torch.manual_seed(5)
    whole, dropped, _ = kept_probabilities(form, 64, 40, 0.1, "cpu", torch.float32)
    kept = dropped != 0
    assert abs(1 - kept.float().mean().item() - 0.1) < 0.003
    assert torch.allclose(dropped[kept], whole[kept] / 0.9, atol=1e-6)
    assert sequences_agree_by_chance(dropped, 64, 0.1)


def test_dropout_is_reproducible_from_its_seed_and_differs_without_it(form):
    _, operand = operands(64)
    layout, rule = layout_of([64]), AttentionRule(dropout=0.5)

    def attend(seed):
        torch.manual_seed(seed)
        return form(*operand, layout, rule)

    assert torch.equal(attend(1), attend(1))
    assert not torch.equal(attend(1), attend(2))


def test_the_backward_pass_drops_what_the_forward_pass_dropped(form):
    torch.manual_seed(5)
    whole, dropped, (projected, value, _) = kept_probabilities(form, 16, 3, 0.375, "cpu", torch.float64)
    factor = (dropped != 0).double() / 0.625
    explicit = explicit_attention(projected[:, 0], projected[:, 1], value, 16, factor)
    upstream = torch.randn_like(dropped)
    ours = torch.autograd.grad(dropped, (projected, value), upstream)
    plain = torch.autograd.grad(explicit, (projected, value), upstream)
    assert all(torch.allclose(a, b, atol=1e-12, rtol=0) for a, b in zip(ours, plain, strict=True))


def test_explaining_gives_rows_that_sum_to_one_and_respect_the_rule():
    _, (query, key, value) = operands(38)
    _, maps = explain_attention(query, key, value, layout_of([7, 31]), AttentionRule(causal=True, window=2))
    assert [each.shape for each in maps] == [(2, 7, 7), (2, 31, 31)]
    for each in maps:
        assert torch.allclose(each.sum(-1), torch.ones(()), atol=1e-6)
        assert (each.triu(1) == 0).all() and (each.tril(-3) == 0).all()


def test_the_operator_passes_torchs_own_check_of_custom_operators():
    _, (query, key, value) = operands(38)
    seed = torch.tensor(3)
    leaves = [each.detach().clone().requires_grad_() for each in (query, key, value)]
    arguments = (*leaves, layout_of([7, 31]).starts_S1, seed, False, -1, 0.1)
    found = library.opcheck(torch.ops.bertsmith.grouped_attention.default, arguments)
    assert found and set(found.values()) == {"SUCCESS"}


def test_sequences_of_like_length_share_a_group_where_that_is_cheaper():
    lengths, counts = np.array([3, 4, 5, 60, 61, 300]), np.array([5, 1, 1, 3, 1, 1])
    assert cheapest_edges(lengths, counts, 2000) == [0, 5, 61, 300]
    assert cheapest_edges(lengths, counts, 0) == [0, 3, 4, 5, 60, 61, 300]
    assert cheapest_edges(lengths, counts, 10**9) == [0, 300]


def test_not_a_number_stays_in_its_sequence_where_others_share_its_group(form):
    layout, rule = layout_of([30, 28, 30, 25]), AttentionRule(dropout=0.1)
    _, (query, key, value) = operands(113)
    poison = torch.zeros_like(value)
    poison[30:58] = float("nan")

    def attend(added):
        torch.manual_seed(1)
        return form(query + added, key + added, value + added, layout, rule)

    clean, poisoned = attend(torch.zeros_like(value)), attend(poison)
    assert torch.equal(poisoned[:30], clean[:30]) and torch.equal(poisoned[58:], clean[58:])
    assert poisoned[30:58].isnan().all() and not clean.isnan().any()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("has_mkl", [True, False])
def test_products_are_for_dropout_in_short_sequences_and_without_mkl_for_few_threads_of_blas(
    monkeypatch, threads, has_mkl
):
    _, operand = operands(38)
    single, half = of_vectors(*operand), of_vectors(*(each.bfloat16() for each in operand))
    short, dropping = layout_of([7, 31]), AttentionRule(dropout=0.1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr("bertsmith.model.kernels.torch_internals.ON_ARM", True)
    monkeypatch.setattr("bertsmith.model.attention.products.MKL", has_mkl)
    monkeypatch.setattr("bertsmith.model.attention.products.onednn_is_enabled", lambda: False)
    assert products_take(single, short, dropping) == (has_mkl or threads <= 2)
    assert products_take(half, short, dropping) == has_mkl
    assert not products_take(single, layout_of([500]), dropping)
    assert not products_take(single, short, AttentionRule())
    monkeypatch.setattr("bertsmith.model.attention.products.onednn_is_enabled", lambda: True)
    assert products_take(single, short, dropping) == has_mkl


def test_each_form_gives_the_same_without_a_gradient(form):
    _, operand = operands(38)
    with torch.no_grad():
        plain = form(*operand, layout_of([7, 31]), AttentionRule())
    assert torch.equal(plain, form(*operand, layout_of([7, 31]), AttentionRule()).detach())
