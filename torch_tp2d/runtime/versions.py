"""What counts the changes of tensors: whether what was made of one is still good."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch_compat import active_fake_mode, local_tensor, version

__all__ = ["VersionGuard", "copy_to_compare", "same_bits", "versions"]


def versions(x: Any) -> tuple[int | None, ...]:
    """What counts the changes of a tensor that torch sees.

    Of a DTensor some count as the shard's alone. What was made in inference mode has no version.
    """
    inside = local_tensor(x)
    of_shard = None if inside.is_inference() else version(inside)
    if inside is x:
        return (of_shard,)
    return None if x.is_inference() else version(x), of_shard


def copy_to_compare(x: Tensor) -> Tensor | None:
    """The values of now, to be held against later ones, where looking at them costs little.

    On a CPU, elsewhere it stops the stream. Fake tensors have none.
    """
    looks = x.device.type == "cpu" and active_fake_mode() is None
    return x.clone() if looks else None


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of a shape hold the same, a NaN being the same as itself."""
    # As bytes: torch.equal finds a NaN unequal to itself.
    return a.numel() == 0 or torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


class VersionGuard:
    """A parameter that backward needs as it was in forward."""

    def __init__(self, param: Tensor) -> None:
        self.param, self.versions = param, versions(param)

    def check(self) -> None:
        """Raises a RuntimeError, as torch does, if the parameter was changed since."""
        if versions(self.param) != self.versions:
            raise RuntimeError(
                f"a parameter of shape {tuple(self.param.shape)} needed for gradient computation "
                f"has been modified by an inplace operation since the forward: run backward before "
                f"the optimizer's step, or forward again after it"
            )
