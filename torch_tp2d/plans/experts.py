"""Mixtures of experts in the decoders of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..mesh.grid import Grid, describe_mesh
from ..mesh.layouts import Layout
from ..styles.base import GridStyle, Resolved, Runner
from ..styles.dtensors import to_dtensor
from ..styles.local_math import parameters_inside, run_locally
from ..styles.module_kinds import describe_module
from .parts import Plan

__all__ = ["WholeExperts", "experts_plan", "refuse_router_losses"]


class WholeExperts(GridStyle):
    """A router and its experts, replicated on every rank; each rank computes its own tokens.

    For a module that maps tokens one by one in code that DTensor cannot run. No weight moves, and
    no token does if the residual stream is in the token layout; since every rank holds all the
    weights, their gradients are partial and are summed over the grid.

    ==========================  ===============================  ========================
    tensor                      layout                           local shape
    ==========================  ===============================  ========================
    input and output, DTensors  ``(Shard(row_dim), Shard(1))``   ``[B/R, S/C, H]``
    parameters                  ``(Replicate(), Replicate())``   the global one
    ==========================  ===============================  ========================

    What a module computes over all tokens together, such as a router's load-balancing loss, would
    be over this rank's tokens only, so models under the built-in plans refuse to compute that loss.

    Args:
        row_dim: which dim of ``[batch, sequence, hidden]`` tp_row splits.

    Raises:
        TypeError: for integer parameters; when the module runs, for an input that is no DTensor.

    Example::

        >>> plan = {"model.layers.*.mlp": WholeExperts(), ...}
    """

    def __init__(self, *, row_dim: int = 0) -> None:
        super().__init__()
        self.row_dim = row_dim

    def param_layouts(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, Layout]]:
        for owner, name in parameters_inside(module):
            yield owner, name, (Replicate(), Replicate())

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        return _ExpertsRunner(grid, self.row_dim)

    def __repr__(self) -> str:
        return f"WholeExperts({f'row_dim={self.row_dim}' if self.row_dim else ''})"


class _ExpertsRunner(Runner):
    style = "WholeExperts"

    def __init__(self, grid: Grid, row_dim: int) -> None:
        self.grid, self.row_dim = grid, row_dim
        self.layout: Layout = Shard(row_dim), Shard(1)

    def resolved(self) -> Resolved:
        return Resolved(self.layout, self.layout)

    def run(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        x, *others = (*args, *kwargs.values())
        if not isinstance(x, DTensor) or others:
            raise TypeError(
                f"{describe_module(module)} on mesh {describe_mesh(self.grid.mesh)} takes one "
                f"DTensor [batch, sequence, hidden], not {[type(a).__name__ for a in (x, *others)]}"
                f": have the norm before it hand on DTensors (use_local_output=False)"
            )
        tokens = x.redistribute(placements=self.grid.placements(self.layout)).to_local()
        computed, shape = tokens, tokens.shape
        if not tokens.numel():
            # A rank without tokens computes one token of zeros and drops the result, so that its
            # gradients, which are summed over all ranks, are zero and not missing.
            computed = torch.cat([tokens.flatten(0, 1), tokens.new_zeros(1, shape[-1])])[None]
        y = run_locally(parameters_inside(module), forward, (computed,), {}, self.grid)
        if computed is not tokens:
            y = y[:, :0].reshape(shape)
        whole = to_dtensor(y, self.layout, self.grid, x.shape)
        return whole.redistribute(placements=x.placements)


def refuse_router_losses(model: Any, asked: bool | None, *, planned: bool = False) -> None:
    """Refuse a router's loss over all tokens, of which each rank sees only its own.

    Args:
        asked: a forward's ``output_router_logits``; None leaves it to the config.
        planned: the model is going to have :class:`WholeExperts`, but the plan is not applied yet.

    Raises:
        ValueError: on every rank, if the loss is asked for.
    """
    if asked is None:
        asked = getattr(getattr(model, "config", None), "output_router_logits", False)
    if not asked:
        return
    if planned or any(
        isinstance(getattr(module, "_tp2d", None), _ExpertsRunner) for module in model.modules()
    ):
        raise ValueError(
            f"{type(model).__name__}: the load-balancing loss of output_router_logits is of all "
            f"tokens together, but the routers of a rank see its own: leave it out, "
            f"config.output_router_logits = False"
        )


def experts_plan(model: Any, where: str, row_dim: int) -> Plan:
    """The plan's entry for the mixtures of experts that the pattern ``where`` names.

    Raises:
        ValueError: for router noise, which would differ from grid to grid, and for a router's loss.
    """
    if getattr(model.config, "router_jitter_noise", 0.0):
        raise ValueError(
            f"{type(model).__name__}: router_jitter_noise draws for each token, which would be "
            f"otherwise on every grid: set config.router_jitter_noise = 0"
        )
    refuse_router_losses(model, None, planned=True)
    return {where: WholeExperts(row_dim=row_dim)}
