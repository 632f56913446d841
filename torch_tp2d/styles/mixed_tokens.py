"""Refuses a module that mixes the tokens of a dim of which each rank has a part."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from .. import debug
from .._torch_compat import tree_leaves
from ..mesh.grid import Grid
from ..mesh.layouts import Layout, row_layout

__all__ = ["refusing_mixed"]


def refusing_mixed(
    forward: Callable[..., Any],
    x: Tensor,
    layout: Layout,
    grid: Grid,
    here: str,
    looked: Callable[[], None],
) -> Callable[..., Any]:
    """``forward``, which refuses to mix tokens of which this rank has a part, where it tells.

    Args:
        x, layout: the input whose tokens are meant, and its layout.
        here: names the module, for messages.
        looked: called when the answer holds for the module's later calls too.

    Raises:
        ValueError: if an output's token depends on other tokens of the input.
    """
    if isinstance(x, DTensor) or x.ndim > 3 or not x.requires_grad:
        return forward
    # What a row has of dim 0 are its samples, or windows of them, which a module may regroup.
    axes = zip((grid.row, grid.col), layout, (1, 0), strict=True)
    split = [
        p.dim
        for axis, p, first in axes
        if isinstance(p, Shard) and axis.size > 1 and p.dim >= first
    ]
    tokens = [dim for dim in split if dim < x.ndim - 1]

    def refusing(*args: Any, **kwargs: Any) -> Any:
        y = forward(*args, **kwargs)
        for one, dim in itertools.product(tree_leaves(y), tokens):
            alike = isinstance(one, Tensor) and one.shape[: x.ndim - 1] == x.shape[:-1]
            if alike and debug.mixes(x, one, dim):
                raise ValueError(
                    f"{here} was given a local tensor of shape {tuple(x.shape)} in layout "
                    f"{layout}, and mixes the tokens of dim {dim}, of which each rank has a "
                    f"part: have the module before it hand on full samples, "
                    f"output_layouts={row_layout()}, or give it torch_tp2d.Replicate()"
                )
        if tokens and all(x.shape[dim] > 1 for dim in tokens):
            looked()
        return y

    return refusing
