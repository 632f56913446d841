"""Bytes of a step: what the arithmetic predicts, and what NCCL would move, by counting.

Both suppose collectives that move no more than they must: for a whole of W bytes on n ranks, an
all-gather or a reduce-scatter sends (n-1)/n W from each rank, an all-reduce twice that.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from variants import KEPT, OURS, Share, Sizes

sys.path.append(str(Path(__file__).resolve().parents[1] / "tutorials"))
from pictures import FSDPCounter  # noqa: E402

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


class WireCounter(FSDPCounter):
    """Counts the bytes that this rank receives in functional collectives and in FSDP2's."""

    def __init__(self) -> None:
        super().__init__(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("all",)))
