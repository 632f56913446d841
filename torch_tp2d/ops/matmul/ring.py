"""``ring``: ``collective`` in rounds, each round's product computed while the next one travels.

What is gathered along ``tp_col`` is multiplied piece by piece as it comes, and what is reduced
there leaves piece by piece as it is computed, on any grid, forward and backward; backward is the
other kind of forward. A weight is gathered before it is needed
(:mod:`torch_tp2d.runtime.ahead`), and its gradient is multiplied while the input's gradient is on
its way, and reduced when nothing else is (:mod:`torch_tp2d.runtime.late`).

For ``torch.compile`` see :mod:`torch_tp2d.ops.matmul.traced`.

The products are ``collective``'s; what is this module's own is when they are computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...comm import (
    Axis,
    Pending,
    all_reduce,
    only_own,
    reduce_from_others,
    reduce_scatter,
    without_own,
)
from ...runtime.ahead import Regather
from ...runtime.context import Context, Watched
from ...runtime.deferred import (
    Assembly,
    Gathering,
    Later,
    Products,
    Transfer,
    rows_of,
    undeferred,
)
from ...runtime.late import Owed, backward_of
from . import collective
from .collective import SQUARE, WHOLE, ab, abt, atb, prefetch

if TYPE_CHECKING:
    from . import LinearOp

__all__ = [
    "SQUARE",
    "WHOLE",
    "Shards",
    "ab",
    "ab_arriving",
    "abt",
    "abt_leaving",
    "atb",
    "atb_arriving",
    "gather",
    "prefetch",
]


class Shards(NamedTuple):
    """How a tensor is split over an axis: by ``dim``, into shards ``sizes`` long."""

    dim: int
    sizes: Sequence[int]
    axis: Axis


class Around(NamedTuple):
    """What a Linear needs to know of the step that it is a part of.

    Args:
        module: the Linear.
        weight: its parameter.
        context: of its mesh.
        shards: how a result that is a partial sum leaves; None leaves it a partial sum.
    """

    module: Any
    weight: Watched
    context: Context
    shards: Shards | None


def ab_arriving(
    a: Tensor | Transfer, b: Tensor, bias: Tensor | None = None, also: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """``a[..., P] b[P, Q] + bias -> c[..., Q]``, in rounds if ``a`` is still being gathered.

    Args:
        also: another operand ``d[..., K]``, for ``a^T d -> [P, K]``, the second result.
    """
    if isinstance(a, Transfer) and not a.pieces:
        a = a.value()
    if isinstance(a, Tensor):
        flat = a.flatten(0, -2)
        c = flat @ b if bias is None else torch.addmm(bias, flat, b)
        second = None if also is None else flat.t() @ also.flatten(0, -2)
        return c.view(*a.shape[:-1], b.shape[1]), second
    out = Assembly([*a.whole.out.shape[:-1], b.shape[1]], a.dim, b)
    second = None if also is None else b.new_zeros(b.shape[0], also.shape[-1])
    for piece in a.arrivals():
        flat = piece.rows.flatten(0, -2)
        part = flat @ b if bias is None else torch.addmm(bias, flat, b)
        piece.put(part.view(*piece.rows.shape[:-1], b.shape[1]), out)
        if also is not None and second is not None:
            second.addmm_(flat.t(), piece.of(also))
    return out.value(), second


def atb_arriving(a: Transfer, c: Tensor) -> Tensor:
    """``a[..., P]^T c[..., Q] -> b[P, Q]``, in rounds: this row's share of it."""
    b = c.new_zeros(a.whole.out.shape[-1], c.shape[-1])
    for piece in a.arrivals():
        b.addmm_(piece.rows.flatten(0, -2).t(), piece.of(c))
    return b


def abt_leaving(
    terms: Sequence[tuple[Tensor, Tensor]],
    shards: Shards,
    bias: Tensor | None = None,
    others: Tensor | None = None,
) -> Pending:
    """Sum of ``c[..., Q] b[P, Q]^T`` over terms and ranks, ``-> a[..., P]`` by shards of a dim.

    Args:
        bias: ``[P]``, added to this rank's part of the sum.
        others: ``[..., P]``, this rank's sum of further terms.
    """
    dim, sizes, axis = shards
    c, b = terms[0]
    rest, features = [n for d, n in enumerate(c.shape[:-1]) if d != dim], b.shape[0]
    mine = [*c.shape[:dim], sizes[axis.index], *c.shape[dim + 1 : -1], features]
    offsets = [sum(sizes[:rank]) for rank in range(len(sizes))]
    sums: list[tuple[int, Pending]] = []

    def part(start: int, counts: Sequence[int], at: int = 0) -> Tensor:
        rows = rows_of(c, dim, offsets, start, counts, at)
        total = rows @ b.t() if bias is None else torch.addmm(bias, rows, b.t())
        # Not in place: selective checkpointing may keep products, and refuses those changed since.
        for d, other in terms[1:]:
            total = torch.addmm(total, rows_of(d, dim, offsets, start, counts, at), other.t())
        if others is not None:
            total = total + rows_of(others, dim, offsets, start, counts, at)
        return total

    spares_own = axis.spares_own
    for start, counts in axis.rounds(sizes, math.prod(rest) * features, c.dtype):
        if spares_own:
            sent = without_own(counts, axis)
            terms_of_others = part(start, sent).view(sum(sent), *rest, features)
            sums.append((start, reduce_from_others(terms_of_others, counts, axis)))
        else:
            whole = part(start, counts).view(sum(counts), *rest, features)
            sums.append((start, reduce_scatter(whole, 0, counts, axis)))
    own = part(0, only_own(sizes, axis), dim).view(mine) if spares_own else None

    def finish(_: list[Tensor]) -> Tensor:
        total = Assembly(mine, dim, c)
        for start, pending in sums:
            rows = pending.wait().movedim(0, dim)
            if own is not None:
                rows = own.narrow(dim, start, rows.shape[dim]) + rows
            total.put(rows, start)
        return total.value()

    return Pending(None, (), finish)


