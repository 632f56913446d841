"""Attention modules on the grid, against one device in fp64."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import world
from models import DOUBLE, batch, grid_mesh, relative, train_beside
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel

import torch_tp2d
from torch_tp2d import (
    Attention2D,
    Colwise2D,
    Rowwise2D,
    attention2d,
    attention_projections,
    balanced_order,
)

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


Case = tuple[int, int, int, int, str]
"""Heads, key heads, queries, keys, mask."""

GRIDS = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 3), (2, 4)]
ALGORITHMS = ["ring", "gather", "two_phase"]
LAYOUTS = [
    (Shard(2), Shard(1)),
    (Shard(2), Shard(3)),
    (Shard(2), Replicate()),
    (Shard(0), Shard(2)),
]
SHAPES: list[Case] = [
    (4, 4, 13, 13, "causal"),
    (4, 2, 13, 13, ""),
    (9, 3, 8, 8, "causal"),
    (3, 1, 5, 5, "bool"),
    (2, 2, 13, 6, "added"),
    (4, 1, 6, 13, "bool"),
    (2, 2, 5, 5, "causal balanced"),
    (4, 2, 13, 13, "causal balanced"),
    (2, 1, 16, 16, "causal balanced"),
]


def _inputs(case: Case, size: int) -> tuple[list[Tensor], Tensor | None]:
    heads, kv_heads, queries, keys, kind = case
    generator = torch.Generator().manual_seed(heads + queries)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=DOUBLE)

    leaves = [
        random(size, heads, queries, 6),
        random(size, kv_heads, keys, 6),
        random(size, kv_heads, keys, 6),
        random(size, heads, queries, 6),
    ]
    mask: Tensor | None = None
    if "bool" in kind:
        mask = random(size, 1, queries, keys) > -0.5
        # A query that sees nothing, and one that sees one key.
        mask[0, :, 0] = False
        mask[0, :, 1] = torch.arange(keys) == keys - 1
    if "added" in kind:
        mask = random(1, heads, queries, keys)
        mask[0, 0, :, 0] = -torch.inf
    return leaves, mask


def _one_device(case: Case, size: int) -> list[Tensor]:
    (*leaves, grad), mask = _inputs(case, size)
    leaves = [x.requires_grad_() for x in leaves]
    mask = mask.requires_grad_() if mask is not None and mask.is_floating_point() else mask
    out = F.scaled_dot_product_attention(
        *leaves, mask, is_causal="causal" in case[4], enable_gqa=True
    )
    out.backward(grad)
    extra = [mask.grad] if mask is not None and mask.requires_grad else []
    return [out.detach(), *(x.grad for x in leaves), *extra]


def _function(rows: int, columns: int, size: int, deep: bool) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    worst = {}
    for n, (case, algorithm) in enumerate(product(SHAPES, ALGORITHMS)):
        for layout in LAYOUTS if deep else [LAYOUTS[n % len(LAYOUTS)]]:
            wanted = _one_device(case, size)
            (*leaves, grad), mask = _inputs(case, size)
            balanced = "balanced" in case[4]
            if balanced:
                order = balanced_order(case[2], rows)
                *leaves, grad = (x[:, :, order] for x in (*leaves, grad))
                wanted = [x[:, :, order] for x in wanted]
            if mask is not None and mask.is_floating_point():
                mask.requires_grad_()
            placed = [distribute_tensor(x, mesh, layout).requires_grad_() for x in leaves]
            out = attention2d(
                *placed,
                mask,
                is_causal="causal" in case[4],
                algorithm=algorithm,
                balanced=balanced,
            )
            assert out.placements == layout
            out.backward(distribute_tensor(grad, mesh, layout))
            extra = []
            if mask is not None and mask.requires_grad:
                torch.distributed.all_reduce(mask.grad)
                # Heads that are replicated along tp_col are shared out too.
                extra = [mask.grad]
            found = [out.detach(), *(x.grad for x in placed), *extra]
            key = f"{algorithm} {case} {layout}"
            worst[key] = max(relative(a, b) for a, b in zip(found, wanted, strict=True))
    return worst


@pytest.mark.parametrize("rows,columns", GRIDS)
def test_every_algorithm_against_one_device(rows: int, columns: int) -> None:
    """Output and gradients of queries, keys, values and masks, of batch 1 and odd shapes."""
    for worst in world.run(rows * columns, _function, rows, columns, 1, False):
        assert max(worst.values()) < 1e-12, {k: v for k, v in worst.items() if v > 1e-12}
