"""Sums over a rank's part of a dim, which are that of all only when the ranks' are added up.

The user's code may do so, and until then whatever is linear in them: scale them, move their dims,
add them to each other. Anything else is made of a part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .._torch_compat.tensors import disable_current_modes
from ..runtime.versions import same_bits
from .one_by_one import is_linear
from .user_code import Call

__all__ = ["WRITES", "PartialSums", "counts_of", "dims_summed"]

_PRODUCTS = ("matmul", "mm", "bmm", "mv", "dot", "inner", "einsum", "linear", "mul", "multiply")
_ADD = ("add", "radd", "iadd", "sub", "rsub", "isub", "cat", "concat", "stack", "where")
_DIVIDE = ("div", "divide", "true_divide", "idiv", "itruediv")
_LINEAR = (
    *("neg", "clone", "contiguous", "to", "float", "double", "half", "bfloat16", "type_as"),
    *("view", "reshape", "flatten", "unflatten", "transpose", "swapaxes", "permute", "movedim"),
    *("unsqueeze", "squeeze", "expand", "expand_as", "chunk", "split", "unbind", "narrow"),
    *("select", "getitem", "get", "t", "sum", "mean", "masked_fill", "imul", "repeat"),
)
WRITES = ("copy_", "fill_", "zero_", "set_")
"""Functions that leave nothing of what they write to."""
_TOGETHER = ("scaled_dot_product_attention", "cross_entropy", "layer_norm", "rms_norm")
"""Functions of which that of a sum is not the sum of those of its terms, too large to try."""


class _Sum(NamedTuple):
    axis: int
    """The index of the mesh axis whose ranks have the other terms."""
    said: str
    values: Tensor
    """A copy, to tell whether the sum was added up in place since."""
    counts: frozenset[int] = frozenset()
    """Divided by one of these it is a mean of what this rank has."""
    mean: str = ""
    """What is said of that mean."""


class PartialSums:
    """Follows partial sums through torch's functions: what is linear in them is one again.

    Functions that no list has are tried.
    """

    def __init__(self) -> None:
        self._known = WeakIdKeyDictionary()

    def __bool__(self) -> bool:
        return bool(self._known.data)

    def note(
        self,
        x: Tensor,
        axis: int,
        said: str,
        counts: frozenset[int] = frozenset(),
        mean: str = "",
    ) -> None:
        """Take ``x`` for a sum over this rank's part, of which ``said`` tells the place."""
        with torch.no_grad(), disable_current_modes():
            self._known[x] = _Sum(axis, said, x.detach().clone(), counts, mean)

    def averaged(self, call: Call) -> str:
        """What is said of a call that divides a sum by how many it is the sum of; else empty."""
        known: _Sum | None = self._known.get(call.given[0])
        number = call.kwargs.get("other", call.args[1] if len(call.args) > 1 else None)
        name = call.name.strip("_")
        if known is None or type(number) not in (int, float) or not number:
            return ""
        if name in ("mul", "multiply", "imul"):
            number = 1 / number
        elif name not in _DIVIDE:
            return ""
        is_count = any(abs(number / count - 1) < 1e-12 for count in known.counts)
        return known.mean if is_count else ""

    def find(self, x: Tensor) -> tuple[int, str] | None:
        """The axis and the place of a partial sum; None if ``x`` is none, or none any more."""
        known: _Sum | None = self._known.get(x)
        if known is None:
            return None
        with torch.no_grad(), disable_current_modes():
            if not same_bits(x.detach(), known.values):
                del self._known[x]
                return None
        return known.axis, known.said

    def among(self, given: Sequence[Tensor]) -> dict[int, tuple[int, str]]:
        """Those that are partial sums, by their place among ``given``."""
        return {at: found for at, x in enumerate(given) if (found := self.find(x)) is not None}

    def misused(
        self, call: Call, sums: Mapping[int, tuple[int, str]], axes_of: Callable[[Tensor], set[int]]
    ) -> str:
        """What a partial sum is of that this function takes for all of it; empty if it takes none.

        Args:
            sums: those given, as they were before the call.
            axes_of: the axes that split a tensor.
        """
        given = call.given
        name, writes = call.name.removeprefix("linalg_").strip("_"), call.name in WRITES
        if writes:
            sums = {at: found for at, found in sums.items() if at}
        if not sums or not call.made:
            return ""
        at, (axis, said) = next(iter(sums.items()))
        known: _Sum = self._known[given[at]]
        others = [x for at, x in enumerate(given) if at not in sums]
        product, divides = name in _PRODUCTS, name in _DIVIDE
        keeps: bool | None = product or divides or name in _ADD or name in _LINEAR or writes
        if not keeps and name not in _TOGETHER:
            keeps = is_linear(call, [given[at] for at in sums])
        if keeps is None:
            return ""
        wrong = (
            not keeps
            or (product and len(sums) > 1)
            or (divides and 1 in sums)
            or (name not in _LINEAR and any(axis in axes_of(x) for x in others))
        )
        if wrong:
            return said
        for x in call.made:
            self.note(x, axis, said, known.counts, known.mean)
        return ""


