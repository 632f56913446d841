"""A tensor that is assembled from blocks as they arrive."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._tracing import in_graph
from ..comm import nothing

__all__ = ["Assembly"]


class Assembly:
    """A tensor of ``shape`` that is assembled from blocks of a dim.

    Each block is written in place; in a traced graph all are concatenated at the end, since there
    writing a block in place would copy the entire tensor.

    Args:
        like: a tensor of its dtype and device, which is kept.
    """

    def __init__(self, shape: Sequence[int], dim: int, like: Tensor) -> None:
        self.shape, self.dim, self.like = torch.Size(shape), dim, like
        self._out: Tensor | None = None
        self._blocks: list[tuple[int, Tensor]] = []

    def put(self, block: Tensor, start: int) -> None:
        """Write a block to its place, from ``start`` on."""
        if block.shape == self.shape and block.is_contiguous():
            # A block that is not contiguous is copied: a user's view() of the result would fail.
            self.give(block)
        elif in_graph():
            self._blocks.append((start, block))
        else:
            if self._out is None:
                self._out = self.like.new_empty(self.shape)
            self._out.narrow(self.dim, start, block.shape[self.dim]).copy_(block)

    def give(self, whole: Tensor) -> None:
        """Set the entire tensor."""
        self._out = whole

    def value(self) -> Tensor:
        """The tensor, after all blocks were put."""
        if self._blocks:
            blocks = sorted(self._blocks, key=lambda block: block[0])
            return torch.cat([block for _, block in blocks], self.dim)
        if self._out is None:
            # There were no blocks, or none with elements.
            self._out = nothing(self.like, self.shape)
        return self._out
