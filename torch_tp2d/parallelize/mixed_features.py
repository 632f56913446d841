"""Which of torch's functions make each feature of all of a dim, as a norm and a softmax do.

Of a dim that ``tp_col`` splits, features or heads, they would see a rank's part. Sums and maxima
are left to the user's code, which may go on with them over the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["dims_mixed"]

_DIM_SECOND = ("softmax", "log_softmax", "softmin", "mean", "var", "std", "cumsum")
_DIM_THIRD = ("normalize", "norm", "vector_norm")
"""Functions by which of their arguments is the dim."""


def dims_mixed(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], ndim: int
) -> tuple[int, ...]:
    """The dims over which a function of this name takes its first argument's elements together.

    Empty for another function, and for one over all dims, which gives a single number.
    """
    name = name.removeprefix("linalg_")
    if name in ("layer_norm", "rms_norm"):
        shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
        return tuple(range(ndim - len(tuple(shape)), ndim))
    if name == "group_norm":
        return (1,)
    if name not in (*_DIM_SECOND, *_DIM_THIRD):
        return ()
    at = 1 if name in _DIM_SECOND else 2
    left_out = 1 if name == "normalize" else None
    dims = kwargs.get("dim", kwargs.get("axis", args[at] if len(args) > at else left_out))
    dims = dims if isinstance(dims, tuple | list) else (dims,)
    # x.std(False) is over all dims.
    dims = tuple(dim % ndim for dim in dims if type(dim) is int)
    return dims if len(dims) < ndim else ()
