"""The compiler's pass that adds products in place: only where nobody can tell, and with the same numbers."""

import pytest
import torch
from torch import Tensor, library
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

from bertsmith.model.kernels import in_place_sums
from bertsmith.model.kernels.in_place_sums import add_in_place
from bertsmith.model.kernels.torch_internals import compiled_whole

aten = torch.ops.aten
ROWS, WIDTH = 800, 768
"""A product that reads what it writes to is right in smaller ones."""


@library.custom_op("tests::joint", mutates_args=())
def joint(x: Tensor) -> tuple[Tensor, Tensor]:
    """Stands for the backward pass of a joint: two new tensors."""
    return 2 * x, x.cos()


@joint.register_fake
def _joint_shapes(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


JOINT = "tests.joint.default"


def last_use(x, weight):
    total, other = joint(x)
    return aten.addmm(total, aten.mm(total, weight), weight), other


def both(x, weight):
    total, other = joint(x)
    return aten.addmm(total, x, weight), aten.addmm(other, x, weight)


def viewed_before(x, weight):
    total, _ = joint(x)
    product = aten.mm(aten.permute(total, (1, 0)), x)
    return aten.addmm(total, x, weight), product


def used_later(x, weight):
    total, _ = joint(x)
    return aten.addmm(total, x, weight) + total


def viewed_later(x, weight):
    total, _ = joint(x)
    turned = aten.permute(total, (1, 0))
    return aten.addmm(total, x, weight), aten.mm(turned, x)


def kept(x, weight):
    total, _ = joint(x)
    return aten.addmm(total, x, weight), total


def of_itself(x, weight):
    total, _ = joint(x)
    return aten.addmm(total, total, weight)


def of_a_view_of_itself(x, weight):
    total, _ = joint(weight)
    return aten.addmm(total, weight, aten.permute(total, (1, 0))), x


def twice(x, weight):
    total, _ = joint(x)
    once = aten.addmm(total, x, weight)
    halves = aten.view(once, (2 * ROWS, WIDTH // 2))
    again = aten.addmm(once, aten.view(aten.sin(halves), (ROWS, WIDTH)), weight)
    return again, aten.sum(halves, [1])


def of_another(x, weight):
    return aten.addmm(aten.mul(x, 2.0), x, weight)


def from_outside(x, weight):
    return aten.addmm(x, x, weight)


def bias(x, weight):
    total, _ = joint(x[0])
    return aten.addmm(total, x, weight)


def scaled(x, weight):
    total, _ = joint(x)
    return aten.addmm(total, x, weight, beta=0.5)


@pytest.mark.parametrize(
    ("function", "in_place"),
    [
        (last_use, 1),
        (both, 2),
        (viewed_before, 1),
        (twice, 1),
        (used_later, 0),
        (viewed_later, 0),
        (kept, 0),
        (of_itself, 0),
        (of_a_view_of_itself, 0),
        (of_another, 0),
        (from_outside, 0),
        (bias, 0),
        (scaled, 0),
    ],
)
def test_a_product_is_added_in_place_where_nobody_reads_what_was_there(function, in_place):
    inputs = (torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH))
    expected = function(*inputs)
    traced = make_fx(function, tracing_mode="fake")(*inputs)
    add_in_place(traced.graph, JOINT)
    traced.graph.lint()
    traced.recompile()
    found = [node for node in traced.graph.nodes if node.target is aten.addmm_.default]
    assert len(found) == in_place
    unchanged = [each.clone() for each in inputs]
    torch.testing.assert_close(traced(*inputs), expected, rtol=0, atol=0)
    assert all(map(torch.equal, inputs, unchanged))


class Joint(torch.autograd.Function):
    """A joint of residual and branch, whose backward pass is the operator above."""

    @staticmethod
    def forward(ctx, residual, branch):
        return residual + branch

    @staticmethod
    def backward(ctx, gradient):
        return joint(gradient)


@pytest.fixture
def compiled_anew(tmp_path, monkeypatch):
    """Nothing is found in the compiler's cache; it tries no vector instructions and prepares no headers."""
    from torch._inductor import config  # takes a second, and every worker of the tests loads this file

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with config.patch({"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}):
        yield


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("ci", ["", "true"])
def test_what_is_compiled_has_the_gradients_of_what_is_not(monkeypatch, ci):
    from torch._inductor import lowering

    torch.compiler.reset()
    monkeypatch.setenv("CI", ci)  # where it is set, the compiler calls no operator that it could take apart
    monkeypatch.delitem(lowering.lowerings, aten.addmm_.default, raising=False)
    stream = torch.Generator().manual_seed(0)
    x, *weights = (
        torch.randn(shape, generator=stream, requires_grad=True) for shape in ((24, 16), (32, 16), (16, 32))
    )
    changed = []

    def watched(graph):
        add_in_place(graph, JOINT)
        changed.append(len(graph.find_nodes(op="call_function", target=aten.addmm_.default)))

    def layer(x):
        return Joint.apply(x, (x @ weights[0].T) @ weights[1].T).sum()

    plain = torch.autograd.grad(layer(x), (x, *weights))
    monkeypatch.setattr(in_place_sums, "add_in_place", watched)
    ours = torch.autograd.grad(compiled_whole(layer)(x), (x, *weights))
    torch.testing.assert_close(ours, plain)
    assert sum(changed) == 1


def test_the_joint_has_the_name_by_which_it_is_known():
    from bertsmith.model.kernels import residual_norm

    assert str(residual_norm._backward._opoverload) == in_place_sums.JOINT


@pytest.mark.usefixtures("compiled_anew")
def test_a_graph_that_was_compiled_is_found_again_on_disk():
    found = []
    for _ in range(2):
        torch.compiler.reset()
        counters.clear()
        compiled_whole(lambda x: x @ x)(torch.ones(3, 3))  # which needs no C++ of its own
        found.append((counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]))
    assert found == [(1, 0), (0, 1)]
