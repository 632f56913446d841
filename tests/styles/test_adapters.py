"""Adapters of rank ``r`` beside a styled Linear, laid out as peft lays them out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

import torch_tp2d
from support import world
from support.fake import fake_grid
from support.marks import deep
from support.models import differences_of_row, grid_mesh
from torch_tp2d import Attention2D, Colwise2D, Lifted, Rowwise2D, attention_projections


class Adapted(nn.Module):
    """A Linear with a low-rank adapter, laid out as peft lays it out."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"a": nn.Linear(base.in_features, 3, bias=False)})
        self.lora_B = nn.ModuleDict({"a": nn.Linear(3, base.out_features, bias=False)})
        self.lora_dropout = nn.ModuleDict()
        self.in_features = base.in_features

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["a"](self.lora_A["a"](x))


class Gated(nn.Module):
    """Two projections in one weight, with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Adapted(nn.Linear(8, 32)), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(gate.sin() * up)


class Attention(nn.Module):
    """Queries of four heads, keys and values of one, each with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads = 4, 1
        # A bias of all keys is what softmax takes away: its gradient is rounding.
        self.q, self.k = Adapted(nn.Linear(8, 8)), Adapted(nn.Linear(8, 2, bias=False))
        self.v, self.o = Adapted(nn.Linear(8, 2)), Adapted(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (-1, 2)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)


def _fused_adapter_rank() -> dict[str, float]:
    mesh = grid_mesh(2, 2)
    row, _ = mesh.get_coordinate()
    torch.manual_seed(0)
    reference = Gated().double()
    model = copy.deepcopy(reference)
    torch_tp2d.parallelize_module(model, mesh, {"up": Colwise2D(parts=2), "down": Rowwise2D()})
    return differences_of_row(model, reference, 2, row)


def test_an_adapter_of_a_fused_projection_is_shared_out_alike() -> None:
    """The adapter's columns were a plain shard, beside the base layer's share of each part.

    Outputs and gradients were wrong without an error.
    """
    for seen in world.run(4, _fused_adapter_rank):
        assert not {k: v for k, v in seen.items() if not v < 1e-12}


def _keys_of_all_columns(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    torch.manual_seed(0)
    reference = Model().double()
    model = copy.deepcopy(reference)
    q, kv, o = attention_projections(
        4, 1, columns, output_layouts=Replicate(), use_local_output=True
    )
    plan: dict[str, Any] = {"attention": Attention2D(), "attention.q": q}
    plan |= {"attention.k": kv, "attention.v": kv, "attention.o": o}
    torch_tp2d.parallelize_module(model, mesh, plan)
    return differences_of_row(model, reference, rows, mesh.get_local_rank("tp_row"))


@pytest.mark.parametrize("grid", [(2, 2), deep((1, 4)), deep((1, 2))])
def test_adapters_of_keys_that_every_column_holds(grid: tuple[int, int]) -> None:
    """Their gradients were one column's, in silence, and the columns' adapters drifted apart.

    A key head that does not divide is replicated and used by each column for queries of its own,
    so its gradient is partial. The base layer was told so (``grad_layouts``), its adapter was not.
    """
    for seen in world.run(grid[0] * grid[1], _keys_of_all_columns, *grid):
        assert not {k: v for k, v in seen.items() if not v < 1e-12}


class Saved(nn.Module):
    """A layer as it was and a copy that is trained in full, as peft has ``modules_to_save``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.original_module = layer
        self.modules_to_save = nn.ModuleDict({"a": copy.deepcopy(layer)})
        self.enabled = True

    @property
    def weight(self) -> Tensor:
        return self.modules_to_save["a"].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.modules_to_save["a"](x) if self.enabled else self.original_module(x)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = Saved(nn.LayerNorm(8)), Saved(nn.Linear(8, 12))
        self.down = Saved(nn.Linear(12, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).sin())


def _copies_rank(enabled: bool) -> dict[str, float]:
    """By the copies, or by the layers as they were."""
    mesh = grid_mesh(2, 2)
    row, _ = mesh.get_coordinate()
    torch.manual_seed(0)
    reference = FeedForward().double()
    for saved in (reference.norm, reference.up, reference.down):
        nn.init.normal_(saved.original_module.weight)
        saved.enabled = enabled
        idle = saved.original_module if enabled else saved.modules_to_save
        idle.requires_grad_(False)
    model = copy.deepcopy(reference)
    plan = {"norm": torch_tp2d.Replicate(), "up": Colwise2D(), "down": Rowwise2D()}
    torch_tp2d.parallelize_module(model, mesh, plan)
    return differences_of_row(model, reference, 2, row)


@pytest.mark.parametrize("enabled", [True, False])
def test_copies_that_are_trained_in_full(enabled: bool) -> None:
    """They were refused as parametrized layers: "its weight is no parameter"."""
    for seen in world.run(4, _copies_rank, enabled):
        assert not {k: v for k, v in seen.items() if not v < 1e-12}


class Scaled(nn.Module):
    """A Linear whose outputs a learned vector scales, laid out as peft's IA3 has it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.ia3_l = nn.ParameterDict({"a": nn.Parameter(torch.ones(layer.out_features, 1))})
        self.in_features, self.out_features = layer.in_features, layer.out_features

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) * self.ia3_l["a"].flatten()


class Looked(nn.Module):
    """An Embedding with an adapter, whose two factors are no Linears."""

    def __init__(self, layer: nn.Embedding) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        sizes = {"A": (3, layer.num_embeddings), "B": (layer.embedding_dim, 3)}
        for name, size in sizes.items():
            factor = nn.ParameterDict({"a": nn.Parameter(torch.ones(size))})
            setattr(self, f"lora_embedding_{name}", factor)


@pytest.mark.parametrize(
    "adapted,style",
    [
        (lambda: Scaled(nn.Linear(8, 12)), Colwise2D()),
        (lambda: Looked(nn.Embedding(9, 8)), Rowwise2D()),
    ],
)
def test_adapters_of_other_kinds_are_refused(adapted: Any, style: Any) -> None:
    """They were called parametrized, or torch raised "Boolean value of Tensor"."""
    with fake_grid(2, 2) as mesh, pytest.raises(ValueError, match="of target_modules"):
        torch_tp2d.parallelize_module(nn.Sequential(adapted()), mesh, {"0": style})


def test_adapters_across_other_axes_are_refused() -> None:
    """They were laid out along ``tp_col``, whatever the base layer's axes."""
    with fake_grid(2, 2) as mesh, pytest.raises(ValueError, match="lora_A.* one by one"):
        plan = {"up": Lifted(ColwiseParallel(), axes="tp_row"), "down": Rowwise2D()}
        torch_tp2d.parallelize_module(Gated(), mesh, plan)
