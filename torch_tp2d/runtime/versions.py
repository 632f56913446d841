"""Telling whether a tensor was changed, so that what was computed from it is out of date."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch_compat import active_fake_mode, disable_current_modes, local_tensor, version

__all__ = ["VersionGuard", "copy_to_compare", "same_bits", "versions"]


def versions(x: Any) -> tuple[int | None, ...]:
    """The version counters of a tensor, which count the changes that torch sees.

    Some changes of a DTensor count only for its shard, so a DTensor has both counters. A tensor
    made in inference mode has none.
    """
    inside = local_tensor(x)
    return (version(x),) if inside is x else (version(x), version(inside))


def copy_to_compare(x: Tensor) -> Tensor | None:
    """A copy of the values, to compare later ones with; None where that is not possible or cheap.

    On devices other than a CPU comparing would synchronize the stream. Fake tensors have no values.
    """
    if x.device.type != "cpu" or active_fake_mode() is not None:
        return None
    # Hidden from selective checkpointing, whose recomputation may be the first to copy.
    with disable_current_modes():
        return x.clone()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape hold the same values, with a NaN equal to itself."""
    # Compared as bytes, since torch.equal takes a NaN for unequal to itself.
    return a.numel() == 0 or torch.equal(_bytes(a), _bytes(b))


def _bytes(x: Tensor) -> Tensor:
    x = x.reshape(-1)
    # One of a single element may have any stride, which its view as bytes may not.
    x = x if x.stride(0) == 1 else x.clone(memory_format=torch.contiguous_format)
    return x.view(torch.uint8)


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
                f"the optimizer's step, or forward again after it"
            )
