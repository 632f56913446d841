"""Whether a module that is run on some of the tokens takes them one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

__all__ = ["mixes"]


def mixes(x: Tensor, y: Tensor, dim: int) -> bool:
    """Whether the first or last token of ``y`` was made of other tokens of ``x``.

    Each of the two is followed back to ``x`` by autograd: what mixes only with tokens before or
    only with those after it, as a causal module does, shows in one of them. Parameters' gradients
    stay as they are. False where that cannot be told: of one token, without a graph between them,
    and with a custom function, a compiled graph or an FSDP2 unit in it, which may not run twice.

    Args:
        x, y: input and output of the module, ``[..., tokens, ...]``.
        dim: that of the tokens in both.
    """
    tokens = x.shape[dim]
    if tokens < 2 or not (x.requires_grad and y.requires_grad) or not _can_run_twice(y, x):
        return False
    for token in (0, tokens - 1):
        of_token = y.select(dim, token).sum()
        (grad,) = torch.autograd.grad(of_token, x, retain_graph=True, allow_unused=True)
        others = 1 if token == 0 else 0
        # NaN tells nothing: a token's own zero gradient becomes it in a square root of zero.
        if grad is not None and bool((grad.narrow(dim, others, tokens - 1).abs() > 0).any()):
            return True
    return False


def _can_run_twice(y: Tensor, x: Tensor) -> bool:
    """Whether torch's own functions alone lead from ``x`` to ``y``."""
    begin = get_gradient_edge(x).node
    leads = {begin: True, None: False}
    order, following = list[Any](), [get_gradient_edge(y).node]
    # A node again when all before it are known: without recursion, which long graphs exceed.
    while following:
        node: Any = following[-1]
        before = [] if node in leads else [one for one, _ in node.next_functions]
        unknown = [one for one in before if one not in leads]
        if unknown:
            following += unknown
            continue
        following.pop()
        if node not in leads:
            leads[node] = any(leads[one] for one in before)
            order.append(node)
    return not any(leads[node] and isinstance(node, BackwardCFunction) for node in order)
