"""The weight-stationary product: the weight stays, tokens come to it and partial sums leave it.

Every rank multiplies all the tokens, in the features of its own block of the weight, by that
block. The products add up along the axis that splits the features in: ``tp_row`` for Colwise2D and
Block2DParallel, ``tp_col`` for Rowwise2D. What gathers the tokens and sums the products is a change
of layout on either side, so nothing here communicates but the bias's gradient, and what crosses the
wire is in proportion to the tokens alone.
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

    The results are summed along an axis, so one rank of it adds each element: the first row where
    they are ``[M, Nj]``; where they are ``[M, Ni]``, the column that holds the element.
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
    """All the tokens times this rank's block.

    Let M be all the tokens, K and N the features in and out.

    ==================  ==============  ===============  =====================================
    ``gathers_input``   x of (i, j)     weight           result
    ==================  ==============  ===============  =====================================
    yes                 ``[M, Ki]``     ``W[Nj, Ki]``    ``[M, Nj]``, partial along ``tp_row``
    no                  ``[M, Kj]``     ``W[Ni, Kj]``    ``[M, Ni]``, partial along ``tp_col``
    ==================  ==============  ===============  =====================================

    The bias is ``[Nj]``. The gradient of the result is whole, on all ranks that it is summed over.
    That of ``x`` is a partial sum along the other axis, for whoever gathered ``x`` to reduce.
    """
    op = call.op
    x = undeferred(x)
    y = x.flatten(0, -2) @ (weight if op.transposed else weight.t())
    if bias is not None:
        at, start, length = bias_part(op)
        # Not in place: selective checkpointing may keep products.
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
    # All the tokens are here, so the weight's gradient is whole: nothing is summed.
    if needs.weight:
        dw = rows.t() @ grad if op.transposed else grad.t() @ rows
    if needs.x:
        dx = grad @ (weight.t() if op.transposed else weight)
        dx = dx.view(*x.shape[:-1], dx.shape[-1])
    if bias_grad is not None:
        db = bias_grad.wait().to(grad.dtype)
    return dx, dw, db


def _bias_grad(total: Tensor, op: LinearOp) -> Pending:
    """The gradient of the bias ``[Nj]`` from that of the result, summed over the tokens."""
    if op.gathers_input:
        return Pending(total)
    at, start, length = bias_part(op)
    mine = total.new_zeros(op.cut.col.split(op.out_features)[op.cut.col.index])
    mine[start : start + length] = total[at : at + length]
    return op.sum_of_bias(mine)
