"""Networks that only answer: packed weights change nothing, 8-bit products little."""

import time
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from bertsmith.model.inference import inference_network
from bertsmith.model.inference.inference_linear import (
    Activation,
    Int8Linear,
    PackedLinear,
    SignedInt8Linear,
    can_pack,
)
from bertsmith.model.inference.inference_network import (
    InferenceBlock,
    calibrated,
    int8_network,
    packed_network,
)
from bertsmith.model.inference.quantised_weights import EightBitSteps, InputRange, in_steps, smoothed
from bertsmith.model.kernels import torch_internals
from bertsmith.model.kernels.activations import ACTIVATIONS
from bertsmith.model.kernels.torch_internals import ON_ARM, has_int8_products
from bertsmith.model.network import new_network
from bertsmith.packed import pack
from tests.tiny import TRANSFORMERS, tiny_encoder_config, tiny_network

OF_ANOTHER_MAKE = ("deberta-v2",)
CONVERTIBLE = tuple(name for name in TRANSFORMERS if name not in OF_ANOTHER_MAKE)
BATCH = pack([[5, 17, 3, 80, 9], [44, 2, 61], [7] * 40])
GELU = Activation("gelu", functional.gelu)


@pytest.fixture(scope="module")
def stream() -> torch.Generator:
    torch.manual_seed(0)  # layers are initialised from torch's own generator
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("model_type", CONVERTIBLE)
def test_packed_weights_give_the_same_states_and_maps(model_type):
    network = tiny_network(model_type, heads={})
    packed = packed_network(network)
    assert all(isinstance(block, InferenceBlock) for block in packed.encoder.blocks)
    with torch.no_grad():
        for ours, plain in zip(
            packed.encoder.hidden_states(BATCH), network.encoder.hidden_states(BATCH), strict=True
        ):
            assert torch.allclose(ours, plain, atol=2e-6)
        maps, expected = (each.encoder.heads.maps(BATCH)[-1][0] for each in (packed, network))
        assert torch.allclose(maps, expected, atol=2e-6)


def test_only_the_wanted_rows_come_out_of_a_packed_network():
    network, rows = tiny_network(), torch.tensor([0, 5, 8])
    with torch.no_grad():
        found = packed_network(network).encoder(BATCH, rows=rows)
        assert torch.allclose(found, network.encoder(BATCH)[rows], atol=2e-6)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_every_activation_is_the_same_packed_and_in_eight_bits(activation):
    config = replace(tiny_encoder_config(), activation=activation)
    network = new_network(config, {}, torch.Generator().manual_seed(0)).eval()
    with torch.no_grad():
        plain = network(BATCH)
        assert torch.allclose(packed_network(network)(BATCH), plain, atol=2e-6)
        assert (
            torch.cosine_similarity(
                int8_network(network, calibrated(network, [BATCH]), torch.float32)(BATCH), plain
            ).min()
            > 0.998
        )


@pytest.mark.parametrize("model_type", OF_ANOTHER_MAKE)
def test_layers_of_another_make_are_left_as_they_are(model_type):
    network = tiny_network(model_type, heads={})
    assert packed_network(network) is network


def test_what_one_dnn_cannot_multiply_is_not_packed():
    network = tiny_network().double()
    assert not can_pack(torch.float64)
    assert packed_network(network) is network


def test_a_packed_layer_with_and_without_what_follows_it(stream):
    linear, values, residual = nn.Linear(24, 40), torch.randn(7, 24, generator=stream), torch.ones(7, 40)
    packed = PackedLinear(linear)
    with torch.no_grad():
        product = linear(values)
    assert torch.allclose(packed(values), product, atol=1e-5)
    assert torch.allclose(packed.activated(values, GELU), functional.gelu(product), atol=1e-5)
    assert torch.allclose(packed.plus(values, residual), product + 1, atol=1e-5)
    assert (residual == 1).all()


# ---- eight bits


def range_of(values_TI: torch.Tensor) -> InputRange:
    return InputRange(float(values_TI.min()), float(values_TI.max()), values_TI.abs().amax(0))


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


