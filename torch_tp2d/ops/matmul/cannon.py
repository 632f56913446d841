"""``cannon``: skew once, then roll both operands (Cannon, 1969), on an n x n grid.

Every step moves one block to a neighbour and none is broadcast, so messages are the smallest of
all the algorithms. The operand that stays put needs no skew: rank (i, j) works in step t on the
block k = (i + j + t) mod n of the dim that the two others share.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...comm import Pending, shift
from .cut import Cut

WHOLE = False
SQUARE = True


def prefetch(b: Tensor, cut: Cut) -> Pending:
    return Pending(b)


def ab(a: Tensor, b: Tensor, cut: Cut) -> Tensor:
    """``a[M, Pj], b[Pi, Qj] -> c[M, Qj]``: ``a`` rolls along the row, ``b`` along the column."""
    n = cut.row.size
    rows, columns = a.shape[0], b.shape[1]
    k = (cut.row.index + cut.col.index) % n
    a_moving = shift(a, cut.row.index, (rows, cut.p_col[k]), cut.col)
    b_moving = shift(b, cut.col.index, (cut.p_row[k], columns), cut.row)
    c = a.new_zeros(rows, columns)
    for t in range(n):
        a_now, b_now = a_moving.wait(), b_moving.wait()
        k = (k + 1) % n
        if t < n - 1:
            a_moving = shift(a_now, 1, (rows, cut.p_col[k]), cut.col)
            b_moving = shift(b_now, 1, (cut.p_row[k], columns), cut.row)
        c = torch.addmm(c, a_now, b_now)
    return c


def abt(c: Tensor, b: Tensor, cut: Cut) -> Tensor:
    """``c[M, Qj], b[Pi, Qj] -> a[M, Pj]``: ``b`` rolls, and so do the sums."""
    n, i, j = cut.row.size, cut.row.index, cut.col.index
    rows, columns = c.shape[0], b.shape[1]
    k = (i + j) % n
    b_moving = shift(b, j, (cut.p_row[k], columns), cut.row)
    a_moving: Pending | None = None
    for t in range(n):
        b_now = b_moving.wait()
        following = (k + 1) % n
        if t < n - 1:
            b_moving = shift(b_now, 1, (cut.p_row[following], columns), cut.row)
        part = c @ b_now.t()
        total = part if a_moving is None else part + a_moving.wait()
        if t < n - 1:
            a_moving = shift(total, 1, (rows, cut.p_col[following]), cut.col)
        k = following
    # The last sum here is of block i + j - 1; block j is with the rank i - 1 places before.
    return shift(total, 1 - i, (rows, cut.p_col[j]), cut.col).wait()


def atb(a: Tensor, c: Tensor, cut: Cut) -> Pending:
    """``a[M, Pj], c[M, Qj] -> b[Pi, Qj]``: ``a`` rolls, and so do the sums."""
    n, i, j = cut.row.size, cut.row.index, cut.col.index
    rows, columns = a.shape[0], c.shape[1]
    k = (i + j) % n
    a_moving = shift(a, i, (rows, cut.p_col[k]), cut.col)
    b_moving: Pending | None = None
    for t in range(n):
        a_now = a_moving.wait()
        following = (k + 1) % n
        if t < n - 1:
            a_moving = shift(a_now, 1, (rows, cut.p_col[following]), cut.col)
        part = a_now.t() @ c
        total = part if b_moving is None else part + b_moving.wait()
        if t < n - 1:
            b_moving = shift(total, 1, (cut.p_row[following], columns), cut.row)
        k = following
    # The last sum here is of block i + j - 1; block i is with the rank j - 1 places before.
    return shift(total, 1 - j, (cut.p_row[i], columns), cut.row)
