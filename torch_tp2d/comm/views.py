"""Views of tensors, which take longer than the copy of a small one: none where nothing changes."""

from __future__ import annotations

from torch import Tensor

__all__ = ["moved", "narrowed"]


def narrowed(x: Tensor, dim: int, start: int, count: int) -> Tensor:
    """``x.narrow(dim, start, count)``; ``x`` itself where that is all of it."""
    return x if count == x.shape[dim] else x.narrow(dim, start, count)


def moved(x: Tensor, dim: int, to: int) -> Tensor:
    """``x.movedim(dim, to)``; ``x`` itself where the dim is there."""
    return x if dim == to else x.movedim(dim, to)
