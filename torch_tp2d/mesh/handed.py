"""Notes on the local tensors that a style hands to the user's code, kept with the tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .._tracing import in_graph
from ..runtime.context import Sizes
from .axes import Axes
from .layouts import Layout

__all__ = [
    "Handed",
    "Sources",
    "hand_out",
    "made_of",
    "notes_of",
    "said_of",
    "sources_of",
    "tokens_told",
]


class Handed(NamedTuple):
    """What a style noted of a local tensor when it handed it out."""

    sizes: Sizes | None = None
    """Global sizes of all dims but the last, where they are certain."""
    layout: Layout | None = None
    ndim: int = 0
    """The number of dims of the tensor that the layout was written for."""
    axes: Axes | None = None
    under_way: Sizes | None = None
    """Where ``sizes`` are not certain: the sizes of the tokens that it was assumed to belong to."""
    shares: frozenset[str] = frozenset()
    """The mesh axes along which ranks that hold the same values have partial gradients of it."""
    sums: frozenset[str] = frozenset()
    """The mesh axes along which the gradient that it is given may be this rank's part of it.

    It is made of parameters that are split there, or whose gradients are summed there. A layout
    would not tell: a table of biases holds no tokens.
    """
    by: str = ""
    """The module that handed it out, for messages."""
    parameter: str = ""
    """The parameter that it is, of a module that uses it as a local tensor; ``sums`` is exact."""
    fused: bool = False
    """Whether the features are those of several projections, of each a part."""


_NOTHING = Handed()

_HANDS_ON = ("RegisterPostBackwardFunctionBackward", "BackwardHookFunctionBackward")
"""Nodes that FSDP2 and backward hooks put in the graph before a module. They pass values on."""


def hand_out(x: Tensor, handed: Handed) -> Tensor:
    """Attach ``handed`` to ``x``, for :func:`said_of` to find, and return it for the user's code.

    For a leaf, and under ``torch.compile``, a view of ``x`` is returned.
    """
    traced = in_graph()
    if traced or x.is_leaf:
        # A leaf may be the user's, a table that a module keeps: the note would stay on it. Within
        # checkpointing Dynamo lets attributes be set on the result of an operation, but not on that
        # of an autograd.Function.
        x = x.view_as(x)
    if traced:
        # By Inductor, what a graph hands on has None in the place of placements that it made.
        said: Any = None if handed.layout is None else tuple(map(_written, handed.layout))
        handed = handed._replace(layout=said)
    x._tp2d_handed = handed  # type: ignore[attr-defined]
    node: Any = None if traced else x.grad_fn
    if node is not None:
        node.metadata["_tp2d_handed", x.output_nr] = handed
    return x


def said_of(x: Tensor) -> Handed:
    """What :func:`hand_out` noted of a tensor; an empty :class:`Handed` if it has not seen it.

    FSDP2 passes its module other tensor objects than it is given, so the note is kept with the
    autograd graph as well.
    """
    found: Handed | None = getattr(x, "_tp2d_handed", None)
    if found is not None:
        return _read(found)
    if in_graph():
        return _NOTHING
    own: Any = x.grad_fn
    if own is None or own.name() not in _HANDS_ON:
        return _NOTHING
    node, index = own, x.output_nr
    while node is not None and node.name() in _HANDS_ON:
        node, index = node.next_functions[index]
    if node is not None:
        found = node.metadata.get(("_tp2d_handed", index))
    return found or _NOTHING


def _written(placement: Placement) -> str:
    """A placement in a note on a tensor of a graph: the dim that is split, or the operation.

    In words, since a number that differs from one module to the next is a symbol in later graphs,
    and a placement cannot be made of a symbol.
    """
    if isinstance(placement, Shard):
        return str(placement.dim)
    return placement.reduce_op if isinstance(placement, Partial) else "replicate"


def _read(handed: Handed) -> Handed:
    """A note with its layout in placements, whether or not :func:`_written` was used."""
    layout: Any = handed.layout
    if layout is None or not isinstance(layout[0], str):
        return handed
    row, col = map(_placement, layout)
    return handed._replace(layout=(row, col))


def _placement(written: str) -> Placement:
    if written.lstrip("-").isdigit():
        return Shard(int(written))
    return Replicate() if written == "replicate" else Partial(written)


_NODES = 200
"""The most autograd nodes to visit: more than a rotary embedding and a norm of heads have."""


def made_of(x: Tensor) -> list[Handed]:
    """The notes of layouts among :func:`notes_of`."""
    node: Any = None if in_graph() else x.grad_fn
    own = None if node is None else node.metadata.get(("_tp2d_handed", x.output_nr))
    if own is not None and own.layout is not None:
        return [own]
    return [note for note in notes_of(x)[0] if note.layout is not None]


def notes_of(x: Tensor, *, beyond_functions: bool = True) -> tuple[list[Handed], bool]:
    """What :func:`hand_out` noted of the tensors from which the user's code has made ``x``.

    They are found through the autograd graph, so none are where no graph is recorded, and none
    under ``torch.compile``.

    Args:
        beyond_functions: look beyond autograd Functions in Python as well, which may send, and so
            give another gradient than they are given: a part of it, or the sum of the parts.

    Returns:
        The notes, and whether the whole graph was looked through.
    """
    if in_graph():
        return [], False
    found = sources_of(x, beyond_functions=beyond_functions)
    return [note for note, _ in found.sources], found.complete


class Sources(NamedTuple):
    """What the user's code has made a tensor of."""

    sources: list[tuple[Handed, Any]]
    """Tensors that were handed out: what is noted of each, and its node and output."""
    between: set[str]
    """The names of the nodes between those and the tensor."""
    complete: bool
    """Whether the whole graph was looked through."""


def sources_of(x: Tensor, *, beyond_functions: bool = False) -> Sources:
    """Look through the autograd graph for the tensors of which ``x`` is made. In eager only."""
    found: list[tuple[Handed, Any]] = []
    between: set[str] = set()
    seen: set[Any] = set()
    edges: list[Any] = [(x.grad_fn, x.output_nr)]
    while edges and len(seen) < _NODES:
        node, index = edge = edges.pop()
        if node is None or edge in seen:
            continue
        seen.add(edge)
        handed = node.metadata.get(("_tp2d_handed", index))
        if handed is not None:
            found.append((handed, edge))
        if handed is not None and (handed.layout is not None or handed.shares):
            continue
        name = node.name()
        between.add(name)
        if name in _HANDS_ON:
            # Only this output's input: the node's others are other arguments of the module.
            edges.append(node.next_functions[index])
        elif beyond_functions or not isinstance(node, BackwardCFunction):
            edges.extend(node.next_functions)
    return Sources(found, between, not edges)


def tokens_told(x: Tensor) -> Sizes | None:
    """The sizes of the tokens in ``x``, by what is noted of it and of the tensors it was made of.

    None where nothing is noted, or where their sizes disagree: attention scores are made of queries
    and keys, which may belong to two streams, and neither stream gives the sizes of the scores.
    """
    told = {one.under_way if one.sizes is None else one.sizes for one in made_of(x) or [said_of(x)]}
    found = [known for known in told if known is not None and len(known) >= x.ndim - 1]
    # A tensor split into heads has more dims than its tokens, among them the tokens' own.
    tokens = [a for a in found if len(a) < x.ndim and all(_among(a, b) for b in found)]
    return tokens[0] if tokens else None


def _among(sizes: Sizes, others: Sizes) -> bool:
    """Whether ``sizes`` occur in this order among ``others``."""
    rest = iter(others)
    return all(size in rest for size in sizes)
