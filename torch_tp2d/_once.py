"""A ``once_differentiable`` that costs nothing where no second derivative is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable as torch_once_differentiable

__all__ = ["once_differentiable"]


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a backward whose results cannot be differentiated; trying to raises RuntimeError.

    The error is torch's. Its decorator enters ``no_grad`` in each backward, which takes a fifth of
    the time of a small node. It is only needed under ``create_graph=True``, where a backward runs
    with gradients enabled.
    """
    refusing = torch_once_differentiable(backward)

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Any) -> Any:
        return (refusing if torch.is_grad_enabled() else backward)(ctx, *grads)

    return once
