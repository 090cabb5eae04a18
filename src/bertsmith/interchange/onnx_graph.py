"""An ONNX graph under construction: operators, weights and the parts that networks repeat.

Shapes: B texts, N tokens of the longest one, D width, I inputs, O outputs.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from bertsmith.model.inference.quantised_weights import QuantisedLinear, bits_of

OPSET = 17
"""The first version with LayerNormalization; newer ones add nothing needed, and old runtimes lack them."""
IR_VERSION = 8
"""File format version of this opset."""
Value = str
"""Name of an operator's output in ONNX."""
FLOATS = {"fp32": np.float32, "fp16": np.float16}
ONNX_TYPES = {
    np.float32: TensorProto.FLOAT,
    np.float16: TensorProto.FLOAT16,
    np.int64: TensorProto.INT64,
}
SIGNED_ZERO = 128
"""Zero point of signed 8-bit inputs stored as unsigned ones, which more runtimes multiply fast."""


class Graph:
    """Nodes and weights of a graph with floats of this precision."""

    def __init__(self, precision: str) -> None:
        self.float: Any = FLOATS[precision]
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._named: dict[tuple[Any, ...], Value] = {}

    def op(self, kind: str, *inputs: Value, **attributes: Any) -> Value:
        """Add an operator and return its first output."""
        return self.several(kind, *inputs, outputs=1, **attributes)[0]

    def several(self, kind: str, *inputs: Value, outputs: int, **attributes: Any) -> list[Value]:
        """Add an operator and return all of its outputs."""
        number = len(self.nodes)
        names = [f"{kind.lower()}_{number}" + (f"_{each}" if each else "") for each in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, **attributes))
        return names

    def array(self, values: NDArray[Any]) -> Value:
        """Return numbers as a constant of the graph."""
        name = f"weight_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.array(values, order="C"), name))
        return name

    def weight(self, tensor: Tensor) -> Value:
        """Return a weight in the graph's precision; a shared one is stored once."""
        key = ("weight", tensor.data_ptr(), *tensor.shape, *tensor.stride())
        return self.once(key, lambda: self.array(tensor.detach().cpu().numpy().astype(self.float)))

    def number(self, value: float) -> Value:
        """Return one real number."""
        return self.once(("number", value), lambda: self.array(np.array(value, self.float)))

    def integers(self, *values: int) -> Value:
        """Return a list of whole numbers: a shape, axes or indices."""
        return self.once(("integers", *values), lambda: self.array(np.array(values, np.int64)))

    def integer(self, value: int) -> Value:
        """Return one whole number."""
        return self.once(("integer", value), lambda: self.array(np.array(value, np.int64)))

    def once(self, key: tuple[Any, ...], make: Callable[[], Value]) -> Value:
        """Return the value of this key; call `make` only the first time."""
        if key not in self._named:
            self._named[key] = make()
        return self._named[key]

    def cast(self, value: Value, to: Any) -> Value:
        """Return the values as another type."""
        return self.op("Cast", value, to=ONNX_TYPES[to])

    # ---- parts that networks repeat

    def linear(self, linear: nn.Linear, values: Value) -> Value:
        """Return the product of a linear layer, in 8 bits if it was calibrated for that."""
        if isinstance(linear, QuantisedLinear):
            product = self._quantised_product(linear, values)
        else:
            product = self.op("MatMul", values, self.weight(linear.weight.detach().T))
        return product if linear.bias is None else self.op("Add", product, self.weight(linear.bias))

    def _quantised_product(self, linear: QuantisedLinear, values: Value) -> Value:
        assert bits_of(linear.whole) == 8, "ONNX supports 8 bits only"

        def make() -> Value:
            whole_IO = self.array(linear.whole.numpy().T)
            return self.op("DequantizeLinear", whole_IO, self.weight(linear.scales_OG[:, 0]), axis=1)

        weight_IO = self.once(("quantised", id(linear)), make)
        if linear.steps is not None:
            if linear.per_input_I is not None:
                factors_I = (linear.per_input_I * linear.steps.size).numpy().astype(self.float)
                values = self.op("Mul", values, self.array(factors_I))
            shift = SIGNED_ZERO if linear.steps.dtype == torch.int8 else linear.steps.zero
            steps = self.number(linear.steps.size), self.array(np.array(shift, np.uint8))
            values = self.op("DequantizeLinear", self.op("QuantizeLinear", values, *steps), *steps)
        return self.op("MatMul", values, weight_IO)

    def norm(self, norm: nn.Module, values: Value) -> Value:
        """Return the values normalised over the last axis, or unchanged without a norm."""
        if isinstance(norm, nn.LayerNorm):
            parts = [self.weight(each) for each in (norm.weight, norm.bias) if each is not None]
            return self.op("LayerNormalization", values, *parts, axis=-1, epsilon=norm.eps)
        if isinstance(norm, nn.RMSNorm):
            assert norm.eps is not None, "ours have one"
            scaled = self.root_mean_square_norm(values, norm.eps)
            return scaled if norm.weight is None else self.op("Mul", scaled, self.weight(norm.weight))
        assert isinstance(norm, nn.Identity), norm
        return values

    def root_mean_square_norm(self, values: Value, eps: float) -> Value:
        """Return values divided by the root of their mean square on the last axis, computed in fp32."""
        exact = values if self.float is np.float32 else self.cast(values, np.float32)
        mean = self.op("ReduceMean", self.op("Mul", exact, exact), axes=[-1], keepdims=1)
        small = self.once(("eps", eps), lambda: self.array(np.array(eps, np.float32)))
        scaled = self.op("Div", exact, self.op("Sqrt", self.op("Add", mean, small)))
        return scaled if self.float is np.float32 else self.cast(scaled, self.float)

    def activation(self, name: str, values: Value) -> Value:
        """Return an activation by its name in config.json."""
        return _ACTIVATIONS[name](self, values)

    def range(self, ids_BN: Value) -> Value:
        """Return the indices 0, 1, 2 ... of the tokens of the longest text [N]."""

        def make() -> Value:
            length = self.op("Gather", self.op("Shape", ids_BN), self.integer(1))
            return self.op("Range", self.integer(0), length, self.integer(1))

        return self.once(("range", ids_BN), make)

    def distances(self, ids_BN: Value) -> Value:
        """Return the index of each query minus the index of each key [N, N]."""

        def make() -> Value:
            places = self.range(ids_BN)
            rows, columns = (self.op("Unsqueeze", places, self.integers(axis)) for axis in (1, 0))
            return self.op("Sub", rows, columns)

        return self.once(("distances", ids_BN), make)


