"""Refuses a module that mixes the tokens of a dim of which each rank has a part."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor, Shard

from .._torch_compat.tensors import outputs_of, top_saved_tensors_default_hooks, tree_leaves
from ..comm.groups import gather_facts, sends
from ..mesh.axes import on_mesh
from ..mesh.grid import Grid, describe_mesh
from ..mesh.handed import sources_of
from ..mesh.layouts import Layout, normalize, row_layout
from ..runtime.context import Watch, in_backward
from .module_kinds import describe_module

__all__ = ["mixes", "refusing_mixed", "tell_mixed"]

Edge = tuple[Any, int]
"""A node of autograd's graph, and which of its outputs."""

_TAKE_ONE_BY_ONE = (
    *("AddBackward0", "SubBackward0", "MulBackward0", "DivBackward0", "NegBackward0"),
    *("ToCopyBackward0", "CloneBackward0", "AliasBackward0", "NativeDropoutBackward0"),
    *("GeluBackward0", "SiluBackward0", "ReluBackward0", "SigmoidBackward0", "TanhBackward0"),
)
"""Nodes of the graph that take elements one by one: what has no others in it mixes nothing."""


def refusing_mixed(
    forward: Callable[..., Any],
    x: Tensor,
    layout: Layout,
    grid: Grid,
    here: str,
    looked: Callable[[], None],
    misfit: Callable[[Tensor], ValueError],
) -> Callable[..., Any]:
    """``forward``, which refuses to mix tokens of which this rank has a part, where it tells.

    And outputs of other tokens than the input has, on every rank: some rank may have as many by
    chance, which alone would go on, and wait for the others.

    It follows the module's graph back, so that no answer is to be had without gradients, nor in
    what checkpointing runs again: saved tensors that are not there would have it run again.

    Args:
        x, layout: the input whose tokens are meant, and its layout.
        here: names the module, for messages.
        looked: called when the answer holds for the module's later calls too.
        misfit: the error of an output of other tokens.

    Raises:
        ValueError: on every rank, if an output's token depends on other tokens of the input, or if
            an output has other tokens on some rank.
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
    # Heads and features that the module puts elsewhere are the user's own to follow.
    by_tokens = Shard(x.ndim - 1) not in layout

    def refusing(*args: Any, **kwargs: Any) -> Any:
        y = forward(*args, **kwargs)
        given = [one for one in tree_leaves(y) if _is_local(one)]
        alike = [one for one in given if one.shape[: x.ndim - 1] == x.shape[:-1]]
        mixed = {dim for one, dim in itertools.product(alike, tokens) if mixes(x, one, dim)}
        # A rank with one token cannot tell, and has to know what the others can.
        several = all(x.shape[dim] > 1 for dim in tokens)
        others = by_tokens and len(alike) < len(given)
        of_dims = (dim in mixed for dim in tokens)
        facts = torch.tensor([several, others, *of_dims], device=x.device).long()
        for axis in (grid.col, grid.row):
            if axis.size > 1:
                facts = gather_facts(facts, axis.process_group)
        told, unfit, *found = facts.view(-1, 2 + len(tokens)).any(0).tolist()
        if unfit:
            raise misfit(given[0])
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


def _is_local(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, DTensor)


def tell_mixed(x: Tensor, layout: Layout, module: nn.Module, grid: Grid, watch: Watch) -> None:
    """Tell ``watch`` if the user's code has made split tokens of other tokens of a rank's part.

    Args:
        x, layout: what ``module`` is given, made of tensors that styles have handed out.
    """
    if in_backward() or top_saved_tensors_default_hooks(True):
        return
    made = sources_of(x)
    if made.between.issubset(_TAKE_ONE_BY_ONE):
        return
    axes = (grid.row, grid.col)
    for note, edge in made.sources:
        if note.layout is None or note.axes is None or note.ndim != x.ndim:
            continue
        there = on_mesh(normalize(note.layout, note.ndim), note.axes)
        for axis, here, source, first in zip(axes, layout, there, (1, 0), strict=True):
            if axis.size == 1 or not isinstance(here, Shard) or here != source:
                continue
            if first <= here.dim < x.ndim - 1 and mixes(edge, x, here.dim):
                watch.refuses(
                    f"{describe_module(module)} on mesh {describe_mesh(grid.mesh)} is given tokens "
                    f"of which each rank has a part along {axis.name}, as {note.by or 'a module'} "
                    f"has handed them out; but each was made of others of the same part. A shift, "
                    f"a flip, a mean over them or a module that mixes tokens sees those of all "
                    f"ranks only if they are handed on whole (output_layouts=Replicate()), as "
                    f"DTensors (use_local_output=False), or under torch_tp2d.Replicate()"
                )
                return


def mixes(x: Tensor | Edge, y: Tensor, dim: int) -> bool:
    """Whether the first or last token of ``y`` was made of other tokens of ``x``.

    Each of the two is followed back to ``x`` by autograd: what mixes only with tokens before or
    only with those after it, as a causal module does, shows in one of them. False where that cannot
    be told: of one token, without a graph between them, and behind a custom function, a compiled
    graph or an FSDP2 unit, which may not run twice.

    Args:
        x, y: input and output of the module, ``[..., tokens, ...]``, equal in all dims but the
            last. The input may be the node of autograd's graph, and its output, that it was.
        dim: that of the tokens in both.
    """
    tokens = y.shape[dim]
    if tokens < 2 or y.grad_fn is None or (isinstance(x, Tensor) and not x.requires_grad):
        return False
    edge = _edge_of(x) if isinstance(x, Tensor) else x
    for token in (0, tokens - 1):
        seed = torch.zeros_like(y)
        seed.select(dim, token).fill_(1)
        grad = _grad_at(edge, y, seed)
        if grad is None or grad.shape[:-1] != y.shape[:-1]:
            return False
        others = 1 if token == 0 else 0
        # NaN tells nothing: a token's own zero gradient becomes it in a square root of zero.
        if bool((grad.narrow(dim, others, tokens - 1).abs() > 0).any()):
            return True
    return False


def _edge_of(x: Tensor) -> Edge:
    edge = get_gradient_edge(x)
    return edge.node, edge.output_nr


def _grad_at(edge: Edge, y: Tensor, grad: Tensor) -> Tensor | None:
    """The gradient of ``y`` at an edge, by torch's own functions alone.

    Nodes are called one by one, so that neither hooks run nor what lies behind the edge.
    """
    found: Tensor | None = None
    given: dict[Any, dict[int, Tensor]] = {y.grad_fn: {y.output_nr: grad}}
    nodes = dict.fromkeys(_between(y.grad_fn, edge[0]))
    with torch.no_grad():
        for node in nodes:
            if node not in given:
                continue
            grads = given.pop(node)
            try:
                made = node(*(grads.get(at) for at in range(len(outputs_of(node)))))
            except RuntimeError:
                # What backward cannot compute it says itself.
                return None
            made = made if isinstance(made, tuple) else (made,)
            for to, one in zip(node.next_functions, made, strict=True):
                if one is None or (to != edge and to[0] not in nodes):
                    continue
                # Of what was broadcast, which the engine sums.
                one = one.sum_to_size(outputs_of(to[0])[to[1]])
                if to == edge:
                    found = one if found is None else found + one
                else:
                    before = given.setdefault(to[0], {})
                    before[to[1]] = before[to[1]] + one if to[1] in before else one
    return found


def _between(end: Any, begin: Any) -> list[Any]:
    """The nodes that lead from ``begin`` to ``end``, this first; none behind a custom function."""
    leads = {begin: True, None: False}
    order, following = list[Any](), [end]
    # A node again when all before it are known: without recursion, which long graphs exceed.
    while following:
        node: Any = following[-1]
        # One of Python's, or of C++, whose name is that of its class.
        custom = node is not None and (isinstance(node, BackwardCFunction) or "::" in node.name())
        before = [] if node in leads or custom else [one for one, _ in node.next_functions]
        unknown = [one for one in before if one not in leads]
        if unknown:
            following += unknown
            continue
        following.pop()
        if node not in leads:
            leads[node] = any(leads[one] for one in before)
            order.append(node)
    return [node for node in reversed(order) if leads[node]]
