"""The weight-stationary product: the weight stays, tokens come to it and partial sums leave it.

Every rank multiplies all the tokens, in the features of its own block of the weight, by that
block. The products add up along the axis that splits the features in: ``tp_row`` for Colwise2D and
Block2DParallel, ``tp_col`` for Rowwise2D. What gathers the tokens and sums the products is a change
of layout on either side (:mod:`torch_tp2d.edges`), so nothing here communicates but the bias's
gradient, and what crosses the wire is in proportion to the tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...comm import Axis, Pending, all_reduce

__all__ = ["StationaryOp", "stationary2d"]


@dataclass(frozen=True, eq=False)
class StationaryOp:
    """How one Linear is computed with its weight in place.

    Args:
        sums_over_row: the features in lie over ``tp_row`` and those out over ``tp_col``
            (Colwise2D, Block2DParallel); else the other way round (Rowwise2D).
        transposed: the module stores ``W^T`` (Hugging Face's Conv1D).
    """

    row: Axis
    col: Axis
    out_features: int
    sums_over_row: bool
    transposed: bool

    def bias_part(self) -> tuple[int, int, int]:
        """The part of the bias ``[Nj]`` that this rank adds: its start in the result, its start
        in the bias, its length.

        The results are summed along an axis, so one rank of it adds each element: the first row
        where they are ``[M, Nj]``; where they are ``[M, Ni]``, the column that holds the element.
        """
        col = self.col.split(self.out_features)
        if self.sums_over_row:
            return 0, 0, col[self.col.index] if self.row.index == 0 else 0
        row = self.row.split(self.out_features)
        in_row, in_col = sum(row[: self.row.index]), sum(col[: self.col.index])
        start = max(in_row, in_col)
        end = min(in_row + row[self.row.index], in_col + col[self.col.index])
        if start >= end:
            return 0, 0, 0
        return start - in_row, start - in_col, end - start


class _Stationary2D(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, op: StationaryOp
    ) -> Tensor:
        y = x.flatten(0, -2) @ (weight if op.transposed else weight.t())
        if bias is not None:
            at, start, length = op.bias_part()
            rest = y.shape[-1] - at - length
            # Not in place: selective checkpointing may keep products.
            y = y + F.pad(bias[start : start + length], (at, rest))
        ctx.op, ctx.has_bias = op, bias is not None
        ctx.save_for_backward(x, weight)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        op: StationaryOp = ctx.op
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        rows, grad = x.flatten(0, -2), grads[0].flatten(0, -2)

        bias_grad = None
        if ctx.has_bias and need_bias:
            bias_grad = _bias_grad(grad.sum(0), op)
        dx = dw = db = None
        # All the tokens are here, so the weight's gradient is whole: nothing is summed.
        if need_weight:
            dw = rows.t() @ grad if op.transposed else grad.t() @ rows
        if need_x:
            dx = grad @ (weight.t() if op.transposed else weight)
            dx = dx.view(*x.shape[:-1], dx.shape[-1])
        if bias_grad is not None:
            db = bias_grad.wait()
        return dx, dw, db, None


def _bias_grad(total: Tensor, op: StationaryOp) -> Pending:
    """The gradient of the bias ``[Nj]`` from that of the result, summed over the tokens."""
    if op.sums_over_row:
        return Pending(total)
    at, start, length = op.bias_part()
    mine = total.new_zeros(op.col.split(op.out_features)[op.col.index])
    mine[start : start + length] = total[at : at + length]
    return all_reduce(mine, op.row)


def stationary2d(x: Tensor, weight: Tensor, bias: Tensor | None, op: StationaryOp) -> Tensor:
    """``x W^T + bias`` on a grid, on local shards, of which the weight's does not move.

    Let M be all the tokens, K and N the features in and out.

    ==================  ==============  ===============  =====================================
    ``sums_over_row``   x of (i, j)     weight           result
    ==================  ==============  ===============  =====================================
    yes                 ``[M, Ki]``     ``W[Nj, Ki]``    ``[M, Nj]``, partial along ``tp_row``
    no                  ``[M, Kj]``     ``W[Ni, Kj]``    ``[M, Ni]``, partial along ``tp_col``
    ==================  ==============  ===============  =====================================

    The bias is ``[Nj]``. The gradient of the result is whole, on all ranks that it is summed over.
    That of ``x`` is a partial sum along the other axis, for whoever gathered ``x`` to reduce.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            return _Stationary2D.apply(x, weight, bias, op)
    return _Stationary2D.apply(x, weight, bias, op)
