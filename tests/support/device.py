"""Where the ranks of the tests compute: on the CPU over gloo, or all of them on one GPU over NCCL.

``TP2D_TEST_DEVICE=cuda python -m pytest tests/collectives`` is the second. NCCL refuses a GPU that
two ranks of a host have; each rank says that it is a host of its own, so they send to each other
through the loopback interface. That tells nothing of time, but the kernels, the streams and the
order of NCCL's collectives are those of a cluster.

Everything that a body makes without saying where is on the GPU: the models, and the random numbers
too, which then are the GPU's. What a test does without ranks stays on the CPU.
"""

from __future__ import annotations

import multiprocessing
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from torch_tp2d.comm.groups import BACKEND

from .world import DEVICE_OF_RANKS

__all__ = ["DEVICE", "join"]

DEVICE = DEVICE_OF_RANKS if multiprocessing.parent_process() is not None else "cpu"
"""Of this process."""

_CPU_GENERATOR = torch.Generator


class _KindOfGenerator(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _CPU_GENERATOR)


class _OnDevice(torch.Generator, metaclass=_KindOfGenerator):
    """A generator that is on the GPU if nothing else is said, as torch's factories then want it."""

    def __new__(cls, device: str = DEVICE) -> torch.Generator:  # type: ignore[misc]
        return _CPU_GENERATOR(device)


def join(rank: int, size: int, store: str, timeout: timedelta) -> None:
    """Make this process a rank of a process group."""
    backend = BACKEND
    if DEVICE != "cpu":
        os.environ.update(
            NCCL_HOSTID=f"rank{rank}",
            NCCL_SOCKET_IFNAME="lo",
            NCCL_IB_DISABLE="1",
            NCCL_CUMEM_ENABLE="0",
        )
        torch.cuda.set_device(0)
        torch.set_default_device(f"{DEVICE}:0")
        torch.Generator = _OnDevice  # type: ignore[misc]
        # A GPU's generator has another seed in each process.
        torch.manual_seed(0)
        backend = "cpu:gloo,cuda:nccl"
    # Stock collectives on plain gloo lose a process now and then; see torch_tp2d.comm.groups.
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout
    )
