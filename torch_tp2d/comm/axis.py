"""One axis of the grid, and how what travels along it is cut.

A large message between two ranks that also send to each other takes twice its time on gloo, so what
travels both ways is cut into pieces of :data:`PIECE_BYTES`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .._torch_compat import resolve_process_group
from ..mesh.layouts import nested_chunk_sizes

__all__ = [
    "FAST_PIECE_BYTES",
    "PIECE_BYTES",
    "ROUNDS",
    "ROUND_SECONDS",
    "Axis",
    "Link",
    "link_is",
    "link_of",
    "only_own",
    "without_own",
]

PIECE_BYTES = 192 * 1024
"""On gloo what travels both ways is cut into pieces of about this size, sent one after another.

Whole, 4 MB to and fro between two ranks took 2.0 times bytes/rate; in 8 pieces 1.09, in 16 1.02.
At 200 Mbit/s steps were shorter than with 128, 256 and 384 KB.
"""

FAST_PIECE_BYTES = 512 * 1024
"""The same for a link known to be fast (:func:`link_is`): at 1 Gbit/s shorter than with 192 and 256
KB by 6 %, and than with 384 and 1024 KB.
"""

FAST = 50e6
"""From how many bytes a second a link is fast: 400 Mbit/s."""

ROUND_SECONDS = 0.3e-3
"""What one round of the pipelined algorithm costs a rank beside its product, on gloo."""

ROUNDS = 4
"""The most rounds of the pipelined algorithm where nothing is cut for the wire's sake.

More hide more of the transfer, and make the products smaller than a GPU likes; not measured yet.
"""


@dataclass
class Link:
    """What is known of how the ranks of a process group send to one another."""

    fast: bool = False


_links: WeakKeyDictionary[dist.ProcessGroup, Link] = WeakKeyDictionary()
"""By the group itself: its name comes again when all groups are destroyed and made anew."""


def link_of(group: dist.ProcessGroup) -> Link:
    """The one that all axes on a process group share."""
    return _links.setdefault(group, Link())


def link_is(rate: float, axis: Axis) -> None:
    """Note the rate, in bytes a second, at which the ranks of an axis send to one another.

    All ranks of the axis have to note the same: transfers are cut by it.
    """
    if rate >= FAST:
        axis.link.fast = True


@dataclass(frozen=True, eq=False)
class Axis:
    """One axis of the grid as a rank sees it: the ranks that differ only in its index.

    ``parts`` is ``(size,)``, or the sizes of the mesh axes that were flattened into this one.
    """

    name: str
    parts: tuple[int, ...]
    index: int
    group: str
    is_gloo: bool
    """Whether transfers are cut, and reduce-scatters made of all-to-alls (module docstring)."""
    link: Link = field(default_factory=Link, repr=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", math.prod(self.parts))

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group itself, of which ``group`` is the name."""
        return resolve_process_group(self.group)

    def split(self, extent: int) -> tuple[int, ...]:
        """Extents of the shards of a dim of ``extent`` elements, one for each rank."""
        return nested_chunk_sizes(extent, self.parts)

    def pieces(self, elements: int, dtype: torch.dtype) -> int:
        """Into how many pieces a transfer of ``elements`` to one peer is cut."""
        return self._cut(elements, dtype) if self.is_gloo else 1

    @property
    def spares_own(self) -> bool:
        """Whether what a rank has of a gather, or keeps of a sum, is left off the wire's buffers.

        On gloo, which copies it. Not in a graph, which might drop a transfer that brings nothing
        to its own rank while the others wait for what it sends.
        """
        return self.is_gloo and not torch.compiler.is_compiling()

    def _cut(self, elements: int, dtype: torch.dtype) -> int:
        largest = FAST_PIECE_BYTES if self.link.fast else PIECE_BYTES
        return max(1, elements * dtype.itemsize // largest)

    def rounds(
        self, sizes: Sequence[int], width: int, dtype: torch.dtype
    ) -> list[tuple[int, tuple[int, ...]]]:
        """Cut shards of ``sizes`` rows of ``width`` elements into what is sent at a time.

        Every rank has a part in every round, unless there is only one: a compiled graph drops a
        transfer of whose result its rank makes nothing, and the others would wait for it.

        Returns:
            ``(start, counts)`` for each round: rank ``r`` sends its rows from ``start`` on,
            ``counts[r]`` of them.
        """
        longest, shortest = max(sizes), min(sizes)
        count = self._cut(longest * width, dtype)
        count = count if self.is_gloo else min(count, ROUNDS)
        starts = range(0, shortest, -(-shortest // count)) if shortest else range(1)
        return [
            (start, tuple(min(end, size) - start for size in sizes))
            for start, end in zip(starts, (*starts[1:], longest), strict=True)
        ]


def without_own(counts: Sequence[int], axis: Axis) -> tuple[int, ...]:
    """A count for each rank, 0 for this one."""
    return (*counts[: axis.index], 0, *counts[axis.index + 1 :])


def only_own(counts: Sequence[int], axis: Axis) -> tuple[int, ...]:
    """This rank's count, 0 for each other."""
    after = axis.size - axis.index - 1
    return (0,) * axis.index + (counts[axis.index],) + (0,) * after
