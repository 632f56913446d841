"""Bytes of a step: what the arithmetic predicts, and what NCCL would move, by counting.

Both suppose collectives that move no more than they must: for a whole of W bytes on n ranks, an
all-gather or a reduce-scatter sends (n-1)/n W from each rank, an all-reduce twice that.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from variants import KEPT, OURS, Share, Sizes

from torch_tp2d import CommCounter

# In matrices of hidden x hidden: q, k, v, o, and two of four each.
MATRICES = 12
WIDTH = 4
"""Bytes of an fp32 element."""
ALL_REDUCES = {"tp": 6, "tp-input": 4, "fsdp-tp": 4}
"""Of activations along the tensor-parallel axis, for a block, forward and backward."""


def others(ranks: int) -> float:
    """(n-1)/n: the part of a whole that a rank does not hold."""
    return (ranks - 1) / ranks


def predicted_bytes(plan: str, share: Share, sizes: Sizes) -> float | None:
    """Bytes that each rank sends in a step, by the formulas of the README.

    With X the elements of the whole activation and W those of a block's matrices, a block sends

    - on a line, with a all-reduces: ``2a X (n-1)/n``; with sequence parallelism four all-gathers
      and four reduce-scatters, ``8 X (n-1)/n``;
    - in FSDP two all-gathers and a reduce-scatter of the weights, ``3 W (n-1)/n``, or one
      all-gather where gathered weights are kept;
    - on R rows and C columns: ``2a X/R (C-1)/C + 3 W/C (R-1)/R``; on a torch_tp2d grid 8 for 2a,
      and 2 for 3, since gathered weights are kept for backward.

    Biases and norms, less than one in a hundred for hidden 256 and more, are left out. None for
    context parallelism, which is not in that arithmetic.
    """
    if plan == "cp-tp":
        return None
    kept = plan == OURS or plan.endswith(KEPT)
    name = plan.removesuffix(KEPT)
    by_sequence = name in ("tp-sp", "fsdp-sp", OURS)
    activations = 8.0 if by_sequence else 2.0 * ALL_REDUCES.get(name, 0)
    matrices = MATRICES * sizes.hidden**2 / share.columns
    block = activations * sizes.elements / share.rows * others(share.columns)
    block += (2 if kept else 3) * matrices * others(share.rows)
    return block * sizes.layers * WIDTH


def received_by_c10d(op: str, args: tuple[Any, ...]) -> int:
    """Bytes that one rank receives in a collective that is not a functional one.

    They are those of FSDP2, ``(output, input, ...)``.
    """
    if op == "_allgather_base_":
        return (args[0].numel() - args[1].numel()) * args[1].element_size()
    if op == "_reduce_scatter_base_":
        return (args[1].numel() - args[0].numel()) * args[1].element_size()
    raise NotImplementedError(f"the bytes of c10d::{op} are not known")


class WireCounter(CommCounter):
    """Counts the bytes that this rank receives in functional collectives and in FSDP2's."""

    def __init__(self) -> None:
        super().__init__(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("all",)))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count ``func`` if it is a collective, and call it."""
        if func.namespace == "c10d":
            self.bytes["fsdp", func._opname] += received_by_c10d(func._opname, args)
            self.calls["fsdp", func._opname] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)
