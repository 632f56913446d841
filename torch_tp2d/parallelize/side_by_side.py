"""Which dims of the tensors that a function is given lie side by side, entry by entry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest

from torch import Tensor

from .user_code import Call

__all__ = ["ELEMENTWISE", "JOIN", "PRODUCT", "aligned", "neighbours"]

PRODUCT = ("matmul", "__matmul__", "bmm")
JOIN = ("cat", "concat", "concatenate", "stack")
ELEMENTWISE = (
    *("add", "sub", "rsub", "mul", "div", "true_divide", "pow", "maximum", "minimum", "where"),
    *("add_", "sub_", "mul_", "div_", "masked_fill", "masked_fill_", "lerp", "addcmul"),
    *("__radd__", "__rsub__", "__rmul__", "__rtruediv__", "__and__", "__or__", "logical_and"),
)
"""Functions of single elements; others are told by the shape of what they make."""
_NOT_ELEMENTWISE = (
    *("linear", "bilinear", "baddbmm", "addmm", "addbmm", "addmv", "addr", "dot", "inner", "mv"),
    *("mm", "rmatmul", "layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"),
    *("prelu", "bucketize", "searchsorted", "embedding", "gather", "scatter", "scatter_add"),
    *("scatter_reduce", "take_along_dim", "index_add", "index_copy", "index_fill", "index_select"),
    *("index_put", "masked_scatter", "getitem", "setitem", "to", "type_as", "view_as"),
    *("reshape_as", "expand_as", "flex_attention", "cdist", "cross", "kron", "isin"),
    *("conv1d", "conv2d", "conv3d", "multi_head_attention_forward", "einsum"),
)
"""Functions of several tensors whose result may be as large as if they were."""


def neighbours(call: Call, x: Tensor) -> Iterator[tuple[Tensor, Mapping[int, int]]]:
    """What else a call takes beside ``x``, and which of its dims lie beside those of ``x``."""
    given, name = call.given, call.name
    if name == "scaled_dot_product_attention":
        if x is given[0] and len(given) > 3:
            yield given[3], aligned(x, given[3])
        return
    of_terms = _terms(call) if name == "einsum" else None
    if not (of_terms or _is_elementwise(call)):
        return
    for at, other in enumerate(given):
        if other is x:
            continue
        if of_terms is None:
            yield other, aligned(x, other)
        else:
            own = next(i for i, one in enumerate(given) if one is x)
            there = {letter: dim for dim, letter in enumerate(of_terms[at])}
            dims = enumerate(of_terms[own])
            yield other, {dim: there[letter] for dim, letter in dims if letter in there}


def aligned(x: Tensor, other: Tensor) -> Mapping[int, int]:
    """The dims that broadcasting lays beside those of ``x``."""
    ahead = x.ndim - other.ndim
    return {dim: dim - ahead for dim in range(max(0, ahead), x.ndim)}


def _is_elementwise(call: Call) -> bool:
    name, given, made = call.name, call.given, call.made
    if name in ELEMENTWISE or name == "stack":
        return True
    if len(given) < 2 or len(made) != 1 or name in PRODUCT or name in JOIN:
        return False
    if name.strip("_") in _NOT_ELEMENTWISE:
        return False
    sizes = zip_longest(*(reversed(x.shape) for x in given), fillvalue=1)
    together = [next((one for one in of_dim if one != 1), 1) for of_dim in sizes]
    return [*reversed(made[0].shape)] == together


def _terms(call: Call) -> list[str] | None:
    """The letters of an equation's terms; None if it is not in letters alone."""
    equation = call.args[0]
    if not isinstance(equation, str) or "." in equation:
        return None
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    fits = len(terms) == len(call.given)
    fits = fits and all(len(t) == x.ndim for t, x in zip(terms, call.given, strict=True))
    return terms if fits else None
