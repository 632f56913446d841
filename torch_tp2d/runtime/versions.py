"""Telling whether a tensor was changed, so that what was computed from it is out of date."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._torch_compat.tensors import (
    active_fake_mode,
    disable_current_modes,
    dispatch_modes,
    versions,
)
from .._tracing import eager_only, in_graph

__all__ = [
    "VersionGuard",
    "copy_to_compare",
    "count_steps",
    "guard_in_backward",
    "same_bits",
    "to_compare",
    "versions",
]


def copy_to_compare(x: Tensor) -> Tensor | None:
    """A copy of the values, to compare later ones with; None where that is not possible or cheap.

    On devices other than a CPU comparing would synchronize the stream. Fake tensors have no values.
    """
    if x.device.type != "cpu":
        return None
    if not dispatch_modes():
        return x.clone()
    if active_fake_mode() is not None:
        return None
    # Hidden from selective checkpointing, whose recomputation may be the first to copy.
    with disable_current_modes():
        return x.clone()


_INTEGERS: Mapping[int, torch.dtype] = {
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}
"""By the size of an element."""


def to_compare(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """The bits of a tensor, which follow its values, and a copy of them, for ``torch.equal``.

    None where :func:`copy_to_compare` gives none.
    """
    if x.device.type != "cpu":
        return None
    size = x.element_size()
    if x.is_contiguous() and not (x.numel() * size % 8 or x.storage_offset() * size % 8):
        bits = x.view(-1).view(torch.int64)
    else:
        bits = x.view(_INTEGERS[size])
    then = copy_to_compare(bits)
    return None if then is None else (bits, then)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits: a NaN is equal to itself."""
    if a.dtype != b.dtype:
        return False
    if a.numel() == 0:
        return True
    a, b = _flat(a), _flat(b)
    # As integers, since torch.equal takes a NaN for unequal to itself, and as long ones where they
    # fit, since it compares one at a time: a weight as bytes takes it eight times as long.
    size = a.element_size()
    counts = a.numel(), int(a.storage_offset()), int(b.storage_offset())
    fits = all([count * size % 8 == 0 for count in counts])
    integers = torch.int64 if fits else _INTEGERS[size]
    return torch.equal(a.view(integers), b.view(integers))


def _flat(x: Tensor) -> Tensor:
    x = x.reshape(-1)
    # One of a single element may have any stride, which its view in another dtype may not.
    return x if x.stride(0) == 1 else x.clone(memory_format=torch.contiguous_format)


@functools.cache
def count_steps() -> None:
    """From now on, have an optimizer's step count as a change of the DTensors that it steps.

    torch does not count what ``foreach`` and ``fused`` optimizers do to a DTensor, so that a step
    between a forward and its backward would not be noticed.
    """
    register_optimizer_step_post_hook(_count_step)


@eager_only
def _count_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if isinstance(param, DTensor) and param.grad is not None:
                increment_version(param)


class VersionGuard:
    """A parameter that backward needs as it was in forward."""

    def __init__(self, param: Tensor) -> None:
        self.param, self.versions = param, versions(param)

    def check(self) -> None:
        """Raise a RuntimeError, as torch does, if the parameter was changed since."""
        if versions(self.param) != self.versions:
            raise RuntimeError(
                f"a parameter of shape {tuple(self.param.shape)} needed for gradient computation "
                f"has been modified by an inplace operation since the forward: run backward before "
                f"the optimizer's step, or forward again after it; to step in backward, do it in a "
                f"hook set by the parameter's register_post_accumulate_grad_hook"
            )


def guard_in_backward(y: Tensor, params: Iterable[Tensor | None]) -> None:
    """Let backward raise as :class:`VersionGuard` does if parameters of ``y`` were changed.

    For what is computed from their shards, of whose changes torch does not tell.
    """
    if in_graph() or y.grad_fn is None:
        return
    guards = [VersionGuard(param) for param in params if param is not None]

    def check(grads: Any) -> None:
        for guard in guards:
            guard.check()

    y.grad_fn.register_prehook(check)
