"""What gloo and NCCL want different, chosen once for each axis.

Everything above :mod:`torch_tp2d.comm` is the same on both: the same algorithms, weights gathered
ahead, sums sent late.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from .._torch_compat import backend_of
from .groups import BACKEND

__all__ = ["GLOO", "NCCL", "Transport", "transport_of"]


@dataclass(frozen=True, eq=False)
class Transport:
    """How the ranks of an axis send to one another.

    Args:
        name: for messages.
        own_groups: the backend of the process groups that axes get for themselves; None where they
            send on the mesh's (:mod:`torch_tp2d.comm.groups`).
        cuts: whether large transfers are cut in pieces, by the rate of the link
            (:mod:`torch_tp2d.comm.axis`), with one round of ``pipelined`` for each, and what a rank
            has itself is left off the wire; else they are whole shards, in one buffer.
        exchanges_sums: whether a reduce-scatter is an exchange of shards and a sum of them here,
            rather than the backend's own.
        keeps_gathered: whether a Linear that is not told keeps a gathered weight for backward,
            where that is no larger than its input; else it gathers it again, as FSDP2 does.
        goes_by_rates: whether links are measured, for ``"auto"`` to choose algorithm and dataflow
            by; else it is ``pipelined`` and the style's own dataflow.
    """

    name: str
    own_groups: str | None
    cuts: bool
    exchanges_sums: bool
    keeps_gathered: bool
    goes_by_rates: bool


GLOO = Transport(
    "gloo",
    own_groups=BACKEND,
    # A large message between two ranks that also send to each other takes twice its time.
    cuts=True,
    # gloo's own costs as much as an all-reduce (measured, see benchmarks).
    exchanges_sums=True,
    # Memory there is; that a second gather hides as well as the first was not seen.
    keeps_gathered=True,
    goes_by_rates=True,
)

NCCL = Transport(
    "nccl",
    own_groups=None,
    cuts=False,
    exchanges_sums=False,
    keeps_gathered=False,
    goes_by_rates=False,
)
"""Of every other backend too: collectives as they are, on the mesh's groups, nothing measured.

Transfers run on streams of the backend's. Each starts behind what the current stream was given
before it, and what it reads and writes is referenced until that stream has waited for it
(:class:`~torch_tp2d.comm.transfers.Pending`), so no memory is given away meanwhile.
"""


def transport_of(mesh: DeviceMesh) -> Transport:
    """The transport of a mesh's axes. Nothing else asks for the backend.

    ``TP2D_TRANSPORT=nccl`` in the environment of every rank takes NCCL's on any backend, so that
    the tests can go its ways on gloo processes (those of ``init_process_group("gloo_in_order")``,
    see :mod:`torch_tp2d.comm.groups`). ``gloo`` is for fake groups, on which nothing travels:
    :func:`torch_tp2d.describe` counts so what gloo would move.

    Raises:
        ValueError: if that variable says anything else, or ``gloo`` where something travels.
    """
    asked = os.environ.get("TP2D_TRANSPORT", "")
    if asked not in ("", NCCL.name, GLOO.name):
        raise ValueError(f'TP2D_TRANSPORT is "{NCCL.name}" or not set, not {asked!r}')
    backend = backend_of(mesh.get_group(0), torch.device(mesh.device_type)).name()
    if asked == GLOO.name:
        if backend != "fake":
            raise ValueError(
                f'TP2D_TRANSPORT is "{GLOO.name}" for fake process groups only, and this one is '
                f"{backend}: it is gloo's ways that gloo goes by default"
            )
        return replace(GLOO, own_groups=None)
    return GLOO if backend == "gloo" and not asked else NCCL
