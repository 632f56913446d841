"""The move that a fused projection needs: shards of the whole dealt out as shards of its parts."""

from __future__ import annotations

import torch
from torch import Tensor

from .axis import Axis
from .pending import Pending
from .transfers import exchange

__all__ = ["reshard_fused"]


def reshard_fused(x: Tensor, dim: int, parts: int, axis: Axis, *, back: bool = False) -> Pending:
    """Go from a shard of a dim that is made of equal parts to a shard of each of the parts.

    Cut into ``parts * size`` blocks, a rank's shard is ``parts`` neighbours, and what it gets is
    every ``size``-th from its own index on: for q, k and v side by side, its share of each.

    Args:
        x: this rank's shard, a multiple of ``parts`` long in ``dim`` and as long as the others'.
        back: the way back.
    """
    if axis.size == 1:
        return Pending(x)
    blocks = x.movedim(dim, 0).unflatten(0, (parts, -1))

    def mine(rank: int) -> list[tuple[int, int]]:
        """``(owner, block)`` after dealing, for each of the blocks that are neighbours here."""
        return [(block % axis.size, block) for block in range(rank * parts, (rank + 1) * parts)]

    here = mine(axis.index)
    order = sorted(range(parts), key=here.__getitem__)
    width = blocks[0].numel()
    sends = [width * sum(owner == rank for owner, _ in here) for rank in range(axis.size)]
    receives = [
        width * sum(owner == axis.index for owner, _ in mine(rank)) for rank in range(axis.size)
    ]
    if back:
        sends, receives = receives, sends
    else:
        # Not by an index tensor, which would be copied to the device each time.
        blocks = torch.stack([blocks[at] for at in order])
    shape = blocks.shape

    def finish(pieces: list[list[Tensor]]) -> Tensor:
        received = [torch.cat(of_rank) for of_rank in zip(*pieces, strict=True)]
        result = torch.cat(received).view(shape)
        if back:
            result = torch.stack([result[order.index(at)] for at in range(parts)])
        return result.flatten(0, 1).movedim(0, dim)

    largest = width * -(-parts // axis.size)
    return exchange(blocks.reshape(-1), sends, receives, axis, largest, finish)
