"""Two-dimensional matrix products: one interface, :func:`linear2d`, and a file per algorithm.

All algorithms give the same result; they differ in what moves when (see :class:`Algorithm` for
what each of them provides).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...comm import all_reduce
from ...runtime.context import Watched
from . import bmr, cannon, collective, ring, summa, traced
from .cut import Algorithm, Cut

__all__ = ["ALGORITHMS", "Algorithm", "Cut", "LinearOp", "linear2d"]

# A module with the functions of the protocol is one, which mypy does not see in a dict.
ALGORITHMS: dict[str, Any] = {
    "collective": collective,
    "ring": ring,
    "summa": summa,
    "bmr": bmr,
    "cannon": cannon,
}


@dataclass(frozen=True, eq=False)
class LinearOp:
    """How one Linear is computed: which algorithm, on which cut, in which direction.

    Args:
        gathers_input: ``y = x b`` with ``b = W^T`` (Colwise2D, Block2DParallel); else
            ``y = x b^T`` with ``b = W`` (Rowwise2D).
        transposed: the module stores ``W^T`` (Hugging Face's Conv1D).
        keep_weight: keep the gathered weight for backward instead of gathering it again.
        regather_input: gather the input again for backward instead of keeping it (``ring``).
    """

    algorithm: Algorithm
    cut: Cut
    gathers_input: bool
    transposed: bool
    keep_weight: bool
    regather_input: bool = False

    @property
    def bias_columns(self) -> slice | None:
        """The output features whose bias this rank adds; None: all that it computes."""
        if self.gathers_input or not self.algorithm.WHOLE:
            return None
        sizes = self.cut.p_col
        start = sum(sizes[: self.cut.col.index])
        return slice(start, start + sizes[self.cut.col.index])

    def own_bias(self, bias: Tensor | None, features: int) -> Tensor | None:
        """This rank's bias among the output's ``features``, zeros where others add theirs."""
        columns = self.bias_columns
        if bias is None or columns is None:
            return bias
        return F.pad(bias, (columns.start, features - columns.stop))

    def as_b(self, weight: Tensor) -> Tensor:
        """The module's weight as the algorithms' ``b``, and ``b``'s gradient as the weight's."""
        return weight.t() if self.gathers_input != self.transposed else weight


class _Linear2D(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        op: LinearOp,
        param: Watched | None,
    ) -> Tensor:
        algorithm, cut = op.algorithm, op.cut
        moving = algorithm.prefetch(op.as_b(weight), cut)
        rows = x.flatten(0, -2)
        b = moving.wait()
        if op.gathers_input:
            y = algorithm.ab(rows, b, cut)
        else:
            y = algorithm.abt(rows, b, cut)
        own = op.own_bias(bias, y.shape[-1])
        if own is not None:
            # Not in place: selective checkpointing may keep products.
            y = y + own
        ctx.op, ctx.param, ctx.has_bias = op, param, bias is not None
        ctx.save_for_backward(x, b if op.keep_weight else weight)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        op: LinearOp = ctx.op
        algorithm, cut = op.algorithm, op.cut
        x, saved = ctx.saved_tensors
        need_x, need_weight, need_bias, *_ = ctx.needs_input_grad
        if need_x and ctx.param is not None:
            ctx.param.check()
        rows = x.flatten(0, -2)
        grad = grads[0].flatten(0, -2)

        # The weight travels while its gradient is computed, and its gradient while the input's is.
        moving = None
        if need_x and not op.keep_weight:
            moving = algorithm.prefetch(op.as_b(saved), cut)
        weight_grad = bias_grad = input_grad = None
        if need_weight:
            a, c = (rows, grad) if op.gathers_input else (grad, rows)
            weight_grad = algorithm.atb(a, c, cut)
        if ctx.has_bias and need_bias:
            columns = op.bias_columns
            mine = grad if columns is None else grad[:, columns]
            bias_grad = all_reduce(mine.sum(0), cut.row)
        dx = dw = db = None
        if need_x:
            b = saved if moving is None else moving.wait()
            if op.gathers_input:
                input_grad = algorithm.abt(grad, b, cut)
            else:
                input_grad = algorithm.ab(grad, b, cut)
            dx = input_grad.view(*x.shape[:-1], input_grad.shape[-1])
        # Waited for here: a gradient still under way breaks compile and may be read too early.
        if weight_grad is not None:
            dw = op.as_b(weight_grad.wait()).contiguous()
        if bias_grad is not None:
            db = bias_grad.wait()
        return dx, dw, db, None, None


def _apply(
    x: Tensor | traced.Shared,
    weight: Tensor,
    bias: Tensor | None,
    op: LinearOp,
    shards: ring.Shards | None,
    param: Watched | None,
) -> Tensor:
    if isinstance(x, traced.Shared):
        if x.whole is None:
            return x.linear(weight, bias, op)
        x = x.whole
    elif shards is not None:
        return traced.leaving(x, weight, bias, op, shards)
    return _Linear2D.apply(x, weight, bias, op, param)


def linear2d(
    x: Tensor | traced.Shared,
    weight: Tensor,
    bias: Tensor | None,
    op: LinearOp,
    shards: ring.Shards | None = None,
    param: Watched | None = None,
) -> Tensor:
    """``x W^T + bias`` on a grid, on local shards.

    Let M be the tokens of this grid row, K and N the features in and out.

    =====================  ======================  ===============  ======================
    direction              x of rank (i, j)        weight           result
    =====================  ======================  ===============  ======================
    ``gathers_input``      ``[M, K]`` if WHOLE,    ``W[Nj, Ki]``    ``[M, Nj]``
                           else ``[M, Kj]``
    not ``gathers_input``  ``[M, Kj]``             ``W[Ni, Kj]``    ``[M, N]``, a partial sum
                                                                    along tp_col, if WHOLE,
                                                                    else ``[M, Nj]``
    =====================  ======================  ===============  ======================

    The bias is ``[Nj]``: a rank adds its part of it, once. The gradient of a whole ``x`` is a
    partial sum along ``tp_col``, for whoever gathered ``x`` to reduce; the gradient of a partial
    result is whole.

    In a traced graph ``ring`` has its transfers made here, beside the product: ``x`` is gathered if
    it is a :class:`~torch_tp2d.ops.matmul.traced.Shared`, and a partial result is summed and cut if
    there are ``shards``.

    Backward raises a RuntimeError if the weight's parameter, ``param``, was changed since.
    """
    device = weight.device.type
    if torch.is_autocast_enabled(device):
        # Before anything moves: the wire carries the low precision too.
        dtype = torch.get_autocast_dtype(device)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        with torch.autocast(device, enabled=False):
            return _apply(x, weight, bias, op, shards, param)
    return _apply(x, weight, bias, op, shards, param)
