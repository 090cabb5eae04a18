"""A network as an ONNX graph over padded texts, with the inputs and outputs that the ecosystem expects.

Shapes: B texts, N tokens of the longest one, H heads, K head width, D width, C choices, S buckets.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch import nn

from bertsmith.interchange.onnx_graph import IR_VERSION, OPSET, Graph, Value
from bertsmith.model.attention.rotary import NormalisedRotary, Rotary
from bertsmith.model.attention.rule import EVERYTHING, AttentionRule
from bertsmith.model.embeddings import Embeddings, PositionTable, SegmentTable
from bertsmith.model.heads import MaskedLanguageHead, OutputHead, Pooler, Transform
from bertsmith.model.inference.quantised_weights import QuantisedEmbedding
from bertsmith.model.network import Network
from bertsmith.model.transformer import transformer
from bertsmith.model.transformer.disentangled import DisentangledAttention

HIDDEN = {np.float32: -1e9, np.float16: -1e4}
"""Value to add to the score of a hidden token. It is finite: a row without visible tokens is padding and
unused, but it must not become NaN."""
OUTPUT_NAMES = {
    "classify": ("logits",),
    "tag": ("logits",),
    "choice": ("logits",),
    "replaced": ("logits",),
    "span": ("start_logits", "end_logits"),
    "mlm": ("logits",),
    "nsp": ("seq_relationship_logits",),
    "sop": ("sop_logits",),
    "pooler": ("pooler_output",),
}
"""Names of each head's outputs in transformers and optimum."""
BATCH, SEQUENCE, CHOICES = "batch_size", "sequence_length", "num_choices"


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of a graph, each [B, N]."""

    ids: Value
    mask: Value
    segments: Value | None


def onnx_model(network: Network, precision: str) -> onnx.ModelProto:
    """Return the graph of a network in evaluation mode: its encoder and all of its heads."""
    graph = Graph(precision)
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if network.config.segments > 1 else [])]
    shape = [BATCH, CHOICES, SEQUENCE] if "choice" in network.heads else [BATCH, SEQUENCE]
    given = [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name in names]
    if "choice" in network.heads:
        lengths = graph.op("Gather", graph.op("Shape", names[0]), graph.integer(2))
        flat = graph.op(
            "Concat", graph.integers(-1), graph.op("Unsqueeze", lengths, graph.integers(0)), axis=0
        )
        names = [graph.op("Reshape", name, flat) for name in names]
    inputs = Inputs(names[0], names[1], names[2] if len(names) > 2 else None)
    with torch.no_grad():
        writer = _NetworkWriter(graph, network, inputs)
        outputs = writer.outputs()
    body = helper.make_graph(graph.nodes, "bertsmith", given, outputs, graph.weights)
    opsets = [helper.make_opsetid("", OPSET)]
    return helper.make_model(body, opset_imports=opsets, ir_version=IR_VERSION, producer_name="bertsmith")


class _NetworkWriter:
    def __init__(self, graph: Graph, network: Network, inputs: Inputs) -> None:
        self.graph, self.network, self.inputs = graph, network, inputs

    # ---- the encoder

    def hidden_states(self) -> Value:
        """Return the last states [B, N, D]."""
        encoder = transformer.as_transformer(self.network.encoder, "form in ONNX")
        hidden = self._embedded(encoder.embeddings)
        for number in encoder.order:
            block = encoder.blocks[number]
            assert isinstance(block, transformer.Block), "every member is made of these"
            hidden = self._after_block(block, hidden)
        return self.graph.norm(encoder.final_norm, hidden)

    def _embedded(self, embeddings: Embeddings) -> Value:
        graph = self.graph
        summed = self._rows(embeddings.words, self.inputs.ids)
        for table in embeddings.added.values():
            assert isinstance(table, nn.Embedding), "tables are embeddings"
            summed = graph.op("Add", summed, self._added(table))
        normed = graph.norm(embeddings.norm, summed)
        return graph.linear(embeddings.widen, normed) if isinstance(embeddings.widen, nn.Linear) else normed

    def _added(self, table: nn.Embedding) -> Value:
        """Return the vectors of positions, segments or task types."""
        graph = self.graph
        if isinstance(table, PositionTable):
            places = graph.op("Add", graph.range(self.inputs.ids), graph.integer(table.first))
            return graph.op("Gather", graph.weight(table.weight), places)
        if isinstance(table, SegmentTable) and self.inputs.segments is not None:
            return graph.op("Gather", graph.weight(table.weight), self.inputs.segments)
        return graph.weight(table.weight[0])  # the same for every token

    def _rows(self, table: nn.Embedding, ids: Value) -> Value:
        graph = self.graph
        if not isinstance(table, QuantisedEmbedding):
            return graph.op("Gather", graph.weight(table.weight), ids)
        rows = graph.cast(graph.op("Gather", self._whole_table(table), ids), graph.float)
        return graph.op("Mul", rows, graph.op("Gather", graph.weight(table.scales_OG), ids))

    def _whole_table(self, table: QuantisedEmbedding) -> Value:
        return self.graph.once(("table",), lambda: self.graph.array(table.whole.numpy()))

    def _after_block(self, block: transformer.Block, hidden: Value) -> Value:
        graph = self.graph
        if isinstance(block, transformer.PostNormBlock):
            attended = graph.op("Add", hidden, self._attended(block.attention, hidden))
            hidden = graph.norm(block.attention_norm, attended)
            fed = graph.op("Add", hidden, self._fed_forward(block.feed_forward, hidden))
            return graph.norm(block.feed_forward_norm, fed)
        added = self._attended(block.attention, graph.norm(block.attention_norm, hidden))
        hidden = graph.op("Add", hidden, graph.norm(block.attention_output_norm, added))
        added = self._fed_forward(block.feed_forward, graph.norm(block.feed_forward_norm, hidden))
        return graph.op("Add", hidden, graph.norm(block.feed_forward_output_norm, added))

    def _fed_forward(self, layer: nn.Module, hidden: Value) -> Value:
        graph = self.graph
        assert isinstance(layer, transformer.FeedForward | transformer.GatedFeedForward), (
            "every member has one of these"
        )
        expanded = graph.linear(layer.expand, hidden)
        if isinstance(layer, transformer.FeedForward):
            return graph.linear(layer.contract, graph.activation(layer.activation_name, expanded))
        inner, gate = graph.several("Split", expanded, outputs=2, axis=-1)
        activated = graph.activation(layer.activation_name, inner)
        return graph.linear(layer.contract, graph.op("Mul", activated, gate))

    # ---- attention

    def _attended(self, attention: transformer.SelfAttention, hidden: Value) -> Value:
        graph, heads = self.graph, attention.heads
        parts = graph.several("Split", graph.linear(attention.project, hidden), outputs=3, axis=-1)
        split = graph.integers(0, 0, heads, attention.project.out_features // (3 * heads))
        query, key, value = (
            graph.op("Transpose", graph.op("Reshape", part, split), perm=[0, 2, 1, 3]) for part in parts
        )
        if attention.rotary is not None:
            query, key = (self._turned(attention.rotary, each, attention) for each in (query, key))
        probabilities = graph.op("Softmax", self._scores(attention, query, key), axis=-1)
        mixed = graph.op("Transpose", graph.op("MatMul", probabilities, value), perm=[0, 2, 1, 3])
        joined = graph.op("Reshape", mixed, graph.integers(0, 0, -1))
        return graph.linear(attention.output, joined)

    def _scores(self, attention: transformer.SelfAttention, query: Value, key: Value) -> Value:
        """Return the attention scores before the softmax [B, H, N, N]."""
        graph = self.graph
        scores = graph.op("MatMul", query, graph.op("Transpose", key, perm=[0, 1, 3, 2]))
        terms, width = 1, attention.project.out_features // (3 * attention.heads)
        if isinstance(attention, DisentangledAttention):
            terms, scores = 3, self._with_positions(attention, query, key, scores)
        scaled = graph.op("Mul", scores, graph.number(1 / math.sqrt(terms * width)))
        visible = graph.op("Add", scaled, self._padding())
        hidden = self._out_of_sight(attention.rule)
        return visible if hidden is None else graph.op("Add", visible, hidden)

    def _padding(self) -> Value:
        """Return the values to add to the scores of padding [B, 1, 1, N]."""
        graph = self.graph

        def make() -> Value:
            mask = graph.cast(self.inputs.mask, graph.float)
            away = graph.op(
                "Mul", graph.op("Sub", graph.number(1.0), mask), graph.number(HIDDEN[graph.float])
            )
            return graph.op("Unsqueeze", away, graph.integers(1, 2))

        return graph.once(("padding",), make)

    def _out_of_sight(self, rule: AttentionRule) -> Value | None:
        """Return the values to add to the scores of tokens that a rule hides [N, N], or None."""
        graph = self.graph
        if not rule.causal and rule.window == EVERYTHING:
            return None

        def make() -> Value:
            distances, parts = graph.distances(self.inputs.ids), []
            if rule.causal:
                ahead = "Greater" if rule.backwards else "Less"
                parts.append(graph.op(ahead, distances, graph.integer(0)))
            if rule.window != EVERYTHING:
                parts.append(graph.op("Greater", graph.op("Abs", distances), graph.integer(rule.window)))
            hidden = parts[0] if len(parts) == 1 else graph.op("Or", *parts)
            return graph.op("Where", hidden, graph.number(HIDDEN[graph.float]), graph.number(0.0))

        return graph.once(("rule", rule.causal, rule.backwards, rule.window), make)

    def _turned(self, rotary: Rotary, features: Value, attention: transformer.SelfAttention) -> Value:
        graph, pairs = self.graph, attention.project.out_features // (6 * attention.heads)
        if isinstance(rotary, NormalisedRotary):
            features = graph.root_mean_square_norm(features, rotary.eps)
        cosine, sine = (self._turns(rotary.theta, pairs, kind) for kind in ("Cos", "Sin"))
        first, second = graph.several("Split", features, outputs=2, axis=-1)
        turned = [
            graph.op("Sub", graph.op("Mul", first, cosine), graph.op("Mul", second, sine)),
            graph.op("Add", graph.op("Mul", second, cosine), graph.op("Mul", first, sine)),
        ]
        return graph.op("Concat", *turned, axis=-1)

    def _turns(self, theta: float, pairs: int, kind: str) -> Value:
        """Return cosine or sine of each position's angles [N, pairs]; angles in fp32, as published."""
        graph = self.graph

        def make_angles() -> Value:
            speeds = 1.0 / theta ** (torch.arange(pairs, dtype=torch.float32) / pairs)
            places = graph.cast(graph.range(self.inputs.ids), np.float32)
            rows = graph.op("Unsqueeze", places, graph.integers(1))
            return graph.op("Mul", rows, graph.array(speeds.numpy()))

        def make() -> Value:
            turns = graph.op(kind, graph.once(("angles", theta, pairs), make_angles))
            return turns if graph.float is np.float32 else graph.cast(turns, graph.float)

        return graph.once((kind, theta, pairs), make)

    def _with_positions(
        self, attention: DisentangledAttention, query: Value, key: Value, scores: Value
    ) -> Value:
        """Return the scores plus the scores of content to position and of position to content."""
        graph = self.graph
        query_HSK, key_HSK, _ = attention.projected(attention.relative())
        buckets = self._buckets(attention, scores)
        to_position = graph.op("MatMul", query, graph.array(_transposed(key_HSK, graph)))
        scores = graph.op("Add", scores, graph.op("GatherElements", to_position, buckets, axis=-1))
        to_content = graph.op("MatMul", key, graph.array(_transposed(query_HSK, graph)))
        turned = graph.op("Transpose", buckets, perm=[0, 1, 3, 2])
        gathered = graph.op("GatherElements", to_content, turned, axis=-1)
        return graph.op("Add", scores, graph.op("Transpose", gathered, perm=[0, 1, 3, 2]))

    def _buckets(self, attention: DisentangledAttention, scores: Value) -> Value:
        """Return the bucket of each query and key, for all texts and heads [B, H, N, N]."""
        graph, relative = self.graph, attention.relative

        def make() -> Value:
            furthest = max(relative.max_distance, self.network.config.positions)
            # In a sequence of this length, the first column has all distances to one side, the first row to
            # the other.
            buckets_NN = relative.buckets(furthest, torch.device("cpu"))
            table = torch.cat((buckets_NN[0].flip(0), buckets_NN[1:, 0]))
            ends = (graph.integer(1 - furthest), graph.integer(furthest - 1))
            near = graph.op("Max", graph.op("Min", graph.distances(self.inputs.ids), ends[1]), ends[0])
            places = graph.op("Add", near, graph.integer(furthest - 1))
            return graph.op("Gather", graph.array(table.numpy()), places)

        return graph.op("Expand", graph.once(("buckets",), make), graph.op("Shape", scores))

    # ---- heads

    def outputs(self) -> list[onnx.ValueInfoProto]:
        """Return the outputs of each head; for a bare encoder the last states, too."""
        hidden, heads = self.hidden_states(), self.network.heads
        found: list[onnx.ValueInfoProto] = []
        is_bare = not set(heads) - {"pooler"}
        if is_bare:
            found.append(
                self._output("last_hidden_state", hidden, [BATCH, SEQUENCE, self.network.config.width])
            )
        for name, head in heads.items():
            if name == "pooler" and not is_bare:
                continue  # other heads depend on it
            scores, shape = self._head(name, head, hidden)
            names = OUTPUT_NAMES[name]
            if len(names) == 1:
                found.append(self._output(names[0], scores, shape))
                continue
            parts = self.graph.several("Split", scores, outputs=len(names), axis=-1)
            for each, part in zip(names, parts, strict=True):
                squeezed = self.graph.op("Squeeze", part, self.graph.integers(-1))
                found.append(self._output(each, squeezed, shape[:-1]))
        return found

    def _head(self, name: str, head: nn.Module, hidden: Value) -> tuple[Value, list[str | int]]:
        graph = self.graph
        if isinstance(head, MaskedLanguageHead):
            transformed = self._transformed(head.transform, hidden)
            scores = graph.op("MatMul", transformed, self._decoder(head))
            if head.bias is not None:
                scores = graph.op("Add", scores, graph.weight(head.bias))
            return scores, [BATCH, SEQUENCE, self.network.config.vocabulary]
        if isinstance(head, Pooler):
            return self._pooled(head, hidden), [BATCH, self.network.config.width]
        assert isinstance(head, OutputHead), "every head is an OutputHead"
        if head.reads == "pooled":
            states = self._pooled(self.network.heads["pooler"], hidden)
        else:
            states = hidden if head.reads == "tokens" else self._sentence(hidden)
        scores = graph.linear(head.output, self._transformed(head.transform, states))
        outputs = head.output.out_features
        if name == "choice":
            number = graph.op("Gather", graph.op("Shape", "input_ids"), graph.integer(1))
            shape = graph.op(
                "Concat", graph.integers(-1), graph.op("Unsqueeze", number, graph.integers(0)), axis=0
            )
            return graph.op("Reshape", scores, shape), [BATCH, CHOICES]
        if name == "replaced":
            return graph.op("Squeeze", scores, graph.integers(-1)), [BATCH, SEQUENCE]
        return scores, [BATCH, SEQUENCE, outputs] if head.reads == "tokens" else [BATCH, outputs]

    def _decoder(self, head: MaskedLanguageHead) -> Value:
        """Return the transposed word table, or the head's own [D, V]."""
        words = self.network.encoder.words
        if head.decoder is not None or not isinstance(words, QuantisedEmbedding):
            table = words.weight if head.decoder is None else head.decoder
            return self.graph.op("Transpose", self.graph.weight(table), perm=[1, 0])
        scales = self.graph.weight(words.scales_OG[:, 0])
        real = self.graph.op("DequantizeLinear", self._whole_table(words), scales, axis=0)
        return self.graph.op("Transpose", real, perm=[1, 0])

    def _transformed(self, transform: nn.Module, states: Value) -> Value:
        if not isinstance(transform, Transform):
            return states
        dense = self.graph.linear(transform.dense, states)
        return self.graph.norm(transform.norm, self.graph.activation(transform.activation_name, dense))

    def _pooled(self, pooler: nn.Module, hidden: Value) -> Value:
        assert isinstance(pooler, Pooler), "nothing else is a pooler"
        return self.graph.op("Tanh", self.graph.linear(pooler.dense, self._sentence(hidden)))

    def _sentence(self, hidden: Value) -> Value:
        """Return the vector of each text [B, D]: its first row, its last one, or the mean of its rows."""
        graph = self.graph
        kind = self.network.encoder.sentence
        if kind == "first":
            return graph.op("Gather", hidden, graph.integer(0), axis=1)
        if kind == "mean":
            weights = graph.op("Unsqueeze", graph.cast(self.inputs.mask, graph.float), graph.integers(2))
            sums = graph.op("ReduceSum", graph.op("Mul", hidden, weights), graph.integers(1), keepdims=0)
            return graph.op("Div", sums, graph.op("ReduceSum", weights, graph.integers(1), keepdims=0))
        last = graph.op("ReduceSum", self.inputs.mask, graph.integers(1), keepdims=1)
        place = graph.op("Unsqueeze", graph.op("Sub", last, graph.integer(1)), graph.integers(2))
        width = graph.op("Expand", place, graph.integers(1, 1, self.network.config.width))
        rows = graph.op("GatherElements", hidden, width, axis=1)
        return graph.op("Squeeze", rows, graph.integers(1))

    def _output(self, name: str, value: Value, shape: list[str | int]) -> onnx.ValueInfoProto:
        """Return an output in single precision, which every caller accepts."""
        graph = self.graph
        if graph.float is np.float32:
            graph.nodes.append(helper.make_node("Identity", [value], [name]))
        else:
            graph.nodes.append(helper.make_node("Cast", [value], [name], to=TensorProto.FLOAT))
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _transposed(vectors_HSK: torch.Tensor, graph: Graph) -> NDArray[Any]:
    turned_HKS: NDArray[Any] = vectors_HSK.mT.numpy().astype(graph.float)
    return turned_HKS
