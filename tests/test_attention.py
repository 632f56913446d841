"""Attention modules on the grid, against one device in fp64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import world
from models import DOUBLE, batch, grid_mesh, relative, train_beside
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import SequenceParallel

import torch_tp2d
from torch_tp2d import Attention2D, Colwise2D, Rowwise2D, attention_projections

TOLERANCE = 1e-11


def rope_tables(positions: Tensor, features: int) -> tuple[Tensor, Tensor]:
    """``(cos, sin)``, each ``[batch, sequence, features]``."""
    rates = 10.0 ** (-torch.arange(0, features, 2, dtype=DOUBLE) / features)
    angles = torch.cat([positions[..., None] * rates] * 2, -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (table[:, None] for table in tables)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Attention(nn.Module):
    """Written for one device: grouped-query attention with rotary positions and masks."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.n_rep = heads // kv_heads
        self.q = nn.Linear(hidden, heads * head_dim)
        self.k = nn.Linear(hidden, kv_heads * head_dim)
        self.v = nn.Linear(hidden, kv_heads * head_dim)
        self.o = nn.Linear(heads * head_dim, hidden)
        self.repeats = False

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        states: Tensor | None = None,
        is_causal: bool = True,
    ) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.view(*y.shape[:2], -1, self.head_dim).transpose(1, 2)

        states = x if states is None else states
        q, k, v = split(self.q(x)), split(self.k(states)), split(self.v(states))
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        if self.repeats:
            k, v = (y.repeat_interleave(self.n_rep, 1) for y in (k, v))
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=is_causal and mask is None,
            enable_gqa=not self.repeats and self.n_rep > 1,
        )
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Causal attention, then an MLP, on the residual stream."""

    def __init__(self, hidden: int, *heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(hidden, *heads)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        x = x + self.attention(self.norm1(x), **context)
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A decoder that knows nothing of parallelism."""

    def __init__(self, vocab: int, hidden: int, *heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList([Block(hidden, *heads) for _ in range(2)])
        self.head = nn.Linear(hidden, vocab)
        self.rope = True
        self.masked = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        size, sequence, _ = x.shape
        context: dict[str, Any] = {}
        if self.rope:
            positions = torch.arange(sequence).expand(size, sequence)
            context["rope"] = rope_tables(positions, self.blocks[0].attention.head_dim)
        if self.masked:
            lengths = sequence - torch.arange(size) % 3
            seen = torch.arange(sequence) < lengths[:, None]
            causal = torch.ones(sequence, sequence, dtype=torch.bool).tril()
            context["mask"] = seen[:, None, None] & causal
        for block in self.blocks:
            x = block(x, **context)
        return self.head(x)


def model_of(vocab: int, hidden: int, *heads: int) -> Model:
    torch.manual_seed(0)
    return Model(vocab, hidden, *heads).to(DOUBLE)


def plan_of(heads: int, kv_heads: int, columns: int, row_dim: int = 0, **attention: Any) -> Any:
    q, kv, o = attention_projections(heads, kv_heads, columns, row_dim=row_dim)
    block = "blocks.*"
    return {
        "embedding": Rowwise2D(row_dim=row_dim, output_layouts=Shard(1), use_local_output=False),
        f"{block}.norm[12]": SequenceParallel(),
        f"{block}.attention": Attention2D(row_dim=row_dim, **attention),
        f"{block}.attention.q": q,
        f"{block}.attention.[kv]": kv,
        f"{block}.attention.o": o,
        f"{block}.up": Colwise2D(row_dim=row_dim),
        f"{block}.down": Rowwise2D(
            row_dim=row_dim, output_layouts=Shard(1), use_local_output=False
        ),
        "head": Colwise2D(row_dim=row_dim, use_local_output=False),
    }


def _trains(rows: int, columns: int, cases: list[tuple[Any, ...]]) -> list[float]:
    mesh = grid_mesh(rows, columns)
    worst = []
    for heads, kv_heads, size, sequence, options in cases:
        reference = model_of(17, 24, heads, kv_heads, 4)
        reference.masked = "masked" in options
        for block in reference.blocks:
            block.attention.repeats = "repeats" in options
        model = copy.deepcopy(reference)
        torch_tp2d.parallelize_module(model, mesh, plan_of(heads, kv_heads, columns))
        worst.append(train_beside(reference, model, 17, size, sequence, steps=2))
    return worst


CASES = [
    (8, 8, 4, 8, ""),
    (8, 2, 4, 8, ""),
    (8, 2, 3, 7, "repeats masked"),
    (8, 1, 1, 8, "masked"),
    (9, 3, 2, 8, "masked"),
    (9, 3, 2, 5, "repeats"),
]


@pytest.mark.parametrize("rows,columns", [(1, 1), (2, 2), (1, 4), (4, 1), (2, 3)])
def test_a_decoder_that_knows_nothing_of_parallelism(rows: int, columns: int) -> None:
    """Heads that divide, key heads that do not, query heads that do not; masks of the model's own
    making; a batch that leaves a row without tokens.
    """
    for worst in world.run(rows * columns, _trains, rows, columns, CASES):
        assert max(worst) < TOLERANCE, worst
