"""A pass of the compiler: a product is added in place to the gradient that a joint gives to its residual.

At the sum of that residual and a product in the backward pass, the compiler makes one `addmm`, which returns
a new tensor: torch first copies the gradient there. This pass adds the product to that gradient in place, if
it is not read afterwards: one copy of all states less for each sub-layer. The numbers are the same.
"""

import operator

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from bertsmith.model.kernels.torch_internals import addmm, addmm_, place_of

JOINT = "bertsmith.residual_norm_backward.default"
"""Operator with results that are new tensors; the compiler knows all their views.

For other tensors this is not certain: sums that it has made may no longer be where their views point.
"""


def add_in_place(graph: Graph, joint: str = JOINT) -> None:
    """Change a graph without other in-place changes."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    added_to = set[Node]()
    for node in graph.find_nodes(op="call_function", target=addmm):
        total = node.args[0] if len(node.args) == 3 and not node.kwargs else None
        if not isinstance(total, Node) or total in added_to or not _is_of(joint, total):
            continue
        if not _same_shape(total, node) or not _is_last_use(total, node, order):
            continue
        with graph.inserting_before(node):
            graph.call_function(addmm_, node.args)
        node.replace_all_uses_with(total)
        graph.erase_node(node)
        added_to.add(total)


def _is_of(joint: str, total: Node) -> bool:
    """True if this is a result of a joint."""
    source = total.args[0] if total.target is operator.getitem else None
    return isinstance(source, Node) and str(source.target) == joint


def _same_shape(total: Node, node: Node) -> bool:
    """True if both have the same shape, and the values of the total are contiguous."""
    ours, summed = total.meta["val"], node.meta["val"]
    same = ours.dim() == summed.dim() and all(
        statically_known_true(a == b) for a, b in zip(ours.shape, summed.shape, strict=True)
    )
    return same and ours.is_contiguous()


def _is_last_use(total: Node, node: Node, order: dict[Node, int]) -> bool:
    """True if neither the product nor anything after it reads the memory of the total."""
    there = {each for each in order if _place(each) == _place(total)}
    return there.isdisjoint(node.args[1:]) and all(
        order[user] <= order[node] for each in there for user in each.users
    )


def _place(node: Node) -> int | None:
    value = node.meta.get("val")
    return place_of(value) if isinstance(value, Tensor) else None
