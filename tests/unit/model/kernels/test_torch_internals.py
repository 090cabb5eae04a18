"""What bertsmith uses of torch without being promised it: each test names what another version broke."""

import importlib
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from bertsmith.model.kernels import torch_internals

SOURCE = Path(torch_internals.__file__).read_text()

# The arguments that are passed by their place, and those by name. The kernels of a GPU are declared on every
# machine, so that a CPU can tell whether they still take what we give them.
OPERATORS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (
        "query key value dropout_p is_causal",
        "attn_mask",
    ),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (
        "grad_out query key value out logsumexp dropout_p is_causal",
        "attn_mask",
    ),
    "aten::_flash_attention_forward": (
        "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask",
        "window_size_left window_size_right",
    ),
    "aten::_efficient_attention_forward": (
        "query key value bias cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p"
        " custom_mask_type compute_log_sumexp",
        "",
    ),
    "aten::addmm": ("self mat1 mat2", ""),
    "aten::addmm_": ("self mat1 mat2", ""),
    "aten::_dyn_quant_pack_4bit_weight": (
        "weights scales_zeros bias block_size in_features out_features",
        "",
    ),
    "aten::_dyn_quant_matmul_4bit": ("inp packed_weights block_size in_features out_features", ""),
    "mkldnn::_is_mkldnn_bf16_supported": ("", ""),
    "mkldnn::_reorder_linear_weight": ("self", ""),
    "mkldnn::_linear_pointwise": ("X W B attr scalars algorithm", ""),
    "mkldnn::_linear_pointwise.binary": ("X other W B attr", ""),
    "onednn::qlinear_prepack": ("weight x_shape", ""),
    "onednn::qlinear_pointwise": (
        "qx x_scale x_zero_point qw w_scale w_zero_point bias output_scale output_zero_point output_dtype"
        " post_op_name post_op_args post_op_algorithm",
        "",
    ),
}
OF_ONEDNN = ("mkldnn::", "onednn::")
ATTRIBUTES = (
    *("_softmax_backward_data", "_addmm_activation", "_C._get_mkldnn_enabled", "_C._set_mkldnn_enabled"),
    *(f"_C._{verb}_deterministic_fill_uninitialized_memory" for verb in ("get", "set")),
    *("_C._cuda_clearCublasWorkspaces", "_dynamo.maybe_mark_dynamic"),
    *(
        "cpu._is_vnni_supported",
        "cpu._is_avx512_bf16_supported",
        "cpu._is_amx_tile_supported",
        "cpu._init_amx",
    ),
    *("_inductor.custom_graph_pass", "_inductor.lowering"),
    *(f"_foreach_{name}" for name in ("add_", "addcmul_", "copy_", "div", "lerp_", "mul_", "norm", "sqrt")),
)


@pytest.mark.parametrize(
    "register",
    [
        nn.Linear.register_forward_hook,
        nn.Linear.register_forward_pre_hook,
        nn.Linear.register_full_backward_hook,
        nn.Linear.register_full_backward_pre_hook,
    ],
    ids=lambda register: register.__name__,
)
def test_a_layer_with_a_hook_is_not_plain(register):
    def plain() -> list[bool]:
        # Of what is compiled already, torch does not ask for hooks again.
        torch.compiler.reset()
        compiled = torch.compile(torch_internals.is_plain, fullgraph=True, backend="eager")
        return [torch_internals.is_plain(linear), compiled(linear)]

    linear = nn.Linear(2, 2)
    assert plain() == [True, True]
    hook = register(linear, lambda *_: None)
    assert plain() == [False, False]
    hook.remove()
    assert plain() == [True, True]


def schema_of(name: str) -> torch.FunctionSchema:
    space, _, operator = name.partition("::")
    operator, _, overload = operator.partition(".")
    return getattr(getattr(getattr(torch.ops, space), operator), overload or "default")._schema


