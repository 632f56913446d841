"""Compiled modules that are given DTensors of several lengths, of which a rank's part is the same.

Of 5 and of 6 tokens on two columns the first has 3. Dynamo guards a DTensor by its shard's sizes.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import SequenceParallel

import torch_tp2d
from support import world
from support.marks import deep
from support.models import batch, grid_mesh, relative
from torch_tp2d import Rowwise2D

VOCAB, WIDTH = 11, 16
TOLERANCE = 1e-11


class _Scaled(nn.Module):
    """A norm of what the module's own code has made of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x * 2)


class _Held(nn.Module):
    """Takes two of its inputs, one of them held by a dict, after its only style."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, other: Tensor, more: dict[str, Tensor]) -> Tensor:
        x = self.norm(x)
        return x * (1 + other.mean((0, 1), keepdim=True) + more["more"].mean((0, 1), keepdim=True))


class _Block(nn.Module):
    """Its heads are made by ``unflatten``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = _Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 2
        # The gradient of a bias of keys is zero.
        self.q, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        given = (project(x) for project in (self.q, self.k, self.v))
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in given)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class _Model(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(VOCAB, WIDTH), middle
        self.head = nn.Linear(WIDTH, VOCAB) if isinstance(middle, _Block) else None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if isinstance(self.middle, _Held):
            same = self.embed(torch.zeros_like(ids[:, :1]).expand(len(ids), 4))
            x = self.middle(same, x, {"more": self.embed(ids.flip(1))})
        else:
            x = self.middle(x)
        return x if self.head is None else self.head(x)


def _lengths(kind: type[nn.Module], rows: int, columns: int, backend: str) -> float:
    mesh = grid_mesh(rows, columns)
    torch.manual_seed(0)
    one = _Model(kind()).double()
    several = copy.deepcopy(one)
    plan: dict[str, Any] = {
        "embed": Rowwise2D(output_layouts=Shard(1), use_local_output=False),
        "middle.norm": SequenceParallel(use_local_output=False),
    }
    if kind is _Block:
        plan = torch_tp2d.plan_for(several, mesh)
    torch_tp2d.parallelize_module(several, mesh, plan)
    several.middle.compile(backend=backend, fullgraph=True)
    worst = 0.0
    for size in (5, 6, 5, 7, 8, 7):
        ids, _ = batch(*((3, size) if columns > 1 else (size, 3)), VOCAB, seed=size)
        means = []
        for model in (one, several):
            model.zero_grad()
            y = model(ids)
            mean = (y.full_tensor() if isinstance(y, DTensor) else y)[..., 0].mean()
            mean.backward()
            means.append(mean.detach())
        worst = max(worst, relative(means[1], means[0]))
        for p, q in zip(one.parameters(), several.parameters(), strict=True):
            assert p.grad is not None and isinstance(q.grad, DTensor)
            worst = max(worst, relative(q.grad.full_tensor(), p.grad))
    return worst


@pytest.mark.parametrize("kind", [_Scaled, deep(_Block), _Held])
@pytest.mark.parametrize(
    "backend,grid",
    [("eager", (1, 2)), deep("aot_eager", (1, 2)), deep("aot_eager", (2, 1))],
)
def test_a_length_of_which_a_rank_has_as_much(
    kind: type[nn.Module], backend: str, grid: tuple[int, int]
) -> None:
    """The rank ran the graph of the other length: a mean of another size, or ranks that sent each
    other what did not fit, or waited.
    """
    assert max(world.run(2, _lengths, kind, *grid, backend)) < TOLERANCE
