"""What backward needs and the user has changed since the forward: refused as on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel

import torch_tp2d
from support import world
from support.marks import deep
from support.models import grid_mesh, relative
from torch_tp2d import Colwise2D, Norm2D, Rowwise2D

VOCAB, WIDTH = 11, 8


class _Model(nn.Module):
    """One Linear or norm of each kind of style that computes on shards."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.norm, self.split = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.whole, self.local = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.writes = ""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        y = self.whole(self.norm(x))
        if self.writes == "residual":
            x += y
        else:
            x = x + y
        y = self.local(x)
        z = self.up(y)
        if self.writes == "after a Linear":
            y *= 2
        elif self.writes == "after a norm":
            x *= 2
        y = self.down(z.tanh()) + y
        return self.head(self.split(y)) + x.sum()


def _plan(stationary: bool) -> dict[str, Any]:
    how: dict[str, Any] = {"dataflow": "weight_stationary"} if stationary else {}
    return {
        "embed": Rowwise2D(output_layouts=Shard(1), use_local_output=False),
        "norm": SequenceParallel(use_local_output=False),
        "whole": torch_tp2d.Replicate(),
        "local": torch_tp2d.Replicate(),
        "up": Colwise2D(use_local_output=False, **how),
        "down": Rowwise2D(output_layouts=Shard(1), use_local_output=False, **how),
        "split": Norm2D(output_layouts=Replicate(), use_local_output=False),
        "head": Colwise2D(output_layouts=Replicate(), use_local_output=False),
    }


WEIGHTS = ["norm", "split", "whole", "local", "up", "down", "head"]


def _backward(model: _Model, ids: Tensor, changed: str) -> str:
    model.zero_grad()
    try:
        loss = model(ids).square().mean()
        if changed:
            with torch.no_grad():
                dict(model.named_parameters())[f"{changed}.weight"].add_(0.5)
        (loss.full_tensor() if isinstance(loss, DTensor) else loss).backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return "raises"
    return "runs"


def _outcomes(rows: int, columns: int, stationary: bool, frozen: bool) -> dict[str, Any]:
    ids, found = torch.arange(24).view(4, 6) % VOCAB, {}
    for changed in ["", *WEIGHTS]:
        torch.manual_seed(0)
        one = _Model().double()
        several = copy.deepcopy(one)
        torch_tp2d.parallelize_module(several, grid_mesh(rows, columns), _plan(stationary))
        for model in (one, several):
            # The checks of the first forward are over.
            _backward(model, ids, "")
            for name in WEIGHTS if frozen else ():
                model.get_submodule(name).requires_grad_(False)
        found[changed] = tuple(_backward(model, ids, changed) for model in (one, several))
        if not changed:
            both = zip(one.parameters(), several.parameters(), strict=True)
            grads = [(p.grad, q.grad.full_tensor()) for p, q in both if p.grad is not None]
            assert max(relative(ours, wanted) for wanted, ours in grads) < 1e-11
    return found


@pytest.mark.parametrize("grid", [(1, 2), deep((2, 1)), deep((2, 2))], ids=str)
@pytest.mark.parametrize("stationary,frozen", [(False, False), (True, True), deep(False, True)])
def test_weights(grid: tuple[int, int], stationary: bool, frozen: bool) -> None:
    """torch counts what is done to a parameter as a change of the DTensor, not of its shard.

    Gradients were wrong without an error, where a norm, ``Replicate()``, ``Norm2D`` or the
    weight-stationary dataflow keep the shard.
    """
    for found in world.run(grid[0] * grid[1], _outcomes, *grid, stationary, frozen):
        assert found.pop("") == ("runs", "runs")
        assert set(found.values()) == {("raises", "raises")}, found


def _written(rows: int, columns: int, where: str) -> list[str]:
    torch.manual_seed(0)
    one = _Model().double()
    several = copy.deepcopy(one)
    torch_tp2d.parallelize_module(several, grid_mesh(rows, columns), _plan(False))
    ids = torch.arange(24).view(4, 6) % VOCAB
    outcomes = []
    for model in (one, several):
        _backward(model, ids, "")
        model.writes = where
        outcomes.append(_backward(model, ids, ""))
    return outcomes


@pytest.mark.parametrize("grid", [(2, 1), deep((1, 2)), deep((2, 2))], ids=str)
@pytest.mark.parametrize("where", ["residual", "after a norm", "after a Linear"])
def test_activations(grid: tuple[int, int], where: str) -> None:
    """DTensors that a style has taken and the user's code writes into: ``x += f(norm(x))``.

    Of what is gathered backward keeps a copy.
    """
    copied = where == "after a Linear" and grid[1] > 1
    for outcomes in world.run(grid[0] * grid[1], _written, *grid, where):
        assert outcomes == ["raises", "runs" if copied else "raises"]
