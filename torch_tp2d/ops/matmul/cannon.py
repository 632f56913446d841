"""``cannon``: skew once, then roll both operands (Cannon, 1969), on an n x n grid.

Every step sends one block to a neighbour and broadcasts none, so messages are the smallest of all
algorithms. The operand that stays needs no skew: in step t rank (i, j) works on block
k = (i + j + t) mod n of the dim that the other two have in common.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...comm import Pending, shift
from .cut import Cut
from .products import backward, forward

__all__ = ["SQUARE", "WHOLE", "ab", "abt", "atb", "backward", "forward", "prefetch"]

WHOLE = False
SQUARE = True


def prefetch(b: Tensor, cut: Cut) -> Pending:
    return Pending(b)


def ab(a: Tensor, b: Tensor, cut: Cut) -> Tensor:
    """``a[M, Pj], b[Pi, Qj] -> c[M, Qj]``: ``a`` rolls along the row, ``b`` along the column."""
    n, i, j = cut.row.size, cut.row.index, cut.col.index
    a_moving = shift(a, i, cut.col, 1, cut.p_col)
    b_moving = shift(b, j, cut.row, 0, cut.p_row)
    c = a.new_zeros(a.shape[0], b.shape[1])
    for t in range(n):
        k = (i + j + t) % n
        a_now, b_now = a_moving.wait(), b_moving.wait()
        if t < n - 1:
            a_moving = shift(a_now, 1, cut.col, 1, cut.p_col, held=k)
            b_moving = shift(b_now, 1, cut.row, 0, cut.p_row, held=k)
        c = torch.addmm(c, a_now, b_now)
    return c


def abt(c: Tensor, b: Tensor, cut: Cut) -> Tensor:
    """``c[M, Qj], b[Pi, Qj] -> a[M, Pj]``: ``b`` rolls, and so do the sums."""
    n, i, j = cut.row.size, cut.row.index, cut.col.index
    b_moving = shift(b, j, cut.row, 0, cut.p_row)
    sums: Pending | None = None
    for t in range(n):
        k = (i + j + t) % n
        b_now = b_moving.wait()
        if t < n - 1:
            b_moving = shift(b_now, 1, cut.row, 0, cut.p_row, held=k)
        part = c @ b_now.t()
        total = part if sums is None else part + sums.wait()
        # After the last step the sum of block j is on the rank i - 1 places before.
        sums = shift(total, 1 if t < n - 1 else 1 - i, cut.col, 1, cut.p_col, held=k)
    assert sums is not None
    return sums.wait()


def atb(a: Tensor, c: Tensor, cut: Cut) -> Pending:
    """``a[M, Pj], c[M, Qj] -> b[Pi, Qj]``: ``a`` rolls, and so do the sums."""
    n, i, j = cut.row.size, cut.row.index, cut.col.index
    a_moving = shift(a, i, cut.col, 1, cut.p_col)
    sums: Pending | None = None
    for t in range(n):
        k = (i + j + t) % n
        a_now = a_moving.wait()
        if t < n - 1:
            a_moving = shift(a_now, 1, cut.col, 1, cut.p_col, held=k)
        part = a_now.t() @ c
        total = part if sums is None else part + sums.wait()
        # After the last step the sum of block i is on the rank j - 1 places before.
        sums = shift(total, 1 if t < n - 1 else 1 - j, cut.row, 0, cut.p_row, held=k)
    assert sums is not None
    return sums
