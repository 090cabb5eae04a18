"""Every private or undocumented name of torch that bertsmith uses, under a descriptive name.

torch may change any of these in a minor version. `pyproject.toml` caps the tested versions, and
`tests/unit/model/test_torch_internals.py` names the parts that another version broke, also for the kernels of
a GPU.
"""

import platform
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import NamedTuple, ParamSpec, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.backends import kleidiai, mkl, mkldnn

P = ParamSpec("P")
R = TypeVar("R")

# ---- abilities of this build and this CPU

ON_ARM = platform.machine().lower() in ("aarch64", "arm64")


def has_mkl() -> bool:
    """True if torch computes with MKL here."""
    return bool(mkl.is_available())  # type: ignore[no-untyped-call]


def has_onednn() -> bool:
    """True if torch computes with oneDNN here."""
    return bool(mkldnn.is_available())  # type: ignore[no-untyped-call]


def onednn_is_enabled() -> bool:
    """True if oneDNN is enabled; torch disables it on some CPUs."""
    return bool(torch._C._get_mkldnn_enabled())


def enable_onednn(enabled: bool) -> None:
    """Turn oneDNN on or off."""
    torch._C._set_mkldnn_enabled(enabled)


@contextmanager
def blas_products(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Inside, BLAS multiplies if it is faster than oneDNN, torch's choice: on ARM, in fp32.

    On ARM torch gives products with a transposed matrix, as in all linear layers, to oneDNN. Planning a small
    one takes 60 microseconds; for large ones a Neoverse N1 computes 33 GFLOP/s, and 37 by OpenBLAS. It
    applies to all threads, and the two round differently: do not use it next to other work.
    """
    before = onednn_is_enabled()
    enable_onednn(before and not takes_blas(dtype, device))
    try:
        yield
    finally:
        enable_onednn(before)


def takes_blas(dtype: torch.dtype, device: torch.device) -> bool:
    """True if `blas_products` turns oneDNN off."""
    return ON_ARM and device.type == "cpu" and dtype == torch.float32


def new_memory_is_filled() -> bool:
    """True if deterministic mode fills new memory."""
    return bool(torch._C._get_deterministic_fill_uninitialized_memory())


def fill_new_memory(filled: bool) -> None:
    """Let deterministic mode fill new memory, or not."""
    torch._C._set_deterministic_fill_uninitialized_memory(filled)


def has_bf16_products() -> bool:
    """True if this CPU multiplies in bf16; emulation is many times slower.

    oneDNN accepts bf16 on any x86 with AVX-512, also without instructions for it (Skylake, Cascade Lake, Ice
    Lake): there it converts.
    """
    taken = has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return taken and (ON_ARM or bool(torch.cpu._is_avx512_bf16_supported()))


def has_4bit_products() -> bool:
    """True if this CPU multiplies 4-bit weights by inputs that it rounds itself (KleidiAI, on ARM)."""
    return bool(kleidiai.is_available())  # type: ignore[no-untyped-call]


def has_int8_products() -> bool:
    """True if this CPU multiplies 8-bit numbers four at a time; without that, fp32 is as fast or faster.

    On x86 that is AVX-512's VNNI; on ARM it also requires Arm's Compute Library beneath oneDNN, which macOS
    lacks (of ARM only a Neoverse N1 was measured).
    """
    if ON_ARM:
        with_acl = bool(mkldnn.is_acl_available())  # type: ignore[no-untyped-call]
        return with_acl and bool(torch.cpu.get_capabilities().get("dot"))
    return bool(torch.cpu._is_vnni_supported())


def multiplies_signed_inputs() -> bool:
    """True if 8-bit products on x86 are as fast with signed inputs as with unsigned ones: by AMX.

    VNNI has instructions for unsigned by signed numbers only, and oneDNN computes others one by one: on a
    Cascade Lake 128 rows of 384 by 1,536 take 5.7 s instead of 0.8 ms.
    """
    # A CPU may have AMX although the system does not let a process use it.
    return ON_ARM or bool(torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx())


# ---- layers

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_plain(linear: object) -> TypeGuard[nn.Linear]:
    """True if a layer is only its weight and bias: any other layer has to be called.

    Others have an adapter inside, replace a linear layer, or have hooks.
    """
    return type(linear) is nn.Linear and not any(getattr(linear, hooks) for hooks in HOOKS)


def learns_bias(linear: object) -> TypeGuard[nn.Linear]:
    """True if the gradient of a bias is required, which the next kernel after a plain layer can sum."""
    learns = is_plain(linear) and linear.bias is not None and linear.bias.requires_grad
    return learns and torch.is_grad_enabled()


# ---- attention


class PackedSequences(NamedTuple):
    """Starts of packed sequences [S + 1], and the length of the longest."""

    starts_S1: Tensor
    longest: int


def flash_attention_for_cpu(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the mix of dense sequences and the logarithm of each softmax's denominator; no dropout."""
    mixed: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=bias
    )
    return mixed


