"""The process groups that the axes of a grid send on.

On NCCL they are the mesh's groups. On gloo each axis gets a group of its own, with one worker
thread. A gloo group of torch's has two, and both write ``pgStatus_->lastCompletedWorkName`` without
a lock (``ProcessGroupGloo::runLoop``, seen in torch 2.13): when two collectives of a group end at
the same time the old name is freed twice, and the process dies of a corrupted heap some allocations
later. That happens to names too long for the small-string buffer, such as those of the functional
collectives, ``ALLGATHER_COALESCED`` and ``ALLREDUCE_COALESCED``. One worker also keeps a group's
transfers in the order in which they were started.

Importing this module registers such groups with torch.distributed as a backend of their own,
``"gloo_in_order"``, since ``new_group`` only makes groups of registered backends. No group uses it
unless asked to. Stock collectives on gloo are exposed to the same bug;
``init_process_group("gloo_in_order")`` protects them by giving every group of the process one
worker.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._torch_compat.distributed import default_timeout, gloo_options, set_timeout, timeout_of
from .._torch_compat.tensors import active_fake_mode, c10d_functional, disable_current_modes
from .._tracing import in_graph

__all__ = [
    "ASKING",
    "BACKEND",
    "gather_facts",
    "gathering_facts",
    "inherit_timeout",
    "is_pretended",
    "own_group",
    "sends",
]

BACKEND = "gloo_in_order"
"""gloo with one worker thread for each group, as a backend of torch.distributed."""
ASKING = "asking"
"""The purpose of the second group of an axis, which large transfers do not queue on.

It is made with the first, whether it is needed or not: torch names a group by how many the process
has, so ranks that had made different numbers of them could make no other one together.
"""


_devices: WeakKeyDictionary[dist.ProcessGroup, list[Any]] = WeakKeyDictionary()


def _devices_of(world: dist.ProcessGroup | None) -> list[Any]:
    """The network devices that torch's own gloo groups use, one set for all groups of ours.

    A device has a thread that looks for what to do a hundred times a second. Where processes share
    their cores, one for each group took a sixth of the tests' time.
    """
    found = None if world is None else _devices.get(world)
    if found is None:
        make, names = dist.ProcessGroupGloo.create_device, os.environ.get("GLOO_SOCKET_IFNAME", "")
        found = [make(interface=name) for name in names.split(",") if name]
        found = found or [dist.ProcessGroupGloo.create_default_device()]
        if world is not None:
            _devices[world] = found
    return found


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    # Once, whatever the number of groups.
    atexit.unregister(_let_workers_rest)
    atexit.register(_let_workers_rest)
    options = gloo_options(_devices_of(dist.group.WORLD), 1, timeout)
    return dist.ProcessGroupGloo(store, rank, size, options)


if dist.is_available() and dist.is_gloo_available():
    dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])


_REST_SECONDS = 1.0
"""The longest that the end of a process waits for other threads; a failed transfer may hold one."""


def _let_workers_rest() -> None:
    """Let gloo's workers let go of the last transfers' tensors before Python ends.

    A worker says that a transfer has ended, and then drops its tensors, for which it may need the
    interpreter's lock. A thread that asks for that while Python ends is taken down amid a
    destructor, and the process with it ("terminate called without an active exception"). The
    workers would be joined in time by ``destroy_process_group()``, but DTensor's caches keep the
    mesh, which keeps its groups.
    """
    end, quiet = time.monotonic() + _REST_SECONDS, 0
    # Seen at rest once, a worker may have waited for the lock that this thread holds while looking.
    while quiet < 3 and time.monotonic() < end:
        time.sleep(0.001)  # Lets them have the lock; torch has no way to await them.
        quiet = 0 if _others_run() else quiet + 1


def _others_run() -> bool:
    """Whether another thread of the process is running; not known, so no, where there is no /proc.

    One that waits for a lock or for another rank is not.
    """
    for task in Path("/proc/self/task").glob("*"):
        if int(task.name) == threading.get_native_id():
            continue
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue  # It has ended since.
        if state == "R":
            return True
    return False


def inherit_timeout(mesh: DeviceMesh) -> None:
    """Give the mesh's groups the timeout that ``init_process_group`` was given.

    ``init_device_mesh`` gives them torch's default (half an hour on gloo) whatever the timeout of
    the process: DTensor's transfers on them, such as those that place parameters, would wait that
    long for a rank that has failed. A mesh with a timeout of its own keeps it.
    """
    world, device = dist.group.WORLD, torch.device(mesh.device_type)
    assert world is not None
    wanted = timeout_of(world, device)
    for group in mesh.get_all_groups():
        given = timeout_of(group, device)
        if wanted is not None and given == default_timeout(group) != wanted:
            set_timeout(wanted, group)


def is_pretended(mesh: DeviceMesh) -> bool:
    """Whether the process groups of a mesh are torch's fake ones, on which nothing is ever sent."""
    return dist.get_backend(mesh.get_group(0)) == "fake"


def sends(mesh: DeviceMesh) -> bool:
    """Whether the ranks of a mesh exchange data that Python can look at.

    Not on a fake process group, with fake tensors or in a traced graph.
    """
    if in_graph():
        return False
    return not is_pretended(mesh) and active_fake_mode() is None


def gather_facts(facts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate every rank's ``facts``, a 1-dim tensor of the same length on every rank.

    For what the ranks tell each other about themselves. It is not counted, traced or watched in
    debug mode, since those are about the model's collectives.
    """
    return gathering_facts(facts, group)()


def gathering_facts(facts: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Start :func:`gather_facts`. The function returned waits for the result."""
    gather, wait = c10d_functional.all_gather_into_tensor, c10d_functional.wait_tensor
    with disable_current_modes(), torch.no_grad():
        moving = gather(facts, group.size(), group.group_name)

    def gathered() -> Tensor:
        with disable_current_modes(), torch.no_grad():
            result: Tensor = wait(moving)
        return result

    return gathered


_Made = dict[tuple[str | None, tuple[int, ...], str], dist.ProcessGroup]
_groups: WeakKeyDictionary[dist.ProcessGroup, _Made] = WeakKeyDictionary()


def own_group(
    ranks: Sequence[int], device: str, backend: str | None, purpose: str = ""
) -> dist.ProcessGroup:
    """A group of our own of these ranks, made when all of them together first ask for it.

    It is kept as long as the world group, rather than as long as a mesh: ranks collect garbage at
    different times, and a rank that still has its group would not take part in making another.

    Args:
        device: the type of the device that holds the tensors to be sent.
        backend: the group's; None is that of the process.
        purpose: the same ranks have a group for each.
    """
    world = dist.group.WORLD
    assert world is not None
    made = _groups.setdefault(world, {})
    key = backend, tuple(ranks), purpose
    if key not in made:
        timeout = timeout_of(world, torch.device(device))
        # If the world is bound to a device, torch splits its communicator and waits for all of its
        # ranks. Those outside the group do not come, such as another pipeline stage's.
        bound, world.bound_device_id = world.bound_device_id, None
        try:
            made[key] = dist.new_group(
                list(ranks), backend=backend, timeout=timeout, use_local_synchronization=True
            )
        finally:
            world.bound_device_id = bound
    return made[key]
