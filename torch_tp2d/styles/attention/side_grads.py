"""The gradient of a plain tensor beside the hidden states: a bias of the scores, a rotary table.

Outside a style a local tensor that is replicated along an axis has a replicated gradient
(:mod:`~torch_tp2d.styles.boundary`), but attention uses it for this rank's tokens and heads alone.
So the ranks' parts of the gradient are summed here, along the axes where nobody else does.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from ..._tracing import in_graph
from ...mesh.axes import names_of, on_mesh
from ...mesh.grid import Grid
from ...mesh.handed import Handed, hand_out, notes_of, said_of
from ...mesh.layouts import TP_COL, TP_ROW, normalize
from ...runtime.context import Context, in_backward

__all__ = ["check_rows", "with_whole_grad"]

_WHOLE = Replicate(), Replicate()


def with_whole_grad(
    x: Tensor, partial: tuple[bool, bool], grid: Grid, here: str, *, of_user: bool = False
) -> Tensor:
    """``x``, of which backward hands on the gradient of all ranks, not this rank's part of it.

    Args:
        partial: along row and col, whether the ranks hold the same of ``x`` and use it for other
            tokens or heads, so that each has a part of the gradient.
        here: names the tensor and its module, for messages.
        of_user: no style has made it.

    Raises:
        ValueError: where it cannot be told whether the modules that ``x`` was made by sum the
            gradients that they are given: in a compiled graph, in what reentrant checkpointing
            runs again, and for modules that differ.
    """
    both = zip(partial, (grid.row, grid.col), strict=True)
    wanted = [one and axis.size > 1 for one, axis in both]
    if not (x.requires_grad and torch.is_grad_enabled() and any(wanted)):
        return x
    names = names_of(grid.axes)
    asked = frozenset().union(*(of for of, one in zip(names, wanted, strict=True) if one))
    done = frozenset() if of_user else _summed_behind(x, asked, grid.context, here)
    row, col = (one and not of <= done for one, of in zip(wanted, names, strict=True))
    if not (row or col):
        return x
    key = grid.col.group, "whole grad", row, col
    # One bias for all layers: its gradients are added up, then summed over the ranks once.
    shared: Tensor | None = grid.context.gathered.get(x, key)
    if shared is None:
        shared = grid.redistribute(x, _WHOLE, _WHOLE, partial_grad=(row, col))
        there = done.union(*(of for of, one in zip(names, (row, col), strict=True) if one))
        said = said_of(x)
        axes = grid.axes if said.layout is None else said.axes
        shared = hand_out(shared, said._replace(axes=axes, shares=said.shares | there))
        # What is kept for a leaf would keep it alive, by the node that accumulates its gradient.
        if not x.is_leaf and not in_graph() and grid.context.running is not None:
            grid.context.gathered.put(x, key, shared)
    return shared


def check_rows(mask: Tensor, grid: Grid, here: str) -> None:
    """Refuse a mask whose gradient is to be summed over the rows, but only where it is made.

    It may have been combined with masks of this row's samples, of which each row has others.

    Raises:
        ValueError: on every rank.
    """
    rows, _ = names_of(grid.axes)
    if grid.row.size == 1 or not (mask.requires_grad and torch.is_grad_enabled()) or in_graph():
        return
    if not rows <= _summed_behind(mask, rows, grid.context, here):
        raise ValueError(
            f"{here} learns, and was made in the module by one that takes the same gradient on "
            f"every row, where each row has a part of it: make it outside of the module, or give "
            f"the one that makes it grad_layouts that are Partial() along {grid.row.name}"
        )


def _summed_behind(x: Tensor, asked: frozenset[str], context: Context, here: str) -> frozenset[str]:
    """Those of the mesh axes along which the styles that ``x`` was made by sum its gradient.

    None for what no style has made: it is the user's own, and whole.
    """
    if in_graph():
        said = said_of(x)
        if said.axes is not None:
            return asked & _summed_by(said, x.ndim)
        raise ValueError(
            f"{here} learns, and a compiled graph does not tell what it was made of, by which its "
            f"gradient is summed over the ranks: pass a DTensor (use_local_output=False for the "
            f"module that makes it), or leave this module out of torch.compile"
        )
    if in_backward() and x.is_leaf and x not in context.whole_leaves:
        raise ValueError(
            f"{here} learns, and reentrant checkpointing hands on another tensor, which does not "
            f"tell what it was made of, by which its gradient is summed over the ranks: use "
            f"checkpoint(..., use_reentrant=False)"
        )
    if x.is_leaf:
        context.whole_leaves[x] = None
    notes, complete = notes_of(x)
    told = {asked & _summed_by(note, note.ndim) for note in notes}
    if len(told) > 1 or not complete:
        raise ValueError(
            f"{here} learns, and is made of outputs of several modules, or too far from them, for "
            f"the plan to tell along which axes its gradient is to be summed: have them hand on "
            f"DTensors (use_local_output=False), or give them one layout by output_layouts"
        )
    return next(iter(told), frozenset())


def _summed_by(note: Handed, ndim: int) -> frozenset[str]:
    summed = note.shares | note.sums
    if note.layout is not None and note.axes is not None:
        # Other tokens or features on each rank: other values, each with a gradient of its own.
        layout = on_mesh(normalize(note.layout, ndim), note.axes)
        summed |= {n for n, p in zip((TP_ROW, TP_COL), layout, strict=True) if isinstance(p, Shard)}
    return summed
