"""Refuses a module that mixes the tokens of a dim of which each rank has a part."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor, Shard

from .._torch_compat import top_saved_tensors_default_hooks, tree_leaves
from ..comm.groups import gather_facts, sends
from ..mesh.grid import Grid
from ..mesh.layouts import Layout, row_layout
from ..runtime.context import in_backward

__all__ = ["mixes", "refusing_mixed"]


def refusing_mixed(
    forward: Callable[..., Any],
    x: Tensor,
    layout: Layout,
    grid: Grid,
    here: str,
    looked: Callable[[], None],
) -> Callable[..., Any]:
    """``forward``, which refuses to mix tokens of which this rank has a part, where it tells.

    It follows the module's graph back, so that no answer is to be had without gradients, nor in
    what checkpointing runs again: saved tensors that are not there would have it run again.

    Args:
        x, layout: the input whose tokens are meant, and its layout.
        here: names the module, for messages.
        looked: called when the answer holds for the module's later calls too.

    Raises:
        ValueError: on every rank, if an output's token depends on other tokens of the input.
    """
    if isinstance(x, DTensor) or x.ndim > 3 or not (x.requires_grad and torch.is_grad_enabled()):
        return forward
    if in_backward() or top_saved_tensors_default_hooks(True) or not sends(grid.mesh):
        return forward
    # What a row has of dim 0 are its samples, or windows of them, which a module may regroup.
    axes = zip((grid.row, grid.col), layout, (1, 0), strict=True)
    split = [
        p.dim
        for axis, p, first in axes
        if isinstance(p, Shard) and axis.size > 1 and p.dim >= first
    ]
    tokens = [dim for dim in split if dim < x.ndim - 1]

    if not tokens:
        return forward

    def refusing(*args: Any, **kwargs: Any) -> Any:
        y = forward(*args, **kwargs)
        mixed = {
            dim
            for one, dim in itertools.product(tree_leaves(y), tokens)
            if isinstance(one, Tensor)
            and one.shape[: x.ndim - 1] == x.shape[:-1]
            and mixes(x, one, dim)
        }
        # A rank with one token cannot tell, and has to know what the others can.
        several = all(x.shape[dim] > 1 for dim in tokens)
        facts = torch.tensor([several, *(dim in mixed for dim in tokens)], device=x.device).long()
        for axis in (grid.col, grid.row):
            if axis.size > 1:
                facts = gather_facts(facts, axis.process_group)
        told, *found = facts.view(-1, 1 + len(tokens)).any(0).tolist()
        if any(found):
            dims = " and ".join(str(dim) for dim, of in zip(tokens, found, strict=True) if of)
            raise ValueError(
                f"{here} was given a local tensor of shape {tuple(x.shape)} in layout {layout}, "
                f"and mixes the tokens of dim {dims}, of which each rank has a part: have the "
                f"module before it hand on full samples, output_layouts={row_layout()}, or give it "
                f"torch_tp2d.Replicate()"
            )
        if told:
            looked()
        return y

    return refusing


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