each_form = pytest.mark.parametrize("form", [Int8Linear, SignedInt8Linear])
where_sums_are_whole = pytest.mark.skipif(
    not ON_ARM and not has_int8_products(),
    reason="an x86 CPU without AVX-512's VNNI may cut sums of products off at 16 bits",
)


@where_sums_are_whole
@each_form
def test_eight_bits_are_whole_numbers_times_the_steps(stream, form):
    linear, whole = nn.Linear(16, 8), torch.randint(-127, 128, (5, 16), generator=stream)
    steps = EightBitSteps(0.5, 0, torch.int8)
    made = form(in_steps(linear, steps), torch.float32)
    with torch.no_grad():
        sizes = linear.weight.abs().amax(1, keepdim=True) / 127
        weight = (linear.weight / sizes).round() * sizes
        expected = functional.linear(whole * 0.5, weight, linear.bias)
    assert torch.allclose(made(whole.to(torch.int8)), expected, atol=1e-4)
    assert torch.allclose(made(whole * 0.5), expected, atol=1e-4)


@where_sums_are_whole
@each_form
def test_an_input_that_dwarfs_the_others_does_not_cost_them_their_steps(stream, form):
    linear, values = nn.Linear(64, 32), torch.randn(50, 64, generator=stream)
    values[:, 3] *= 100
    with torch.no_grad():
        linear.weight[:, 3] /= 100
        exact = linear(values)
    one_step = form(in_steps(linear, range_of(values).steps()), torch.float32)
    assert relative_error(form(smoothed(linear, range_of(values)), torch.float32)(values), exact) < 0.012
    assert relative_error(one_step(values), exact) > 0.1


@where_sums_are_whole
@each_form
def test_an_activation_is_handed_on_in_steps_of_the_layer_after_it(stream, form):
    expand, contract = nn.Linear(32, 64), nn.Linear(64, 32)
    values, residual = torch.randn(20, 32, generator=stream), torch.randn(20, 32, generator=stream)
    with torch.no_grad():
        inner = functional.gelu(expand(values))
        exact = contract(inner) + residual
    steps = range_of(inner).steps()
    first = form(smoothed(expand, range_of(values)), torch.float32, to=steps)
    second = form(in_steps(contract, steps), torch.float32)
    between = first.activated(values, GELU)
    assert between.dtype == torch.uint8
    assert relative_error((between.float() - steps.zero) * steps.size, inner) < 0.02
    assert relative_error(second.plus(between, residual), exact) < 0.01


def test_what_is_beyond_the_steps_is_cut_off_and_not_turned_around():
    for steps, ends in (
        (EightBitSteps(1.0, 0, torch.int8), [127, -127]),
        (EightBitSteps(1.0, 9, torch.uint8), [255, 0]),
    ):
        assert steps.quantise(torch.tensor([300.0, -300.0])).tolist() == ends


@each_form
def test_inputs_that_come_rounded_are_not_scaled_again(stream, form):
    linear, values = nn.Linear(256, 128, bias=False), torch.rand(40, 256, generator=stream)
    steps = EightBitSteps(0.0123, 0, torch.uint8)
    made = form(in_steps(linear, steps), torch.bfloat16)
    whole = (values / steps.size).round()
    with torch.no_grad():
        exact = linear(whole * steps.size)
    slope = float((made(whole.to(torch.uint8)).float() * exact).sum() / exact.square().sum())
    assert slope == pytest.approx(1.0, abs=8e-4)


@where_sums_are_whole
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_both_forms_of_eight_bits_give_the_same(stream, bias, dtype, tolerance):
    expand, contract = nn.Linear(32, 64, bias=bias), nn.Linear(64, 32, bias=bias)
    values = torch.randn(20, 32, generator=stream)
    residual = torch.randn(20, 32, generator=stream).to(dtype)
    kept = residual.clone()
    with torch.no_grad():
        inner = functional.gelu(expand(values))
    weights = smoothed(expand, range_of(values)), in_steps(contract, range_of(inner).steps())
    found = []
    for form in (Int8Linear, SignedInt8Linear):
        first, second = form(weights[0], dtype), form(weights[1], dtype)
        activated = first.activated(values.to(dtype), GELU)
        found.append([first(values.to(dtype)), activated, second.plus(inner.to(dtype), residual)])
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype == dtype
        assert relative_error(other.float(), one.float()) < tolerance
    assert torch.equal(residual, kept)


