"""Dropout on shards, in plans that name it or not: what one device drops, whatever the grid.

How it is known which part of a whole a rank drops from is in ``test_dropout_parts.py``, the masks
themselves in ``test_dropout_masks.py``.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import torch_tp2d
from support import models, world
from support.dropout import Feeds, Layer, differences, feeds_plan, on_one_device
from support.marks import deep
from support.models import EVEN, UNEVEN, grid_mesh, parallelize, relative, transformer
from torch_tp2d import Colwise2D, Dropout2D, Rowwise2D

TOLERANCE = 1e-12


class FunctionalLayer(Layer):
    """Such a layer by ``F.dropout``, as BART has it."""

    def __init__(self, hidden: int, inner: int, p: float) -> None:
        super().__init__(hidden, inner, 0.0)
        self.dropout_rate = p

    def forward(self, x: Tensor) -> Tensor:
        inner = F.dropout(self.wi(self.norm(x)).relu(), self.dropout_rate, self.training)
        return x + F.dropout(self.wo(inner), p=self.dropout_rate, training=self.training)


def _transformer(sizes: tuple[int, int, int]) -> nn.Module:
    return transformer(sizes[2], dropout_p=0.2)


def _on_a_grid(plan: str, rows: int, columns: int) -> float:
    worst = 0.0
    mesh = grid_mesh(rows, columns)
    for sizes in (EVEN, UNEVEN):
        model = _transformer(sizes)
        reference = on_one_device(model)
        parallelize(model, mesh, getattr(models, plan)())
        worst = max(worst, differences(reference, model, sizes))
    return worst


@pytest.mark.parametrize("rows,columns", [(1, 1), deep(2, 2), deep(1, 4), deep(4, 1), deep(3, 2)])
def test_every_grid_drops_what_one_device_drops(rows: int, columns: int) -> None:
    """Dropouts that no plan entry names, on local tensors in the token layout."""
    assert max(world.run(rows * columns, _on_a_grid, "plan_2d", rows, columns)) < TOLERANCE


@pytest.mark.parametrize(
    "plan", [deep("plan_mixed"), deep("plan_dtensor"), deep("plan_without_sequence_parallel")]
)
def test_in_other_plans(plan: str) -> None:
    assert max(world.run(4, _on_a_grid, plan, 2, 2)) < TOLERANCE


def _gpt2(rows: int, columns: int) -> float:
    """The tutorial's model and plan, its dropout 0.1 in and around attention."""
    from gpt2 import GPT2, GPT2Config
    from plans import plan_2d

    sizes = 3, 13, 33
    config = GPT2Config(33, n_positions=16, n_embd=16, n_layer=2, n_head=4, dropout=0.1)
    model = GPT2(config).double()
    reference = on_one_device(model)
    torch_tp2d.parallelize_module(model, grid_mesh(rows, columns), plan_2d())
    return differences(reference, model, sizes)


@pytest.mark.parametrize("rows,columns", [(1, 1), (2, 2)])
def test_the_tutorials_gpt2(rows: int, columns: int) -> None:
    assert max(world.run(rows * columns, _gpt2, rows, columns)) < TOLERANCE


def _feeds(rows: int, columns: int, layer: type[Layer]) -> dict[Any, float]:
    seen = {}
    mesh = grid_mesh(rows, columns)
    for row_dim in (0, 1):
        for tokens in (True, False):
            for local in (True, False):
                for sizes in (EVEN, UNEVEN):
                    model = Feeds(sizes[2], layer)
                    reference = on_one_device(model)
                    plan = feeds_plan(row_dim, tokens=tokens, local=local)
                    torch_tp2d.parallelize_module(model, mesh, plan)
                    seen[row_dim, tokens, local, sizes] = differences(reference, model, sizes)
    return seen


@pytest.mark.parametrize("rows,columns", [deep(2, 2), deep(1, 3), deep(3, 2)])
def test_tokens_rows_and_features_even_or_not(rows: int, columns: int) -> None:
    """Both axes on the sequence (row_dim 1) too, where shards are chunks of chunks."""
    for seen in world.run(rows * columns, _feeds, rows, columns, Layer):
        assert max(seen.values()) < TOLERANCE, seen


def _lifted_feeds() -> float:
    """Nothing but lifted styles says that rows hold parts of sequences."""
    model = Feeds(UNEVEN[2])
    reference = on_one_device(model)

    def lifted(kind: Any, **layouts: Any) -> torch_tp2d.Lifted:
        return torch_tp2d.Lifted(kind(**layouts), row_dim=1)

    plan = {
        "tok": lifted(RowwiseParallel, input_layouts=Replicate()),
        "layers.*.wi": lifted(ColwiseParallel),
        "layers.*.wo": lifted(RowwiseParallel),
        "head": lifted(ColwiseParallel, use_local_output=False),
    }
    torch_tp2d.parallelize_module(model, grid_mesh(2, 2), plan)
    return differences(reference, model, UNEVEN)


