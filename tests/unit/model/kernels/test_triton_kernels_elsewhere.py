"""What CPUs see of the Triton kernels, which tests/gpu tries: nothing."""

import ast
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import bertsmith
from bertsmith.model.attention import short, tiled
from bertsmith.model.attention.projection import Projection
from bertsmith.model.attention.rotary import Rotary
from bertsmith.model.attention.rule import AttentionRule
from bertsmith.model.attention.short import short_takes, tiled_takes
from bertsmith.model.kernels import fused_gelu, triton_ready
from bertsmith.model.kernels import residual_norm as residual_norm_module
from bertsmith.model.kernels.fused_gelu import gated_gelu, linear_gelu
from bertsmith.model.kernels.residual_norm import residual_norm
from bertsmith.model.kernels.torch_internals import learns_bias
from bertsmith.model.kernels.triton_ready import compiles
from bertsmith.objectives import word_losses
from bertsmith.packed import ALL
from tests.attention_cases import layout_of, of_vectors

FOLDER = Path(bertsmith.__path__[0])
KERNEL_FILES = {path.stem for path in FOLDER.rglob("*.py") if "\nimport triton\n" in path.read_text()}


def loaded_by(path: Path) -> set[str]:
    """The modules that a file loads when it is loaded itself, by the last part of their names."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[-1] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {(node.module or "").split(".")[-1], *(alias.name for alias in node.names)}
    return names


def test_only_kernels_load_triton_and_nothing_loads_kernels_with_itself():
    attention = {"short_triton", "tiled_triton"}
    others = {"residual_norm_triton", "fused_gelu_triton", "word_losses_triton"}
    assert attention | others | {"partial_sums_triton", "triton_dropout"} == KERNEL_FILES
    for path in FOLDER.rglob("*.py"):
        if path.stem not in KERNEL_FILES:
            assert not loaded_by(path) & {"triton", *KERNEL_FILES}, path


@pytest.fixture
def machine_with_triton(monkeypatch, tmp_path):
    """One with Triton, a C compiler, and a home that kernels can be kept in."""
    monkeypatch.setattr(triton_ready, "find_spec", lambda name: name)
    monkeypatch.setattr(triton_ready.shutil, "which", lambda name: name if name == "gcc" else None)
    for name in ("CC", "TRITON_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


def test_kernels_can_be_compiled_where_all_that_they_need_is_there(machine_with_triton, tmp_path):
    assert compiles()
    machine_with_triton.setenv("TRITON_CACHE_DIR", str(tmp_path / "not" / "made" / "yet"))
    assert compiles()
    machine_with_triton.setattr(triton_ready.shutil, "which", lambda _: None)
    assert not compiles()
    machine_with_triton.setenv("CC", "some-compiler")
    assert compiles()
    machine_with_triton.setattr(triton_ready, "find_spec", lambda _: None)
    assert not compiles()


def test_kernels_are_not_compiled_where_none_can_be_kept_or_loaded(machine_with_triton, tmp_path):
    status = os.statvfs(tmp_path)
    without_programs = SimpleNamespace(f_flag=status.f_flag | os.ST_NOEXEC)
    with machine_with_triton.context() as patch:
        patch.setattr(triton_ready.os, "statvfs", lambda _: without_programs)
        assert not compiles()
    machine_with_triton.setattr(triton_ready.os, "access", lambda *_: False)
    assert not compiles()


def projection_of(width: int, *, turned: bool) -> Projection:
    """Attention inputs of one token and two heads."""
    hidden, linear = torch.zeros(1, 8, dtype=torch.bfloat16), nn.Linear(8, 6 * width)
    return Projection(hidden, linear, width, Rotary(100.0) if turned else None, torch.zeros(1).long(), ALL)


def test_the_type_of_a_product_is_known_before_it():
    inputs = projection_of(16, turned=False)
    single = replace(inputs, hidden_TD=inputs.hidden_TD.float())
    double = replace(inputs, hidden_TD=inputs.hidden_TD.double())
    for each, type_of_weights in ((inputs, torch.bfloat16), (single, torch.float32), (double, torch.float64)):
        given = replace(each, linear=nn.Linear(8, 96, dtype=type_of_weights))
        assert given.dtype == given.apart()[0].dtype
        with torch.autocast("cpu", torch.bfloat16):
            assert given.dtype == given.apart()[0].dtype


def test_a_cpu_takes_no_kernel_for_short_sequences():
    inputs = of_vectors(*torch.zeros(3, 4, 2, 64, dtype=torch.bfloat16))
    assert not short_takes(inputs, layout_of([4]), AttentionRule())


@pytest.mark.parametrize(
    ("longest", "width", "turned", "taken"),
    [
        (128, 128, True, True),
        (129, 64, False, True),
        (512, 32, False, True),
        (513, 64, False, False),
        (129, 128, False, False),
        (129, 64, True, False),
        (64, 80, False, False),
    ],
)
def test_longer_sequences_have_kernels_where_nothing_is_turned(monkeypatch, longest, width, turned, taken):
    monkeypatch.setattr(short, "_kernels_take", lambda *_: True)
    inputs, layout, rule = projection_of(width, turned=turned), layout_of([longest]), AttentionRule()
    assert (short_takes(inputs, layout, rule) or tiled_takes(inputs, layout, rule)) == taken
    vectors = of_vectors(*torch.zeros(3, 1, 2, width, dtype=torch.bfloat16))
    assert not tiled_takes(vectors, layout, rule)


def test_a_graph_for_a_cpu_does_not_depend_on_the_longest_sequence():
    class Unasked:
        @property
        def longest(self):
            raise AssertionError("asked")

    for takes in (short_takes, tiled_takes):
        assert not takes(projection_of(64, turned=False), Unasked(), AttentionRule())


@pytest.mark.parametrize("training", [True, False])
def test_a_residual_norm_is_the_norm_of_the_sum(training):
    residual, values, linear = torch.randn(5, 8), torch.randn(5, 16), nn.Linear(16, 8)
    norm, dropout = nn.LayerNorm(8), nn.Dropout(0.5).train(training)
    torch.manual_seed(1)
    joined = residual_norm(residual, values, linear, norm, dropout)
    torch.manual_seed(1)
    assert torch.equal(joined, norm(residual + dropout(linear(values))))


class Other(nn.Linear):
    """A layer that may compute something else."""


@pytest.mark.parametrize(
    ("layer", "summed"),
    [
        (nn.Linear(2, 2), True),
        (nn.Linear(2, 2, bias=False), False),
        (nn.Linear(2, 2).requires_grad_(requires_grad=False), False),
        (Other(2, 2), False),
    ],
    ids=["plain", "without a bias", "frozen", "other"],
)
def test_kernels_sum_the_gradient_of_a_plain_layers_bias(layer, summed):
    assert learns_bias(layer) == summed
    with torch.no_grad():
        assert not learns_bias(layer)


def test_what_the_norm_sums_the_layer_before_it_does_not(monkeypatch):
    monkeypatch.setattr(residual_norm_module, "triton_runs_on", lambda _device: True)
    given = []
    monkeypatch.setattr(residual_norm_module, "fused_residual_norm", lambda *operands: given.append(operands))
    values, linear, norm = torch.randn(3, 16), nn.Linear(16, 8), nn.LayerNorm(8)
    residual_norm(torch.randn(3, 8), values, linear, norm, nn.Dropout(0.0))
    ((_, branch, _, _, bias),) = given
    assert bias is linear.bias and torch.equal(branch, linear(values))
    branch.sum().backward()
    assert linear.bias.grad is None and linear.weight.grad is not None


def test_a_linear_layer_with_gelu_is_one_after_the_other():
    values, linear = torch.randn(5, 8), nn.Linear(8, 16)
    assert torch.equal(linear_gelu(values, linear), nn.functional.gelu(linear(values)))


def test_in_bf16_without_gradients_it_is_so_too():
    values, linear = torch.randn(5, 8).bfloat16(), nn.Linear(8, 16).bfloat16()
    with torch.no_grad():
        assert torch.equal(linear_gelu(values, linear), nn.functional.gelu(linear(values)))


def test_a_gated_gelu_is_the_gelu_of_one_half_times_the_other():
    halves = torch.randn(5, 16)
    assert torch.equal(gated_gelu(halves), nn.functional.gelu(halves[:, :8]) * halves[:, 8:])


@pytest.mark.parametrize(
    ("words", "dtype", "taken"),
    [
        (30_528, torch.bfloat16, True),
        (30_528, torch.float16, True),
        (30_528, torch.float32, False),
        (30_522, torch.bfloat16, False),
        (2, torch.bfloat16, False),
    ],
)
def test_losses_of_many_words_in_half_precision_have_a_kernel(monkeypatch, words, dtype, taken):
    monkeypatch.setattr(word_losses, "triton_runs_on", lambda _device: True)
    assert word_losses.kernel_takes(torch.zeros(1, words, dtype=dtype)) == taken


def of_norm(values_TD):
    seed, weight = torch.zeros(1, dtype=torch.int64), values_TD[0]
    operands = (values_TD, values_TD, weight, weight, seed, weight)
    return residual_norm_module._forward_operator(*operands, 1e-12, 6)[0]


def of_attention(operator, *tables):
    def attend(values_TD):
        starts, seed = torch.tensor([0, 4], dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
        bias = values_TD[0]
        mixed = operator(values_TD.view(-1, 3, 2, 16), *tables, starts, seed, bias, 4, 6)
        return mixed if isinstance(mixed, torch.Tensor) else mixed[0]

    return attend


@pytest.mark.parametrize(
    "compute",
    [
        of_norm,
        of_attention(short._forward_operator, None, None),
        of_attention(tiled._forward_operator),
        lambda values_TD: fused_gelu._biased_forward(values_TD, values_TD[0]),
        lambda values_TD: fused_gelu._gated_operator(values_TD),
        lambda values_TD: word_losses._forward_operator(values_TD, torch.zeros(4, dtype=torch.int64))[0],
    ],
    ids=["norm", "short attention", "tiled attention", "biased GELU", "gated GELU", "losses of words"],
)
def test_kernels_give_gradients_where_layers_are_recomputed(compute):
    # Fake tensors have shapes and no values: of the kernels only what torch is told about them runs.
    with FakeTensorMode():
        values_TD = torch.empty(4, 96, requires_grad=True)
        checkpoint(compute, values_TD, use_reentrant=False).sum().backward()
    assert values_TD.grad is not None and values_TD.grad.shape == (4, 96)
