"""Redirects the dropout and attention calls of a module's own code to versions for the grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._torch_compat.tensors import flex_attention_op
from .._tracing import in_graph

__all__ = ["RATES", "Intercept"]

_OTHERS: Mapping[Any, bool] = {
    F.alpha_dropout: False,
    F.dropout1d: True,
    F.dropout2d: True,
    F.dropout3d: True,
    F.feature_alpha_dropout: False,
    torch.alpha_dropout: True,
    torch.alpha_dropout_: True,
    torch.feature_alpha_dropout: True,
    torch.feature_alpha_dropout_: True,
    torch.feature_dropout: True,
    torch.feature_dropout_: True,
    torch.native_dropout: True,
}
"""The other functions that drop, and whether they do so by default: not defined on shards."""

RATES: Mapping[Any, tuple[int, str, float]] = {
    F.dropout: (1, "p", 0.5),
    torch.dropout: (1, "p", 0.5),
    torch.dropout_: (1, "p", 0.5),
    **{function: (1, "p", 0.5) for function in _OTHERS},
    F.scaled_dot_product_attention: (4, "dropout_p", 0.0),
    F.multi_head_attention_forward: (10, "dropout_p", 0.0),
}
"""Every function that drops: the place and the name of its rate, and the rate by default."""


class Intercept(TorchFunctionMode):
    """Inside it, torch's ``dropout`` and ``scaled_dot_product_attention`` call replacements.

    Args:
        drop: ``(x, p) -> Tensor``, called only in training and with ``p`` other than 0.
        attention: has the signature of ``scaled_dot_product_attention``.
        here: the module and its mesh, for messages.

    Raises:
        ValueError: by the other functions of torch that drop, in training and with ``p`` other
            than 0.
    """

    def __init__(
        self,
        drop: Callable[[Tensor, float], Tensor],
        attention: Callable[..., Tensor],
        here: str,
    ) -> None:
        super().__init__()
        self.drop, self.attention, self.here = drop, attention, here

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is flex_attention_op:
            _check_blocks(args[0], args[4])
        return self.replaced(func)(*args, **(kwargs or {}))

    def replaced(self, func: Any) -> Callable[..., Any]:
        """What is called in the place of a function, which mostly is that function."""
        if func is F.dropout:
            return self._dropout
        if func is F.scaled_dot_product_attention:
            return self.attention
        if func is F.multi_head_attention_forward:
            return self._of_heads
        if func == torch.dropout or func == torch.dropout_:
            return partial(self._torch_dropout, func == torch.dropout_)
        if func in _OTHERS:
            return partial(_other, self.here, func)
        if func is Tensor.unflatten and in_graph():
            # Its own code calls that of a base class, which Dynamo does not trace.
            return torch.unflatten
        return func

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        # flex_attention compiles the call of its operator, and the compiler wraps errors inside.
        if error is None or in_graph():
            return
        if _MISFIT in str(error) and not isinstance(error, ValueError):
            raise ValueError(f"{_MISFIT}{_MEND}") from error

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0.0:
            return input
        dropped = self.drop(input, p)
        return input.copy_(dropped) if inplace else dropped

    def _torch_dropout(self, inplace: bool, input: Tensor, p: float, train: bool) -> Tensor:
        return self._dropout(input, p, train, inplace)

    def _of_heads(self, *args: Any, **kwargs: Any) -> Any:
        """``multi_head_attention_forward``, whose own calls are replaced too.

        A mode is not active in a function that it was given, so torch's code runs with other
        functions under the names by which it calls these.
        """
        own = F.multi_head_attention_forward
        place, name, _ = RATES[own]
        p = args[place] if len(args) > place else kwargs[name]
        if not p or not kwargs.get("training", True):
            return own(*args, **kwargs)
        names = {
            **own.__globals__,
            "dropout": self._dropout,
            "scaled_dot_product_attention": self.attention,
            "has_torch_function": lambda tensors: False,
        }
        inside = FunctionType(own.__code__, names, own.__name__, own.__defaults__)
        return inside(*args, **kwargs)


def _other(
    here: str,
    func: Any,
    input: Tensor,
    p: float = 0.5,
    training: bool | None = None,
    inplace: bool = False,
    *,
    train: bool | None = None,
) -> Any:
    asked = train if training is None else training
    if p and (_OTHERS[func] if asked is None else asked):
        raise ValueError(
            f"{here}: it calls {func.__name__} of a tensor {tuple(input.shape)}, which drops more "
            f"than single elements or shifts the others, and that is not defined on shards here: "
            f"call F.dropout in its place, or set its p to 0"
        )
    given = {"inplace": inplace} if inplace else {}
    return func(input, p, _OTHERS[func] if asked is None else asked, **given)


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