def counts_of(x: Tensor, dims: Sequence[int], split: int) -> frozenset[int]:
    """How many entries are added up along several of ``dims``, one of them ``split``.

    Not along that dim alone, nor so few: half of a sum, where a rank has two samples, is no mean.
    """
    others = [x.shape[dim] for dim in dims if dim != split]
    several = (more for n in range(1, len(others) + 1) for more in combinations(others, n))
    return frozenset(x.shape[split] * math.prod(more) for more in several) - {0, 1, 2, 4}


def dims_summed(call: Call) -> list[tuple[int, ...]]:
    """For each tensor given, the dims over which a call adds up; else empty."""
    args, kwargs, given = call.args, call.kwargs, call.given
    name = call.name.removeprefix("linalg_").strip("_")
    x, *more = given
    if name in ("sum", "nansum"):
        dims = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
        dims = dims if isinstance(dims, tuple | list) else (dims,)
        dims = tuple(dim % x.ndim for dim in dims if type(dim) is int)
        return [dims or tuple(range(x.ndim))]
    if name == "einsum":
        return _of_equation(args[0], given) if isinstance(args[0], str) else []
    if not more or not (x.ndim and more[0].ndim):
        return []
    y, last = more[0], x.ndim - 1
    if name in ("matmul", "mm", "bmm", "mv", "dot"):
        return [(last,), (max(y.ndim - 2, 0),)]
    if name == "rmatmul":
        return [(max(last - 1, 0),), (y.ndim - 1,)]
    if name in ("inner", "linear", "vdot"):
        return [(last,), (y.ndim - 1,)]
    if name == "vecdot":
        dim = kwargs.get("dim", args[2] if len(args) > 2 else -1)
        return [(dim % x.ndim,), (dim % y.ndim,)]
    dims = kwargs.get("dims", args[2] if len(args) > 2 else None)
    if name == "tensordot" and isinstance(dims, int):
        return [tuple(range(x.ndim - dims, x.ndim)), tuple(range(dims))]
    if name == "tensordot" and isinstance(dims, tuple | list) and len(dims) == 2:
        of_both = zip((x, y), dims, strict=True)
        return [
            tuple(d % t.ndim for d in ([ds] if isinstance(ds, int) else ds)) for t, ds in of_both
        ]
    return []


def _of_equation(equation: str, given: Sequence[Tensor]) -> list[tuple[int, ...]]:
    terms, arrow, result = equation.replace(" ", "").partition("->")
    letters = terms.replace(",", "").replace("...", "")
    kept = set(result) if arrow else {one for one in letters if letters.count(one) == 1}
    found = []
    for term, x in zip(terms.split(","), given, strict=False):
        front, _, back = term.partition("...")
        at = {dim: one for dim, one in enumerate(front)}
        at |= {x.ndim - len(back) + dim: one for dim, one in enumerate(back)}
        found.append(tuple(dim for dim, one in at.items() if one not in kept))
    return found
