"""Our Triton kernels against what they replace, with the same dropout masks.

Without a GPU, Triton's interpreter runs them on the CPU, all but what is compiled or recorded:
TRITON_INTERPRET=1 pytest --noconftest tests/gpu/test_*_kernels.py -k "not compiled and not recorded"
"""

import random

import pytest
import torch
from torch import nn

from bertsmith.model.attention.attend import KERNELS
from bertsmith.model.attention.rotary import Rotary
from bertsmith.model.attention.rule import AttentionRule, reference_attention
from bertsmith.model.attention.short import attend_short, attend_within
from bertsmith.model.kernels import fused_gelu as fused_gelu_module
from bertsmith.model.kernels import residual_norm as residual_norm_module
from bertsmith.model.kernels.elementwise import real_probability
from bertsmith.model.kernels.fused_gelu import biased_gelu, fused_gated_gelu, linear_gelu
from bertsmith.model.kernels.residual_norm import fused_residual_norm, residual_norm
from bertsmith.model.network import new_network
from bertsmith.packed import pack
from tests.attention_cases import layout_of, of_vectors
from tests.interpreted import DEVICE, HALF, INTERPRETED, OTHER, largest_difference
from tests.tiny import tiny_encoder_config

pytestmark = pytest.mark.gpu

ROWS = 67 if INTERPRETED else 5000
"""More than there are programs, so that each takes several."""
LENGTHS = [1, 17, 128, 2, 64, 33, 65, 0, 0]
FULL_LENGTHS = [128, 17, 100, 64, 128, 0]
"""Of which most are not short."""
LONG_LENGTHS = [1, 300, 128, 0, 512, 129, 65, 0]
"""Of which some take several tiles."""
RATES = [0.0, 0.1]
SCALE = 1 / (1 - real_probability(0.1))
ROTARY = Rotary(100.0)


# ---- residual sum, dropout, LayerNorm


def norm_case(rows: int, width: int, residual_type: torch.dtype, branch_type: torch.dtype):
    stream = torch.Generator().manual_seed(rows + width)
    residual, branch, upstream = (torch.randn(rows, width, generator=stream) for _ in range(3))
    norm = nn.LayerNorm(width, eps=1e-12)
    with torch.no_grad():
        norm.weight.normal_(1.0, 0.3, generator=stream)
        norm.bias.normal_(0.0, 0.3, generator=stream)
    residual = residual.to(DEVICE, residual_type).requires_grad_()
    branch = branch.to(DEVICE, branch_type).requires_grad_()
    upstream *= 64  # so that no gradient of what is kept is rounded to 0
    return residual, branch, norm.to(DEVICE), upstream.to(DEVICE, branch_type)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("width", [1000, 768, 64, 100])
@pytest.mark.parametrize(
    ("residual_type", "branch_type", "tolerance"),
    [
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.bfloat16, 1e-2),
        (torch.float32, torch.bfloat16, 1e-2),
        (torch.float16, torch.float16, 2e-3),
    ],
    ids=str,
)
def test_norm_and_its_gradients_equal_the_plain_ones(residual_type, branch_type, tolerance, width, rate):
    residual, branch, norm, upstream = norm_case(ROWS, width, residual_type, branch_type)
    branch_bias = torch.zeros(width, device=DEVICE, requires_grad=True)
    torch.manual_seed(3)
    ours = fused_residual_norm(residual, branch, norm, rate, branch_bias)
    leaves = (residual, branch, norm.weight, norm.bias, branch_bias)
    gradients = torch.autograd.grad(ours, leaves, upstream)
    # Where nothing is dropped the two gradients are the same: what the backward pass dropped is seen there.
    kept = (gradients[1] != 0).double() if rate else torch.ones_like(branch, dtype=torch.float64)
    assert abs(kept.mean().item() - (1 - rate)) < 0.02
    exact = nn.LayerNorm(width, eps=1e-12, device=DEVICE, dtype=torch.float64)
    exact.load_state_dict(norm.state_dict())
    exact_residual, exact_branch = (each.detach().double().requires_grad_() for each in (residual, branch))
    plain = exact(exact_residual + exact_branch * kept * (SCALE if rate else 1.0))
    leaves = (exact_residual, exact_branch, exact.weight, exact.bias)
    plain_gradients = torch.autograd.grad(plain, leaves, upstream.double())
    plain_gradients += (plain_gradients[1].sum(0),)
    assert ours.dtype == branch_type
    assert [each.dtype for each in gradients[:2]] == [residual_type, branch_type]
    assert largest_difference((ours, *gradients), (plain, *plain_gradients)) < tolerance


