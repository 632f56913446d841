"""The collectives that everything else is built on, along one axis of the grid.

They work on plain local tensors, trace under ``torch.compile`` and can be counted
(:class:`torch_tp2d.CommCounter`). :mod:`~torch_tp2d.comm.transfers` has those that start a transfer
and return it as a :class:`Pending`, :mod:`~torch_tp2d.comm.moves` the differentiable ones.
"""

from .axis import (
    FAST,
    FAST_PIECE_BYTES,
    ROUND_SECONDS,
    Axis,
    link_of,
    only_own,
    set_link_rate,
    without_own,
)
from .fused import reshard_fused
from .moves import move, reshard_fused_grad
from .pending import Pending, nothing
from .shards import gather_evenly, gather_shards, scatter_evenly, scatter_shards
from .transfers import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather_others,
    reduce,
    reduce_from_others,
    reduce_scatter,
    shift,
)
from .transport import GLOO, NCCL, Transport, transport_of
from .views import moved, narrowed

__all__ = [
    "FAST",
    "FAST_PIECE_BYTES",
    "GLOO",
    "NCCL",
    "ROUND_SECONDS",
    "Axis",
    "Pending",
    "Transport",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather_evenly",
    "gather_others",
    "gather_shards",
    "link_of",
    "move",
    "moved",
    "narrowed",
    "nothing",
    "only_own",
    "reduce",
    "reduce_from_others",
    "reduce_scatter",
    "reshard_fused",
    "reshard_fused_grad",
    "scatter_evenly",
    "scatter_shards",
    "set_link_rate",
    "shift",
    "transport_of",
    "without_own",
]
