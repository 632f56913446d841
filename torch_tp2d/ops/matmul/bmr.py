"""``bmr``: broadcast, multiply, roll. Algorithm 1 of TP2D (doi 10.11992/tis.202411023).

On an n x n grid, ``C = A B`` in n steps. In step t, with k = (i + t) mod n:

1. *broadcast* ``A[i, k]`` along the grid row,
2. *multiply* it with the block of B held now, ``B[k, j]``, and add to ``C[i, j]``,
3. *roll* B one place up its grid column, so that ``B[k + 1, j]`` is held next.

One block beside the operands is in flight at a time: the roll of a step starts before its
multiplication. Backward is the same loop with the roles exchanged: ``dA = dC B^T`` reduces its
products where forward broadcasts, ``dB = A^T dC`` rolls its sums instead of an operand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...comm import Pending, broadcast, reduce, shift
from .cut import Cut
from .products import backward, forward

__all__ = ["SQUARE", "WHOLE", "ab", "abt", "atb", "backward", "forward", "prefetch"]

WHOLE = False
SQUARE = True


def prefetch(b: Tensor, cut: Cut) -> Pending:
    return Pending(b)


def ab(a: Tensor, b: Tensor, cut: Cut) -> Tensor:
    """``a[M, Pj], b[Pi, Qj] -> c[M, Qj]``."""
    n, i = cut.row.size, cut.row.index
    c = a.new_zeros(a.shape[0], b.shape[1])
    for t in range(n):
        k = (i + t) % n
        rolling = _roll(b, t, cut)
        a_k = broadcast(a, None, (a.shape[0], cut.p_col[k]), k, cut.col).wait()
        c = torch.addmm(c, a_k, b)
        b = rolling.wait()
    return c


def abt(c: Tensor, b: Tensor, cut: Cut) -> Tensor:
    """``c[M, Qj], b[Pi, Qj] -> a[M, Pj]``."""
    n, i, j = cut.row.size, cut.row.index, cut.col.index
    a = c.new_zeros(c.shape[0], cut.p_col[j])
    for t in range(n):
        k = (i + t) % n
        rolling = _roll(b, t, cut)
        total = reduce(c @ b.t(), k, cut.col).wait()
        if k == j:
            a = total
        b = rolling.wait()
    return a


def atb(a: Tensor, c: Tensor, cut: Cut) -> Pending:
    """``a[M, Pj], c[M, Qj] -> b[Pi, Qj]``: the sum of block k rolls through all mesh rows."""
    n, i = cut.row.size, cut.row.index
    rolling: Pending | None = None
    for t in range(n):
        k = (i + t) % n
        a_k = broadcast(a, None, (a.shape[0], cut.p_col[k]), k, cut.col).wait()
        part = a_k.t() @ c
        total = part if rolling is None else part + rolling.wait()
        rolling = shift(total, 1, cut.row, 0, cut.p_row, held=k)
    assert rolling is not None
    return rolling


def _roll(b: Tensor, t: int, cut: Cut) -> Pending:
    """Start receiving the next block of ``b``; after the last step there is none."""
    n, i = cut.row.size, cut.row.index
    if t == n - 1:
        return Pending(b)
    return shift(b, 1, cut.row, 0, cut.p_row, held=(i + t) % n)
