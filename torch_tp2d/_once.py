"""``once_differentiable``, at no cost where no second derivative is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable as torch_once_differentiable

__all__ = ["once_differentiable"]


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward whose results cannot be differentiated again; an attempt is torch's RuntimeError.

    torch's decorator enters ``no_grad`` in each backward, a fifth of what a small node takes, and
    only a backward under ``create_graph=True`` runs with gradients enabled.
    """
    refusing = torch_once_differentiable(backward)

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Any) -> Any:
        return (refusing if torch.is_grad_enabled() else backward)(ctx, *grads)

    return once
