"""Process groups of a world that only exists as numbers: one process plays any rank of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from support.models import grid_mesh

NAMES = ("tp_row", "tp_col")


@contextmanager
def pretend(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(*shape: int, names: tuple[str, ...] = NAMES) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@contextmanager
def fake_grid(rows: int, columns: int) -> Iterator[DeviceMesh]:
    """A grid, of which this process is rank 0."""
    with pretend(0, rows * columns):
        yield grid_mesh(rows, columns)
