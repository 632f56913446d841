"""Options by which Inductor hides a compiled block's transfers of weights behind its products.

``torch.compile`` traces a module by itself: its weight is gathered when it runs, and the sum of its
gradient awaited before its backward ends. In eager :mod:`torch_tp2d.runtime` knows which modules
come next. Inductor is given the graph of a whole block, and so can know too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

from .._torch_compat.modules import graph_pass
from .._torch_compat.tensors import c10d_functional as _c10d
from .._torch_compat.tensors import collective_of
from .._tracing import WEIGHT
from ..runtime.regather import GATHERED_AHEAD

__all__ = ["SUMS", "gather_ahead", "overlap_options", "reorder", "wait_late"]

SUMS = 8
"""How many sums of gradients are under way before the first is awaited: a layer's weights and
biases, as many as the weights that are gathered ahead have."""

_WAIT = _c10d.wait_tensor.default


def overlap_options() -> dict[str, Any]:
    """Options for ``torch.compile`` with which a block's weights are gathered ahead.

    In a graph the weights of the next modules are gathered while this one computes, and the sums of
    weights' gradients are awaited late. As in eager, but not beyond the graph: a block's first
    weight is still awaited, and its last sums.

    Returns:
        ``options`` for Inductor, to add others to; every rank has to use the same.

    Example:

    .. code-block:: python

        for block in model.layers:
            block.compile(fullgraph=True, options=overlap_options())
    """
    return {
        "post_grad_custom_post_pass": graph_pass(reorder, __file__),
        # Inductor looks for an order that takes less memory, in which little overlaps.
        "reorder_for_peak_memory": False,
    }


def reorder(graph: Graph) -> None:
    """Change the order of a graph's transfers, as :func:`overlap_options` has it."""
    gather_ahead(graph)
    wait_late(graph)


def gather_ahead(graph: Graph) -> None:
    """Start each weight's gather before that of ``GATHERED_AHEAD`` weights earlier is awaited.

    All ranks have to start the collectives of a group in one order. So where a gather goes follows
    from the gathers and waits of weights alone, in which the ranks' graphs are alike, and not from
    what is computed between, in which they may differ: one may have no tokens. All that was started
    before that wait, such as the gather of the tokens that meet the weight, stays before.
    """
    gathers = _gathers(graph)
    for at in range(1, len(gathers)):
        ours, earlier = gathers[at], gathers[max(0, at - GATHERED_AHEAD)]
        place = gathers[at - 1].starts[-1]
        while place not in earlier.waits and place not in ours.starts:
            place = place.next
        moved = ours.inputs.union(ours.starts) if place in earlier.waits else set()
        for node in [node for node in _since(place) if node in moved]:
            place.prepend(node)


@dataclass
class _Gather:
    """The gather of one weight, perhaps in pieces."""

    sources: set[Node]
    """The graph's inputs that it is made of."""
    starts: list[Node] = field(default_factory=list)
    waits: set[Node] = field(default_factory=set)
    inputs: set[Node] = field(default_factory=set)
    """What is computed of the sources before it starts, and moves with it."""


def _gathers(graph: Graph) -> list[_Gather]:
    """The gathers of weights in the order in which they start.

    Without those of weights that other transfers have brought.
    """
    found: list[_Gather] = []
    for node in graph.nodes:
        if not _starts(node) or WEIGHT not in node.meta.get("custom", {}):
            continue
        above = _above(node)
        waits = _awaited(node)
        if not waits or any(_starts(one) or one.target is _WAIT for one in above):
            continue
        sources = {one for one in above if one.op == "placeholder"}
        if not found or found[-1].sources != sources:
            found.append(_Gather(sources))
        found[-1].starts.append(node)
        found[-1].waits |= waits
        found[-1].inputs |= above - sources
    return found


def wait_late(graph: Graph) -> None:
    """Await what the graph returns as it comes, after :data:`SUMS` other such transfers.

    Those are the sums of gradients. Every transfer starts when it did.
    """
    *nodes, output = graph.nodes
    returned = {output}
    for node in reversed(nodes):
        light = node.op == "call_function" and not _starts(node) and not _multiplies(node)
        if light and node.users and returned.issuperset(node.users):
            returned.add(node)
    sums = [node for node in nodes if _awaited(node) & returned]
    # Of what is returned, the last of the sums that it is made of.
    last = {wait: at for at, start in enumerate(sums) for wait in _awaited(start) & returned}
    for node in nodes:
        made_of = [last[one] for one in node.all_input_nodes if one in last]
        if node in returned and made_of:
            last[node] = max(made_of)
    places = [*sums[SUMS:], *[output] * SUMS]
    position = {node: at for at, node in enumerate(graph.nodes)}
    for node in nodes:
        if node in last and position[node] < position[places[last[node]]]:
            places[last[node]].prepend(node)


def _awaited(start: Node) -> set[Node]:
    return {user for user in start.users if user.target is _WAIT}


def _starts(node: Node) -> bool:
    """Whether a node starts a collective."""
    # Inputs, outputs and calls of Python functions have none.
    return hasattr(node.target, "namespace") and bool(collective_of(node.target))


def _multiplies(node: Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in flop_registry


def _above(node: Node) -> set[Node]:
    """All that a node is computed of."""
    found: set[Node] = set()
    left = [node]
    while left:
        new = set(left.pop().all_input_nodes) - found
        found |= new
        left += new
    return found


def _since(node: Node) -> Iterator[Node]:
    while node.op != "root":
        yield node
        node = node.next
