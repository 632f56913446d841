"""Redirects the dropout and attention calls of a module's own code to versions for the grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._torch_compat import flex_attention_op

__all__ = ["Intercept"]


class Intercept(TorchFunctionMode):
    """Inside it, torch's ``dropout`` and ``scaled_dot_product_attention`` call replacements.

    Args:
        drop: ``(x, p) -> Tensor``, called only in training and with ``p`` other than 0.
        attention: has the signature of ``scaled_dot_product_attention``.
    """

    def __init__(
        self, drop: Callable[[Tensor, float], Tensor], attention: Callable[..., Tensor]
    ) -> None:
        super().__init__()
        self.drop, self.attention = drop, attention

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.dropout:
            func = self._dropout
        elif func is F.scaled_dot_product_attention:
            func = self.attention
        elif func is flex_attention_op:
            _check_blocks(args[0], args[4])
        return func(*args, **(kwargs or {}))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        # flex_attention compiles the call of its operator, and the compiler wraps errors inside.
        if error is not None and _MISFIT in str(error) and not isinstance(error, ValueError):
            raise ValueError(f"{_MISFIT}{_MEND}") from error

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0.0:
            return input
        dropped = self.drop(input, p)
        return input.copy_(dropped) if inplace else dropped


_MISFIT = "flex_attention got a BlockMask that was made for another batch or other heads"
_MEND = (
    ": on a grid a module sees this row's part of the batch and this column's heads, but only a "
    "BlockMask that is an argument of a module under Attention2D is cut to them. Pass it so, or "
    "make it with B=None and H=None, or for the sizes of the query"
)


def _check_blocks(query: Tensor, block_mask: tuple[Any, ...]) -> None:
    """Refuse a BlockMask of another size, of which flex_attention would take the first rows.

    Raises:
        ValueError: where its batch or heads are neither 1 nor the query's.
    """
    counts = next(x for x in block_mask if isinstance(x, Tensor))
    if counts.shape[0] not in (1, query.shape[0]) or counts.shape[1] not in (1, query.shape[1]):
        raise ValueError(f"{_MISFIT}{_MEND}")
