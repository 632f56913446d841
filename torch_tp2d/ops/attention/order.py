"""The positions of a sequence that each rank of an axis holds, and the causal mask between ranks.

With contiguous shards and a causal mask the last rank attends to all keys and the first to hardly
any. In the balanced order rank ``i`` of ``R`` holds chunks ``i`` and ``2R - 1 - i`` of ``2R``, one
from the beginning and one from the end, so that all ranks have equal work.
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
    """Local queries ``q`` to ``q + queries`` attend to keys ``k`` to ``k + keys`` of some rank."""

    q: int
    queries: int
    k: int
    keys: int
    causal: bool
    """Whether each query attends to keys up to its own position only; otherwise to all keys."""


@dataclass(frozen=True)
class Order:
    """``spans[rank]``: the ``(start, stop)`` of the runs of positions that a rank holds, in order.

    An explicit mask does not depend on it: the mask's columns are in the order of the ranks.
    """

    spans: tuple[tuple[tuple[int, int], ...], ...]

    @staticmethod
    def contiguous(sizes: Sequence[int]) -> Order:
        ends = list(accumulate(sizes))
        return Order(tuple(((end - size, end),) for size, end in zip(sizes, ends, strict=True)))

    @staticmethod
    def balanced(sizes: Sequence[int]) -> Order:
        """Two chunks on each rank; the sizes may differ.

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
        """The number of positions on each rank."""
        return tuple(sum(stop - start for start, stop in spans) for spans in self.spans)

    def positions(self, rank: int | None = None, device: torch.device | None = None) -> Tensor:
        """The positions of one rank's tokens, or of all tokens, rank by rank."""
        held = (
            [span for spans in self.spans for span in spans] if rank is None else self.spans[rank]
        )
        return torch.cat([torch.arange(*span, device=device) for span in held])

    def parts(self, i: int, j: int, causal: bool, keys: Sequence[int] | None = None) -> list[Part]:
        """The parts of rank ``j``'s keys that rank ``i``'s queries attend to.

        Args:
            keys: the number of keys on each rank, if they belong to another sequence.
        """
        queries, count = self.sizes[i], (self.sizes if keys is None else keys)[j]
        if not causal or i == j:
            whole = Part(0, queries, 0, count, causal)
            return [whole] if queries and count else []
        parts: list[Part] = []
        at = 0
        for start, stop in self.spans[i]:
            # Spans ascend within a rank, so the keys seen of another rank are its first ones.
            seen = sum(b - a for a, b in self.spans[j] if b <= start)
            if seen and stop > start:
                if parts and parts[-1].keys == seen and parts[-1].q + parts[-1].queries == at:
                    parts[-1] = parts[-1]._replace(queries=parts[-1].queries + stop - start)
                else:
                    parts.append(Part(at, stop - start, 0, seen, False))
            at += stop - start
        return parts


def balanced_order(sequence: int, rows: int) -> Tensor:
    """The order of tokens that balances causal attention along ``tp_row``.

    Put the ids, their positions and the targets in this order before the model sees them, and
    give the attention modules ``Attention2D(row_dim=1, balanced=True)``. The ids are replicated, so
    this transfers nothing. Mesh row ``i`` then holds chunks ``i`` and ``2R - 1 - i`` of ``2R``.

    The model has to take positions as an argument: a model that numbers its tokens itself numbers
    them in this order. A mask that it makes is in this order as well, which is why Attention2D
    takes no explicit mask with it. (Hugging Face makes one for padded batches, and where positions
    do not ascend, which it takes for packed documents, unless it is given
    ``attention_mask=torch.ones_like(ids)``.)

    Args:
        sequence: the length of the sequence, any.
        rows: the size of ``tp_row``.

    Returns:
        ``order[sequence]``, int64: ``order[n]`` is the position of the ``n``-th token in the new
        order. Indexing an output by ``order.argsort()`` restores the order of the text.

    Example::

        >>> order = balanced_order(8, 2)
        >>> order.tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
        >>> logits = model(ids[:, order], position_ids=order[None])
        >>> loss = cross_entropy(logits, targets[:, order])
    """
    return Order.balanced(chunk_sizes(sequence, rows)).positions()
