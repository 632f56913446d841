"""``summa``: broadcast a panel of each operand, multiply, add (van de Geijn and Watts, 1997).

The contracted dim P is split into panels, each owned by one mesh column in ``a`` and one mesh row
in ``b``. ``a`` has C blocks in P and ``b`` has R, so a panel ends wherever a block of either does,
and any grid will do. The next panel is transferred while the current one is multiplied.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ...comm import Axis, Pending, broadcast, reduce
from .cut import Cut
from .products import backward, forward

__all__ = ["SQUARE", "WHOLE", "ab", "abt", "atb", "backward", "forward", "prefetch"]

WHOLE = False
SQUARE = False


class _Panel(NamedTuple):
    """A range of P: its owner along each axis, and its start in the owner's block."""

    width: int
    row: int
    row_start: int
    col: int
    col_start: int


def _panels(cut: Cut) -> list[_Panel]:
    row_ends, col_ends = list(accumulate(cut.p_row)), list(accumulate(cut.p_col))
    panels = []
    for start, end in pairwise(sorted({0, *row_ends, *col_ends})):
        row = next(rank for rank, stop in enumerate(row_ends) if start < stop)
        col = next(rank for rank, stop in enumerate(col_ends) if start < stop)
        panels.append(
            _Panel(
                end - start,
                row,
                start - row_ends[row] + cut.p_row[row],
                col,
                start - col_ends[col] + cut.p_col[col],
            )
        )
    return panels


def _send(x: Tensor, dim: int, panel: _Panel, axis: Axis, on_col: bool) -> Pending:
    """Broadcast ``panel`` of ``x``'s ``dim`` from its owner along ``axis``."""
    owner, start = (panel.col, panel.col_start) if on_col else (panel.row, panel.row_start)
    shape = list(x.shape)
    shape[dim] = panel.width
    return broadcast(x, (dim, start, panel.width), shape, owner, axis)


def prefetch(b: Tensor, cut: Cut) -> Pending:
    return Pending(b)


def ab(a: Tensor, b: Tensor, cut: Cut) -> Tensor:
    """``a[M, Pj], b[Pi, Qj] -> c[M, Qj]``: both operands' panels are broadcast."""
    panels = _panels(cut)
    c = a.new_zeros(a.shape[0], b.shape[1])
    moving = _send(a, 1, panels[0], cut.col, True), _send(b, 0, panels[0], cut.row, False)
    for following in [*panels[1:], None]:
        a_panel, b_panel = moving[0].wait(), moving[1].wait()
        if following is not None:
            moving = _send(a, 1, following, cut.col, True), _send(b, 0, following, cut.row, False)
        c = torch.addmm(c, a_panel, b_panel)
    return c


def abt(c: Tensor, b: Tensor, cut: Cut) -> Tensor:
    """``c[M, Qj], b[Pi, Qj] -> a[M, Pj]``: ``b``'s panels are broadcast, ``a``'s reduced."""
    panels = _panels(cut)
    moving = _send(b, 0, panels[0], cut.row, False)
    parts: list[tuple[_Panel, Pending]] = []
    for panel, following in zip(panels, [*panels[1:], None], strict=True):
        b_panel = moving.wait()
        if following is not None:
            moving = _send(b, 0, following, cut.row, False)
        parts.append((panel, reduce(c @ b_panel.t(), panel.col, cut.col)))
    totals = [(panel, part.wait()) for panel, part in parts]
    mine = [total for panel, total in totals if panel.col == cut.col.index]
    return torch.cat(mine, 1) if mine else c.new_zeros(c.shape[0], 0)


def atb(a: Tensor, c: Tensor, cut: Cut) -> Pending:
    """``a[M, Pj], c[M, Qj] -> b[Pi, Qj]``: ``a``'s panels are broadcast, ``b``'s reduced."""
    panels = _panels(cut)
    moving = _send(a, 1, panels[0], cut.col, True)
    parts: list[tuple[_Panel, Pending]] = []
    for panel, following in zip(panels, [*panels[1:], None], strict=True):
        a_panel = moving.wait()
        if following is not None:
            moving = _send(a, 1, following, cut.col, True)
        parts.append((panel, reduce(a_panel.t() @ c, panel.row, cut.row)))
    totals = [(panel, part.wait()) for panel, part in parts]
    mine = [total for panel, total in totals if panel.row == cut.row.index]
    return Pending(torch.cat(mine, 0) if mine else c.new_zeros(0, c.shape[1]))
