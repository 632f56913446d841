"""How transfers differ between gloo and NCCL, chosen once for each axis.

Everything above :mod:`torch_tp2d.comm` is the same on both: the algorithms, the prefetch of weights
and the deferred sums.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from .._torch_compat.distributed import backend_of
from .groups import BACKEND

__all__ = ["GLOO", "NCCL", "Transport", "transport_of"]


@dataclass(frozen=True, eq=False)
class Transport:
    """How the ranks of an axis send to one another.

    Args:
        name: for messages.
        own_groups: the backend of the process groups that axes get for themselves; None if they use
            the mesh's (:mod:`torch_tp2d.comm.groups`).
        cuts: whether large transfers are split into pieces, by the rate of the link
            (:mod:`torch_tp2d.comm.axis`), with one round of ``pipelined`` for each, and a rank's
            own data is left off the wire; else entire shards are sent, in one buffer.
        exchanges_sums: whether a reduce-scatter is an exchange of shards, summed here, rather than
            the backend's own.
        keeps_gathered: whether a Linear without ``reshard_after_forward`` keeps its gathered weight
            for backward where that is no larger than its input; else it gathers the weight a second
            time, as FSDP2 does.
        goes_by_rates: whether links are measured, for ``"auto"`` to choose the algorithm and the
            dataflow by; else it chooses ``pipelined`` and the style's own dataflow.
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
    # Two ranks that send each other large messages at once take twice the time of one message.
    cuts=True,
    # gloo's reduce-scatter costs as much as an all-reduce (measured, see benchmarks).
    exchanges_sums=True,
    # There is enough memory, and a second gather was not seen to overlap as well as the first.
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
"""For every other backend too: its own collectives, on the mesh's groups, and no measurements.

Transfers run on streams of the backend's. Each starts after what was queued on the current stream
before it, and the tensors that it reads and writes are referenced until that stream has waited for
it (:class:`~torch_tp2d.comm.transfers.Pending`), so that their memory is not reused meanwhile.
"""


def transport_of(mesh: DeviceMesh) -> Transport:
    """The transport of a mesh's axes. Nothing else asks for the backend.

    ``TP2D_TRANSPORT=nccl`` in the environment of every rank chooses NCCL's on any backend, so that
    the tests can run its code on gloo processes (those of ``init_process_group("gloo_in_order")``,
    see :mod:`torch_tp2d.comm.groups`). ``gloo`` is for fake groups, which transfer nothing:
    :func:`torch_tp2d.describe` uses it to count what gloo would move.

    Raises:
        ValueError: if the variable has any other value, or is ``gloo`` on groups that are not fake.
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