@pytest.mark.parametrize(
    ("with_acl", "with_dot", "expected"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_arm_has_eight_bit_products_with_its_library_and_dot_products(
    monkeypatch, with_acl, with_dot, expected
):
    monkeypatch.setattr(torch_internals, "ON_ARM", True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_acl_available", lambda: with_acl)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"dot": with_dot})
    assert torch_internals.has_int8_products() == expected


@pytest.mark.parametrize(
    ("on_arm", "taken", "instructions", "expected"),
    [
        (False, True, False, False),
        (False, True, True, True),
        (True, True, False, True),
        (True, False, True, False),
    ],
)
def test_bf16_that_an_x86_cpu_has_no_instructions_for_is_imitated(
    monkeypatch, on_arm, taken, instructions, expected
):
    monkeypatch.setattr(torch_internals, "ON_ARM", on_arm)
    monkeypatch.setattr(torch_internals, "has_onednn", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: taken, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    assert torch_internals.has_bf16_products() == expected


@pytest.mark.parametrize(
    ("on_arm", "amx", "allowed", "expected"),
    [
        (False, True, True, True),
        (False, True, False, False),
        (False, False, False, False),
        (True, False, False, True),
    ],
)
def test_signed_inputs_are_multiplied_by_amx_where_a_process_may_use_it(
    monkeypatch, on_arm, amx, allowed, expected
):
    monkeypatch.setattr(torch_internals, "ON_ARM", on_arm)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: allowed)
    assert torch_internals.multiplies_signed_inputs() == expected


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_takes_what_it_is_given(name):
    if name.startswith(OF_ONEDNN) and not torch_internals.has_onednn():
        pytest.skip("this build of torch has no oneDNN")
    by_place, by_name = (each.split() for each in OPERATORS[name])
    arguments = schema_of(name).arguments
    assert [each.name for each in arguments if not each.kwarg_only][: len(by_place)] == by_place
    assert {each.name for each in arguments} >= {*by_place, *by_name}
    needed = {each.name for each in arguments if not each.has_default_value()}
    assert needed <= {*by_place, *by_name}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_private_name_is_still_there(name):
    if name.startswith("_C._cuda_") and torch.version.cuda is None:
        pytest.skip("this build of torch has no CUDA")
    for late in ("custom_graph_pass", "lowering"):  # torch itself loads them late
        importlib.import_module(f"torch._inductor.{late}")
    found = torch
    for part in name.split("."):
        assert hasattr(found, part), f"torch {torch.__version__} has no {name}"
        found = getattr(found, part)


def test_every_private_name_is_listed_above():
    used = set(re.findall(r"torch\.((?:cpu\.|_C\.|_dynamo\.)?_\w+(?:\.\w+)?)", SOURCE))
    assert used == set(ATTRIBUTES)
    operators = set(re.findall(r"torch\.ops\.(\w+\.\w+(?:\.binary)?)", SOURCE))
    assert operators == {name.replace("::", ".") for name in OPERATORS}


def test_no_other_file_uses_a_private_name():
    private = re.compile(r"torch\.([a-z_.]+\.)?_(?!_)|torch\.ops\.")
    package = Path(torch_internals.__file__).parents[2]
    files = [each for each in package.rglob("*.py") if each.name != "torch_internals.py"]
    assert [each.name for each in files if private.search(each.read_text())] == []


def test_compiling_silences_one_remark_of_the_compiler_and_no_other():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch_internals.compiled_whole(lambda x: x)
        warnings.warn("\nOnline softmax is disabled on the fly since Inductor decides", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert [str(each.message) for each in told] == ["something else"]


class Scaled(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = torch.nn.Linear(2, width)

    def plain(self, x, scale=2.0):
        return self.layer(x) * scale


def test_a_process_compiles_more_runs_than_the_compiler_takes_of_one_code(monkeypatch):
    torch.compiler.reset()
    real = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda code, fullgraph, options: real(code, fullgraph=fullgraph, backend="eager")
    )
    x, runs = torch.ones(3, 2), [Scaled(width) for width in range(1, 12)]
    compiled = [torch_internals.compiled_whole(run.plain) for run in runs]
    assert all(torch.equal(each(x), run.plain(x)) for each, run in zip(compiled, runs, strict=True))


# ---- who multiplies on ARM


@pytest.fixture
def on_arm(monkeypatch):
    """An ARM machine where oneDNN computes: torch may have given it up in this process."""
    monkeypatch.setattr(torch_internals, "ON_ARM", True)
    before = torch_internals.onednn_is_enabled()
    torch_internals.enable_onednn(True)
    yield
    torch_internals.enable_onednn(before)


def inside(dtype=torch.float32, device="cpu"):
    return torch_internals.blas_products(dtype, torch.device(device))


def test_blas_multiplies_in_fp32_on_arm_and_only_inside(on_arm):
    with inside():
        assert not torch_internals.onednn_is_enabled()
        with inside():
            pass
        assert not torch_internals.onednn_is_enabled()
    assert torch_internals.onednn_is_enabled()
    for other in (inside(torch.bfloat16), inside(device="meta")):
        with other:
            assert torch_internals.onednn_is_enabled()
    with pytest.raises(ZeroDivisionError), inside():
        raise ZeroDivisionError
    assert torch_internals.onednn_is_enabled()


def test_what_a_user_turned_off_stays_off(on_arm):
    torch_internals.enable_onednn(False)
    with inside():
        pass
    assert not torch_internals.onednn_is_enabled()


def test_elsewhere_nothing_is_changed(on_arm, monkeypatch):
    monkeypatch.setattr(torch_internals, "ON_ARM", False)
    with inside():
        assert torch_internals.onednn_is_enabled()
