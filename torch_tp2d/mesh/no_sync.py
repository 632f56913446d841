"""Gradient accumulation: gathers and reductions shared by the micro-batches of a step."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ..runtime.context import context_of
from .grid import check_mesh

__all__ = ["no_sync"]


class no_sync:
    """Run micro-batches whose weight gradients are reduced together with those of a later one.

    As with ``DistributedDataParallel.no_sync()`` and FSDP2's ``set_requires_gradient_sync(False)``,
    all micro-batches of a step but the last run inside, forward and backward. The first gathers
    each weight along ``tp_row`` and keeps it for the others; the partial gradients of the weight on
    this rank are added up and reduced once, in the backward of the last. With k micro-batches the
    transfers of weights on an R x C grid are 1/k of what they are otherwise; those of activations
    do not change.

    What is kept takes memory until then: for each Linear 1/C of its weight, gathered, and as much
    for its gradient. A Linear with ``reshard_after_forward=True`` keeps its gradient only. What
    other modules reduce (biases, norms, replicated parameters) is small and is reduced for each
    micro-batch. So is everything under ``torch.compile``, with the algorithms ``"summa"``,
    ``"bmr"`` and ``"cannon"``, and with ``dataflow="weight_stationary"``.

    ``.grad`` of the weights does not change until the last backward is over. A weight that the last
    micro-batch does not use gets its gradient at the end of that backward. Until then parameters
    must not be changed. The gradients that are kept are not in ``.grad``, so ``zero_grad()`` does
    not clear them: call :meth:`discard` to give up a step. An exception inside discards by itself,
    and so does one in the last backward, once that has come to the model's output: when the next
    forward begins. Before a second backward of the same graph call :meth:`discard`.
    The last backward has to go through a Linear of the plan; an optimizer that steps without such a
    backward raises. ``torch.autograd.grad`` returns the gradient of its own micro-batch, inside as
    outside.

    Args:
        mesh: the one that the plan was applied on. With FSDP2 outside, call
            ``model.set_requires_gradient_sync(False)`` as well, and with True for the last.

    Raises:
        TypeError: for another kind of mesh.
        ValueError: for a mesh that is not ``("tp_row", "tp_col")``. On every rank, on a CPU, if a
            weight was changed since it was gathered, in a way that torch does not see: at the end
            of the backward that has used it, or when the next forward begins.
            In a step of an optimizer of ``torch.optim`` before the last backward.

    Source: FSDP2 and DDP accumulate like this along their axis; TP2D (doi 10.11992/tis.202411023)
    does not mention it. The factor 1/k is ours, checked by ``tests/use/test_accumulation.py``.

    Example::

        >>> *first, last = micro_batches
        >>> with torch_tp2d.no_sync(mesh):
        ...     for ids, target in first:
        ...         (loss(model(ids), target) / k).backward()
        >>> (loss(model(last[0]), last[1]) / k).backward()
        >>> optimizer.step()
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        check_mesh(mesh)
        self._accumulation = context_of(mesh).accumulation

    def __enter__(self) -> None:
        self._before = self._accumulation.holds
        self._accumulation.holds = True

    def __exit__(self, kind: Any, *error: Any) -> None:
        self._accumulation.holds = self._before
        if kind is not None:
            self._accumulation.discard()

    def discard(self) -> None:
        """Drop the gradients kept by the micro-batches of a step that is not taken.

        To be called on all ranks, together with ``zero_grad()``: ``no_sync(mesh).discard()``.
        """
        self._accumulation.discard()