@pytest.mark.parametrize("hooked", [False, True])
def test_the_bias_before_a_norm_learns_and_a_hook_is_called(monkeypatch, hooked):
    monkeypatch.setattr(residual_norm_module, "triton_runs_on", lambda _: True)  # the interpreter, too
    residual, _, norm, upstream = norm_case(ROWS, 64, torch.float32, torch.float32)
    values, linear = torch.randn(ROWS, 100, device=DEVICE), nn.Linear(100, 64, device=DEVICE)
    calls = []
    if hooked:
        linear.register_forward_pre_hook(lambda *_: calls.append(1))
    leaves = (residual, linear.weight, linear.bias, norm.weight)
    ours = residual_norm(residual, values, linear, norm, nn.Dropout(0.0))
    gradients = torch.autograd.grad(ours, leaves, upstream)
    assert len(calls) == hooked
    plain = norm(residual + linear(values))
    plain_gradients = torch.autograd.grad(plain, leaves, upstream)
    assert largest_difference((ours, *gradients), (plain, *plain_gradients)) < 1e-4


def test_norm_gives_the_same_bits_from_the_same_seed():
    residual, branch, norm, upstream = norm_case(ROWS, 128, torch.bfloat16, torch.bfloat16)

    def run(seed):
        torch.manual_seed(seed)
        normed = fused_residual_norm(residual, branch, norm, 0.5)
        return normed, *torch.autograd.grad(normed, (residual, branch, norm.weight), upstream)

    assert all(map(torch.equal, run(1), run(1)))
    assert not any(map(torch.equal, run(1), run(2)))


def test_norm_drops_each_row_and_column_at_its_rate():
    residual, branch, norm, upstream = norm_case(1000, 256, torch.float32, torch.float32)
    (gradient,) = torch.autograd.grad(fused_residual_norm(residual, branch, norm, 0.3), branch, upstream)
    dropped = (gradient == 0).double()
    assert abs(dropped.mean().item() - 0.3) < 0.005
    assert (dropped.mean(0) - 0.3).abs().max() < 0.08 and (dropped.mean(1) - 0.3).abs().max() < 0.15
    neighbours = (dropped[:, 1:] * dropped[:, :-1]).mean().item()
    assert abs(neighbours - 0.09) < 0.005


def test_a_compiled_norm_equals_the_plain_one():
    torch.compiler.reset()
    residual, _, norm, upstream = norm_case(512, 768, torch.float32, torch.bfloat16)
    linear = nn.Linear(64, 768, device=DEVICE, dtype=torch.bfloat16)
    values = torch.randn(512, 64, device=DEVICE, dtype=torch.bfloat16)
    compiled = torch.compile(residual_norm, fullgraph=True)
    ours = compiled(residual, values, linear, norm, nn.Dropout(0.0))
    plain = norm(residual + linear(values))
    leaves = (residual, linear.weight, linear.bias, norm.weight, norm.bias)
    gradients = torch.autograd.grad(ours, leaves, upstream)
    plain_gradients = torch.autograd.grad(plain, leaves, upstream.float())
    assert ours.dtype == torch.bfloat16
    assert largest_difference((ours, *gradients), (plain, *plain_gradients)) < 1e-2


# ---- GELU

EXTREMES = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 30.0, -30.0, 5.5, -5.5])