def test_eight_bits_do_not_depend_on_what_the_folder_was_read_in(stream):
    linear = nn.Linear(384, 512, bias=False)
    values = torch.randn(20, 384, generator=stream).bfloat16()
    read = smoothed(linear, range_of(values.float()))
    for form in (Int8Linear, SignedInt8Linear):
        products = [form(each, torch.bfloat16)(values) for each in (read, deepcopy(read).to(torch.bfloat16))]
        assert torch.equal(*products)


@pytest.mark.parametrize(("on_arm", "form"), [(True, SignedInt8Linear), (False, Int8Linear)])
def test_the_form_of_eight_bits_is_the_machines(monkeypatch, on_arm, form):
    monkeypatch.setattr(inference_network, "ON_ARM", on_arm)
    network = tiny_network()
    blocks = int8_network(network, calibrated(network, [BATCH]), torch.float32).encoder.blocks
    assert {type(linear) for block in blocks for linear in block.linears.in_order()} == {form}


@where_sums_are_whole
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_signed_inputs_that_are_moved_up_give_the_same(stream, monkeypatch, dtype, tolerance):
    linear, values = nn.Linear(64, 32), torch.randn(20, 64, generator=stream)
    read, found = smoothed(linear, range_of(values)), []
    for signed in (True, False):
        monkeypatch.setattr(torch_internals, "multiplies_signed_inputs", lambda signed=signed: signed)
        found.append(Int8Linear(read, dtype)(3 * values.to(dtype)))  # some of them out of range
    assert relative_error(found[1].float(), found[0].float()) < tolerance


@pytest.mark.skipif(not has_int8_products(), reason="this CPU does not have 8-bit products")
def test_eight_bits_are_faster(stream, one_thread):
    # By two to three times; inputs of the wrong type go to a kernel that takes ten to thousands of times as
    # long, and another version of torch may want another type.
    linear, values = nn.Linear(384, 1536), torch.randn(256, 384, generator=stream)

    def fastest(linear) -> float:
        times = []
        while sum(times) < 0.05:  # a slow kernel is called once or twice
            began = time.perf_counter()
            linear(values)
            times.append(time.perf_counter() - began)
        return min(times)

    form = SignedInt8Linear if ON_ARM else Int8Linear
    eight = form(smoothed(linear, range_of(values)), torch.float32)
    assert any(fastest(eight) < fastest(PackedLinear(linear)) for _ in range(3))


@pytest.mark.parametrize("range_", [(-5.0, -1.0), (0.5, 3.0), (-0.17, 9.0)])
def test_the_zero_of_steps_is_one_of_them(range_):
    assert 0 <= InputRange(*range_, torch.ones(1)).steps().zero <= 255


def test_shared_layers_are_calibrated_on_all_their_uses():
    network = tiny_network("albert", heads={})
    with torch.no_grad():
        exact = network(BATCH)
        found = int8_network(network, calibrated(network, [BATCH]), torch.float32)(BATCH)
    assert torch.cosine_similarity(found, exact).min() > 0.998


def test_the_network_that_was_read_keeps_its_precision_and_its_weights():
    network = tiny_network()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    int8_network(network, calibrated(network, [BATCH]), torch.bfloat16)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_a_network_in_eight_bits_stays_near_and_takes_what_else_it_has_in_another_precision():
    network = tiny_network()
    with torch.no_grad():
        exact = network(BATCH)
        rounded = int8_network(network, calibrated(network, [BATCH]), torch.bfloat16)
        found = rounded(BATCH)
    assert found.dtype == torch.bfloat16
    assert torch.cosine_similarity(found.float(), exact).min() > 0.995
