"""An efficient reduce-scatter on gloo, to put under plans that use torch's own.

gloo's reduce-scatter costs as much as an all-reduce, which NCCL's does not. Plans that reduce-
scatter are therefore timed twice: as they are, and with what torch_tp2d does on gloo (an
all-to-all of the shards, sent in pieces, and a local sum) in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from torch_tp2d import comm
from torch_tp2d.comm import groups


def exchange_reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum ``x`` over the group and keep this rank's equal part of dim 0."""
    ranks = dist.get_process_group_ranks(group)
    size = len(ranks)
    axis = comm.Axis(
        name="benchmark",
        parts=(size,),
        index=group.rank(),
        group=groups.own_group(ranks, "cpu", groups.BACKEND).group_name,
        transport=comm.GLOO,
    )
    return comm.reduce_scatter(x, 0, [x.shape[0] // size] * size, axis).wait()


def _functional(x: Tensor, op: str, size: int, group: str) -> Tensor:
    if op != "sum":
        raise NotImplementedError(f"reduce-scatter of {op}")
    return exchange_reduce_scatter(x, _resolve_process_group(group))  # type: ignore[arg-type]


@contextmanager
def exchanged_reduce_scatters() -> Iterator[None]:
    """Within it the functional reduce-scatter, which DTensor uses, exchanges shards instead."""
    # torch registers its own kernel for all backends in one; this one goes before it, and away.
    with torch.library._scoped_library("_c10d_functional", "IMPL") as library:
        library.impl("reduce_scatter_tensor", _functional, "CPU")
        yield


class ExchangeReduceScatter(ReduceScatter):
    """The same for FSDP2, by its ``set_custom_reduce_scatter``."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Sum or average ``input_tensor``, flat, into ``output_tensor``."""
        if async_op or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise NotImplementedError(f"reduce-scatter of {op}, asynchronous: {async_op}")
        total = exchange_reduce_scatter(input_tensor, group)
        if op == dist.ReduceOp.AVG:
            total /= group.size()
        output_tensor.copy_(total)