def test_rows_hold_parts_of_sequences_by_lifted_styles_alone() -> None:
    """Of a plan of lifted styles the ``row_dim`` was not seen.

    Dropouts that it does not name took rows to hold samples: refused where an embedding tells the
    sizes, and dropping others than one device does where none is.
    """
    assert max(world.run(4, _lifted_feeds)) < TOLERANCE


def _features_over_both_axes(inner: int) -> float:
    everywhere = Shard(-1), Shard(-1)
    model = Feeds(8, inner=inner)
    reference = on_one_device(model)
    plan = feeds_plan(0, tokens=False) | {
        "layers.*.wi": Colwise2D(output_layouts=everywhere),
        "layers.*.inner_dropout": Dropout2D(input_layouts=everywhere),
        "layers.*.wo": Rowwise2D(input_layouts=everywhere),
    }
    torch_tp2d.parallelize_module(model, grid_mesh(2, 2), plan)
    return differences(reference, model, EVEN)


@pytest.mark.parametrize("inner", [2, 7])
def test_declared_features_over_both_axes(inner: int) -> None:
    """A random program hung: two features over four ranks, one on each rank of one column.

    The ranks that hold none asked the others how many there are in all; the others thought to know
    it from the Linear beside, as one is what each rank of a column holds of its two.
    """
    assert max(world.run(4, _features_over_both_axes, inner)) < TOLERANCE


@pytest.mark.deep
def test_what_a_modules_own_code_drops() -> None:
    for seen in world.run(4, _feeds, 2, 2, FunctionalLayer):
        assert max(seen.values()) < TOLERANCE, seen


class Heads(nn.Module):
    """Attention weights of local heads, ``[B, H, S, S]``, under dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 2
        self.query, self.key = nn.Linear(6, 8), nn.Linear(6, 8)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.query, self.key)
        )
        return self.dropout(q @ k.transpose(-1, -2))


def _heads(rows: int, columns: int) -> float:
    mesh = grid_mesh(rows, columns)
    torch.manual_seed(0)
    model = Heads().double()
    reference = on_one_device(model)
    plan = {
        "query": Colwise2D(),
        "key": Colwise2D(),
        "dropout": Dropout2D(input_layouts=Shard(1)),
    }
    torch_tp2d.parallelize_module(model, mesh, plan)
    x = torch.randn(2 * rows, 5, 6, dtype=torch.float64)
    row, column = mesh.get_local_rank("tp_row"), mesh.get_local_rank("tp_col")
    torch.manual_seed(1)
    wanted = reference(x).chunk(rows)[row].chunk(columns, 1)[column]
    torch.manual_seed(1)
    return relative(model(x.chunk(rows)[row]).detach(), wanted.detach())


def test_a_named_dropout_on_heads() -> None:
    assert max(world.run(4, _heads, 2, 2)) < TOLERANCE


def _refusal(case: str) -> str:
    mesh = grid_mesh(1, 2)
    layer = Layer(4, 8, 0.5)
    plan: dict[str, Any] = {"wi": Colwise2D(), "wo": Rowwise2D()}
    x = torch.ones(2, 3, 4)
    if case == "kind":
        layer.dropout = nn.AlphaDropout(0.5)
    elif case == "inplace":
        layer.dropout = nn.Dropout(0.5, inplace=True)
    elif case == "style":
        plan["norm"] = Dropout2D()
    elif case == "row_dim":
        plan["wo"] = Rowwise2D(row_dim=1)
    elif case == "heads":
        x = torch.ones(2, 3, 4, 4)
    try:
        torch_tp2d.parallelize_module(layer, mesh, plan)
        layer.dropout(x)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    "case,words",
    [
        ("kind", "ValueError: 'dropout': AlphaDropout.*use nn.Dropout in its place"),
        ("inplace", "ValueError: 'dropout'.*set inplace to False"),
        ("style", "TypeError: 'norm'.*Dropout2D is for nn.Dropout, not LayerNorm"),
        ("row_dim", "ValueError: 'norm'.*row_dim 0 and others 1: name it"),
        ("heads", r"ValueError: .*\(2, 3, 4, 4\).*Dropout2D\(input_layouts=Shard\(1\)\)"),
        ("width", "ValueError: .*the .8. features of modules beside it, or a whole output"),
    ],
)
def test_what_is_refused(case: str, words: str) -> None:
    for message in world.run(2, _refusal, case):
        assert re.search(words, message), message
