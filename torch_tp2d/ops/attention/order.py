"""Which positions of a sequence the ranks of an axis hold, and what a causal mask leaves of them.

In a sequence cut into contiguous shards the last rank attends to everything and the first to next
to nothing. In the balanced order rank ``i`` of ``R`` holds chunks ``i`` and ``2R - 1 - i`` of
``2R``, an early one and a late one, and all have the same to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ...mesh.layouts import chunk_sizes

__all__ = ["Order", "Part", "balanced_order"]


class Part(NamedTuple):
    """Local queries ``q, q + queries`` attend to local keys ``k, k + keys`` of some rank."""

    q: int
    queries: int
    k: int
    keys: int
    causal: bool
    """Whether only to those that are not behind them; otherwise to all."""


@dataclass(frozen=True)
class Order:
    """``spans[rank]``: the ``(start, stop)`` of the runs of positions that a rank holds, in order.

    All that matters to a mask of one's own is the order of the ranks: its columns are in it.
    """

    spans: tuple[tuple[tuple[int, int], ...], ...]

    @staticmethod
    def contiguous(sizes: Sequence[int]) -> Order:
        ends = list(accumulate(sizes))
        return Order(tuple(((end - size, end),) for size, end in zip(sizes, ends, strict=True)))

    @staticmethod
    def balanced(sizes: Sequence[int]) -> Order:
        """Two chunks a rank; the sizes may differ.

        >>> Order.balanced((4, 4)).spans
        (((0, 2), (6, 8)), ((2, 4), (4, 6)))
        """
        early = [-(-size // 2) for size in sizes]
        late = [size // 2 for size in sizes]
        starts = list(accumulate(early + late[::-1], initial=0))
        return Order(
            tuple(
                ((starts[i], starts[i + 1]), (starts[-2 - i], starts[-1 - i]))
                for i in range(len(sizes))
            )
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """What each rank holds."""
        return tuple(sum(stop - start for start, stop in spans) for spans in self.spans)

    def positions(self, rank: int | None = None, device: torch.device | None = None) -> Tensor:
        """Of one rank's tokens, or of all, rank by rank."""
        held = (
            [span for spans in self.spans for span in spans] if rank is None else self.spans[rank]
        )
        return torch.cat([torch.arange(*span, device=device) for span in held])

    def parts(self, i: int, j: int, causal: bool, keys: Sequence[int] | None = None) -> list[Part]:
        """What rank ``i``'s queries see of rank ``j``'s keys.

        Args:
            keys: how many keys each rank holds, where they are of another sequence.
        """
        queries, count = self.sizes[i], (self.sizes if keys is None else keys)[j]
        if not causal or i == j:
            whole = Part(0, queries, 0, count, causal)
            return [whole] if queries and count else []
        parts: list[Part] = []
        at = 0
        for start, stop in self.spans[i]:
            # Spans ascend within a rank, so what is seen of another rank's is where it begins.
            seen = sum(b - a for a, b in self.spans[j] if b <= start)
            if seen and stop > start:
                if parts and parts[-1].keys == seen and parts[-1].q + parts[-1].queries == at:
                    parts[-1] = parts[-1]._replace(queries=parts[-1].queries + stop - start)
                else:
                    parts.append(Part(at, stop - start, 0, seen, False))
            at += stop - start
        return parts


def balanced_order(sequence: int, rows: int) -> Tensor:
    """The order of tokens in which causal attention along ``tp_row`` is shared out evenly.

    Put the ids, their positions and the targets in this order before the model sees them, and
    give the attention modules ``Attention2D(row_dim=1, balanced=True)``. Every rank has the whole
    ids, so this moves nothing. Row ``i`` then holds chunk ``i`` and chunk ``2R - 1 - i`` of ``2R``.

    The model has to take positions as an argument: what numbers its tokens by itself numbers them
    as they come. So does what makes a mask, which is why Attention2D takes no explicit mask in
    this order. (Hugging Face makes one for padded batches, and where positions do not ascend, which
    it takes for packed documents, unless it is given ``attention_mask=torch.ones_like(ids)``.)

    Args:
        sequence: its length, any.
        rows: the size of ``tp_row``.

    Returns:
        ``order[sequence]``, int64: ``order[n]`` is the position of the token that comes ``n``-th.
        ``order.argsort()`` brings an output back into the order of the text.

    Example::

        >>> order = balanced_order(8, 2)
        >>> order.tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
        >>> logits = model(ids[:, order], position_ids=order[None])
        >>> loss = cross_entropy(logits, targets[:, order])
    """
    return Order.balanced(chunk_sizes(sequence, rows)).positions()
