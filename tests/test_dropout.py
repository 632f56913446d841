"""Dropout on shards: the mask of one device, whatever the grid."""

from __future__ import annotations

import copy
from typing import Any

import models
import pytest
import torch
import torch_tp2d
import world
from models import batch, grid_mesh, loss_of, parallelize, plan_2d, relative, transformer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel
from torch.utils.checkpoint import checkpoint

from torch_tp2d import Colwise2D, Dropout2D, Rowwise2D
from torch_tp2d.ops.dropout import draw_key, drop, dropped

TOLERANCE = 1e-12
EVEN, UNEVEN = (4, 8, 8), (3, 13, 33)
"""Batch, sequence, vocab. On 4 rows a batch of 3 leaves one without tokens."""


class WholeDropout(nn.Module):
    """What the styles have to give, on one device: every index of every dim."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        return drop(x, dropped(draw_key(), self.p, [torch.arange(n) for n in x.shape]), self.p)


def on_one_device(model: nn.Module) -> nn.Module:
    """A copy of a model with every nn.Dropout in it replaced."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Dropout:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, WholeDropout(module.p))
    return model


class Layer(nn.Module):
    """A feed-forward layer as T5 has it: dropout on the features too."""

    def __init__(self, hidden: int, inner: int, p: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.wi = nn.Linear(hidden, inner)
        self.inner_dropout = nn.Dropout(p)
        self.wo = nn.Linear(inner, hidden)
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.wo(self.inner_dropout(self.wi(self.norm(x)).relu())))


class Feeds(nn.Module):
    """Embedding, feed-forward layers and a head."""

    def __init__(self, vocab: int, hidden: int = 6, inner: int = 10, p: float = 0.2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok = nn.Embedding(vocab, hidden)
        self.drop = nn.Dropout(p)
        self.layers = nn.ModuleList(Layer(hidden, inner, p) for _ in range(2))
        self.head = nn.Linear(hidden, vocab)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.tok(ids))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def feeds_plan(row_dim: int, *, tokens: bool, local: bool = True) -> dict[str, Any]:
    """Residual stream in the token layout or the row layout; features local or DTensors."""
    stream = Shard(1) if tokens else Replicate()
    norm: Any = SequenceParallel() if tokens else torch_tp2d.Replicate(row_dim=row_dim)
    if tokens and row_dim:
        norm = torch_tp2d.Lifted(norm, row_dim=row_dim)
    on = {"row_dim": row_dim}
    return {
        "tok": Rowwise2D(output_layouts=stream, **on),
        "layers.*.norm": norm,
        "layers.*.wi": Colwise2D(input_layouts=stream, use_local_output=local, **on),
        "layers.*.wo": Rowwise2D(output_layouts=stream, **on),
        "head": Colwise2D(input_layouts=stream, use_local_output=False, **on),
    }


def differences(
    reference: nn.Module, model: nn.Module, sizes: tuple[int, int, int], seed: int = 5
) -> float:
    """Loss and gradients of two steps from one seed; the largest relative difference."""
    size, sequence, vocab = sizes
    worst = 0.0
    for step in range(2):
        ids, target = batch(size, sequence, vocab, seed=step)
        losses = []
        for part in (reference, model):
            part.zero_grad()
            torch.manual_seed(seed + step)
            losses.append(loss_of(part(ids), target))
            losses[-1].backward()
        worst = max(worst, relative(losses[1].detach(), losses[0].detach()))
        for param, ours in zip(reference.parameters(), model.parameters(), strict=True):
            worst = max(worst, relative(ours.grad, param.grad))
    return worst


def _transformer(sizes: tuple[int, int, int]) -> nn.Module:
    model = transformer(sizes[2], dropout_p=0.2)
    for layer in model.layers:
        layer.attention.dropout_p = 0.0
    return model


def _on_a_grid(plan: str, rows: int, columns: int) -> float:
    worst = 0.0
    mesh = grid_mesh(rows, columns)
    for sizes in (EVEN, UNEVEN):
        model = _transformer(sizes)
        reference = on_one_device(model)
        parallelize(model, mesh, getattr(models, plan)())
        worst = max(worst, differences(reference, model, sizes))
    return worst


@pytest.mark.parametrize("rows,columns", [(1, 1), (2, 2), (1, 4), (4, 1), (3, 2)])
def test_every_grid_drops_what_one_device_drops(rows: int, columns: int) -> None:
    """Dropouts that no plan entry names, on local tensors in the token layout."""
    assert max(world.run(rows * columns, _on_a_grid, "plan_2d", rows, columns)) < TOLERANCE


@pytest.mark.parametrize("plan", ["plan_mixed", "plan_dtensor", "plan_without_sequence_parallel"])
def test_in_other_plans(plan: str) -> None:
    assert max(world.run(4, _on_a_grid, plan, 2, 2)) < TOLERANCE


def _feeds(rows: int, columns: int) -> dict[Any, float]:
    seen = {}
    mesh = grid_mesh(rows, columns)
    for row_dim in (0, 1):
        for tokens in (True, False):
            for local in (True, False):
                for sizes in (EVEN, UNEVEN):
                    model = Feeds(sizes[2])
                    reference = on_one_device(model)
                    plan = feeds_plan(row_dim, tokens=tokens, local=local)
                    torch_tp2d.parallelize_module(model, mesh, plan)
                    seen[row_dim, tokens, local, sizes] = differences(reference, model, sizes)
    return seen


@pytest.mark.parametrize("rows,columns", [(2, 2), (1, 3), (3, 2)])
def test_tokens_rows_and_features_even_or_not(rows: int, columns: int) -> None:
    """Both axes on the sequence (row_dim 1) too, where shards are chunks of chunks."""
    for seen in world.run(rows * columns, _feeds, rows, columns):
        assert max(seen.values()) < TOLERANCE, seen
