"""One axis of the grid, and how transfers along it are split into pieces.

Where its transport asks for that, transfers that go both ways between two ranks are sent in pieces
of :data:`PIECE_BYTES`, and those of all ranks with all others in smaller ones
(:data:`INCOMING_BYTES`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._torch_compat.distributed import resolve_process_group
from .._tracing import in_graph
from ..mesh.layouts import nested_chunk_sizes
from .groups import ASKING, own_group
from .transport import NCCL, Transport, transport_of

__all__ = [
    "FAST",
    "FAST_PIECE_BYTES",
    "PIECE_BYTES",
    "ROUND_SECONDS",
    "Axis",
    "Link",
    "set_link_rate",
    "link_of",
    "only_own",
    "without_own",
]

PIECE_BYTES = 192 * 1024
"""Large transfers are sent in pieces of about this size, one after another.

On gloo, 4 MB both ways between two ranks took 2.0 times bytes/rate in one piece, 1.09 times in 8
pieces and 1.02 times in 16. At 200 Mbit/s steps were shorter than with 128, 256 and 384 KB.
"""

FAST_PIECE_BYTES = 1024 * 1024
"""The same for a link known to be fast (:func:`set_link_rate`), together with
:data:`FAST_INCOMING_BYTES`.

With both at twice what they had been, a step took 0.97 to 0.99 times as long on sockets of which
the processors are the limit, and 0.99 to 1.01 times at 1 Gbit/s, by TCP with CUBIC; at four times
it took as long as at twice.
"""

INCOMING_BYTES = 768 * 1024
"""An exchange is split further where the others would send a rank more than about this at once.

On gloo every rank sends to all others together, and what a connection cannot buffer waits for the
slowest of them. At 200 Mbit/s exchanges of 192 to 512 KB with each rank took 1.5 times bytes/rate
on 8 ranks and 1.0 to 1.4 times on 4, of 96 KB 1.04 times on 8; at 1 Gbit/s on 4 ranks those of 512
KB took 1.4 times and of 256 KB 1.15 times, by TCP with BBR (with CUBIC much the same, from 256 KB
on). A gather hears from one neighbour only.
"""

FAST_INCOMING_BYTES = 2 * INCOMING_BYTES
"""The same for a fast link."""

COPIES_FROM = 5
"""Along this many ranks or more a small sum is made of copies that all send to all at once.

