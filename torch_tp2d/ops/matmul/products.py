"""A Linear made of an algorithm's three products, one after the other.

Forward and backward of ``collective``, ``summa``, ``bmr`` and ``cannon``, each of which says how a
product is computed and what moves for it (:class:`~torch_tp2d.ops.matmul.cut.Algorithm`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...comm import all_reduce
from ...runtime.context import selective_region
from ...runtime.deferred import undeferred
from .call import Call, Forward, Gradients, LinearOp, Needs

__all__ = ["backward", "forward"]


def forward(call: Call, needs: Needs, x: Tensor, weight: Tensor, bias: Tensor | None) -> Forward:
    op = call.op
    algorithm, cut = op.algorithm, op.cut
    moving = call.gather(weight)
    # A view of what is still on its way would be given a copy.
    x = undeferred(x)
    rows = x.flatten(0, -2)
    b = moving.wait()
    if algorithm.WHOLE and any(needs):
        call.keep_weight(b)
    y = algorithm.ab(rows, b, cut) if op.gathers_input else algorithm.abt(rows, b, cut)
    if bias is not None:
        y = _with_bias(y, bias, op)
    y = y.view(*x.shape[:-1], y.shape[-1])
    return Forward((y,), (x, b if op.keep_weight else weight), bias is not None)


def _with_bias(y: Tensor, bias: Tensor, op: LinearOp) -> Tensor:
    columns = op.bias_columns
    if torch.compiler.is_compiling() or selective_region() is not None:
        # Selective checkpointing may keep the product.
        own = op.own_bias(bias, y.shape[-1])
        return y if own is None else y + own
    (y if columns is None else y[:, columns]).add_(bias)
    return y


def backward(
    call: Call, needs: Needs, state: Any, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]
) -> Gradients:
    op = call.op
    algorithm, cut = op.algorithm, op.cut
    x, weight = saved
    rows, grad = x.flatten(0, -2), undeferred(grads[0]).flatten(0, -2)

    # The weight travels while its gradient is computed, and its gradient while the input's is.
    moving = None
    if needs.x and not op.keep_weight:
        moving = call.gather(weight)
    weight_grad = bias_grad = None
    if needs.weight:
        a, c = (rows, grad) if op.gathers_input else (grad, rows)
        kept = call.gradients_kept() if algorithm.WHOLE else None
        if kept is None:
            weight_grad = algorithm.atb(a, c, cut)
        elif kept.holds:
            call.keep_gradient(a.t() @ c)
        else:
            weight_grad = op.sum_over_rows(kept.with_kept(call.module, a.t() @ c))
    if state and needs.bias:
        columns = op.bias_columns
        mine = grad if columns is None else grad[:, columns]
        bias_grad = all_reduce(mine.sum(0), cut.row)
    dx = dw = db = None
    if needs.x:
        b = weight if moving is None else moving.wait()
        dx = algorithm.abt(grad, b, cut) if op.gathers_input else algorithm.ab(grad, b, cut)
        dx = dx.view(*x.shape[:-1], dx.shape[-1])
    # Waited for here: a gradient still under way breaks compile and may be read too early.
    if weight_grad is not None:
        dw = op.as_b(weight_grad.wait()).contiguous()
    if bias_grad is not None:
        db = bias_grad.wait()
    return dx, dw, db
