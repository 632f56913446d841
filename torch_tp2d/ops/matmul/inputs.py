"""Inputs that are gathered along an axis once for all the Linears that take them.

In eager mode the gather is a node of its own, whose value is still under way and whose gradient may
be products not yet multiplied. In a traced graph, which has plain tensors only, the first Linear
that takes the input gathers it (:class:`Shared`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..._once import once_differentiable
from ..._tracing import apply_node
from ...comm import reduce_scatter
from ...runtime.context import Context
from ...runtime.deferred import Gathering, Products, Transfer, undeferred
from ...runtime.reductions import backward_of
from .call import Call, Shards, apply
from .rounds import abt_leaving

__all__ = ["Shared", "gather"]


class _Gather(torch.autograd.Function):
    """Gathers an input whose gradient is partial and is summed over the axis."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shards: Shards, context: Context | None, whole: Tensor | None
    ) -> Tensor:
        ctx.shards, ctx.context, ctx.again = shards, context, None
        if isinstance(whole, Tensor) and not isinstance(whole, Gathering):
            return whole.view_as(whole)
        transfer = Transfer(x, *shards) if whole is None else whole.transfer
        ctx.again = transfer.again
        return Gathering(transfer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        if isinstance(grad, Products):
            leaving = abt_leaving(grad.terms, ctx.shards)
        else:
            leaving = reduce_scatter(undeferred(grad), *ctx.shards)
        if ctx.context is not None:
            backward = backward_of(ctx.context)
            backward.start_reductions()
            backward.compute_reductions()
            if ctx.again is not None:
                ctx.again.done()
        return leaving.wait().contiguous(), None, None, None


def gather(
    x: Tensor, shards: Shards, context: Context | None, whole: Tensor | None = None
) -> Tensor:
    """``x`` gathered along an axis, with the transfer still under way.

    Its gradient is partial and is reduced by one reduce-scatter.

    Args:
        context: whose pending gradients are computed and sent meanwhile in backward; None in a
            traced graph.
        whole: the gathered tensor, or the :class:`Gathering` that brings it, if there is one.
    """
    return apply_node(_Gather, x, shards, context, whole)


class Shared:
    """An input to be gathered along an axis, by the first module that takes it.

    Args:
        shard: this rank's shard, whose gradient is the sum of all partial gradients.
    """

    def __init__(self, shard: Tensor, shards: Shards) -> None:
        self.shard, self.shards = shard, shards
        self.whole: Tensor | None = None
        dim, sizes, _ = shards
        self.shape = torch.Size([*shard.shape[:dim], sum(sizes), *shard.shape[dim + 1 :]])

    def value(self) -> Tensor:
        """The gathered input."""
        if self.whole is None:
            whole = Transfer(self.shard, *self.shards).value()
            self.whole = gather(self.shard, self.shards, None, whole)
        return self.whole

    def linear(self, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        """``x W^T + bias`` of the input ``x``; the first call gathers ``x`` beside its product."""
        if self.whole is not None:
            (y,) = apply(self.whole, weight, bias, call)
            return y
        y, self.whole = apply(self.shard, weight, bias, replace(call, shards=self.shards))
        return y
