"""Which of torch's functions take all of a dim together, as a norm, a softmax and a mean do.

Of a dim that is split, features, heads, tokens or samples, they would see a rank's part. Sums are
left to the user's code: those of the ranks add up to the sum of all.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .user_code import Call

__all__ = ["dims_mixed", "dims_reduced", "dims_sliced", "is_routing"]

_DIM_SECOND = (
    *("softmax", "log_softmax", "softmin", "mean", "var", "std", "cumsum", "cumprod", "cummax"),
    *("cummin", "logcumsumexp", "argmax", "argmin", "flip", "sort", "argsort"),
)
_DIM_THIRD = (
    *("normalize", "norm", "vector_norm", "roll", "topk", "kthvalue", "diff", "quantile"),
    *("cosine_similarity", "fft_fft", "fft_ifft", "fft_rfft", "fft_irfft"),
)
"""Functions by which of their arguments is the dim."""
_DIM_LEFT_OUT: Mapping[str, int] = {
    "normalize": 1,
    "cosine_similarity": 1,
    **dict.fromkeys(("sort", "argsort", "topk", "kthvalue", "diff"), -1),
    **dict.fromkeys((name for name in _DIM_THIRD if name[:3] == "fft"), -1),
}
"""The dim that some of them take by default."""
_DIM_LAST = ("cdist", "pairwise_distance", "scaled_dot_product_attention")

_CONVOLVE = ("conv1d", "conv2d", "conv3d", "avg_pool1d", "avg_pool2d", "avg_pool3d")
"""Functions of the last dims, and of the channels before them unless these are in groups."""

_SLICES: Mapping[str, int] = {
    **dict.fromkeys(("chunk", "split", "split_with_sizes", "tensor_split"), 2),
    **dict.fromkeys(("unbind", "narrow", "select", "glu"), 1),
}
"""Functions that take some entries of a dim, and which of their arguments that is, else 0."""

_REDUCE_SECOND = (
    *("mean", "nanmean", "var", "std", "logsumexp", "amax", "amin", "max", "min", "prod"),
    *("median", "nanmedian", "std_mean", "var_mean", "mode"),
)
_REDUCE_THIRD = ("norm", "vector_norm", "quantile", "nanquantile")
_MEAN_LOSSES = (
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "huber_loss"),
    *("gaussian_nll_loss", "kl_div", "l1_loss", "mse_loss", "nll_loss", "smooth_l1_loss"),
    *("poisson_nll_loss", "soft_margin_loss"),
)

_BY_INDEX = (
    *("getitem", "index_select", "gather", "take", "take_along_dim", "masked_select", "index_put"),
    *("scatter", "scatter_add", "index_add", "index_copy", "masked_scatter"),
)


def is_routing(call: Call) -> bool:
    """Whether a call picks by an index, or makes one: numbers that have no gradient."""
    x = call.given[0]
    return call.name.strip("_") in _BY_INDEX or not (x.is_floating_point() or x.is_complex())


def dims_mixed(call: Call, ndim: int) -> tuple[int, ...]:
    """The dims over which a call takes its first argument's elements together.

    Empty for another function, and for one over all dims, which gives a single number.
    """
    args, kwargs = call.args, call.kwargs
    name = call.name.removeprefix("linalg_")
    if name in ("layer_norm", "rms_norm"):
        shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
        return tuple(range(ndim - len(tuple(shape)), ndim))
    if name == "group_norm":
        return (1,)
    if name == "batch_norm":
        training = kwargs.get("training", args[5] if len(args) > 5 else False)
        return (0, *range(2, ndim)) if training else ()
    if name in _DIM_LAST:
        return (ndim - 1,)
    if name in _CONVOLVE:
        groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
        channels = 0 if "pool" in name or groups != 1 else 1
        return tuple(range(max(0, ndim - int(name[-2]) - channels), ndim))
    if name not in (*_DIM_SECOND, *_DIM_THIRD):
        return ()
    at = 1 if name in _DIM_SECOND else 2
    left_out = _DIM_LEFT_OUT.get(name)
    named = next((kwargs[key] for key in ("dim", "axis", "dims") if key in kwargs), left_out)
    dims = args[at] if len(args) > at else named
    if name == "flip":
        dims = args[1:] if type(dims) is int else dims
    dims = dims if isinstance(dims, tuple | list) else (dims,)
    # x.std(False) is over all dims.
    dims = tuple(dim % ndim for dim in dims if type(dim) is int)
    return dims if len(dims) < ndim else ()


def dims_reduced(call: Call, ndim: int) -> tuple[int, ...] | None:
    """The dims over which a call makes one number, which is not a sum, of many.

    None for another function.
    """
    args, kwargs = call.args, call.kwargs
    name = call.name.removeprefix("linalg_")
    if name in _MEAN_LOSSES:
        return tuple(range(ndim)) if kwargs.get("reduction", "mean") == "mean" else None
    if name not in (*_REDUCE_SECOND, *_REDUCE_THIRD):
        return None
    at = 1 if name in _REDUCE_SECOND else 2
    given = kwargs.get("dim", kwargs.get("axis", args[at] if len(args) > at else None))
    if isinstance(given, Tensor):
        return None  # The larger of two tensors.
    dims = given if isinstance(given, tuple | list) else (given,)
    dims = tuple(dim % ndim for dim in dims if type(dim) is int)
    return dims or tuple(range(ndim))


def dims_sliced(call: Call, ndim: int) -> list[int]:
    """The dims of which a call takes some entries that lie side by side.

    Not every second one and the like, by which code takes apart what it knows to be interleaved.
    """
    name, args, kwargs = call.name, call.args, call.kwargs
    if name in _SLICES:
        at = _SLICES[name]
        left_out = -1 if name == "glu" else 0
        dim = kwargs.get("dim", args[at] if len(args) > at else left_out)
        return [dim % ndim] if type(dim) is int else []
    if name != "__getitem__":
        return []
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if any(isinstance(one, Tensor | list | bool) for one in index):
        return []
    taken = [one for one in index if one is not None]
    if (ahead := next((at for at, one in enumerate(taken) if one is Ellipsis), None)) is not None:
        left = ndim - (len(taken) - 1)
        taken[ahead : ahead + 1] = [slice(None)] * left
    return [
        dim
        for dim, one in enumerate(taken)
        if not isinstance(one, slice)
        or (one.step in (None, 1) and (one.start, one.stop) != (None, None))
    ]
