"""Which code a graph that ``torch.compile`` traces leaves out, and why.

Such a graph is made once, on each rank for itself, and differs from eager mode in four ways:

* It has no values that Python could look at, and no state but the tensors' own. Checks and hooks
  are :func:`eager_only`; what was noted for the next module is noted on the tensor.
* It has plain tensors only: nothing stands in for a value that is still under way, so a weight is
  gathered, and a gradient reduced, by the node that needs it.
* Its sizes may be symbols, which do not compare as numbers do: they are made :func:`static`.
* It drops a transfer whose result its rank does not use, and merges transfers of equal inputs,
  though the other ranks' graphs may need both. There every rank has to use what it is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx.traceback import annotate

from ._torch_compat.modules import begins_no_graph
from ._torch_compat.tensors import apply_in_eager

__all__ = [
    "WEIGHT",
    "apply_node",
    "eager_only",
    "in_graph",
    "in_one_piece",
    "moving_weight",
    "static",
]


in_graph = torch.compiler.is_compiling
"""Whether the code that runs becomes a part of a graph."""


def static(size: int) -> int:
    """A size as a constant of the graph, which is traced again for another.

    Shards follow from sizes by too many steps for symbols: a rank whose shard stays the same would
    have other conditions in its graph than one whose shard does not.
    """
    # Dynamo makes constants of a range's bounds.
    return len(range(size)) if in_graph() else size


WEIGHT = "tp2d_weight"
"""The note on a graph's nodes that move a weight, for :mod:`torch_tp2d.integrations.inductor`."""


def moving_weight() -> AbstractContextManager[Any]:
    """Inside it a graph's nodes are noted to move a weight. For graphs alone."""
    return annotate({WEIGHT: True})


def apply_node(function: type[torch.autograd.Function], x: Any, *others: Any) -> Any:
    """``function.apply`` by the shortest way. Of the tensors ``x`` alone may be the user's."""
    return function.apply(x, *others) if in_graph() else apply_in_eager(function, x, *others)


def eager_only(run: Callable[..., None]) -> Callable[..., None]:
    """Decorate a check, or a hook, that a graph leaves out."""

    @functools.wraps(run)
    def unless_traced(*args: Any, **kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            run(*args, **kwargs)

    return unless_traced


@begins_no_graph
def in_one_piece(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that is a part of a graph as a whole, or runs in eager as a whole.

    Where ``torch.compile`` fails to make a graph of a function it runs it as it is, and goes on to
    make graphs of the functions that this one calls: a module would be half in a graph.
    """
    return run(*args, **kwargs)
