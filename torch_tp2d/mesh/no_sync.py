"""Gradient accumulation: what several micro-batches share of an optimizer step."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ..runtime.context import context_of
from .grid import check_mesh

__all__ = ["no_sync"]


class no_sync:
    """Run micro-batches whose weights' gradients are reduced with those of a later one.

    As ``DistributedDataParallel.no_sync()`` and FSDP2's ``set_requires_gradient_sync(False)``: all
    micro-batches of a step but the last run inside, forward and backward. A weight is gathered
    along ``tp_row`` by the first of them and kept for the others, and what its gradients are on
    this rank is added up, and reduced once, in the backward of the last. Per micro-batch of k, the
    weights of an R x C grid cost 1/k of what they do otherwise; activations cost what they do.

    What is kept takes memory until then: for each Linear 1/C of its weight, gathered, and as much
    for its gradient. A Linear with ``reshard_after_forward=True`` keeps its gradient only. What
    other modules reduce is small (biases, norms, replicated parameters), and reduced each time, and
    so is everything under ``torch.compile``, in ``"summa"``, ``"bmr"`` and ``"cannon"``, and where
    weights stay (``dataflow="weight_stationary"``).

    ``.grad`` of the weights is as before until the last backward is over. A weight that the last
    micro-batch does not use gets its gradient at the end of that backward. Until then parameters
    must not be changed. What is kept is not in ``.grad``, so ``zero_grad()`` does not reach it: a
    step that is given up is forgotten by :meth:`discard`. An exception inside does that by itself.
    The last backward has to go through a Linear of the plan; an optimizer that steps without is an
    error. What ``torch.autograd.grad`` returns is of its own micro-batch, inside as outside.

    Args:
        mesh: the one that the plan was applied on. With FSDP2 outside, call
            ``model.set_requires_gradient_sync(False)`` as well, and True for the last.

    Raises:
        TypeError: for another kind of mesh.
        ValueError: for a mesh that is not ``("tp_row", "tp_col")``. In a forward, on a CPU, of a
            weight that was changed since it was gathered, in a way that torch does not see.
            In a step of an optimizer of ``torch.optim`` before the last backward.

    Source: FSDP2 and DDP accumulate so along their axis; TP2D (doi 10.11992/tis.202411023) does
    not speak of it. The count is ours, held by ``tests/use/test_accumulation.py``.

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
        """Forget the gradients of micro-batches whose step is not taken.

        To be called by all ranks, beside ``zero_grad()``: ``no_sync(mesh).discard()``.
        """
        self._accumulation.discard()
