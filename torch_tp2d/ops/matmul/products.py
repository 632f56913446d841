"""A Linear computed by an algorithm's three products, one after the other.

This is the forward and backward of ``collective``, ``summa``, ``bmr`` and ``cannon``, which define
the products and their transfers (:class:`~torch_tp2d.ops.matmul.cut.Algorithm`).
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...runtime.deferred import undeferred
from .call import Call, Forward, Gradients, Needs

__all__ = ["backward", "forward"]


def forward(call: Call, needs: Needs, x: Tensor, weight: Tensor, bias: Tensor | None) -> Forward:
    op = call.op
    algorithm, cut = op.algorithm, op.cut
    moving = call.gather(weight)
    # Before the view below, for which a Gathering would make a copy.
    x = undeferred(x)
    rows = x.flatten(0, -2)
    b = moving.wait()
    if algorithm.WHOLE:
        if any(needs):
            call.keep_weight(b)
        # One kernel for product and bias, which rounds only once.
        weight_of_rows = b.t() if op.gathers_input else b
        y = F.linear(rows, weight_of_rows, op.own_bias(bias, weight_of_rows.shape[0]))
    else:
        y = algorithm.ab(rows, b, cut) if op.gathers_input else algorithm.abt(rows, b, cut)
        # Not in place: selective checkpointing may save the product.
        y = y if bias is None else y + bias
    y = y.view(*x.shape[:-1], y.shape[-1])
    return Forward((y,), (x, b if op.keep_weight else weight), bias is not None)


def backward(
    call: Call, needs: Needs, state: Any, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]
) -> Gradients:
    op = call.op
    algorithm, cut = op.algorithm, op.cut
    x, weight = saved
    rows, grad = x.flatten(0, -2), undeferred(grads[0]).flatten(0, -2)

    # The weight is transferred while its gradient is computed, and that gradient while the input's
    # is computed.
    moving = None
    if needs.x and not op.keep_weight:
        moving = call.gather(weight)
    weight_grad = bias_grad = dx = dw = db = None
    if needs.weight:
        a, c = (rows, grad) if op.gathers_input else (grad, rows)
        kept = call.gradients_kept() if algorithm.WHOLE else None
        if not algorithm.WHOLE:
            weight_grad = algorithm.atb(a, c, cut)
        elif cut.row.size == 1:
            # Nothing is summed, nor kept for a sum.
            dw = c.t() @ a if op.transposes else a.t() @ c
        elif kept is None:
            weight_grad = op.sum_over_rows(a.t() @ c)
        elif kept.holds:
            call.keep_gradient(a.t() @ c)
        else:
            weight_grad = op.sum_over_rows(call.with_kept(kept, a.t() @ c))
    if state and needs.bias:
        columns = op.bias_columns
        mine = grad if columns is None else grad[:, columns]
        bias_grad = op.sum_of_bias(mine.sum(0))
    if needs.x:
        b = weight if moving is None else moving.wait()
        dx = algorithm.abt(grad, b, cut) if op.gathers_input else algorithm.ab(grad, b, cut)
        dx = dx.view(*x.shape[:-1], dx.shape[-1])
    # Awaited here: a gradient still under way breaks torch.compile and may be read too early.
    if weight_grad is not None:
        dw = op.weight_grad(weight_grad.wait(), grad.dtype)
    if bias_grad is not None:
        db = bias_grad.wait().to(grad.dtype)
    return dx, dw, db
