"""What the width of a local tensor tells: whether it is a shard of split features, and of how many.

It is told by the feature counts that the plan's Linears near it give or take.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.distributed.tensor.placement_types import Placement

from ..comm import Axis
from .surroundings import is_of_features

__all__ = ["Widths"]


class Widths:
    """The feature counts that modules give or take, those split over ``col`` and those replicated.

    Every rank comes to the same conclusion about a tensor, whatever part of it the rank holds.
    """

    def __init__(
        self, col: Axis, features: Sequence[tuple[int, Placement]], wholes: Iterable[int] = ()
    ) -> None:
        self._col = col
        self.split = sorted({number for number, p in features if is_of_features(p)})
        self._wholes = {number for number, p in features if not is_of_features(p)} | {*wholes}
        parts = {part for number in self.split for part in col.split(number)}
        self._either = self._wholes & parts

    def told(self, width: int) -> set[bool]:
        """Whether a local tensor of this width is a shard: the possible answers, maybe none."""
        part, whole = bool(self._parts(width)), width in self._wholes
        if self._either and (part or width in self._either):
            return {True, False}
        return {True} if part else {False} if whole else set()

    def whole_of(self, width: int) -> int | None:
        """The full feature count of which this rank's shard has this width.

        None if several counts could be meant, on this rank or on another.
        """
        alike = [
            number
            for number in self.split
            for like in self._parts(width)
            if any(map(int.__eq__, self._col.split(number), self._col.split(like)))
        ]
        return alike[0] if len(alike) == 1 else None

    def _parts(self, width: int) -> list[int]:
        return [n for n in self.split if self._col.split(n)[self._col.index] == width]
