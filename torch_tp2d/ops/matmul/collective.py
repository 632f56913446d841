"""``collective``: all-gather the operands, multiply once, reduce-scatter the partial sums.

The simplest schedule, with the fewest and largest messages: on any grid, weights are gathered along
``tp_row`` and their gradients reduce-scattered along it. Transfers along ``tp_col`` are
redistributions around the product.
"""

from __future__ import annotations

from torch import Tensor

from ...comm import Pending, all_gather, all_reduce, reduce_scatter
from .cut import Cut
from .products import backward, forward

__all__ = ["SQUARE", "WHOLE", "ab", "abt", "atb", "atb_sum", "backward", "forward", "prefetch"]

WHOLE = True
SQUARE = False


def prefetch(b: Tensor, cut: Cut) -> Pending:
    """``b[Pi, Qj] -> b[P, Qj]``."""
    return Pending(b) if cut.replicated else all_gather(b, 0, cut.p_row, cut.row)


def ab(a: Tensor, b: Tensor, cut: Cut) -> Tensor:
    """``a[M, P], b[P, Qj] -> c[M, Qj]``."""
    return a @ b


def abt(c: Tensor, b: Tensor, cut: Cut) -> Tensor:
    """``c[M, Qj], b[P, Qj] -> a[M, P]``, a partial sum along ``tp_col``."""
    return c @ b.t()


def atb(a: Tensor, c: Tensor, cut: Cut) -> Pending:
    """``a[M, P], c[M, Qj] -> b[Pi, Qj]``, summed over the mesh rows."""
    return atb_sum(a.t() @ c, cut)


def atb_sum(partial: Tensor, cut: Cut) -> Pending:
    """Sum the mesh rows' partial gradients ``b[P, Qj]`` of a weight."""
    if cut.replicated:
        return all_reduce(partial, cut.row)
    return reduce_scatter(partial, 0, cut.p_row, cut.row)