def _gelu(graph: Graph, values: Value) -> Value:
    erf = graph.op("Erf", graph.op("Mul", values, graph.number(math.sqrt(0.5))))
    return _half_of_one_plus(graph, values, erf)


def _tanh_gelu(graph: Graph, values: Value) -> Value:
    cube = graph.op("Mul", graph.op("Mul", values, values), values)
    inner = graph.op("Add", values, graph.op("Mul", cube, graph.number(0.044715)))
    tanh = graph.op("Tanh", graph.op("Mul", inner, graph.number(math.sqrt(2 / math.pi))))
    return _half_of_one_plus(graph, values, tanh)


def _half_of_one_plus(graph: Graph, values: Value, gate: Value) -> Value:
    half = graph.op("Mul", values, graph.number(0.5))
    return graph.op("Mul", half, graph.op("Add", gate, graph.number(1.0)))


def _squared_relu(graph: Graph, values: Value) -> Value:
    positive = graph.op("Relu", values)
    return graph.op("Mul", positive, positive)


def _silu(graph: Graph, values: Value) -> Value:
    return graph.op("Mul", values, graph.op("Sigmoid", values))


_ACTIVATIONS: dict[str, Callable[[Graph, Value], Value]] = {
    "gelu": _gelu,
    "gelu_new": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "relu": lambda graph, values: graph.op("Relu", values),
    "relu2": _squared_relu,
    "silu": _silu,
    "swish": _silu,
    "tanh": lambda graph, values: graph.op("Tanh", values),
}
"""Functions by their names in `model/kernels/activations.py`."""