class _Gather(torch.autograd.Function):
    """A gathered input whose gradient is a share, to be summed over the axis."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shards: Shards, context: Context, whole: Tensor | None
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
        if not torch.compiler.is_compiling():
            backward = backward_of(ctx.context)
            backward.send_owed()
            backward.compute_owed()
            if ctx.again is not None:
                ctx.again.done()
        return leaving.wait().contiguous(), None, None, None


def gather(x: Tensor, shards: Shards, context: Context, whole: Tensor | None = None) -> Tensor:
    """``x`` gathered along an axis, still on its way.

    Its gradient is a share of the whole one: it goes back by one reduce-scatter.

    Args:
        whole: the gathered value, where there is a transfer of it already.
    """
    return _Gather.apply(x, shards, context, whole)


class _Late(torch.autograd.Function):
    """What was made of a parameter's shard, and whose gradient may come deferred.

    Its own node, so that backward reaches it after the more urgent transfers have started: made
    before the module's input is gathered, it is run after that gather's backward.
    """

    @staticmethod
    def forward(ctx: Any, shard: Tensor) -> Tensor:
        return shard.view_as(shard)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return undeferred(grads[0])


def late(shard: Tensor) -> Tensor:
    """What was made of a parameter's shard, for :func:`linear`; it takes the shard itself too."""
    return _Late.apply(shard) if torch.is_grad_enabled() and shard.requires_grad else shard


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        op: LinearOp,
        moving: Pending,
        around: Around,
    ) -> Tensor:
        shards = around.shards
        b = moving.wait()
        y: Tensor
        if op.gathers_input:
            y, _ = ab_arriving(x.transfer if isinstance(x, Gathering) else x, b, bias)
        else:
            own = op.own_bias(bias, b.shape[0])
            if shards is not None:
                y = abt_leaving([(x, b)], shards, own).wait()
            else:
                y = F.linear(x, b, own)
        ctx.op, ctx.around, ctx.has_bias = op, around, bias is not None
        ctx.weight_shape = weight.shape
        kept, ctx.again = x, None
        ctx.arriving = isinstance(x, Gathering)
        if isinstance(x, Gathering):
            if op.regather_input and x.transfer.shard is not None:
                # The gathered input is freed when the user's code is done with it.
                kept, ctx.again = x.transfer.shard, x.transfer.again
            else:
                x.transfer.shard = None
        ctx.regather = None
        if not op.keep_weight and ctx.needs_input_grad[0]:
            cut = op.cut
            ctx.regather = Regather(
                around.module,
                weight,
                lambda w: collective.prefetch(op.as_b(w), cut),
                around.context,
            )
        ctx.save_for_backward(kept, b if op.keep_weight else weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        op: LinearOp = ctx.op
        cut, shards = op.cut, ctx.around.shards
        if ctx.needs_input_grad[0]:
            ctx.around.weight.check()
        backward = backward_of(ctx.around.context)
        x, saved = ctx.saved_tensors
        need_x, need_weight, need_bias, *_ = ctx.needs_input_grad
        grad = undeferred(grads[0])
        if ctx.again is not None and need_weight:
            x = Gathering(ctx.again.transfer(x))
        moving = ctx.regather.take() if ctx.regather is not None and need_x else Pending(saved)
        partial: Tensor | None = None
        dx = dw = db = None
        arriving = None if shards is None else Transfer(grad, *shards)
        if ctx.regather is not None:
            ctx.regather.start_those_before(backward)
        if need_x and not op.gathers_input:
            # What both products share is multiplied twice as it comes.
            dx, partial = ab_arriving(
                arriving or grad, moving.wait(), also=x if need_weight else None
            )
        if arriving is not None:
            grad = arriving.value()
        if ctx.has_bias and need_bias:
            mine = grad if op.bias_columns is None else grad[..., op.bias_columns]
            biases = Owed(
                mine.flatten(0, -2).sum(0), lambda part: all_reduce(part, cut.row), backward
            )
            db = Later(mine.shape[-1:], mine, biases.value)
        if need_weight:
            a, c = (x, grad) if op.gathers_input else (grad, x)

            def product() -> Tensor:
                return undeferred(a).flatten(0, -2).t() @ c.flatten(0, -2)

            part = product if partial is None else partial
            weights = Owed(part, lambda part: collective.atb_sum(part, cut), backward)
            dw = Later(ctx.weight_shape, grad, lambda: op.as_b(weights.value()).contiguous())
        if need_x and op.gathers_input:
            b = moving.wait()
            dx = Products(((grad, b),)) if ctx.arriving else grad @ b.t()
        if not isinstance(dx, Products):
            # What comes next is the user's, attention say, and sends nothing.
            backward.send_owed()
        return dx, dw, db, None, None, None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    op: LinearOp,
    moving: Pending,
    around: Around,
) -> Tensor:
    """:func:`torch_tp2d.ops.matmul.linear2d` in rounds.

    Args:
        x: as there, or what :func:`gather` returned.
        weight, bias: parameters' shards, or what :func:`late` returned.
        moving: the weight's gather.
    """
    return _Linear.apply(x, weight, bias, op, moving, around)