@pytest.mark.parametrize("width", [3072, 100])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)], ids=str
)
def test_biased_gelu_and_its_gradients_equal_the_plain_ones(dtype, tolerance, width):
    stream = torch.Generator().manual_seed(width)
    product, upstream = (3 * torch.randn(ROWS, width, generator=stream) for _ in range(2))
    product[0, :8] = EXTREMES
    product = product.to(DEVICE, dtype).requires_grad_()
    bias = torch.randn(width, generator=stream).to(DEVICE).requires_grad_()
    upstream = upstream.to(DEVICE, dtype)
    ours = biased_gelu(product, bias)
    gradients = torch.autograd.grad(ours, (product, bias), upstream)
    exact, exact_bias = (each.detach().double().requires_grad_() for each in (product, bias))
    plain = nn.functional.gelu(exact + exact_bias)
    plain_gradients = torch.autograd.grad(plain, (exact, exact_bias), upstream.double())
    assert [ours.dtype, *(each.dtype for each in gradients)] == [dtype, dtype, torch.float32]
    assert largest_difference((ours, *gradients), (plain, *plain_gradients)) < tolerance


@pytest.mark.parametrize("width", [2048, 100])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)], ids=str
)
def test_gated_gelu_and_its_gradients_equal_the_plain_ones(dtype, tolerance, width):
    stream = torch.Generator().manual_seed(width)
    halves, upstream = (3 * torch.randn(ROWS, columns, generator=stream) for columns in (2 * width, width))
    halves[0, :8] = EXTREMES
    halves = halves.to(DEVICE, dtype).requires_grad_()
    upstream = upstream.to(DEVICE, dtype)
    ours = fused_gated_gelu(halves)
    (gradient,) = torch.autograd.grad(ours, halves, upstream)
    exact = halves.detach().double().requires_grad_()
    inner, gate = exact.chunk(2, dim=-1)
    plain = nn.functional.gelu(inner) * gate
    (plain_gradient,) = torch.autograd.grad(plain, exact, upstream.double())
    assert ours.dtype == gradient.dtype == dtype
    parts, plain_parts = (ours, *gradient.chunk(2, -1)), (plain, *plain_gradient.chunk(2, -1))
    assert largest_difference(parts, plain_parts) < tolerance
    with torch.no_grad():  # without the operator
        assert torch.equal(fused_gated_gelu(halves), ours)


# ---- attention


def attention_case(width: int, dtype: torch.dtype, lengths=LENGTHS, heads: int = 2):
    stream = torch.Generator().manual_seed(width)
    projected = torch.randn(sum(lengths), 3, heads, width, generator=stream)
    upstream = torch.randn(sum(lengths), heads, width, generator=stream)
    return projected.to(DEVICE, dtype).requires_grad_(), upstream.to(DEVICE, dtype)


def kept_by(projected, rate: float, seed: int, lengths=LENGTHS):
    """Which scores of each sequence [H, N, N] are kept, read off by attending to one-hot values."""
    layout, seen = layout_of(lengths, DEVICE), []
    shape = (len(projected), 3, projected.shape[2], 64)
    for first in range(0, layout.longest, 64):
        one_hot = torch.zeros(shape, device=DEVICE, dtype=projected.dtype)
        for start, end in layout.bounds():
            columns = torch.eye(end - start, device=DEVICE)[:, first : first + 64]
            one_hot[start:end, 2, :, : columns.shape[1]] = columns[:, None]
        torch.manual_seed(seed)
        seen.append(attend_within(one_hot, layout, AttentionRule(dropout=rate)) != 0)
    rows = torch.cat(seen, -1)
    return [rows[start:end, :, : end - start].transpose(0, 1) for start, end in layout.bounds()]


