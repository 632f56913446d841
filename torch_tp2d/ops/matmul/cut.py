"""How a weight is sharded over the grid, and the interface of the algorithms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ...comm import Axis, Pending

if TYPE_CHECKING:
    from .call import Call, Forward, Gradients, Needs

__all__ = ["Algorithm", "Cut", "SumsAtOnce"]


@dataclass(frozen=True)
class Cut:
    """A weight ``b[P, Q]`` whose dim 0 is sharded over ``row`` and dim 1 over ``col``.

    Rank (i, j) holds ``b[p[i], q[j]]``. Activations are sharded by tokens over ``row``; ``M`` below
    is this mesh row's number of them. ``replicated`` weights are not sharded in dim 0.
    """

    row: Axis
    col: Axis
    p: int
    q: int
    replicated: bool = False
    p_row: tuple[int, ...] = field(init=False)
    """Extents of P over the mesh rows, those of ``b``'s blocks."""
    p_col: tuple[int, ...] = field(init=False)
    """Extents of P over the mesh columns, those of ``a``'s blocks."""
    stays: bool = field(init=False)
    """Whether there is nothing to gather along the mesh rows."""

    def __post_init__(self) -> None:
        # Not computed in each step: that takes longer than a small product.
        object.__setattr__(self, "p_row", self.row.split(self.p))
        object.__setattr__(self, "p_col", self.col.split(self.p))
        object.__setattr__(self, "stays", self.replicated or self.row.size == 1)


class Algorithm(Protocol):
    """How a Linear is computed: ``forward`` and ``backward`` of one autograd node.

    Most algorithms consist of the weight's transfer (``prefetch``) and of three products on local
    blocks (:mod:`torch_tp2d.ops.matmul.products`):

    ==========  ================  ==========================  ==========================
    product     what it computes  operands of rank (i, j)     result of rank (i, j)
    ==========  ================  ==========================  ==========================
    ``ab``      ``c = a b``       ``a[M, P*]``, ``b[Pi, Qj]``  ``c[M, Qj]``
    ``abt``     ``a = c b^T``     ``c[M, Qj]``, ``b[Pi, Qj]``  ``a[M, P*]``
    ``atb``     ``b = a^T c``     ``a[M, P*]``, ``c[M, Qj]``   ``b[Pi, Qj]``
    ==========  ================  ==========================  ==========================

    ``P*`` is ``Pj`` where ``WHOLE`` is false: ``a`` is a block of the feature layout, and the
    algorithm moves it. Where ``WHOLE`` is true, ``a`` is ``a[M, P]``, gathered along ``tp_col``
    before the product, and ``abt`` returns a partial sum along ``tp_col``, reduced afterwards.
    ``SQUARE`` algorithms need as many mesh rows as columns.
    """

    WHOLE: bool
    SQUARE: bool

    @staticmethod
    def forward(
        call: Call, needs: Needs, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Forward: ...

    @staticmethod
    def backward(
        call: Call, needs: Needs, state: Any, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]
    ) -> Gradients: ...

    @staticmethod
    def prefetch(b: Tensor, cut: Cut) -> Pending:
        """Start the transfer of the weight, whose result the products take as ``b``."""
        ...

    @staticmethod
    def ab(a: Tensor, b: Tensor, cut: Cut) -> Tensor: ...

    @staticmethod
    def abt(c: Tensor, b: Tensor, cut: Cut) -> Tensor: ...

    @staticmethod
    def atb(a: Tensor, c: Tensor, cut: Cut) -> Pending: ...


class SumsAtOnce(Algorithm, Protocol):
    """An algorithm that reduces a weight's gradient in one transfer, which may be deferred.

    These are the ones whose ``WHOLE`` is true.
    """

    @staticmethod
    def atb_sum(partial: Tensor, cut: Cut) -> Pending: ...
