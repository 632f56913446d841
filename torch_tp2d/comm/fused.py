"""The move that a fused projection needs: shards of the whole dealt out as shards of its parts."""

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
    """Go from a shard of a dim that is made of parts to a shard of each of the parts.

    For q, k and v side by side, which need not be of one size: this rank's share of each, side by
    side.

    Args:
        x: this rank's shard.
        parts: the sizes of the parts.
        back: the way back.
    """
    if axis.size == 1:
        return Pending(x)
    ranks = range(axis.size)
    here = [_common(parts, axis, axis.index, rank) for rank in ranks]
    there = [_common(parts, axis, rank, axis.index) for rank in ranks]
    gives, gets = (there, here) if back else (here, there)
    rows = x.movedim(dim, 0)
    width = math.prod(rows.shape[1:])
    # What lies here is of one part after the other, and of each for one rank after the other.
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
    """Of each part, how much of what ``owner`` holds of the whole is ``taker``'s of that part."""
    wholes = [0, *accumulate(axis.split(sum(parts)))]
    found = []
    for start, stop in pairwise([0, *accumulate(parts)]):
        cuts = list(accumulate(axis.split(stop - start), initial=start))
        low, high = max(wholes[owner], cuts[taker]), min(wholes[owner + 1], cuts[taker + 1])
        found.append(max(0, high - low))
    return found
