"""What is known of a local tensor that a style has handed to the user's code, kept with it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.context import Sizes
from .axes import Axes
from .layouts import Layout

__all__ = ["Handed", "hand_out", "made_of", "said_of", "tokens_told"]


class Handed(NamedTuple):
    """What a style said of a local tensor when it handed it out."""

    sizes: Sizes | None = None
    """Global sizes of all dims but the last, where they are certain."""
    layout: Layout | None = None
    ndim: int = 0
    """The dims that the layout speaks of."""
    axes: Axes | None = None
    under_way: Sizes | None = None
    """Where they are not: those of the tokens that it was taken for a part of."""
    shares: frozenset[str] = frozenset()
    """The mesh axes along which ranks that hold the same hand back shares of its gradient."""


_HANDS_ON = ("RegisterPostBackwardFunctionBackward", "BackwardHookFunctionBackward")
"""What FSDP2, and a backward hook, put in the graph before a module: it changes no tensor."""


def hand_out(x: Tensor, handed: Handed) -> Tensor:
    """``x``, for the user's code, with what :func:`said_of` is to find."""
    if torch.compiler.is_compiling():
        # Within checkpointing Dynamo lets attributes be set on what an operation gave, and not on
        # what an autograd.Function did.
        x = x.view_as(x)
    x._tp2d_handed = handed  # type: ignore[attr-defined]
    node: Any = None if torch.compiler.is_compiling() else x.grad_fn
    if node is not None:
        node.metadata["_tp2d_handed", x.output_nr] = handed
    return x


def said_of(x: Tensor) -> Handed:
    """What :func:`hand_out` was told of a tensor; of one that it has not seen, nothing.

    FSDP2 hands its module other tensors than it is given, so it is kept with the graph as well.
    """
    found: Handed | None = getattr(x, "_tp2d_handed", None)
    if found is None and not torch.compiler.is_compiling():
        node: Any = x.grad_fn
        index = x.output_nr
        while node is not None and node.name() in _HANDS_ON:
            node, index = node.next_functions[index]
        if node is not None and node is not x.grad_fn:
            found = node.metadata.get(("_tp2d_handed", index))
    return Handed() if found is None else found


_NODES = 200
"""How many autograd nodes to look at: more than a rotary embedding and a norm of heads have."""


def made_of(x: Tensor) -> list[Handed]:
    """What :func:`hand_out` was told of the tensors that the user's code has made this one of.

    By the graph, so nothing is found where none is recorded, nor while one is traced.
    """
    found: list[Handed] = []
    if torch.compiler.is_compiling():
        return found
    seen: set[Any] = set()
    edges: list[Any] = [(x.grad_fn, x.output_nr)]
    while edges and len(seen) < _NODES:
        node, index = edge = edges.pop()
        if node is None or edge in seen:
            continue
        seen.add(edge)
        handed = node.metadata.get(("_tp2d_handed", index))
        if handed is not None:
            found.append(handed)
        elif node.name() in _HANDS_ON:
            # What else goes into the module is another matter.
            edges.append(node.next_functions[index])
        else:
            edges.extend(node.next_functions)
    return found


def tokens_told(x: Tensor) -> Sizes | None:
    """Those of the tokens that ``x`` has, or is made of, by what was said of them.

    None where nothing was, or of tokens of several sizes: queries and keys are of two streams, and
    neither tells of their scores.
    """
    told = {one.under_way if one.sizes is None else one.sizes for one in made_of(x) or [said_of(x)]}
    found = [known for known in told if known is not None and len(known) >= x.ndim - 1]
    # Heads have more dims than their tokens, the same ones among them.
    tokens = [a for a in found if len(a) < x.ndim and all(_among(a, b) for b in found)]
    return tokens[0] if tokens else None


def _among(sizes: Sizes, others: Sizes) -> bool:
    """Whether sizes stand in this order among others."""
    rest = iter(others)
    return all(size in rest for size in sizes)
