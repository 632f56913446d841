"""The exchange for fused projections: from shards of the full dim to shards of its parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from .axis import Axis
from .pending import Pending
from .transfers import exchange

__all__ = ["reshard_fused"]


def reshard_fused(
    x: Tensor, dim: int, parts: Sequence[int], axis: Axis, *, back: bool = False
) -> Pending:
    """Go from a shard of a dim that consists of several parts to a shard of each part.

    For q, k and v side by side in one weight, which need not be of one size, the result is this
    rank's shards of q, of k and of v, side by side.

    Args:
        x: this rank's shard.
        parts: the sizes of the parts.
        back: go from the shards of the parts to the shard of the full dim instead.
    """
    if axis.size == 1:
        return Pending(x)
    ranks = range(axis.size)
    here = [_common(parts, axis, axis.index, rank) for rank in ranks]
    there = [_common(parts, axis, rank, axis.index) for rank in ranks]
    gives, gets = (there, here) if back else (here, there)
    rows = x.movedim(dim, 0)
    width = math.prod(rows.shape[1:])
    # x holds one part after another, and within each part the elements for one rank after another.
    pieces = iter(rows.split([of[part] for part in range(len(parts)) for of in gives]))
    to: list[list[Tensor]] = [[] for _ in ranks]
    for _ in parts:
        for rank in ranks:
            to[rank].append(next(pieces))
    flat = torch.cat([piece for of_rank in to for piece in of_rank]).reshape(-1)

    def finish(wires: list[list[Tensor]]) -> Tensor:
        received = [
            torch.cat(of_rank).view(sum(gets[rank]), *rows.shape[1:]).split(gets[rank])
            for rank, of_rank in enumerate(zip(*wires, strict=True))
        ]
        ordered = [received[rank][part] for part in range(len(parts)) for rank in ranks]
        return torch.cat(ordered).movedim(0, dim)

    sends, receives = ([width * sum(of) for of in each] for each in (gives, gets))
    largest = width * max(sum(_common(parts, axis, a, b)) for a in ranks for b in ranks)
    return exchange(flat, sends, receives, axis, largest, finish)


def _common(parts: Sequence[int], axis: Axis, owner: int, taker: int) -> list[int]:
    """For each part, how much of ``taker``'s shard of it lies in ``owner``'s shard of the dim."""
    wholes = [0, *accumulate(axis.split(sum(parts)))]
    found = []
    for start, stop in pairwise([0, *accumulate(parts)]):
        cuts = list(accumulate(axis.split(stop - start), initial=start))
        low, high = max(wholes[owner], cuts[taker]), min(wholes[owner + 1], cuts[taker + 1])
        found.append(max(0, high - low))
    return found
