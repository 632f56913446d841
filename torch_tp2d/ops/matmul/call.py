"""One Linear on a grid as one autograd node: the arguments and results of an algorithm.

An algorithm is a module with two functions, ``forward`` and ``backward``. It makes the transfers of
the weight, and those of activations that overlap with its products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..._once import once_differentiable
from ..._torch_compat.modules import parameters_of
from ..._torch_compat.tensors import adds_to_grad, local_tensor, unviewed
from ..._tracing import apply_node, in_graph, moving_weight
from ...comm import Axis, Pending, all_reduce
from ...runtime.accumulation import Accumulation
from ...runtime.context import Context, autocast_dtype
from ...runtime.reductions import backward_of
from ...runtime.versions import VersionGuard
from .cut import Algorithm, Cut, SumsAtOnce

__all__ = [
    "Call",
    "Forward",
    "Gradients",
    "LinearOp",
    "Needs",
    "Shards",
    "apply",
    "low_precision",
]


class Shards(NamedTuple):
    """How a tensor is sharded over an axis: in ``dim``, into shards of ``sizes``."""

    dim: int
    sizes: Sequence[int]
    axis: Axis


@dataclass(frozen=True, eq=False)
class LinearOp:
    """How one Linear is computed: by which algorithm, on which blocks, in which direction.

    Args:
        gathers_input: ``y = x b`` with ``b = W^T`` (Colwise2D, Block2DParallel); else
            ``y = x b^T`` with ``b = W`` (Rowwise2D).
        transposed: the module stores ``W^T`` (Hugging Face's Conv1D).
        keep_weight: keep the gathered weight for backward instead of gathering it a second time.
        keep_between: keep it for the next micro-batch (:class:`~torch_tp2d.no_sync`).
        regather_input: keep only the input's shard for backward and gather it a second time there
            (``pipelined``).
        reduce_dtype: the dtype in which gradients are summed over the mesh rows; None is that of
            the products.
    """

    algorithm: Algorithm
    cut: Cut
    gathers_input: bool
    transposed: bool
    keep_weight: bool
    keep_between: bool = False
    regather_input: bool = False
    reduce_dtype: torch.dtype | None = None
    bias_columns: slice | None = field(init=False)
    """The output features whose bias this rank adds; None: all that it computes."""

    def __post_init__(self) -> None:
        columns, col = None, self.cut.col
        if not self.gathers_input and self.algorithm.WHOLE and col.size > 1:
            start = sum(self.cut.p_col[: col.index])
            columns = slice(start, start + self.cut.p_col[col.index])
        object.__setattr__(self, "bias_columns", columns)

    @property
    def out_features(self) -> int:
        return self.cut.q if self.gathers_input else self.cut.p

    def own_bias(self, bias: Tensor | None, features: int) -> Tensor | None:
        """This rank's bias padded to the output's ``features``, with zeros where others add it."""
        columns = self.bias_columns
        if bias is None or columns is None:
            return bias
        return F.pad(bias, (columns.start, features - columns.stop))

    def to_be_summed(self, part: Tensor) -> Tensor:
        """A mesh row's partial gradient, in the dtype of sums over the mesh rows."""
        return part if self.reduce_dtype is None else part.to(self.reduce_dtype)

    def part_of_grad(self, a: Tensor, c: Tensor) -> Tensor:
        """This mesh row's partial gradient of ``b``, ``a[M, P]^T c[M, Qj] -> b[P, Qj]``."""
        if self.cut.row.size == 1 and self.transposes:
            # With the strides that the weight's gradient has, as nothing else is made of it.
            return (c.t() @ a).t()
        return a.t() @ c

    def sum_over_rows(self, part: Tensor) -> Pending:
        """Sum the mesh rows' partial gradients ``b[P, Qj]`` of a weight, in one transfer."""
        if self.cut.row.size == 1:
            return Pending(part)
        return cast(SumsAtOnce, self.algorithm).atb_sum(self.to_be_summed(part), self.cut)

    def sum_of_bias(self, part: Tensor) -> Pending:
        """Sum the mesh rows' partial gradients of a bias."""
        if self.cut.row.size == 1:
            return Pending(part)
        return all_reduce(self.to_be_summed(part), self.cut.row)

    def weight_grad(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        """The reduced gradient of ``b`` as the gradient of the weight, in ``dtype``."""
        grad = self.as_b(total)
        # A to() that changes nothing takes longer than the comparison.
        return (grad if grad.dtype == dtype else grad.to(dtype)).contiguous()

    def as_b(self, weight: Tensor) -> Tensor:
        """The algorithms' ``b`` of the module's weight, or the weight's gradient of ``b``'s."""
        return weight.t() if self.transposes else weight

    @property
    def transposes(self) -> bool:
        """Whether ``b`` is the module's weight transposed."""
        return self.gathers_input != self.transposed


@dataclass(frozen=True, eq=False)
class Call:
    """One use of a Linear.

    Args:
        moving: the weight's gather, if it was started before; else the algorithm starts it.
        shards: how to scatter a result that is a partial sum along ``tp_col``, or how to gather an
            input along it; None if that is done outside of the call.
        module: the Linear.
        param: guards the weight that this use took, which must not change before backward. The
            module may have another one by then.
        context: the mesh's context; None, as ``module`` and ``param``, in a traced graph, which
            defers nothing and keeps nothing between micro-batches.
        operand: computes the weight operand from that weight, differentiably.
    """

    op: LinearOp
    moving: Pending | None = None
    shards: Shards | None = None
    module: Any = None
    param: VersionGuard | None = None
    context: Context | None = None
    operand: Callable[[], Tensor] | None = None

    @property
    def known_context(self) -> Context:
        assert self.context is not None
        return self.context

    @property
    def own(self) -> Any:
        """The weight that this use took."""
        assert self.param is not None
        return self.param.param

    def guards_of(self, b: Tensor) -> tuple[VersionGuard, ...]:
        """What tells whether an operand is still that of forward: nothing, if it is a copy."""
        if self.param is None or b.data_ptr() != local_tensor(self.own).data_ptr():
            return ()
        return (self.param,)

    @property
    def accumulation(self) -> Accumulation | None:
        """The gradient accumulation, if it is in use."""
        if self.context is None or self.operand is None:
            return None
        return self.context.accumulation or None if self.op.cut.row.size > 1 else None

    @property
    def without_gather(self) -> Call:
        """The call for backward: a gather that was started would keep the gathered weight alive."""
        if self.moving is None:
            return self
        return Call(self.op, None, self.shards, self.module, self.param, self.context, self.operand)

    def gather(self, weight: Tensor) -> Pending:
        """Start the gather of the weight, unless an earlier micro-batch has kept it."""
        if self.op.cut.stays:
            return Pending(self.op.as_b(weight))
        kept = self.accumulation
        held = None if kept is None else kept.gathered(self.module, self.own, weight.dtype)
        if held is not None:
            return held
        op = self.op
        if not in_graph():
            return op.algorithm.prefetch(op.as_b(weight), op.cut)
        with moving_weight():
            return op.algorithm.prefetch(op.as_b(weight), op.cut)

    def keep_weight(self, gathered: Tensor) -> None:
        """Keep the gathered weight for the next micro-batch."""
        kept = None if self.op.cut.stays else self.accumulation
        if kept is not None and self.op.keep_between:
            kept.keep_weight(self.module, self.own, gathered)

    def keep_gradient(self, part: Tensor) -> None:
        """Keep this rank's partial gradient of the weight for the last micro-batch."""
        part = self.op.to_be_summed(part)
        self.known_context.accumulation.keep_gradient(self.module, self.own, part, self._finish)

    def with_kept(self, kept: Accumulation, part: Tensor) -> Tensor:
        """This rank's partial gradient of the weight and what earlier micro-batches have kept."""
        return kept.with_kept(self.module, self.own, part)

    def gradients_kept(self) -> Accumulation | None:
        """The accumulation of gradients, in a backward that adds to the weight's ``.grad``.

        None in one by torch.autograd.grad, which returns the reduced gradient of its own
        micro-batch.
        """
        kept = self.accumulation
        return kept if kept is not None and adds_to_grad(self.own) else None

    def _finish(self, part: Tensor) -> None:
        """Reduce the kept gradient of a weight that the last micro-batch has not used.

        Raises:
            ValueError: if FSDP2, which has resharded it by now, would not see its gradient.
        """
        assert self.operand is not None
        op, param = self.op, self.own
        held = parameters_of(self.module).get("weight")
        if isinstance(held, DTensor) and held.device_mesh != param.device_mesh:
            raise ValueError(
                f"the last micro-batch did not use the weight {tuple(param.shape)} of "
                f"{self.module} on mesh {self.known_context.of}, for which no_sync keeps a "
                f"gradient, and FSDP2, which shards the weight too, has let go of it by now: use "
                f"all of an FSDP2 unit's weights in a step's last micro-batch"
            )
        grad = op.as_b(op.sum_over_rows(part).wait())
        # It may have been frozen since; what was kept is of when it was not.
        learns = param.requires_grad
        param.requires_grad_()
        try:
            with torch.enable_grad():
                weight = self.operand()
            torch.autograd.backward(weight, grad.to(weight.dtype).contiguous())
        finally:
            param.requires_grad_(learns)


class Needs(NamedTuple):
    """The operands that need a gradient."""

    x: bool
    weight: bool
    bias: bool


class Forward(NamedTuple):
    """What an algorithm's forward returns: outputs, the result first, and what backward needs."""

    outputs: tuple[Tensor, ...]
    saved: tuple[Tensor, ...]
    state: Any = None


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""The gradients of the input, the weight and the bias."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call
    ) -> tuple[Tensor, ...]:
        needs = Needs(*ctx.needs_input_grad[:3])
        result = call.op.algorithm.forward(call, needs, x, weight, bias)
        ctx.call = call.without_gather
        ctx.state = result.state
        ctx.save_for_backward(*result.saved)
        return result.outputs if in_graph() else tuple(map(unviewed, result.outputs))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        needs = Needs(*ctx.needs_input_grad[:3])
        if needs.x and call.param is not None:
            call.param.check()
        if call.accumulation is not None:
            backward_of(call.known_context).settle_kept()
        algorithm = call.op.algorithm
        return (*algorithm.backward(call, needs, ctx.state, ctx.saved_tensors, grads), None)


def apply(x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> tuple[Tensor, ...]:
    """Compute a Linear by its algorithm, in the precision of autocast if that is on."""
    device = weight.device.type
    if autocast_dtype(device) is None:
        return apply_node(_Linear, x, weight, bias, call)
    x, weight, bias = low_precision(x, weight, bias)
    with torch.autocast(device, enabled=False):
        return apply_node(_Linear, x, weight, bias, call)


def low_precision(*operands: Tensor | None) -> tuple[Any, ...]:
    """Cast operands to autocast's dtype, before transfers, which are then in that dtype too."""
    there = [x for x in operands if x is not None]
    dtype = autocast_dtype(there[0].device.type) if there else None
    if dtype is None:
        return operands
    return tuple(None if x is None else x.to(dtype) for x in operands)
