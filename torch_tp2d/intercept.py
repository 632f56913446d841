"""Having the dropout and the attention that a module's own code computes computed on the grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Intercept"]


class Intercept(TorchFunctionMode):
    """While it is entered, torch's ``dropout`` and ``scaled_dot_product_attention`` are others'.

    Args:
        drop: ``(x, p) -> Tensor``, called only if something is to be dropped.
        attention: takes what ``scaled_dot_product_attention`` takes.
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
        return func(*args, **(kwargs or {}))

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0.0:
            return input
        dropped = self.drop(input, p)
        return input.copy_(dropped) if inplace else dropped
