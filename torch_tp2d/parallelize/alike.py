"""Whether ranks that hold other parts of a dim have made the same values for them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FACTS", "are_alike", "facts_of"]

FACTS = 3
"""How many numbers :func:`facts_of` gives."""


def facts_of(x: Tensor, dim: int) -> Tensor:
    """Whether a tensor varies along a dim, and what tells its first and second slice there."""
    x = torch.view_as_real(x) if x.is_complex() else x
    first, second = (x.narrow(dim, min(at, x.shape[dim] - 1), 1) for at in (0, 1))
    varies = (x != first).any().long()
    return torch.stack([varies, *(_sum(one).view(torch.int64) for one in (first, second))])


def _sum(x: Tensor) -> Tensor:
    x = torch.nan_to_num(x.flatten().double())
    # What a mask hides would round away what it leaves.
    x = torch.where(x.abs() > 1e10, 3 * x.sign(), x)
    # Weights of different sizes: a permutation changes the sum.
    weights = torch.arange(len(x), device=x.device, dtype=x.dtype)
    return x @ (0.5 + (weights * 0.6180339887498949).frac_())


def are_alike(met: list[list[int]]) -> bool:
    """Whether ranks with other parts have the same values, which vary within a part."""
    if len(met) < 2 or not any(varies for _, _, _, varies, _, _ in met):
        return False
    seconds = {second for _, _, size, _, _, second in met if size > 1}
    return len({first for *_, first, _ in met}) == 1 and len(seconds) <= 1
