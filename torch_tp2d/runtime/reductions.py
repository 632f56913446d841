"""Reductions of parameters' gradients, which nothing waits for until backward is nearly over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from .._torch_compat.tensors import at_end_of_backward, current_graph_task_id
from .._tracing import in_graph
from ..comm import Axis, Pending, all_reduce
from .context import Context, in_backward
from .deferred import LazyResult, undeferred

__all__ = [
    "Backward",
    "PendingReduction",
    "backward_of",
    "drop_unfinished",
    "of_pass",
    "summed",
]


class PendingReduction:
    """A sum over ranks that is not urgent, such as that of a parameter's gradient.

    Backward computes this rank's part while more urgent transfers are under way
    (:meth:`Backward.compute_reductions`), and sends it when none is
    (:meth:`Backward.start_reductions`): beside an urgent transfer it would take half of the link.
    Both happen in the same order on all ranks.

    Args:
        part: this rank's partial sum, or a function that computes it.
        send: starts the reduction of the partial sum.
    """

    def __init__(
        self,
        part: Tensor | Callable[[], Tensor],
        send: Callable[[Tensor], Pending],
        backward: Backward,
    ) -> None:
        self.part: Tensor | Callable[[], Tensor] | None = part
        self._send = send
        self._pending: Pending | None = None
        self._backward = backward
        self._on_behalf = backward.context.on_behalf_of()
        backward.pending.append(self)

    def compute(self) -> None:
        """Compute this rank's part, if that is not done."""
        if callable(self.part):
            self.part = self._on_behalf(self.part)

    def send(self) -> None:
        """Start the reduction, if it has not started."""
        self.compute()
        if isinstance(self.part, Tensor):
            self._pending, self.part = self._on_behalf(self._send, self.part), None

    def value(self) -> Tensor:
        """Wait for the sum. The other pending reductions are started too, so that they overlap."""
        if self._pending is None:
            self._backward.start_reductions()
            self.send()
        assert self._pending is not None
        return self._pending.wait()


class Backward:
    """One run of autograd's engine, and the transfers that it still has to start or await."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.pending: list[PendingReduction] = []
        self.at_end: list[Callable[[], None]] = []
        """Called when the backward is over, such as to await transfers that were not used."""
        self.in_any_case: list[Callable[[], None]] = []
        """Called when it is over, or when a forward finds that an exception has ended it."""
        self.of_pass = False
        """Whether it belongs to a forward that ran as a :class:`~.prefetch.Pass`."""

    def __repr__(self) -> str:
        return f"Backward({len(self.pending)} sums pending, {len(self.at_end)} calls at its end)"

    def compute_reductions(self) -> None:
        """Compute the pending parts: best between starting a transfer and waiting for it."""
        for reduction in self.pending:
            reduction.compute()

    def start_reductions(self) -> None:
        """Send the parts that are computed: best when no other transfer is under way."""
        waiting, self.pending = self.pending, []
        for reduction in waiting:
            if callable(reduction.part):
                self.pending.append(reduction)
            else:
                reduction.send()

    def settle_kept(self) -> None:
        """Have what micro-batches keep settled at the end, if this is the last backward of a step.

        To be called before anything of it can raise: :func:`drop_unfinished` goes by it.
        """
        kept = self.context.accumulation
        if kept and not kept.holds and kept.settle not in self.at_end:
            self.at_end.append(kept.settle)

    def close(self) -> None:
        """End the backward: run the calls in :attr:`at_end`."""
        self.pending.clear()
        for call in self.at_end:
            call()
        self.at_end.clear()
        self.undo()
        self.context.unseen.tell()

    def undo(self) -> None:
        """Run the calls in :attr:`in_any_case`."""
        while self.in_any_case:
            self.in_any_case.pop()()


def backward_of(context: Context) -> Backward:
    """The backward that runs now; a backward that is run within another one has its own."""
    number = current_graph_task_id()
    found = context.backwards.get(number)
    if found is None:
        found = context.backwards[number] = Backward(context)

        def close() -> None:
            # A forward that began in another thread meanwhile may have removed it.
            ended = context.backwards.pop(number, None)
            if ended is not None:
                ended.close()

        at_end_of_backward(close)
    return found


def drop_unfinished(context: Context) -> None:
    """Forget backward passes that an exception has ended, when a forward begins.

    If one of them was the last of a step, then what the step's micro-batches kept is given up: it
    is not in ``.grad``, and so ``zero_grad()`` does not clear it.
    """
    if not context.backwards:
        return
    kept = context.accumulation
    if any(kept.settle in backward.at_end for backward in context.backwards.values()):
        kept.discard()
    for backward in context.backwards.values():
        backward.undo()
    context.backwards.clear()


def of_pass(context: Context) -> bool:
    """Whether a :class:`~.prefetch.Pass` runs, or checkpointing recomputes a part of one.

    A recomputation has to reuse gathered inputs as the pass did, or the two would run different
    operations.
    """
    if in_backward():
        return backward_of(context).of_pass
    return context.running is not None


def summed(
    parts: Sequence[Tensor | None],
    axes: Sequence[Axis],
    context: Context,
    like: Tensor | None = None,
) -> list[Tensor | None]:
    """Sum small tensors that nothing waits for yet over axes, all in one transfer for each axis.

    Args:
        like: a tensor of the dtype of the results; by default they have that of the parts.
    """
    there = [part for part in parts if part is not None]
    if not there:
        return list(parts)
    flat = torch.cat([part.reshape(-1) for part in there])
    total = _over(flat, axes, flat.dtype if like is None else like.dtype, context)
    starts = iter([0, *accumulate(part.numel() for part in there)])

    def one(shape: torch.Size, start: int) -> Tensor:
        def make() -> Tensor:
            # A clone: a gradient that is a view of the total cannot be copied by deepcopy.
            return undeferred(total).narrow(0, start, shape.numel()).view(shape).clone()

        return LazyResult(shape, total, make) if isinstance(total, LazyResult) else make()

    return [None if part is None else one(part.shape, next(starts)) for part in parts]


def _over(part: Tensor, axes: Sequence[Axis], dtype: torch.dtype, context: Context) -> Tensor:
    """``part`` summed over axes; deferred, except under ``torch.compile``."""

    def after(total: Tensor, axes: Sequence[Axis]) -> Tensor:
        for axis in axes:
            total = all_reduce(total, axis).wait()
        return total.to(dtype)

    if not axes or in_graph():
        return after(part, axes)
    first, *others = axes
    pending = PendingReduction(part, lambda part: all_reduce(part, first), backward_of(context))
    like = part.new_empty(0, dtype=dtype)
    return LazyResult(part.shape, like, lambda: after(pending.value(), others))
