"""``ring`` in a graph that ``torch.compile`` traces, which has plain tensors only.

There a Linear and the transfer beside it are one autograd node, and what the node starts it awaits.
The users of one gathered input still share one gather, beside which the first of them is
multiplied, and one scatter of its gradient. A weight is gathered when its module runs.

The order in which a node does things is that of the graph. Inductor looks for one that takes less
memory, and transfers that wait for nothing beside them do:
``torch.compile(options={"reorder_for_peak_memory": False})`` keeps it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...comm import Pending, all_reduce
from ...runtime.context import Context
from ...runtime.deferred import Transfer
from . import collective
from .ring import Shards, ab_arriving, abt_leaving, atb_arriving, gather

if TYPE_CHECKING:
    from . import LinearOp

__all__ = ["Shared", "leaving"]


class Shared:
    """An input gathered along an axis: whoever takes it first gathers it.

    Args:
        shard: this rank's, whose gradient is the sum of all shares.
    """

    def __init__(self, shard: Tensor, shards: Shards, context: Context) -> None:
        self.shard, self.shards, self.context = shard, shards, context
        self.whole: Tensor | None = None
        dim, sizes, _ = shards
        self.shape = torch.Size([*shard.shape[:dim], sum(sizes), *shard.shape[dim + 1 :]])

    def value(self) -> Tensor:
        """The whole."""
        if self.whole is None:
            whole = Transfer(self.shard, *self.shards).value()
            self.whole = gather(self.shard, self.shards, self.context, whole)
        return self.whole

    def to(self, dtype: torch.dtype) -> Shared:
        """Itself, in a dtype that is then everybody's: they are under the same autocast."""
        self.shard = self.shard.to(dtype)
        self.whole = None if self.whole is None else self.whole.to(dtype)
        return self

    def linear(self, weight: Tensor, bias: Tensor | None, op: LinearOp) -> Tensor:
        """``x W^T + bias`` of the input ``x`` as it comes, from which on the whole is there."""
        y, self.whole = _Traced.apply(self.shard, weight, bias, op, self.shards)
        return y


class _Traced(torch.autograd.Function):
    """A Linear and the transfer beside it in one node, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, op: LinearOp, shards: Shards
    ) -> tuple[Tensor, ...]:
        moving = collective.prefetch(op.as_b(weight), op.cut)
        if op.gathers_input:
            arriving = Transfer(x, *shards)
            b = moving.wait()
            y, _ = ab_arriving(arriving, b, bias)
            x = arriving.value()
        else:
            b = moving.wait()
            y = abt_leaving([(x, b)], shards, op.own_bias(bias, b.shape[0])).wait()
        ctx.op, ctx.shards, ctx.has_bias = op, shards, bias is not None
        ctx.save_for_backward(x, b if op.keep_weight else weight)
        return (y, x) if op.gathers_input else (y,)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        op: LinearOp = ctx.op
        x, saved = ctx.saved_tensors
        need_x, need_weight, need_bias, *_ = ctx.needs_input_grad
        grad, *others = grads
        moving = Pending(saved)
        arriving = None if op.gathers_input else Transfer(grad, *ctx.shards)
        if need_x and not op.keep_weight:
            moving = collective.prefetch(op.as_b(saved), op.cut)
        summing = reducing = weight_grad = None
        # What is on its way beside the weight's gradient is this node's own transfer, and beside
        # that gradient's is the other product.
        if arriving is not None:
            partial = atb_arriving(arriving, x) if need_weight else None
            grad = arriving.value()
        else:
            if need_x:
                summing = abt_leaving([(grad, moving.wait())], ctx.shards, others=others[0])
            partial = x.flatten(0, -2).t() @ grad.flatten(0, -2) if need_weight else None
        if partial is not None:
            weight_grad = collective.atb_sum(partial, op.cut)
        if ctx.has_bias and need_bias:
            mine = grad if op.bias_columns is None else grad[..., op.bias_columns]
            reducing = all_reduce(mine.flatten(0, -2).sum(0), op.cut.row)
        dx = dw = db = None
        if summing is not None:
            dx = summing.wait()
        elif need_x:
            dx = grad @ moving.wait()
        # Waited for here: a gradient still under way breaks compile and may be read too early.
        if weight_grad is not None:
            dw = op.as_b(weight_grad.wait()).contiguous()
        if reducing is not None:
            db = reducing.wait()
        return dx, dw, db, None, None


def leaving(x: Tensor, weight: Tensor, bias: Tensor | None, op: LinearOp, shards: Shards) -> Tensor:
    """``x W^T`` summed over ``tp_col`` and cut as ``shards`` say."""
    (y,) = _Traced.apply(x, weight, bias, op, shards)
    return y
