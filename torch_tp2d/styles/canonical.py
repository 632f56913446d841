"""DTensors as users' code makes them, in placements that the styles' layouts can say."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from .._once import once_differentiable
from .._torch_compat.distributed import StridedShard

__all__ = ["canonical"]


class _Canonical(torch.autograd.Function):
    """DTensor's own change of layout refuses a gradient that is a sum where it took an average."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, sums: bool) -> DTensor:
        return x.redistribute(placements=_canonical_placements(x, sums))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: DTensor) -> tuple[DTensor, None]:
        return grads[0].redistribute(placements=_canonical_placements(grads[0], False)), None


def _canonical_placements(x: DTensor, sums: bool) -> list[Placement]:
    def is_kept(p: Placement) -> bool:
        if p.is_replicate():
            return True
        if isinstance(p, Partial):
            return sums and p.reduce_op == "sum"
        return not isinstance(p, StridedShard)

    return [p if is_kept(p) else Replicate() for p in x.placements]


def canonical(x: DTensor, *, sums: bool = False) -> DTensor:
    """A DTensor placed as layouts say it: by ``Shard`` and ``Replicate``.

    Averages, maxima and sums over the ranks are taken. A dim that was flattened from two, of which
    an axis splits the second (``_StridedShard``), is gathered along that axis.

    Args:
        sums: leave sums to be reduced.
    """
    kept = _canonical_placements(x, sums)
    return x if kept == [*x.placements] else _Canonical.apply(x, sums)
