"""What a rank of a grid does in a step, recorded without devices: meta tensors, a fake group.

:class:`Recorder` keeps the collectives that start, their waits and the matrix products between, in
order, and what would stop or break a step on a GPU. One process plays the ranks one after another
(:func:`as_rank`), each in a world that exists only as numbers, and so on NCCL's transport. What is
asked of the record is in ``test_devices.py`` (which rank waits for which, :func:`disagreement`) and
``test_overlap.py`` (what is waited for without a product beside it, :class:`Exposed`).
"""

from __future__ import annotations

import math
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _resolve_process_group, _world
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_tp2d._torch_compat.tensors import active_fake_mode, collective_of, flops_of
from torch_tp2d.runtime.deferred import Deferred

Group = tuple[tuple[int, ...], int]
"""A communicator: its ranks, and which it is of those that have these ranks, as they were made."""

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"}
READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero", "equal"}
"""They wait for the device: the host has to know a number, or how many there are."""
MAKERS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)


class Collective(NamedTuple):
    """What a rank starts."""

    group: Group
    op: str
    dtype: str
    sizes: tuple[Any, ...]
    """The same on every rank; of an all-to-all what is sent to each, and received from each."""
    received: int
    """Bytes that this rank receives."""


class Wait(NamedTuple):
    """For the collective of that number."""

    collective: int


class Product(NamedTuple):
    """A matrix product of so many operations."""

    operations: int


@dataclass
class Record:
    """What a rank did, in order."""

    events: list[Collective | Wait | Product] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """What a step on a GPU would stop for or die of."""

    @property
    def collectives(self) -> list[Collective]:
        return [event for event in self.events if isinstance(event, Collective)]