On gloo a ring takes 2 (N - 1) steps, in each of which every rank has to wake up. With copies a step
on 8 x 1 at 200 Mbit/s, with four ranks on each processor, took 0.95 times as long. Along fewer
ranks that is fewer steps, and the copies are up to twice as many bytes as the ring's.
"""

COPIED_BYTES = 128 * 1024
"""The most bytes of copies that a rank is sent for one sum."""

FAST = 50e6
"""A link of at least this many bytes a second counts as fast: 400 Mbit/s."""

ROUND_SECONDS = 0.3e-3
"""The overhead of one round of the pipelined algorithm, beside its product, on gloo."""


@dataclass
class Link:
    """What is known of how the ranks of a process group send to one another."""

    fast: bool = False


_links: WeakKeyDictionary[dist.ProcessGroup, Link] = WeakKeyDictionary()
"""Keyed by the group itself: names are reused when all groups are destroyed and made anew."""


def link_of(group: dist.ProcessGroup) -> Link:
    """The one link of all axes on a process group."""
    return _links.setdefault(group, Link())


def set_link_rate(rate: float, axis: Axis) -> None:
    """Note the rate, in bytes a second, at which the ranks of an axis send to one another.

    All ranks of the axis have to note the same rate: it decides how transfers are split.
    """
    if rate >= FAST:
        axis.link.fast = True


@dataclass(frozen=True, eq=False)
class Axis:
    """One axis of the grid as a rank sees it: the ranks that differ only in its index.

    ``parts`` is ``(size,)``, or the sizes of the mesh axes that were flattened into this one.
    ``fuses`` says whether a gather or a sum along it beside a product is done by one operator
    together with the product (:mod:`torch_tp2d.ops.matmul.fused`). ``asking_group`` is the group of
    :attr:`asking`; "" if that is the axis' own.
    """

    name: str
    parts: tuple[int, ...]
    index: int
    group: str
    transport: Transport = NCCL
    link: Link = field(default_factory=Link, repr=False)
    fuses: bool = False
    asking_group: str = ""
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", math.prod(self.parts))

    @classmethod
    def of(cls, mesh: DeviceMesh, dim: int) -> Axis:
        """The axis of a mesh dim. Collective: all ranks of the mesh call it together."""
        group, transport = mesh.get_group(dim), transport_of(mesh)
        asking = ""
        if transport.own_groups is not None and group.size() > 1:
            ranks, backend = dist.get_process_group_ranks(group), transport.own_groups
            group = own_group(ranks, mesh.device_type, backend)
            asking = own_group(ranks, mesh.device_type, backend, ASKING).group_name
        name = mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else f"dim{dim}"
        index, link = mesh.get_local_rank(dim), link_of(group)
        return cls(
            name, (group.size(),), index, group.group_name, transport, link, asking_group=asking
        )

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group whose name ``group`` is."""
        return resolve_process_group(self.group)

    @property
    def asking(self) -> Axis:
        """The same ranks, on a group for what they wait for at once, such as each other's sizes.

        On gloo, where a group has one worker, that would wait for the weights gathered ahead.
        """
        return replace(self, group=self.asking_group) if self.asking_group else self

    def split(self, extent: int) -> tuple[int, ...]:
        """Extents of the shards of a dim of ``extent`` elements, one for each rank."""
        return nested_chunk_sizes(extent, self.parts)

    def fuses_shards(self, sizes: Sequence[int]) -> bool:
        """Whether a fused operator moves shards of these sizes: it takes only equal ones."""
        return self.fuses and self._alike(sizes)

    def moves_evenly(self, sizes: Sequence[int]) -> bool:
        """Whether shards of these sizes are moved by the very steps that torch's collectives take.

        They are in a compiled graph, if they are neither split into pieces nor padded: Inductor
        recognises only the steps that torch writes.
        """
        return not self.transport.cuts and in_graph() and self._alike(sizes)

    def _alike(self, sizes: Sequence[int]) -> bool:
        return self.size > 1 and sizes[0] > 0 and len(set(sizes)) == 1

    def pieces(self, elements: int, dtype: torch.dtype, *, exchanged: bool = False) -> int:
        """Into how many pieces a transfer of ``elements`` to one peer is split.

        Args:
            exchanged: all ranks send to all others at once, not each to the next.
        """
        if not self.transport.cuts:
            return 1
        size = elements * dtype.itemsize
        incoming = size * (self.size - 1) if exchanged else 0
        largest, most = PIECE_BYTES, INCOMING_BYTES
        if self.link.fast:
            largest, most = FAST_PIECE_BYTES, FAST_INCOMING_BYTES
        return max(1, size // largest, math.ceil(incoming / most))

    def copies_terms(self, elements: int, dtype: torch.dtype) -> bool:
        """Whether every rank of a sum sends its term to all others at once, rather than on a ring.

        Not in a compiled graph, where a sum is one node that Inductor knows.
        """
        if not self.transport.exchanges_sums or self.size < COPIES_FROM or in_graph():
            return False
        return elements * dtype.itemsize * (self.size - 1) <= COPIED_BYTES

    @property
    def own_apart(self) -> bool:
        """Whether a rank handles its own shard, or its own term of a sum, while the rest moves.

        Not in a compiled graph, which might drop a transfer that brings nothing to its own rank
        while the others wait for what it sends.
        """
        return not in_graph()

    def rounds(
        self, sizes: Sequence[int], width: int, dtype: torch.dtype, *, exchanged: bool = True
    ) -> list[tuple[int, tuple[int, ...]]]:
        """Split shards of ``sizes`` rows of ``width`` elements into rounds, sent one by one.

        Every rank has rows in every round, unless there is only one round: a compiled graph drops
        a transfer whose result its rank does not use, and the other ranks would wait for it.

        Args:
            exchanged: as for :meth:`pieces`.

        Returns:
            ``(start, counts)`` for each round: rank ``r`` sends its rows from ``start`` on,
            ``counts[r]`` of them.
        """
        longest, shortest = max(sizes), min(sizes)
        count = self.pieces(longest * width, dtype, exchanged=exchanged)
        starts = range(0, shortest, -(-shortest // count)) if shortest else range(1)
        return [
            (start, tuple(min(end, size) - start for size in sizes))
            for start, end in zip(starts, (*starts[1:], longest), strict=True)
        ]


def without_own(counts: Sequence[int], axis: Axis) -> tuple[int, ...]:
    """``counts`` with 0 for this rank."""
    return (*counts[: axis.index], 0, *counts[axis.index + 1 :])


def only_own(counts: Sequence[int], axis: Axis) -> tuple[int, ...]:
    """``counts`` with 0 for every other rank."""
    after = axis.size - axis.index - 1
    return (0,) * axis.index + (counts[axis.index],) + (0,) * after
