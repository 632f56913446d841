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

# Modules with the protocol's functions are Algorithms, but mypy does not see that in a dict.
ALGORITHMS: Mapping[str, Any] = {
    "collective": collective,
    "pipelined": pipelined,
    "fused": fused,
    "summa": summa,
    "bmr": bmr,
    "cannon": cannon,
}

IN_ROUNDS = "pipelined", "fused"
"""The algorithms that move activations along ``tp_col`` themselves, beside their products."""

STATIONARY: Any = stationary
"""The weight-stationary dataflow, as an algorithm of its own."""


def linear2d(x: Tensor | Shared, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    """``x W^T + bias`` on a grid, on local shards, as one autograd node.

    Let M be the number of tokens of this mesh row, K and N those of the input and output features.

    =====================  ======================  ===============  ======================
    direction              x of rank (i, j)        weight           result
    =====================  ======================  ===============  ======================
    ``gathers_input``      ``[M, K]`` if WHOLE,    ``W[Nj, Ki]``    ``[M, Nj]``
                           else ``[M, Kj]``
    not ``gathers_input``  ``[M, Kj]``             ``W[Ni, Kj]``    ``[M, N]``, a partial sum
                                                                    along tp_col, if WHOLE,
                                                                    else ``[M, Nj]``
    =====================  ======================  ===============  ======================

    The bias is ``[Nj]``, and every element of it is added by one rank of the mesh row. The gradient
    of a gathered ``x`` is a partial sum along ``tp_col``, reduced where ``x`` was gathered; the
    gradient of a partial result is replicated. The weight-stationary dataflow has other blocks
    (:mod:`torch_tp2d.ops.matmul.stationary`).

    ``pipelined`` takes an ``x`` that is still being gathered, and reduce-scatters a partial result
    itself if the call has ``shards``.

    Raises:
        RuntimeError: in backward, if the weight's parameter was changed since the forward.
    """
    if isinstance(x, Shared):
        return x.linear(weight, bias, call)
    (y, *_) = apply(x, weight, bias, call)
    return y