@contextmanager
def as_rank(rank: int, *shape: int, device: str = "cpu") -> Iterator[DeviceMesh]:
    """A mesh as one of its ranks sees it; of three axes the first is ``"dp"``."""
    # DTensor keeps the meshes of the worlds before, whose groups are gone.
    _clear_sharding_prop_cache()
    store = FakeStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=math.prod(shape))
    try:
        names = ("dp", "tp_row", "tp_col")[-len(shape) :]
        yield init_device_mesh(device, shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def _group_of(group: Any) -> tuple[Group, int]:
    """The communicator, and this rank's index in it."""
    if isinstance(group, str):
        group = _resolve_process_group(group)
    ranks = tuple(dist.get_process_group_ranks(group))
    alike = [g for g in _world.pg_map if tuple(dist.get_process_group_ranks(g)) == ranks]
    return (ranks, alike.index(group)), group.rank()


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


class _Lists(TorchFunctionMode):
    """Finds Python lists and numbers that are copied to the device, which dispatch does not see."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(at, list | range) for at in index):
                self._find("an index that is a list")
        result = func(*args, **(kwargs or {}))
        if func in MAKERS and (result.ndim or result.device.type != "cpu"):
            self._find("a tensor made of a list or number")
        return result

    def _find(self, fault: str) -> None:
        # What a model itself does so is not ours to mend.
        if "torch_tp2d/" in (place := _place()):
            self.record.faults.append(f"{fault}, in {place}")


class Recorder(TorchDispatchMode):
    """Records a step that runs under it.

    Args:
        device: the type of the device on which the model is; ``"meta"`` stands for a GPU.
    """

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.device = device
        self.record = Record()
        self._wires: dict[int, int] = {}
        self._awaited: set[int] = set()
        self._kept: list[Tensor] = []
        self._lists = _Lists(self.record)

    def __enter__(self) -> Recorder:
        self._lists.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._lists.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # What is inside a deferred tensor, or a DTensor, is seen when it comes to the mode itself.
        if any(issubclass(kind, (DTensor, Deferred, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented
        if self.device == "meta" and active_fake_mode() is not None:
            # DTensor finds out shapes.
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func.namespace == "_c10d_functional":
            result = func(*args, **kwargs)
            if name == "wait_tensor":
                self._wait(args[0])
            elif op := collective_of(func):
                self._start(op, args, result)
            return result
        if func.namespace == "symm_mem":
            # It sends and multiplies by turns.
            result = func(*args, **kwargs)
            self._start(name, args, tree_leaves(result)[0])
            self.record.events.append(Product(flops_of(func, args, kwargs, result)))
            self._wait(tree_leaves(result)[0])
            return result
        if func.namespace == "c10d":
            # FSDP2's, into tensors of its own.
            out, x, group, *_ = args
            op = {"_allgather_base_": "all_gather_into_tensor"}.get(name, "reduce_scatter_tensor")
            self._start(op, (x, "avg", ProcessGroup.unbox(group)), out)
            return func(*args, **kwargs)
        if func.namespace == "fsdp" and name == "split_with_sizes_copy":
            # What was gathered is put in its places. What it reduces is awaited at the end.
            self._wait(args[0])
        result = func(*args, **kwargs)
        self._look(name, func, given, result)
        if name.rstrip("_") in PRODUCTS:
            self.record.events.append(Product(_operations(name.rstrip("_"), args, result)))
        return result

    def _start(self, op: str, args: Any, result: Tensor) -> None:
        group, index = _group_of(args[-1])
        x, ranks = args[0], len(group[0])
        width = x.element_size()
        match op:
            case "all_gather_into_tensor" | "fused_all_gather_matmul":
                sizes, received = (x.numel(),), (ranks - 1) * x.numel()
            case "reduce_scatter_tensor":
                sizes, received = (x.numel(), args[1]), (ranks - 1) * x.numel() // ranks
            case "fused_matmul_reduce_scatter":
                total = x.numel() // x.shape[-1] * args[1].shape[-1]
                sizes, received = (total, args[2]), (ranks - 1) * total // ranks
            case "all_reduce":
                sizes, received = (x.numel(), args[1]), 2 * (ranks - 1) * x.numel() // ranks
            case "broadcast":
                sizes, received = (x.numel(), args[1]), 0 if args[1] == index else x.numel()
            case "all_to_all_single":
                per_row = math.prod(x.shape[1:])
                receives, sends = ([n * per_row for n in args[at]] for at in (1, 2))
                sizes = tuple(sends), tuple(receives)
                received = sum(receives) - receives[index]
            case _:
                raise AssertionError(f"{op} is not known")
        dtype = str(x.dtype).removeprefix("torch.")
        self._wires[_storage(result)] = len(self.record.collectives)
        self._kept.append(result)
        self.record.events.append(Collective(group, op, dtype, sizes, received * width))

    def _wait(self, wire: Tensor) -> None:
        at = self._wires.get(_storage(wire))
        # DTensor waits again for what has been waited for.
        if at is not None and at not in self._awaited:
            self._awaited.add(at)
            self.record.events.append(Wait(at))

    def _look(self, name: str, func: Any, given: Sequence[Tensor], result: Any) -> None:
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        kinds = {x.device.type for x in given if x.ndim or x.device.type != "cpu"}
        where = [x.device.type for x in made]
        fault = ""
        if len(kinds) > 1:
            fault = f"tensors of {sorted(kinds)}"
        elif name in READS and kinds - {"cpu"}:
            fault = "the host waits for the device"
        elif self.device in kinds and "cpu" in where:
            fault = "a copy to the host"
        elif not kinds and any(x.ndim and x.device.type == "cpu" for x in made):
            fault = "a tensor made on the CPU"
        elif kinds == {"cpu"} and self.device in where:
            fault = "a copy from the host"
        if fault:
            self.record.faults.append(f"{func}: {fault}, in {_place()}")


def _place() -> str:
    """The line that runs, of the library or of the model."""
    frames = [
        frame
        for frame in traceback.extract_stack()
        if not frame.filename.endswith((__file__, "styles/intercept.py"))
        and "/torch/" not in frame.filename
    ]
    frame = frames[-1]
    return f"{'/'.join(frame.filename.split('/')[-4:])}:{frame.lineno} {frame.name}"


def _operations(name: str, args: Any, result: Any) -> int:
    if name.startswith("convolution"):
        grad, weight = args[0], args[2] if name == "convolution_backward" else args[1]
        out = grad if name == "convolution_backward" else result
        return 2 * out.numel() * weight[0].numel()
    inner = args[1 if name in ("addmm", "baddbmm") else 0].shape[-1]
    return 2 * result.numel() * inner


# Whether the ranks fit each other


def disagreement(records: Sequence[Record]) -> str:
    """What would make ranks, each of which does what its record says, wait for ever; or ``""``.

    In each group every rank has to start the same collectives in the same order. And there has to
    be an order of all collectives that fits every rank's: where two ranks take two groups in
    turns, each may hold the device for the one that the other is to start next.
    """
    by_group: dict[Group, dict[int, list[Collective]]] = {}
    before: dict[tuple[Group, int], set[tuple[Group, int]]] = {}
    for rank, record in enumerate(records):
        last = None
        for collective in record.collectives:
            of_rank = by_group.setdefault(collective.group, {}).setdefault(rank, [])
            here = collective.group, len(of_rank)
            before.setdefault(here, set()).update([] if last is None else [last])
            of_rank.append(collective)
            last = here
    for group, ranks in by_group.items():
        if said := _differ(group, ranks):
            return said
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        (ranks, which), at = error.args[1][0]
        others = {collective[0][0] for collective in error.args[1]} - {ranks}
        return f"collective {at} of {ranks} ({which}) waits for itself, by way of {sorted(others)}"
    return ""


def _differ(group: Group, ranks: dict[int, list[Collective]]) -> str:
    members, _ = group
    if set(ranks) != set(members):
        return f"of {members} only {sorted(ranks)} start anything"
    for at, here in enumerate(zip_longest(*(ranks[rank] for rank in members))):
        if None in here or len({(one.op, one.dtype) for one in here}) > 1:
            return f"collective {at} of {members}: {here}"
        if here[0].op == "all_to_all_single":
            sends, receives = zip(*(one.sizes for one in here), strict=True)
            fits = sends == tuple(zip(*receives, strict=True))
        else:
            fits = len({one.sizes for one in here}) == 1
        if not fits:
            return f"collective {at} of {members}: {[one.sizes for one in here]}"
    return ""


# What is waited for with nothing beside it


class Machine(NamedTuple):
    """Rates that are stated, not measured: of an H100 in bf16, its node's and its nodes' links."""

    operations: float = 400e12
    """A second."""
    near: float = 300e9
    """Bytes that a device receives a second from its neighbours, along the last axis."""
    far: float = 50e9
    """The same from others."""
    latency: float = 10e-6
    """Of each collective, in seconds."""

    def seconds(self, collective: Collective) -> float:
        (first, *_, last), size = collective.group[0], len(collective.group[0])
        rate = self.near if last - first == size - 1 else self.far
        return self.latency + collective.received / rate


@dataclass(frozen=True)
class Exposed:
    """Of a record: bytes that a rank receives, and those that it waits for doing nothing.

    A collective is exposed if no product is started between it and its wait. The seconds are those
    in which nothing is multiplied, where the collectives of a group come one after another.
    """

    received: int
    exposed: int
    waiting: float
    computing: float

    @staticmethod
    def of(record: Record, machine: Machine) -> Exposed:
        now, computing, products, exposed = 0.0, 0.0, 0, 0
        free: dict[Group, float] = defaultdict(float)
        under_way: list[tuple[Collective, float, int]] = []
        for event in record.events:
            match event:
                case Product():
                    now += event.operations / machine.operations
                    computing += event.operations / machine.operations
                    products += 1
                case Collective():
                    start = max(now, free[event.group])
                    free[event.group] = end = start + machine.seconds(event)
                    under_way.append((event, end, products))
                case Wait():
                    collective, end, before = under_way[event.collective]
                    exposed += collective.received if products == before else 0
                    now = max(now, end)
        received = sum(collective.received for collective in record.collectives)
        return Exposed(received, exposed, now - computing, computing)

    def __sub__(self, other: Exposed) -> Exposed:
        return Exposed(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __str__(self) -> str:
        return (
            f"{self.received / 2**20:.0f} MiB, {100 * self.exposed / self.received:.1f} % exposed; "
            f"{1e3 * self.waiting:.2f} ms waiting, {1e3 * self.computing:.2f} ms computing"
        )
