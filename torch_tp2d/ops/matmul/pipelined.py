"""``pipelined``: ``collective`` in rounds, each computed while the next one is transferred.

An operand gathered along ``tp_col`` is multiplied piece by piece as it arrives, and a result
reduced along it is sent piece by piece as it is computed, on any grid, in forward and backward; a
forward that gathers has a backward that reduces, and vice versa. A weight is gathered before it is
needed (:mod:`torch_tp2d.runtime.prefetch`). Its gradient is computed during the transfer of the
input's gradient, and reduced when no other transfer is under way
(:mod:`torch_tp2d.runtime.reductions`).

For ``torch.compile`` see :mod:`torch_tp2d.ops.matmul.traced`. The weight is transferred as by
``collective``; only the order of computation is this module's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._once import once_differentiable
from ..._torch_compat.tensors import hooked_in_backward
from ..._tracing import in_graph
from ...comm import Pending
from ...runtime.deferred import Again, Gathering, LazyResult, Products, Transfer, undeferred
from ...runtime.reductions import PendingReduction, backward_of
from ...runtime.regather import WeightRegather
from . import traced
from .call import Call, Forward, Gradients, Needs
from .collective import SQUARE, WHOLE, ab, abt, atb, atb_sum, prefetch
from .rounds import ab_arriving, abt_leaving

__all__ = [
    "SQUARE",
    "WHOLE",
    "ab",
    "abt",
    "atb",
    "atb_sum",
    "backward",
    "forward",
    "takes_deferred_grad",
    "prefetch",
]


class _DeferredGrad(torch.autograd.Function):
    """The identity on a parameter's operand, with a gradient that may be a :class:`Deferred`.

    It is a node of its own so that backward comes to it after the more urgent transfers have
    started: as it is made before the module's input is gathered, it runs after that gather's
    backward.
    """

    @staticmethod
    def forward(ctx: Any, shard: Tensor) -> Tensor:
        return shard.view_as(shard)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return undeferred(grads[0])


def takes_deferred_grad(shard: Tensor) -> Tensor:
    """Let the gradient of ``shard``, made from a parameter's shard, be a :class:`Deferred`."""
    return _DeferredGrad.apply(shard) if torch.is_grad_enabled() and shard.requires_grad else shard


class _State(NamedTuple):
    """What forward passes to backward beside the saved tensors."""

    weight_shape: torch.Size
    has_bias: bool
    arriving: bool
    """Whether the input was a :class:`Gathering`, which takes its gradient unmultiplied."""
    again: Again | None
    """Repeats the gather of the input, if only its shard was kept."""
    regather: WeightRegather | None
    """Repeats the gather of the weight, if only its shard was kept."""


def forward(call: Call, needs: Needs, x: Tensor, weight: Tensor, bias: Tensor | None) -> Forward:
    if in_graph():
        return traced.forward(call, needs, x, weight, bias)
    op, shards = call.op, call.shards
    moving = call.gather(weight) if call.moving is None else call.moving
    b = moving.wait()
    if any(needs):
        call.keep_weight(b)
    if op.gathers_input:
        y, _ = ab_arriving(x.transfer if isinstance(x, Gathering) else x, b, bias)
    else:
        own = op.own_bias(bias, b.shape[0])
        y = F.linear(x, b, own) if shards is None else abt_leaving([(x, b)], shards, own).wait()
    kept, again, regather = x, None, None
    if isinstance(x, Gathering):
        if op.regather_input and x.transfer.shard is not None:
            # The gathered input is freed once the user's code no longer refers to it.
            kept, again = x.transfer.shard, x.transfer.again
        else:
            x.transfer.shard = None
    if not op.keep_weight and needs.x:
        gather = call.without_gather.gather
        regather = WeightRegather(call.module, weight, gather, call.known_context)
    state = _State(weight.shape, bias is not None, isinstance(x, Gathering), again, regather)
    return Forward((y,), (kept, b if op.keep_weight else weight), state)


def _keep_for_last(call: Call) -> Callable[[Tensor], Pending]:
    def keep(part: Tensor) -> Pending:
        call.keep_gradient(part)
        return Pending(part)

    return keep


def backward(
    call: Call, needs: Needs, state: Any, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]
) -> Gradients:
    if not isinstance(state, _State):
        return traced.backward(call, needs, state, saved, grads)
    op, shards = call.op, call.shards
    running = backward_of(call.known_context)
    x, weight = saved
    grad = undeferred(grads[0])
    if state.again is not None and needs.weight:
        x = Gathering(state.again.transfer(x))
    regather = state.regather
    moving = regather.take() if regather is not None and needs.x else Pending(weight)
    partial: Tensor | None = None
    dx = dw = db = None
    arriving = None if shards is None else Transfer(grad, *shards)
    if regather is not None:
        regather.start_those_before(running)
    # Without columns only sums of weights travel, so each leaves before anything else is computed.
    alone = op.cut.col.size == 1
    if needs.x and not op.gathers_input and not alone:
        # Each arriving piece of the gradient is an operand of both products.
        dx, partial = ab_arriving(arriving or grad, moving.wait(), also=x if needs.weight else None)
    if arriving is not None:
        grad = arriving.value()
    if state.has_bias and needs.bias:
        mine = grad if op.bias_columns is None else grad[..., op.bias_columns]
        total = mine.flatten(0, -2).sum(0)
        if op.cut.row.size == 1:
            db = total
        else:
            biases = PendingReduction(total, op.sum_of_bias, running)
            db = LazyResult(mine.shape[-1:], mine, lambda: biases.value().to(mine.dtype))
    if needs.weight:
        a, c = (x, grad) if op.gathers_input else (grad, x)

        def product() -> Tensor:
            return op.part_of_grad(undeferred(a).flatten(0, -2), c.flatten(0, -2))

        part = product if partial is None else partial
        kept = call.gradients_kept()
        if kept is not None and kept.holds:
            running.at_end.append(PendingReduction(part, _keep_for_last(call), running).send)
        else:

            def reduce(part: Tensor) -> Pending:
                whole = part if kept is None else call.with_kept(kept, part)
                return op.sum_over_rows(whole)

            weights = PendingReduction(part, reduce, running)

            def summed() -> Tensor:
                return op.weight_grad(weights.value(), grad.dtype)

            dw = LazyResult(state.weight_shape, grad, summed)
    if alone:
        running.compute_reductions()
        running.start_reductions()
    if needs.x and dx is None:
        b = moving.wait()
        # A hook that steps the weight runs before the gradient of a shared input is complete.
        if state.arriving and not hooked_in_backward(call.own):
            dx = Products(((grad, b),), call.guards_of(b))
        else:
            dx = grad @ (b.t() if op.gathers_input else b)
    if not isinstance(dx, Products):
        # Next comes the backward of user code, such as attention, which transfers nothing.
        running.start_reductions()
    return dx, dw, db
