"""``pipelined`` in a graph that ``torch.compile`` traces, which has plain tensors only.

There a Linear and the transfer beside it are one autograd node, which awaits every transfer that it
starts. The Linears that take one gathered input still have one gather, which overlaps with the
product of the first, and one reduce-scatter of its gradient. A weight is gathered when its module
runs.

The order of operations in a node becomes that of the graph. Inductor looks for an order that uses
less memory, and transfers that overlap with nothing do. With the options that
:mod:`torch_tp2d.integrations.inductor` gives it keeps the order, but starts weights' gathers
earlier and awaits sums later.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...comm import Pending
from ...runtime.deferred import Transfer
from . import products
from .call import Call, Forward, Gradients, Needs
from .rounds import ab_arriving, abt_leaving, atb_arriving

__all__ = ["backward", "forward"]


def forward(call: Call, needs: Needs, x: Tensor, weight: Tensor, bias: Tensor | None) -> Forward:
    op, shards = call.op, call.shards
    if shards is None:
        return products.forward(call, needs, x, weight, bias)
    moving = call.gather(weight)
    outputs: tuple[Tensor, ...]
    if op.gathers_input:
        arriving = Transfer(x, *shards)
        b = moving.wait()
        y, _ = ab_arriving(arriving, b, bias)
        x = arriving.value()
        outputs = y, x
    else:
        b = moving.wait()
        outputs = (abt_leaving([(x, b)], shards, op.own_bias(bias, b.shape[0])).wait(),)
    return Forward(outputs, (x, b if op.keep_weight else weight), bias is not None)


def backward(
    call: Call, needs: Needs, state: Any, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]
) -> Gradients:
    op, shards = call.op, call.shards
    if shards is None:
        return products.backward(call, needs, state, saved, grads)
    x, weight = saved
    grad, *others = grads
    moving = Pending(weight)
    arriving = None if op.gathers_input else Transfer(grad, *shards)
    if needs.x and not op.keep_weight:
        moving = call.gather(weight)
    summing = reducing = weight_grad = None
    # This node's own transfer overlaps with the product of the weight's gradient, and the reduction
    # of that gradient with the other product.
    dx = dw = db = None
    if arriving is not None and arriving.waits_for_product and needs.x:
        dx, partial = ab_arriving(arriving, moving.wait(), also=x if needs.weight else None)
        grad = arriving.value()
    elif arriving is not None:
        partial = atb_arriving(arriving, x) if needs.weight else None
        grad = arriving.value()
    else:
        if needs.x:
            summing = abt_leaving([(grad, moving.wait())], shards, others=others[0])
        partial = x.flatten(0, -2).t() @ grad.flatten(0, -2) if needs.weight else None
    if partial is not None:
        weight_grad = op.sum_over_rows(partial)
    if state and needs.bias:
        mine = grad if op.bias_columns is None else grad[..., op.bias_columns]
        reducing = op.sum_of_bias(mine.flatten(0, -2).sum(0))
    if summing is not None:
        dx = summing.wait()
    elif needs.x and dx is None:
        dx = grad @ moving.wait()
    # Awaited here: a gradient still under way breaks torch.compile and may be read too early.
    if weight_grad is not None:
        dw = op.weight_grad(weight_grad.wait(), grad.dtype)
    if reducing is not None:
        db = reducing.wait().to(grad.dtype)
    return dx, dw, db