def plain_attention(projected, kept, rate: float, lengths):
    layout, mixed = layout_of(lengths, DEVICE), []
    for (start, end), kept_HNN in zip(layout.bounds(), kept, strict=True):
        query, key, value = projected[start:end].unbind(1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
        weights = scores.softmax(-1) * kept_HNN * (SCALE if rate else 1.0)
        mixed.append(torch.einsum("hqk,khd->qhd", weights, value))
    return torch.cat(mixed)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize(
    ("width", "lengths"),
    [
        *((64, LENGTHS), (16, LENGTHS), (128, LENGTHS), (64, FULL_LENGTHS), (128, FULL_LENGTHS)),
        *((64, [1, 64, 33, 0, 2]), (64, [32, 5, 0, 1])),
        *((64, LONG_LENGTHS), (16, LONG_LENGTHS)),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float16, 2e-3), OTHER],
    ids=str,
)
def test_attention_and_its_gradient_equal_the_plain_ones(dtype, tolerance, width, lengths, rate):
    projected, upstream = attention_case(width, dtype, lengths)
    kept = kept_by(projected, rate, seed=5, lengths=lengths)
    share = torch.cat([each.flatten() for each in kept]).double().mean().item()
    assert abs(share - (1 - rate)) < 0.01
    torch.manual_seed(5)
    ours = attend_within(projected, layout_of(lengths, DEVICE), AttentionRule(dropout=rate))
    (gradient,) = torch.autograd.grad(ours, projected, upstream)
    exact = projected.detach().double().requires_grad_()
    plain = plain_attention(exact, kept, rate, lengths)
    (plain_gradient,) = torch.autograd.grad(plain, exact, upstream.double())
    assert ours.dtype == gradient.dtype == dtype
    # Of query, key and value each by itself: they differ in size.
    parts, plain_parts = (ours, *gradient.unbind(1)), (plain, *plain_gradient.unbind(1))
    assert largest_difference(parts, plain_parts) < tolerance


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("lengths", [LENGTHS, FULL_LENGTHS, LONG_LENGTHS], ids=str)
def test_attention_sums_the_gradient_of_the_bias_of_its_projection(lengths, rate):
    projected, upstream = attention_case(64, HALF, lengths)
    layout, rule = layout_of(lengths, DEVICE), AttentionRule(dropout=rate)
    bias = torch.zeros(3 * 2 * 64, device=DEVICE, requires_grad=True)
    mixed, gradients = [], []
    for given in (None, bias):
        torch.manual_seed(5)  # the same masks
        mixed.append(attend_within(projected, layout, rule, bias=given))
        inputs = [projected] if given is None else [projected, given]
        gradients += torch.autograd.grad(mixed[-1], inputs, upstream)
    assert torch.equal(*mixed) and torch.equal(*gradients[:2])
    sums = gradients[0].double().sum(0)
    assert gradients[2].dtype == bias.dtype and gradients[2].shape == bias.shape
    # Sums of rounded gradients and of those before rounding; a query's are near 0, and a key's are 0.
    ours = gradients[2].double().view(sums.shape)
    assert not ours[1].any()
    assert (ours - sums).abs().max() < 1e-2 * gradients[0].double().abs().sum(0).max()


def positions():
    """Two apart: the numbers of rows would not do in their place."""
    return torch.cat([2 * torch.arange(length) for length in LENGTHS]).to(DEVICE)


@pytest.mark.parametrize("width", [64, 16, 128])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), OTHER], ids=str)
def test_attention_turns_queries_and_keys_and_their_gradients_back(dtype, tolerance, width):
    projected, upstream = attention_case(width, dtype)
    layout = layout_of(LENGTHS, DEVICE)
    turns = ROTARY.turns(positions(), projected)
    ours = attend_within(projected, layout, AttentionRule(), turns)
    (gradient,) = torch.autograd.grad(ours, projected, upstream)
    exact = projected.detach().double().requires_grad_()
    query, key, value = exact.unbind(1)
    plain = reference_attention(*ROTARY(query, key, positions()), value, layout, AttentionRule())
    (plain_gradient,) = torch.autograd.grad(plain, exact, upstream.double())
    assert ours.dtype == gradient.dtype == dtype
    parts, plain_parts = (ours, *gradient.unbind(1)), (plain, *plain_gradient.unbind(1))
    # What was turned is rounded once more before the products.
    assert largest_difference(parts, plain_parts) < 2 * tolerance


@pytest.mark.parametrize("rate", RATES)
def test_turning_inside_equals_turning_before(rate):
    projected, upstream = attention_case(64, HALF)
    layout, rule = layout_of(LENGTHS, DEVICE), AttentionRule(dropout=rate)

    def run(mix):
        torch.manual_seed(5)  # the same masks
        mixed = mix()
        (gradient,) = torch.autograd.grad(mixed, projected, upstream)
        return mixed, *(each.double() for each in gradient.unbind(1))

    def turned_before():
        query, key, value = projected.unbind(1)
        turned = of_vectors(*ROTARY(query, key, positions()), value)
        return in_heads(attend_short(turned, layout, rule), projected)

    ours = run(lambda: attend_within(projected, layout, rule, ROTARY.turns(positions(), projected)))
    before = run(turned_before)
    # One is rounded once, the other three times.
    assert largest_difference(ours, before) < (4e-3 if INTERPRETED else 3e-2)


