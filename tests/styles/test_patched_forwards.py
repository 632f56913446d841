"""Modules on which another forward was put, as libraries do that wrap modules or speed them up."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate

import torch_tp2d
from support import world
from support.fake import fake_grid
from support.marks import deep
from support.models import differences_of_row, grid_mesh
from torch_tp2d import Attention2D, Colwise2D, Local2D, Rowwise2D


class Attention(nn.Module):
    """Four heads of two features."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        for name in ("q", "k", "v", "o"):
            setattr(self, name, nn.Linear(8, 8, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            proj(x).view(batch, tokens, self.num_heads, 2).transpose(1, 2)
            for proj in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, tokens, -1))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.beta = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down((self.beta * self.up(x)).sin())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.attention, self.mlp = Attention(), Gated()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.attention(x=self.norm(x))
        return x + self.mlp(x)


def _scaled(self: Any, x: Tensor) -> Tensor:
    return self._was(x) * 1.5


def _patch(block: Block) -> None:
    for module in (block.norm, block.attention, block.mlp):
        module._was = module.forward
        module.forward = MethodType(_scaled, module)


def _patched(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    torch.manual_seed(0)
    reference = Block().double()
    _patch(reference)
    model = copy.deepcopy(reference)
    plan = {
        "first": Colwise2D(output_layouts=Replicate()),
        "norm": torch_tp2d.Replicate(),
        "attention": Attention2D(),
        "attention.[qkv]": Colwise2D(),
        "attention.o": Rowwise2D(),
        "mlp": Local2D(params={"beta": Partial()}),
        "mlp.up": Colwise2D(),
        "mlp.down": Rowwise2D(),
    }
    torch_tp2d.parallelize_module(model, mesh, plan)
    return differences_of_row(model, reference, rows, mesh.get_local_rank("tp_row"))


@pytest.mark.parametrize("grid", [(2, 2), deep((1, 4)), deep((4, 1))])
def test_the_style_runs_the_forward_that_was_put_there(grid: tuple[int, int]) -> None:
    """The style did not run: torch found the norm's weight, a DTensor, beside a local tensor."""
    for seen in world.run(grid[0] * grid[1], _patched, *grid):
        assert not {k: v for k, v in seen.items() if not v < 1e-12}


def test_a_linear_that_computes_something_else_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model[0]._was = model[0].forward
    model[0].forward = MethodType(_scaled, model[0])
    with fake_grid(2, 2) as mesh, pytest.raises(TypeError, match="another forward put on it"):
        torch_tp2d.parallelize_module(model, mesh, {"0": Colwise2D()})
