import pytest
import torch

from bertsmith.model.attention.attend import KERNELS, attend
from bertsmith.model.attention.rule import AttentionRule, reference_attention
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

pytestmark = pytest.mark.gpu

packed_attention = of_three(attend)
FORMS = [name for name, kernel in KERNELS.items() if kernel.device != "cpu" and name != "tiled"]
"""Those that take query, key and value; tests/gpu/test_triton_kernels.py has the other."""
PRECISIONS = [(torch.bfloat16, 1.5e-2, 5e-2), (torch.float16, 2e-3, 1e-2), (torch.float32, 1e-4, 5e-4)]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance", "gradient_tolerance"), PRECISIONS, ids=str)
def test_the_fast_form_equals_the_reference_forward_and_backward(rule, dtype, tolerance, gradient_tolerance):
    layout = layout_of(LENGTHS, "cuda")
    projected, (query, key, value) = operands(sum(LENGTHS), width=64, device="cuda", dtype=dtype)
    upstream = torch.randn(query.shape, device="cuda", dtype=dtype)
    fast = packed_attention(query, key, value, layout, rule)
    (gradient,) = torch.autograd.grad(fast, projected, upstream)
    exact = projected.detach().double().requires_grad_()
    plain = reference_attention(*exact.unbind(1), layout, rule)
    (plain_gradient,) = torch.autograd.grad(plain, exact, upstream.double())
    assert fast.dtype == dtype
    assert (fast.double() - plain).abs().max() < tolerance
    assert (gradient.double() - plain_gradient).abs().max() < gradient_tolerance


def first_that_takes(query, layout, rule) -> str:
    inputs = of_vectors(query, query, query)
    return next(name for name in FORMS if KERNELS[name].takes(inputs, layout, rule))


@pytest.mark.parametrize("name", FORMS)
def test_each_form_equals_the_reference_wherever_it_is_taken(name):
    form, layout, compared = of_three(KERNELS[name].attend), layout_of(LENGTHS, "cuda"), 0
    for dtype, tolerance, gradient_tolerance in PRECISIONS:
        projected, operand = operands(sum(LENGTHS), width=64, device="cuda", dtype=dtype)
        exact = projected.detach().double().requires_grad_()
        upstream = torch.randn(operand[0].shape, device="cuda", dtype=dtype)
        for rule in (rule for rule in RULES if first_that_takes(operand[0], layout, rule) == name):
            fast = form(*operand, layout, rule)
            (gradient,) = torch.autograd.grad(fast, projected, upstream, retain_graph=True)
            plain = reference_attention(*exact.unbind(1), layout, rule)
            (plain_gradient,) = torch.autograd.grad(plain, exact, upstream.double())
            assert (fast.double() - plain).abs().max() < tolerance, (dtype, rule)
            assert (gradient.double() - plain_gradient).abs().max() < gradient_tolerance, (dtype, rule)
            compared += 1
    assert compared


def test_half_precision_takes_flash_and_single_takes_efficient(monkeypatch):
    taken = []
    for name, kernel in KERNELS.items():

        def recorded(*arguments, attend=kernel.attend, name=name):
            taken.append(name)
            return attend(*arguments)

        monkeypatch.setitem(KERNELS, name, kernel._replace(attend=recorded))
    layout = layout_of(LENGTHS, "cuda")
    for dtype, rule in (
        (torch.bfloat16, AttentionRule(window=4)),
        (torch.float32, AttentionRule()),
        (torch.float32, AttentionRule(window=4)),
        (torch.float32, AttentionRule(dropout=0.1)),
        (torch.float64, AttentionRule()),
    ):
        _, operand = operands(sum(LENGTHS), width=64, device="cuda", dtype=dtype)
        packed_attention(*operand, layout, rule)
    assert taken == ["flash", "efficient", *["grouped"] * 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dropout_drops_its_fraction_and_scales_what_it_keeps(dtype):
    torch.manual_seed(5)
    whole, dropped, _ = kept_probabilities(packed_attention, 64, 200, 0.1, "cuda", dtype)
    present = whole > 1e-4  # in bf16 the smallest probabilities round to zero by themselves
    kept = (dropped != 0) & present
    assert abs(1 - kept.sum().item() / present.sum().item() - 0.1) < 0.002
    assert torch.allclose(dropped[kept].float(), whole[kept].float() / 0.9, rtol=2e-2, atol=1e-4)
    assert sequences_agree_by_chance(dropped, 64, 0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dropout_is_reproducible_from_its_seed_and_differs_without_it(dtype):
    _, operand = operands(sum(LENGTHS), width=64, device="cuda", dtype=dtype)
    layout, rule = layout_of(LENGTHS, "cuda"), AttentionRule(dropout=0.5)

    def attend(seed):
        torch.manual_seed(seed)
        return packed_attention(*operand, layout, rule)

    assert torch.equal(attend(1), attend(1))
    assert not torch.equal(attend(1), attend(2))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 6e-2), (torch.float32, 2e-3)], ids=str)
def test_the_backward_pass_drops_what_the_forward_pass_dropped(dtype, tolerance):
    torch.manual_seed(5)
    _, dropped, (projected, value, _) = kept_probabilities(packed_attention, 16, 9, 0.4, "cuda", dtype)
    factor = (dropped != 0).double() / 0.6
    exact, exact_value = (
        projected.detach().double().requires_grad_(),
        value.detach().double().requires_grad_(),
    )
    explicit = explicit_attention(exact[:, 0], exact[:, 1], exact_value, 16, factor)
    upstream = torch.randn_like(dropped)
    ours = torch.autograd.grad(dropped, (projected, value), upstream)
    plain = torch.autograd.grad(explicit, (exact, exact_value), upstream.double())
    assert all((a.double() - b).abs().max() < tolerance for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_empty_sequences_and_poison_leave_the_others_unchanged(dtype):
    lengths = [*LENGTHS, 0, 0, 0]
    layout = layout_of(lengths, "cuda")
    _, (query, key, value) = operands(sum(lengths), width=64, device="cuda", dtype=dtype)
    clean = packed_attention(query, key, value, layout_of(LENGTHS, "cuda"), AttentionRule())
    poison = torch.zeros_like(value)
    poison[7:38] = float("nan")
    poisoned = packed_attention(query + poison, key + poison, value + poison, layout, AttentionRule())
    assert poisoned[7:38].isnan().all()
    assert torch.equal(poisoned[:7], clean[:7]) and torch.equal(poisoned[38:], clean[38:])