def in_heads(mixed_TD, projected_T3HK):
    """Mixed values as the kernel gives them, by head."""
    return mixed_TD.unflatten(1, projected_T3HK.shape[2:])


@pytest.mark.parametrize("lengths", [LENGTHS, [1, 17, 512, 2, 64]], ids=str)
def test_attention_drops_no_two_sequences_or_heads_alike(lengths):
    projected, _ = attention_case(16, HALF, lengths)
    kept = kept_by(projected, 0.5, seed=7, lengths=lengths)
    long, medium = kept[2], kept[4]
    rows, columns = long[0].chunk(2), long[0].chunk(2, -1)
    for one, other in ((long[0], long[1]), (long[0, :64, :64], medium[0]), rows, columns):
        assert abs((one == other).double().mean().item() - 0.5) < 0.05


@pytest.mark.parametrize("length", [30, 60, 128, 300])  # of each tile, and of several
def test_attention_drops_no_two_columns_alike(length):
    lengths = [length] * (8 if INTERPRETED else 40)
    projected, _ = attention_case(16, HALF, lengths)
    # A rate of which the shared byte decides something: not that of a power of two.
    dropped = 1.0 - torch.cat(kept_by(projected, 0.2, seed=7, lengths=lengths)).double()
    apart = 5 * dropped[..., 0].numel() ** -0.5  # five deviations of a column's correlation
    assert ((dropped.mean((0, 1)) - 0.2).abs() < apart).all()
    centred = dropped - dropped.mean()
    for shift in (1, 2, 3, 4, 7, 8, 9, 16, 24):
        products = centred[..., shift:] * centred[..., :-shift]
        assert (products.mean((0, 1)).abs() < apart * centred.var()).all(), shift


def test_attention_of_three_tensors_equals_that_of_their_projection():
    projected, upstream = attention_case(32, HALF)
    layout, rule = layout_of(LENGTHS, DEVICE), AttentionRule(dropout=0.1)

    def run(mix, seed):
        torch.manual_seed(seed)
        mixed = mix()
        return mixed, *torch.autograd.grad(mixed, projected, upstream)

    def whole():
        return attend_within(projected, layout, rule)

    assert all(map(torch.equal, run(whole, 1), run(whole, 1)))
    apart = run(lambda: in_heads(attend_short(of_vectors(*projected.unbind(1)), layout, rule), projected), 1)
    assert all(map(torch.equal, run(whole, 1), apart))
    assert not any(map(torch.equal, run(whole, 1), run(whole, 2)))


@pytest.mark.parametrize("lengths", [LENGTHS, LONG_LENGTHS], ids=str)
def test_poison_in_one_sequence_leaves_the_others_unchanged(lengths):
    projected, upstream = attention_case(16, HALF, lengths)
    layout = layout_of(lengths, DEVICE)
    start, end = list(layout.bounds())[2]
    poisoned = projected.detach().clone()
    poisoned[start:end] = float("nan")
    poisoned.requires_grad_()
    clean, ours = (attend_within(each, layout, AttentionRule()) for each in (projected, poisoned))
    (clean_gradient,) = torch.autograd.grad(clean, projected, upstream)
    (gradient,) = torch.autograd.grad(ours, poisoned, upstream)
    for one, other in ((clean, ours), (clean_gradient, gradient)):
        assert torch.equal(one[:start], other[:start]) and torch.equal(one[end:], other[end:])
    assert ours[start:end].isnan().all()


# ---- inside of a step