def flash_attention_for_cpu_backward(
    operands: tuple[Tensor, Tensor, Tensor],
    saved: tuple[Tensor, Tensor, Tensor],
    *,
    causal: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of (query, key, value), given (gradient, mix, denominators)."""
    gradient, mixed, normalisers = saved
    gradients: tuple[Tensor, Tensor, Tensor]
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, *operands, mixed, normalisers, 0.0, causal, attn_mask=bias
    )
    return gradients


def softmax_backward(gradient: Tensor, probabilities: Tensor) -> Tensor:
    """Return the gradient of the scores, given their softmax over the last axis and its gradient."""
    return torch._softmax_backward_data(gradient, probabilities, -1, probabilities.dtype)


def flash_attention_varlen(
    operands: tuple[Tensor, Tensor, Tensor],
    packed: PackedSequences,
    *,
    dropout: float,
    causal: bool,
    window: tuple[int, int],
) -> Tensor:
    """Compute flash attention over packed sequences on CUDA; a window of -1 to a side sees all of it."""
    starts, longest = packed
    mixed_THK: Tensor = torch.ops.aten._flash_attention_forward(
        *(*operands, starts, starts, longest, longest, dropout, causal, False),
        window_size_left=window[0],
        window_size_right=window[1],
    )[0]
    return mixed_THK


def efficient_attention_varlen(
    operands: tuple[Tensor, Tensor, Tensor], packed: PackedSequences, *, causal: bool
) -> Tensor:
    """Compute memory-efficient attention over packed sequences on CUDA [1, T, H, K]; no dropout or window."""
    starts, longest = packed
    mixed_1THK: Tensor = torch.ops.aten._efficient_attention_forward(
        *operands, None, starts, starts, longest, longest, 0.0, int(causal), True
    )[0]
    return mixed_1THK


# ---- cuBLAS


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Inside, recorded products keep their workspaces in the memory of the recording.

    cuBLAS has one for each stream, of ordinary memory, and any other recording (torch.compile with CUDA
    graphs) frees all of them: a replay would then write to foreign memory.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def linear_tanh_gelu(values_TI: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
    """Compute on CUDA the tanh form of GELU of a linear layer, fused, before it is rounded."""
    return torch._addmm_activation(bias_O, values_TI, weight_OI.T, use_gelu=True)


# ---- oneDNN's linear layers, for constant weights


def pack_linear_weight(weight_OI: Tensor) -> Tensor:
    """Return the weight in oneDNN's fastest layout."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI)
    return packed


def packed_linear(
    values_TI: Tensor, weight: Tensor, bias_O: Tensor | None, activation: str = "none", form: str = ""
) -> Tensor:
    """Return the product with a packed weight, with a fused activation."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(values_TI, weight, bias_O, activation, [], form)
    return product


def packed_linear_plus(
    values_TI: Tensor, residual_TO: Tensor, weight: Tensor, bias_O: Tensor | None
) -> Tensor:
    """Return the product with a packed weight, with a fused residual."""
    added: Tensor = torch.ops.mkldnn._linear_pointwise.binary(values_TI, residual_TO, weight, bias_O, "add")
    return added


def pack_int8_weight(weight_OI: Tensor) -> Tensor:
    """Return an 8-bit weight in oneDNN's fastest layout."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(weight_OI, None)
    return packed


class Quantised(NamedTuple):
    """8-bit values with the size of a step and the value that represents 0."""

    values_TI: Tensor
    scale: float
    zero: int


class QuantisedWeight(NamedTuple):
    """A packed 8-bit weight with a scale and a zero for each output, or one for all of them, and the bias."""

    weight: Tensor
    scales_O: Tensor
    zeros_O: Tensor
    bias_O: Tensor | None


def int8_linear(
    inputs: Quantised,
    weight: QuantisedWeight,
    output: tuple[float, int, torch.dtype],
    activation: str = "none",
    form: str = "",
) -> Tensor:
    """Return the product of 8-bit values in the output's (scale, zero, type), with a fused activation."""
    product: Tensor = torch.ops.onednn.qlinear_pointwise(*inputs, *weight, *output, activation, [], form)
    return product


# ---- KleidiAI's linear layers of 4-bit weights, which round each row of inputs to 8 bits on the fly


def pack_4bit_weight(
    whole: Tensor, scales_OG: Tensor, bias_O: Tensor | None, sizes: tuple[int, int, int]
) -> Tensor:
    """Pack two 4-bit numbers per byte for KleidiAI; sizes: inputs of a group, inputs, outputs."""
    # Scales of groups must be bf16.
    packed: Tensor = torch.ops.aten._dyn_quant_pack_4bit_weight(whole, scales_OG.bfloat16(), bias_O, *sizes)
    return packed


def linear_4bit(values_TI: Tensor, packed: Tensor, sizes: tuple[int, int, int]) -> Tensor:
    """Return the product with a packed weight of 4 bits, plus its bias."""
    product: Tensor = torch.ops.aten._dyn_quant_matmul_4bit(values_TI, packed, *sizes)
    return product


# ---- the compiler


addmm, addmm_ = torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default


def compiled_whole(function: Callable[P, R]) -> Callable[P, R]:
    """The function as one compiled graph, without the compiler's remark on how it splits a softmax."""
    # The compiler takes two seconds to load, and our pass loads it.
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
    from torch._inductor.lowering import lowerings, make_fallback, require_contiguous

    from bertsmith.model.kernels import in_place_sums

    class InPlaceSums(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            in_place_sums.add_in_place(graph)

        def uuid(self) -> bytes:  # a graph in torch's cache was compiled with this pass
            return get_hash_for_files((in_place_sums.__file__,))

    if addmm_ not in lowerings:
        # The compiler would call torch's own operator anyway, but if the variable CI is set, it asks its
        # developers why they do not decompose it.
        make_fallback(addmm_, require_contiguous, warn=False)  # type: ignore[no-untyped-call]
    warnings.filterwarnings("ignore", r"\s*Online softmax is disabled", UserWarning)
    return torch.compile(
        _with_code_of_its_own(function),
        fullgraph=True,
        options={
            "post_grad_custom_post_pass": InPlaceSums(),
            # On CUDA the number of rows would decide if sums over rows and over columns share a kernel: the
            # first step with 6,827 rows of BERT-Base would wait ten seconds for a new graph.
            "triton.mix_order_reduction_non_strict_mode": True,
        },
    )


def _with_code_of_its_own(function: Callable[P, R]) -> Callable[P, R]:
    """Return a copy with a separate code object, and so a separate count of graphs.

    The compiler makes no more than eight graphs of one code object, and the runs of a sweep share the method.
    """
    plain = cast(FunctionType, getattr(function, "__func__", function))
    code = plain.__code__.replace()
    copy = FunctionType(code, plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__)
    return MethodType(copy, function.__self__) if isinstance(function, MethodType) else copy


def place_of(tensor: Tensor) -> int:
    """Return the address of a tensor, also of one without data; views of each other share it."""
    return int(tensor.untyped_storage()._cdata)


def mark_dynamic(tensor: Tensor) -> None:
    """Declare to the compiler that the first size varies, before it treats it as a constant."""
    torch._dynamo.maybe_mark_dynamic(tensor, 0)


# ---- one operation over a list of tensors, in one kernel on a GPU

foreach_add_ = torch._foreach_add_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_copy_ = torch._foreach_copy_
foreach_div = torch._foreach_div
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sqrt = torch._foreach_sqrt
