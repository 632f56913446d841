"""A decoder written for one device, whose attention is a module on the grid, and its plan."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import SequenceParallel

from support.models import DOUBLE
from torch_tp2d import Attention2D, Colwise2D, Lifted, Rowwise2D, attention_projections


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
        self.repeats = self.by_matmul = False
        self.dropout = 0.0

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
        if self.by_matmul:
            scores = q @ k.mT / self.head_dim**0.5
            y = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=self.dropout,
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

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.embedding(ids)
        size, sequence, _ = x.shape
        context: dict[str, Any] = {}
        if self.rope:
            positions = torch.arange(sequence) if positions is None else positions
            positions = positions.expand(size, sequence)
            context["rope"] = rope_tables(positions, self.blocks[0].attention.head_dim)
        if self.masked:
            lengths = sequence - 1 - torch.arange(size) % 3
            seen = torch.arange(sequence) < lengths[:, None]
            causal = torch.ones(sequence, sequence, dtype=torch.bool).tril()
            context["mask"] = seen[:, None, None] & causal
        for block in self.blocks:
            x = block(x, **context)
        return self.head(x)


def model_of(vocab: int, hidden: int, *heads: int) -> Model:
    torch.manual_seed(0)
    return Model(vocab, hidden, *heads).to(DOUBLE)


def plan_of(
    heads: int, kv_heads: int, columns: int, row_dim: int = 0, **attention: Any
) -> dict[str, Any]:
    whole_keys = row_dim == 1 and attention.get("algorithm") == "local"
    q, kv, o = attention_projections(
        heads, kv_heads, columns, row_dim=row_dim, whole_keys=whole_keys
    )
    onto_tokens = {"row_dim": row_dim, "output_layouts": Shard(1), "use_local_output": False}
    return {
        "embedding": Rowwise2D(**onto_tokens),
        "blocks.*.norm[12]": Lifted(SequenceParallel(), row_dim=row_dim),
        "blocks.*.attention": Attention2D(row_dim=row_dim, **attention),
        "blocks.*.attention.q": q,
        "blocks.*.attention.[kv]": kv,
        "blocks.*.attention.o": o,
        "blocks.*.up": Colwise2D(row_dim=row_dim),
        "blocks.*.down": Rowwise2D(**onto_tokens),
        "head": Colwise2D(row_dim=row_dim, use_local_output=False),
    }
