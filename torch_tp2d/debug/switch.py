"""Turns debug mode on and off, and wraps the forward of a styled module while it is on."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from .._torch_compat.tensors import tree_leaves
from .._tracing import in_graph
from ..comm import pending
from .collectives import watched
from .copies import compare_every, runs_backward
from .layers import forward_of, label

__all__ = ["disable", "enable", "enable_by_environment", "is_on", "run_as_layer"]


def enable(every: int = 1) -> None:
    """Turn debug mode on. Every rank has to call it, before the code that is to be watched.

    Args:
        every: one of this many backward passes is followed by a comparison of copies.

    Raises:
        ValueError: unless ``every`` is positive.

    Example::

        >>> torch_tp2d.debug.enable()
        >>> model(ids).sum().backward()
    """
    if every < 1:
        raise ValueError(f"of every how many backward passes one is checked, not {every}")
    compare_every(every)
    pending.watch = watched


def disable() -> None:
    """Turn debug mode off, on every rank."""
    compare_every(0)
    pending.watch = None


def is_on() -> bool:
    """Whether debug mode is on; it is off in a traced graph."""
    return pending.watch is not None and not in_graph()


def run_as_layer(
    module: nn.Module, name: str, run: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Run ``run(*args, **kwargs)``, the forward of ``module``, and name it with its transfers.

    The autograd nodes that it creates are labelled, so that the transfers of its backward are
    attributed to it too.
    """
    with forward_of(name):
        result = run(*args, **kwargs)
    made = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.grad_fn is not None]
    given = {x.grad_fn for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
    nodes: list[Any] = [x.grad_fn for x in made if x.grad_fn not in given]
    for x in made:
        if x.grad_fn not in given:
            x.register_hook(partial(runs_backward, module))
    label(nodes, given, name)
    return result


def enable_by_environment() -> None:
    """Turn debug mode on if the environment variable ``TP2D_DEBUG`` says so.

    Raises:
        ValueError: if it is set to anything but a number.
    """
    given = os.environ.get("TP2D_DEBUG", "")
    if not given.isdecimal() and given:
        raise ValueError(
            f"TP2D_DEBUG is 0, 1 or of every how many backward passes one is checked, not {given!r}"
        )
    if int(given or 0):
        enable(int(given))
