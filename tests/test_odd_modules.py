"""Modules that are written another way than most: right on the grid, or refused in words."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import world
from models import grid_mesh, relative
from test_bytes import fake_grid
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import torch_tp2d
from torch_tp2d import Attention2D, attention_projections

BATCH, SEQUENCE, HIDDEN, HEADS = 4, 16, 32, 4


class FlexAttention(nn.Module):
    """Attention by ``flex_attention``, which has no backward on the CPU."""

    def __init__(self, kept: BlockMask | None = None) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.kept = kept
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: Tensor, block_mask: BlockMask | None = None) -> Tensor:
        size, sequence, _ = x.shape
        q, k, v = (
            y.view(size, sequence, -1, HIDDEN // HEADS).transpose(1, 2)
            for y in (self.q(x), self.k(x), self.v(x))
        )
        mask = self.kept if block_mask is None else block_mask
        y = flex_attention(q, k, v, block_mask=mask)
        return self.o(y.transpose(1, 2).reshape(size, sequence, -1))


def _blocks(size: int | None, heads: int | None) -> BlockMask:
    """Causal within documents of each sequence's own, and within another window for each head."""
    generator = torch.Generator().manual_seed(3)
    documents = torch.randint(0, 3, (BATCH, SEQUENCE), generator=generator)
    windows = torch.tensor([16, 3, 5, 9])

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = documents[b, query] == documents[b, key] if size else query >= 0
        near = query - key < windows[h] if heads else query >= 0
        return (query >= key) & same & near

    return create_block_mask(seen, size, heads, SEQUENCE, SEQUENCE, device="cpu", BLOCK_SIZE=4)


def _flex_plan(columns: int) -> dict[str, Any]:
    q, kv, o = attention_projections(HEADS, None, columns)
    return {"": Attention2D(input_layouts=Replicate()), "q": q, "[kv]": kv, "o": o}


def _flex_rank(rows: int, columns: int) -> None:
    mesh = grid_mesh(rows, columns)
    torch.manual_seed(0)
    reference = FlexAttention().double()
    x = torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=torch.float64)
    row, _ = mesh.get_coordinate()
    own = x.chunk(rows)[row] if row < len(x.chunk(rows)) else x[:0]
    with torch.no_grad():
        for size, heads in ((BATCH, None), (BATCH, HEADS), (None, HEADS), (None, None)):
            mask = _blocks(size, heads)
            wanted = reference(x, mask)
            module = copy.deepcopy(reference)
            torch_tp2d.parallelize_module(module, mesh, _flex_plan(columns))
            for given in (mask, mask):
                y = module(own, block_mask=given)
                assert relative(y.full_tensor(), wanted) < 1e-12
        # A mask that the module keeps is not known to be one of the whole batch.
        keeps = copy.deepcopy(reference)
        keeps.kept = _blocks(BATCH, HEADS)
        torch_tp2d.parallelize_module(keeps, mesh, _flex_plan(columns))
        with pytest.raises(ValueError, match="BlockMask that was made for another batch"):
            keeps(own)
        with pytest.raises(ValueError, match="(?s)block_mask.*for 3 in its batch.*are 4"):
            module(own, create_block_mask(_any, 3, None, SEQUENCE, SEQUENCE, device="cpu"))


def _any(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


@pytest.mark.parametrize("grid", [(2, 2), (2, 1), (1, 2)])
def test_a_block_mask_is_cut_to_the_row_and_the_heads(grid: tuple[int, int]) -> None:
    """A BlockMask made for the whole batch was handed on as it was.

    flex_attention took its first rows for the second row of the mesh, a wrong mask without an
    error; compiled it ended the process with SIGFPE.
    """
    world.run(grid[0] * grid[1], _flex_rank, *grid)


class WrittenOut(nn.Module):
    """Grouped-query attention as Hugging Face's "eager" has it."""

    def __init__(self, heads: int, key_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = heads, key_heads
        self.n_rep = heads // key_heads
        self.head_dim = HIDDEN // heads
        self.q, self.o = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.k, self.v = (nn.Linear(HIDDEN, key_heads * self.head_dim) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.view(*y.shape[:2], -1, self.head_dim).transpose(1, 2)
            for y in (self.q(x), self.k(x), self.v(x))
        )
        k, v = (y.repeat_interleave(self.n_rep, 1) for y in (k, v))
        y = (q @ k.mT).softmax(-1) @ v
        return self.o(y.transpose(1, 2).flatten(2))


def test_written_out_attention_is_refused_before_it_fails_by_itself() -> None:
    """Key heads that do not divide, and a module that multiplies queries and keys itself.

    The message that says so came after the module had run, and it never got so far: torch's
    "size of tensor a (4) must match the size of tensor b (2)" came instead.
    """
    with fake_grid(1, 4) as mesh:
        q, kv, o = attention_projections(8, 2, 4)
        plan = {"": Attention2D(input_layouts=Replicate()), "q": q, "[kv]": kv, "o": o}
        module = WrittenOut(8, 2)
        torch_tp2d.parallelize_module(module, mesh, plan)
        words = "did not call scaled_dot_product_attention.*8 query and 2 key heads.*sdpa"
        with pytest.raises(ValueError, match=words) as caught:
            module(torch.randn(2, SEQUENCE, HIDDEN))
        assert isinstance(caught.value.__cause__, RuntimeError)
        # Hugging Face's own say in their config how they compute it.
        module = WrittenOut(8, 2)
        module.config = SimpleNamespace(_attn_implementation="eager")
        words = "by 'eager' and not by scaled_dot_product_attention.*8 query and 2 key heads"
        with pytest.raises(ValueError, match=words):
            torch_tp2d.parallelize_module(module, mesh, plan)
