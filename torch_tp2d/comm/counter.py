"""Counting collectives and bytes, ours and anybody's."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh

from .._torch_compat import TorchDispatchMode, collective_of, resolve_process_group

__all__ = ["CommCounter"]


def _received(op: str, args: Sequence[Any], ranks: int) -> int:
    """Elements that one rank receives in a functional collective of ``ranks`` ranks."""
    size = args[0].numel()
    match op:
        case "all_gather_into_tensor":
            return (ranks - 1) * size
        case "reduce_scatter_tensor":
            return (ranks - 1) * size // ranks
        case "all_reduce":
            return 2 * (ranks - 1) * size // ranks
        case "broadcast":
            return size
    raise AssertionError(f"{op} is not counted")


def _ranks(group: ProcessGroup) -> tuple[int, ...]:
    return tuple(get_process_group_ranks(group))


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
        names = mesh.mesh_dim_names or tuple(str(dim) for dim in range(mesh.ndim))
        # By their ranks: on gloo our collectives run on groups other than the mesh's.
        self._axes = {_ranks(mesh.get_group(dim)): name for dim, name in enumerate(names)}
        self.calls: dict[tuple[str, str], int] = defaultdict(int)
        self.bytes: dict[tuple[str, str], int] = defaultdict(int)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        op = collective_of(func)
        if op:
            self._count(op, args)
        return func(*args, **(kwargs or {}))

    def _count(self, op: str, args: tuple[Any, ...]) -> None:
        group = args[-1]
        if isinstance(group, str):
            group = resolve_process_group(group)
        name = self._axes.get(_ranks(group), "other")
        ranks, index = group.size(), group.rank()
        width = args[0].element_size()
        if op == "all_to_all_single":
            per_row = math.prod(args[0].shape[1:])
            received = sum(count for rank, count in enumerate(args[1]) if rank != index) * per_row
        elif op == "broadcast" and args[1] == index:
            received = 0
        else:
            received = _received(op, args, ranks)
        self.calls[name, op] += 1
        self.bytes[name, op] += received * width

    @property
    def total_bytes(self) -> int:
        """Bytes received by this rank, over all axes."""
        return sum(self.bytes.values())

    def __str__(self) -> str:
        return "\n".join(
            f"{axis:6} {op:24} {self.calls[axis, op]:5} {self.bytes[axis, op]:12} B"
            for axis, op in sorted(self.calls)
        )
