"""Which of torch's functions make each feature of all of a dim, as a norm and a softmax do.

Of a dim that ``tp_col`` splits, features or heads, they would see a rank's part. Sums and maxima
are left to the user's code, which may go on with them over the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["dims_mixed"]

_PLACE_OF_DIM = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "mean", "var", "std", "cumsum"), 1),
    **dict.fromkeys(("normalize", "norm", "vector_norm"), 2),
}
"""By the name of a function, which of its arguments the dim is."""
_DIM_LEFT_OUT = {"normalize": 1}


def dims_mixed(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], ndim: int
) -> tuple[int, ...]:
    """The dims over which a function of this name takes its first argument's elements together.

    Empty for another function, and for one over all dims, which gives a single number.
    """
    if name in ("layer_norm", "rms_norm"):
        shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
        return tuple(range(ndim - len(tuple(shape)), ndim))
    if name == "group_norm":
        return (1,)
    at = _PLACE_OF_DIM.get(name)
    if at is None:
        return ()
    dims = kwargs.get("dim", args[at] if len(args) > at else _DIM_LEFT_OUT.get(name))
    if isinstance(dims, int):
        dims = (dims,)
    if not isinstance(dims, tuple | list) or len(dims) >= ndim:
        return ()
    return tuple(dim % ndim for dim in dims if isinstance(dim, int))
