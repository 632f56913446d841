"""The weight-stationary product: the weight stays, tokens are gathered and partial sums reduced.

Every rank multiplies all tokens, in the features of its own block of the weight, by that block. The
products are partial sums along the axis that shards the input features: ``tp_row`` for Colwise2D
and Block2DParallel, ``tp_col`` for Rowwise2D. Gathering the tokens and summing the products are
redistributions before and after, so that only the bias's gradient is communicated here, and the
amount transferred is proportional to the tokens alone.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...comm import Pending
from ...runtime.deferred import undeferred
from .call import Call, Forward, Gradients, LinearOp, Needs

__all__ = ["backward", "forward"]

WHOLE = True
SQUARE = False


def bias_part(op: LinearOp) -> tuple[int, int, int]:
    """The part of the bias ``[Nj]`` that this rank adds: its start in the result, its start in the
    bias, its length.

    The results are summed along an axis, so only one of its ranks may add each element: the first
    mesh row for results ``[M, Nj]``; for ``[M, Ni]``, the mesh column that holds the element.
    """
    row, col = op.cut.row, op.cut.col
    of_col = col.split(op.out_features)
    if op.gathers_input:
        return 0, 0, of_col[col.index] if row.index == 0 else 0
    of_row = row.split(op.out_features)
    in_row, in_col = sum(of_row[: row.index]), sum(of_col[: col.index])
    start = max(in_row, in_col)
    end = min(in_row + of_row[row.index], in_col + of_col[col.index])
    if start >= end:
        return 0, 0, 0
    return start - in_row, start - in_col, end - start


def forward(call: Call, needs: Needs, x: Tensor, weight: Tensor, bias: Tensor | None) -> Forward:
    """Multiply all tokens by this rank's block of the weight.

    Let M be the number of all tokens, K and N those of the input and output features.

    ==================  ==============  ===============  =====================================
    ``gathers_input``   x of (i, j)     weight           result
    ==================  ==============  ===============  =====================================
    yes                 ``[M, Ki]``     ``W[Nj, Ki]``    ``[M, Nj]``, partial along ``tp_row``
    no                  ``[M, Kj]``     ``W[Ni, Kj]``    ``[M, Ni]``, partial along ``tp_col``
    ==================  ==============  ===============  =====================================

    The bias is ``[Nj]``. The gradient of the result is replicated on the ranks that it is summed
    over. That of ``x`` is a partial sum along the other axis, reduced where ``x`` was gathered.
    """
    op = call.op
    x = undeferred(x)
    y = x.flatten(0, -2) @ (weight if op.transposed else weight.t())
    if bias is not None:
        at, start, length = bias_part(op)
        # Not in place: selective checkpointing may save products.
        y = y + F.pad(bias[start : start + length], (at, y.shape[-1] - at - length))
    return Forward((y.view(*x.shape[:-1], y.shape[-1]),), (x, weight), bias is not None)


def backward(
    call: Call, needs: Needs, state: Any, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]
) -> Gradients:
    op = call.op
    x, weight = saved
    rows, grad = x.flatten(0, -2), undeferred(grads[0]).flatten(0, -2)
    bias_grad = _bias_grad(grad.sum(0), op) if state and needs.bias else None
    dx = dw = db = None
    # Every rank has all tokens, so the weight's gradient is not partial and needs no reduction.
    if needs.weight:
        dw = rows.t() @ grad if op.transposed else grad.t() @ rows
    if needs.x:
        dx = grad @ (weight.t() if op.transposed else weight)
        dx = dx.view(*x.shape[:-1], dx.shape[-1])
    if bias_grad is not None:
        db = bias_grad.wait().to(grad.dtype)
    return dx, dw, db


def _bias_grad(total: Tensor, op: LinearOp) -> Pending:
    """The gradient of the bias ``[Nj]`` from the result's gradient summed over the tokens."""
    if op.gathers_input:
        return Pending(total)
    at, start, length = bias_part(op)
    mine = total.new_zeros(op.cut.col.split(op.out_features)[op.cut.col.index])
    mine[start : start + length] = total[at : at + length]
    return op.sum_of_bias(mine)
