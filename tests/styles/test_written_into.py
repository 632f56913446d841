"""What a style hands out and the user's code writes into: ``nn.ReLU(inplace=True)``, ``x += y``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel

import torch_tp2d
from support import world
from support.marks import deep
from support.models import batch, grid_mesh, loss_of, relative
from torch_tp2d import Colwise2D, Rowwise2D

VOCAB, WIDTH = 13, 16
TOLERANCE = 1e-11


class _Gated(nn.Module):
    """Writes into the output of the module called ``where``, or of several."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24)
        self.down = nn.Linear(24, WIDTH)
        self.relu = nn.ReLU(inplace=True)

    def _written(self, name: str, x: Tensor, write: Callable[[Tensor], Tensor]) -> Tensor:
        return write(x) if self.where == name else x

    def forward(self, ids: Tensor) -> Tensor:
        x = self._written("embed", self.embed(ids), lambda x: x.add_(0.5))
        y = self._written("norm", self.norm(x), lambda y: y.mul_(0.7))
        gate = self._written("gate", self.gate(y), self.relu)
        up = self._written("up", self.up(y), lambda y: y.mul_(2))
        if self.where == "product":
            up *= gate
        else:
            up = F.silu(gate) * up
        down = self._written("down", self.down(up), lambda y: y.div_(2))
        if self.where == "residual":
            down += x
        else:
            down = down + x
        logits = self.head(self.last(down))
        return self._written("head", logits, lambda y: y.mul_(0.3))


WHERE = ["embed", "norm", "gate", "up", "product", "down", "residual", "head"]


def _tokens(module: nn.Module, mesh: Any) -> dict[str, Any]:
    columns = {"input_layouts": Shard(1)}
    return {
        "embed": Rowwise2D(output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
        "up": Colwise2D(**columns),
        "gate": Colwise2D(**columns),
        "down": Rowwise2D(output_layouts=Shard(1)),
        "last": SequenceParallel(use_local_output=True),
        "head": Colwise2D(**columns, use_local_output=False),
    }


def _rows(module: nn.Module, mesh: Any) -> dict[str, Any]:
    return {
        "embed": Rowwise2D(output_layouts=Replicate()),
        "norm": torch_tp2d.Replicate(),
        "up": Colwise2D(),
        "gate": Colwise2D(),
        "down": Rowwise2D(output_layouts=Replicate()),
        "last": torch_tp2d.Replicate(),
        "head": Colwise2D(use_local_output=False),
    }


def _beside(rows: int, columns: int, where: str) -> list[float]:
    mesh, found = grid_mesh(rows, columns), []
    for plan in (_tokens, _rows, torch_tp2d.plan_for):
        torch.manual_seed(0)
        one = _Gated(where).double()
        several = copy.deepcopy(one)
        torch_tp2d.parallelize_module(several, mesh, plan(several, mesh))
        for seed in range(2):
            ids, target = batch(3, 5, VOCAB, seed=seed)
            for model in (one, several):
                logits = model(ids)
                whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
                loss_of(whole, target).backward()
        for p, q in zip(one.parameters(), several.parameters(), strict=True):
            assert p.grad is not None and isinstance(q.grad, DTensor)
            found.append(relative(q.grad.full_tensor(), p.grad))
    return found


@pytest.mark.parametrize("grid", [(2, 2), deep((1, 4)), deep((4, 1)), deep((2, 3))], ids=str)
@pytest.mark.parametrize("where", WHERE)
def test_a_user_may_write_into_what_a_style_hands_out(where: str, grid: tuple[int, int]) -> None:
    """Autograd took what our functions had made for views, into which nothing may be written.

    A ReLU in place behind a Colwise2D raised; with parts that differ in length some ranks raised
    and the others waited for them.
    """
    for found in world.run(grid[0] * grid[1], _beside, *grid, where):
        assert max(found) < TOLERANCE
