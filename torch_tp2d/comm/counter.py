"""Counting collectives and their bytes, those of this library and of any other code."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh

from .._torch_compat.distributed import resolve_process_group
from .._torch_compat.tensors import TorchDispatchMode, active_fake_mode, collective_of

__all__ = ["AxisNames", "CommCounter", "crossing"]


def _received(op: str, args: Sequence[Any], ranks: int, index: int) -> int:
    """Elements that a rank receives in a functional collective of ``ranks`` ranks."""
    size = int(args[0].numel())
    match op:
        case "all_gather_into_tensor":
            return (ranks - 1) * size
        case "reduce_scatter_tensor":
            return (ranks - 1) * size // ranks
        case "all_reduce":
            return 2 * (ranks - 1) * size // ranks
        case "fused_all_gather_matmul":
            return (ranks - 1) * size
        case "fused_matmul_reduce_scatter":
            tokens, features = size // args[0].shape[-1], args[1].shape[-1]
            return (ranks - 1) * tokens * features // ranks
        case "broadcast":
            return 0 if args[1] == index else size
        case "all_to_all_single":
            per_row = math.prod(args[0].shape[1:])
            return sum(count for rank, count in enumerate(args[1]) if rank != index) * per_row
    raise AssertionError(f"{op} is not counted")


def crossing(op: str, args: Sequence[Any]) -> tuple[ProcessGroup, int]:
    """The group of a functional collective, and the bytes that this rank receives in it."""
    group = args[-1]
    if isinstance(group, str):
        group = resolve_process_group(group)
    received = _received(op, args, group.size(), group.rank())
    return group, received * int(args[0].element_size())


def _ranks(group: ProcessGroup) -> tuple[int, ...]:
    return tuple(get_process_group_ranks(group))


def _dispatches(kind: type) -> bool:
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__  # type: ignore[attr-defined]


class AxisNames:
    """The names of a mesh's axes, by their process groups.

    Groups are told by their ranks, since on gloo our collectives run on other groups than the
    mesh's.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        names = mesh.mesh_dim_names or tuple(str(dim) for dim in range(mesh.ndim))
        self._axes = {_ranks(mesh.get_group(dim)): name for dim, name in enumerate(names)}

    def of(self, group: ProcessGroup) -> str:
        """The name of the group's axis; ``other`` if it belongs to none."""
        return self._axes.get(_ranks(group), "other")


class CommCounter(TorchDispatchMode):
    """Counts the functional collectives run under it and the bytes that this rank receives.

    Counts what reaches the dispatcher, so stock styles and DTensor redistributions are counted
    beside ours; a broadcast counts nothing on its source, an all-reduce counts as a
    reduce-scatter and an all-gather. Collectives inside a compiled graph and FSDP2's own are not
    seen.

    Example::

        >>> with CommCounter(mesh["tp_row", "tp_col"]) as comm:
        ...     model(ids).sum().backward()
        >>> print(comm)
        tp_col all_gather_into_tensor       2      4096 B
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._axes = AxisNames(mesh)
        self.calls: dict[tuple[str, str], int] = defaultdict(int)
        self.bytes: dict[tuple[str, str], int] = defaultdict(int)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if active_fake_mode() is None and any(map(_dispatches, types)):
            # Such as DTensor: the collectives that it makes of the operator are seen here later.
            return NotImplemented
        op = collective_of(func)
        if op:
            self._count(op, args)
        return func(*args, **(kwargs or {}))

    def _count(self, op: str, args: tuple[Any, ...]) -> None:
        group, received = crossing(op, args)
        key = self._axes.of(group), op
        self.calls[key] += 1
        self.bytes[key] += received

    @property
    def total_bytes(self) -> int:
        """Bytes received by this rank, over all axes."""
        return sum(self.bytes.values())

    def __str__(self) -> str:
        return "\n".join(
            f"{axis:6} {op:24} {self.calls[axis, op]:5} {self.bytes[axis, op]:12} B"
            for axis, op in sorted(self.calls)
        )
