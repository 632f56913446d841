"""The heads that a rank computes, where queries, or keys and values, may be replicated."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...comm import Axis

__all__ = ["Heads", "check_groups"]

_HEADS = 1


def check_groups(query: int, key: int) -> None:
    """Raise a ValueError if the query heads do not form equal groups over the key heads."""
    if query < 1 or key < 1 or query % key:
        raise ValueError(f"{query} query heads are no multiple of {key} key and value heads")


@dataclass(frozen=True)
class Heads:
    """``query`` heads attend to ``key`` heads, in groups, and are distributed over ``axis``.

    Heads whose number the axis divides are sharded. Key heads that it does not divide are
    replicated; if it does not divide the query heads, all heads are. A rank then computes some of
    them, and not every rank equally many.
    """

    query: int
    key: int
    axis: Axis

    @property
    def group(self) -> int:
        return self.query // self.key

    @property
    def whole_query(self) -> bool:
        return self.query % self.axis.size != 0

    @property
    def whole_key(self) -> bool:
        return self.whole_query or self.key % self.axis.size != 0

    @property
    def given(self) -> int:
        """The number of query heads that a rank is given."""
        return self.query if self.whole_query else self.query // self.axis.size

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of query heads that each rank computes."""
        return self.axis.split(self.query)

    @property
    def first(self) -> int:
        """The first query head that this rank computes."""
        return sum(self.sizes[: self.axis.index])

    @property
    def _own(self) -> range:
        return range(self.first, self.first + self.sizes[self.axis.index])

    @property
    def _own_keys(self) -> range:
        own = self._own
        return range(own[0] // self.group, own[-1] // self.group + 1) if own else range(0)

    def index(self, *, of_all: bool = False) -> tuple[int, ...] | None:
        """The key head of each of this rank's query heads, or of all; None if one to one."""
        own, keys = (range(self.query), range(self.key)) if of_all else (self._own, self._own_keys)
        index = tuple(head // self.group - keys[0] for head in own)
        return None if index == tuple(range(len(keys))) else index

    def once(self, key: Tensor) -> Tensor:
        """Undo the repetition of key or value heads for their query heads, if the module did it.

        Raises:
            ValueError: for any other number of heads.
        """
        parts = 1 if self.whole_key else self.axis.size
        count = key.shape[_HEADS]
        if count * parts == self.key:
            return key
        if count * parts == self.query or (self.key == 1 and count == self.given):
            return key[:, :: max(1, count * parts // self.key)]
        raise ValueError(
            f"a key or value has {count} heads, but {self.key // parts} or, repeated, "
            f"{self.query // parts} were expected"
        )

    def own_query(self, x: Tensor) -> Tensor:
        """This rank's heads of a query or mask; unchanged unless it has all query heads."""
        if x.shape[_HEADS] != self.query:
            return x
        own = self._own
        return x.narrow(_HEADS, own.start, len(own))

    def own_key(self, x: Tensor) -> Tensor:
        """The key or value heads that this rank's queries use; their gradient is then partial."""
        if not self.whole_key:
            return x
        own = self._own_keys
        return x.narrow(_HEADS, own.start, len(own))