@pytest.mark.parametrize(
    ("architecture", "own", "type_of_states"),
    [("bert", {}, HALF), ("modernbert", {"global_layers": (0, 1, 2)}, torch.float32)],  # it ends in a norm
)
def test_a_network_is_as_close_to_single_precision_as_without_the_kernels(
    monkeypatch, architecture, own, type_of_states
):
    config = tiny_encoder_config(architecture, width=64, heads=2, inner=128, **own)
    network = new_network(config, {}, torch.Generator().manual_seed(1)).to(DEVICE).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(4)  # away from where all is linear
    rng = random.Random(1)
    batch = pack([[rng.randrange(90) for _ in range(length)] for length in (64, 5, 1, 128, 33)]).to(DEVICE)

    def run(taken: bool, dtype: torch.dtype) -> list[torch.Tensor]:
        for name in ("short", "tiled"):
            kernel = KERNELS[name]._replace(device="any", takes=lambda *_: taken)
            monkeypatch.setitem(KERNELS, name, kernel)
        for module, name in (
            (residual_norm_module, "kernel_takes"),
            (fused_gelu_module, "kernel_takes"),
            (fused_gelu_module, "gate_kernel_takes"),
        ):
            monkeypatch.setattr(module, name, lambda *_, **__: taken)
        with torch.autocast(DEVICE, dtype=dtype, enabled=dtype != torch.float32):
            states = network.encoder(batch)
        network.zero_grad()
        states.float().pow(3).mean().backward()
        return [states, *(each.grad for each in network.encoder.parameters())]

    exact, plain, ours = run(False, torch.float32), run(False, HALF), run(True, HALF)
    assert plain[0].dtype == torch.float32 and ours[0].dtype == type_of_states

    def distance(these):
        return sum(((a - b).norm() / b.norm()).item() for a, b in zip(these, exact, strict=True))

    assert 0 < distance(ours) < 2 * distance(plain)


def all_kernels(hidden, project, norm, layout, positions_T):
    """A small block: GELU, with a gate too, attention with positions and without, then the residual sum."""
    activated = linear_gelu(hidden, project)
    gated = fused_gated_gelu(torch.cat((activated, activated), -1))
    projected, rule = gated.unflatten(-1, (3, 2, -1)), AttentionRule(dropout=0.1)
    mixed = attend_within(projected, layout, rule, bias=project.bias)
    if positions_T is not None:
        mixed = mixed + attend_within(projected, layout, rule, ROTARY.turns(positions_T, projected))
    return fused_residual_norm(hidden, mixed.flatten(1), norm, 0.1, project.bias[:64])


def block_case(lengths):
    torch.manual_seed(0)
    project, norm = nn.Linear(64, 192).to(DEVICE), nn.LayerNorm(64).to(DEVICE)
    hidden = torch.randn(sum(lengths), 64, device=DEVICE)
    turned = positions() if lengths is LENGTHS else None  # longer ones are not
    return hidden, project, norm, layout_of(lengths, DEVICE), turned


@pytest.mark.parametrize("lengths", [LENGTHS, LONG_LENGTHS], ids=str)
def test_compiled_kernels_are_reproducible_from_the_seed_and_compile_once(lengths):
    torch.compiler.reset()
    torch._dynamo.config.error_on_recompile = True
    block = block_case(lengths)
    project = block[1]
    compiled = torch.compile(all_kernels, fullgraph=True)

    def run(seed):
        torch.manual_seed(seed)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            normed = compiled(*block)
        normed.float().pow(3).sum().backward()
        gradients = project.weight.grad, project.bias.grad
        project.zero_grad()
        return normed, *gradients

    try:
        assert all(map(torch.equal, run(1), run(1)))
        assert not any(map(torch.equal, run(1), run(2)))
    finally:
        torch._dynamo.config.error_on_recompile = False


@pytest.mark.parametrize("lengths", [LENGTHS, LONG_LENGTHS], ids=str)
def test_a_recorded_step_draws_new_masks_each_time(lengths):
    torch.compiler.reset()
    block = block_case(lengths)
    project, norm = block[1:3]

    @torch.compile(fullgraph=True, mode="reduce-overhead", dynamic=False)
    def loss_of(*block):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return all_kernels(*block).float().pow(3).sum()

    losses = []
    for _ in range(5):
        for each in (project, norm):
            each.zero_grad()  # gradients live in the graph's memory, which the next step overwrites
        torch.compiler.cudagraph_mark_step_begin()
        loss = loss_of(*block)
        loss.backward()
        losses.append(loss.item())
        assert project.weight.grad.isfinite().all()
    assert len(set(losses)) == len(losses)
