"""Of process groups, meshes, DTensors, and modules as data parallelism wraps them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.distributed.distributed_c10d import _set_pg_timeout as set_timeout
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.fx import Graph

# Meshes and process groups. set_timeout: torch gives a mesh's groups the default timeout.


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that this one is a slice of: all slices of it have one :class:`Context`."""
    return mesh._get_root_mesh()


def current_mesh() -> DeviceMesh:
    """The mesh of the surrounding ``with mesh:``, as torch's ``parallelize_module`` takes it."""
    return _mesh_resources.get_current_mesh()


_first_fake_rank = itertools.count(1 << 16)


@contextmanager
def fake_world(ranks: int, rank: int) -> Iterator[int]:
    """A default process group that transfers nothing, whatever group the process has.

    torch keeps its groups in one object, which is replaced meanwhile, and in a registry of names,
    from which the fake groups' names are removed at the end.

    The ranks begin at a number at which no other mesh of the process begins: DTensor caches the
    meshes that it has seen, and would take this one for another of the same ranks.

    Args:
        ranks: the number of ranks of the mesh.
        rank: which of them this process is.

    Yields:
        The number of the first rank.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    before, hook, first = c10d._world, sys.excepthook, next(_first_fake_rank)
    kinds = "map names group_ranks backend_config to_tag coalesce_state"
    tables: Any = {name: {} for name in ("tags_to_pg", *(f"pg_{kind}" for kind in kinds.split()))}
    # So that names differ from those of the process's own groups.
    here: Any = SimpleNamespace(default_pg=None, comms=[], group_count=1 << 30, **tables)
    c10d._world = here
    try:
        size = first + ranks
        dist.init_process_group("fake", store=FakeStore(), rank=first + rank, world_size=size)
        yield first
    finally:
        for name in here.pg_names.values():
            c10d._unregister_process_group(name)
        c10d._world = before
        c10d._update_default_pg(before.default_pg)
        sys.excepthook = hook


def resolve_process_group(name: str) -> dist.ProcessGroup:
    """The process group of a name, by which the functional collectives refer to it."""
    return c10d._resolve_process_group(name)  # type: ignore[arg-type]


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend of a group for a device, such as a ProcessGroupGloo; None if there is none."""
    if torch.device(device.type) not in group._device_types:
        return None
    return group._get_backend(device)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The timeout of a group's transfers; None for a backend that has no such option."""
    options = getattr(backend_of(group, device), "options", None)
    return getattr(options, "_timeout", None)


def default_timeout(group: dist.ProcessGroup) -> timedelta:
    """The timeout of a group of this backend that was given none."""
    return c10d._get_default_timeout(dist.get_backend(group))


def gloo_options(devices: Sequence[Any], threads: int, timeout: timedelta) -> Any:
    """Options of a gloo group with ``threads`` worker threads, where torch's groups have two."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = list(devices)
    options._threads = threads
    options._timeout = timeout
    return options


# DTensor. StridedShard: the placement that DTensor gives a flattened sequence of uneven shards.


def spec_of(x: Any) -> Any:
    """A DTensor's spec: its mesh, placements and global shape; None for other tensors."""
    return getattr(x, "_spec", None)


def place_by_keyword(op: Any, name: str) -> None:
    """Let DTensor's cache of an operator's placements look at a keyword argument."""
    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op].static_kwargkey = [name]


def spec_for(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> Any:
    """The spec of a DTensor."""
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, dtype))


def dtensor_of(local: Tensor, spec: Any) -> DTensor:
    """A shard as a DTensor, without ``from_local``'s checks, which take longer than a product."""
    # A copy of the spec, as torch changes specs in place.
    own = object.__new__(type(spec))
    own.__dict__.update(spec.__dict__)
    # Without __init__, which does nothing but tell torch.export.
    return DTensor.__new__(DTensor, local, own, requires_grad=False)


@contextmanager
def deciding_layouts_within(around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Have DTensor look for the layout of an operator's result within ``around()``.

    To know the result's shape it runs the operator on fake tensors as large as the whole ones.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    names = "propagate_op_sharding_non_cached", "_propagate_tensor_meta_non_cached"

    def within(decide: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def decided(schema: Any) -> Any:
            with around():
                return decide(schema)

        return decided

    for name in names:
        setattr(propagator, name, within(getattr(propagator, name)))
    try:
        yield
    finally:
        for name in names:
            vars(propagator).pop(name, None)


# How data parallelism wraps modules

REPLICATE = "torch.distributed._composable.replicate"


def has_replicate(module: nn.Module) -> bool:
    """Whether the composable ``replicate`` averages a module's gradients."""
    states = module.__dict__.get(STATE_KEY, {}).values()
    return any(type(state).__module__ == REPLICATE for state in states)


def is_sharded_by_fsdp(module: nn.Module) -> bool:
    """Whether FSDP2 shards a module's own parameters, and so follows a ``load_state_dict``."""
    hooks = module._load_state_dict_post_hooks.values()
    return any(hook.__module__.startswith("torch.distributed.fsdp.") for hook in hooks)


def was_localized(param: Any) -> bool:
    """Whether DistributedDataParallel, with a ``device_mesh``, made a DTensor parameter plain."""
    return hasattr(param, "_st_info")
