"""Two-dimensional matrix products: one interface, :func:`linear2d`, and a file per algorithm.

All algorithms give the same result; they differ in what moves when (see :class:`Algorithm` for
what each of them provides).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from . import bmr, cannon, collective, fused, pipelined, stationary, summa
from .call import Call, LinearOp, Shards, apply
from .cut import Algorithm, Cut
from .inputs import Shared

__all__ = [
    "ALGORITHMS",
    "IN_ROUNDS",
    "STATIONARY",
    "Algorithm",
    "Call",
    "Cut",
    "LinearOp",
    "Shards",
    "linear2d",
]

# A module with the functions of the protocol is one, which mypy does not see in a dict.
ALGORITHMS: Mapping[str, Any] = {
    "collective": collective,
    "pipelined": pipelined,
    "fused": fused,
    "summa": summa,
    "bmr": bmr,
    "cannon": cannon,
}

IN_ROUNDS = "pipelined", "fused"
"""Those that move activations along ``tp_col`` themselves, beside their products."""

STATIONARY: Any = stationary
"""The dataflow in which the weight stays, as an algorithm of its own."""


def linear2d(x: Tensor | Shared, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    """``x W^T + bias`` on a grid, on local shards, as one autograd node.

    Let M be the tokens of this grid row, K and N the features in and out.

    =====================  ======================  ===============  ======================
    direction              x of rank (i, j)        weight           result
    =====================  ======================  ===============  ======================
    ``gathers_input``      ``[M, K]`` if WHOLE,    ``W[Nj, Ki]``    ``[M, Nj]``
                           else ``[M, Kj]``
    not ``gathers_input``  ``[M, Kj]``             ``W[Ni, Kj]``    ``[M, N]``, a partial sum
                                                                    along tp_col, if WHOLE,
                                                                    else ``[M, Nj]``
    =====================  ======================  ===============  ======================

    The bias is ``[Nj]``: a rank adds its part of it, once. The gradient of a whole ``x`` is a
    partial sum along ``tp_col``, for whoever gathered ``x`` to reduce; the gradient of a partial
    result is whole. The stationary dataflow has other blocks
    (:mod:`torch_tp2d.ops.matmul.stationary`).

    ``pipelined`` takes an ``x`` that is still being gathered, and sums and cuts a partial result
    itself if the call has ``shards``.

    Raises:
        RuntimeError: in backward, if the weight's parameter was changed since.
    """
    if isinstance(x, Shared):
        return x.linear(weight, bias, call)
    (y, *_) = apply(x, weight, bias, call)
    return y
