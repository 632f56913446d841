"""The process groups that the axes of a grid send on.

NCCL's are the mesh's own. On gloo each axis gets a group of its own, with one worker thread. A
gloo group of torch's has two, and both write ``pgStatus_->lastCompletedWorkName`` without a lock
(``ProcessGroupGloo::runLoop``, seen in torch 2.13): when two collectives of a group end at once
the old name is freed twice, and the process dies of a corrupted heap some allocations later. It
takes a name too long for the small-string buffer, which ``ALLGATHER_COALESCED`` and
``ALLREDUCE_COALESCED``, those of the functional collectives, are. One worker also keeps a group's
transfers in the order in which they were started.

Importing this module registers such groups with torch.distributed as a backend of their own,
``"gloo_in_order"``, since ``new_group`` makes none that no backend is registered for. No group uses
it that was not asked to. Stock collectives on gloo are as exposed as ours would be:
``init_process_group("gloo_in_order")`` gives every group of the process one worker.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._torch_compat import (
    active_fake_mode,
    c10d_functional,
    default_timeout,
    disable_current_modes,
    gloo_options,
    set_timeout,
    timeout_of,
)

__all__ = [
    "BACKEND",
    "gather_facts",
    "inherit_timeout",
    "own_group",
    "sends",
]

BACKEND = "gloo_in_order"
"""gloo with one worker thread for each group, as a backend of torch.distributed."""


def _devices() -> list[Any]:
    """The interfaces that torch's own groups use."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not names:
        return [dist.ProcessGroupGloo.create_default_device()]
    return [dist.ProcessGroupGloo.create_device(interface=name) for name in names.split(",")]


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(store, rank, size, gloo_options(_devices(), 1, timeout))


if dist.is_available() and dist.is_gloo_available():
    dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])


def inherit_timeout(mesh: DeviceMesh) -> None:
    """Give the mesh's groups the timeout that ``init_process_group`` was given.

    ``init_device_mesh`` leaves them torch's default (gloo's is half an hour), whatever the process
    has: what DTensor sends on them, to place parameters say, would wait that long for a rank that
    has failed. A mesh with a timeout of its own keeps it.
    """
    world, device = dist.group.WORLD, torch.device(mesh.device_type)
    assert world is not None
    wanted = timeout_of(world, device)
    for group in mesh.get_all_groups():
        given = timeout_of(group, device)
        if wanted is not None and given == default_timeout(group) != wanted:
            set_timeout(wanted, group)


def sends(mesh: DeviceMesh) -> bool:
    """Whether the ranks of a mesh really hear of each other: not on a fake process group."""
    fake = dist.get_backend(mesh.get_group(0)) == "fake"
    return not fake and active_fake_mode() is None


def gather_facts(facts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's ``facts``, of one dim and of the same length everywhere, one after the other.

    What the ranks tell each other about themselves: neither counted nor traced, nor watched in
    debug mode, which is about the model's collectives.
    """
    gather, wait = c10d_functional.all_gather_into_tensor, c10d_functional.wait_tensor
    with disable_current_modes(), torch.no_grad():
        gathered: Tensor = wait(gather(facts, group.size(), group.group_name))
    return gathered


_Made = dict[tuple[str | None, tuple[int, ...]], dist.ProcessGroup]
_groups: WeakKeyDictionary[dist.ProcessGroup, _Made] = WeakKeyDictionary()


def own_group(ranks: Sequence[int], device: str, backend: str | None) -> dist.ProcessGroup:
    """A group of our own of these ranks, made when they first ask for it, all of them together.

    Kept as long as the world that it is a part of, rather than as long as a mesh: ranks collect
    garbage at different times, and one that still has its group would not come to make another.

    Args:
        device: the type of the device on which lies what is sent.
        backend: of the group; None is the one that the process has.
    """
    world = dist.group.WORLD
    assert world is not None
    made = _groups.setdefault(world, {})
    key = backend, tuple(ranks)
    if key not in made:
        timeout = timeout_of(world, torch.device(device))
        # Of a world that is bound to a device torch splits the communicator, and waits for every
        # rank of it. The others do not come: a pipeline stage's, say, that needs no such group.
        bound, world.bound_device_id = world.bound_device_id, None
        try:
            made[key] = dist.new_group(
                list(ranks), backend=backend, timeout=timeout, use_local_synchronization=True
            )
        finally:
            world.bound_device_id = bound
    return made[key]
