"""The model that the benchmark times: a stack of GPT blocks with neither embedding nor head."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention that takes as many heads as its projections give it.

    With ``parts`` above 1 it has that part of the heads only, as one rank of a plan has.
    """

    def __init__(self, hidden: int, heads: int, parts: int = 1) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.wq = nn.Linear(hidden, hidden // parts)
        self.wk = nn.Linear(hidden, hidden // parts)
        self.wv = nn.Linear(hidden, hidden // parts)
        self.wo = nn.Linear(hidden // parts, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same shape, or to a plan's layout of it."""
        b, s, _ = x.shape
        # -1 rather than the number of heads: a plan leaves each rank some of them.
        q, k, v = (
            projection(x).view(b, s, -1, self.head_dim).transpose(1, 2)
            for projection in (self.wq, self.wk, self.wv)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(b, s, -1))


class FeedForward(nn.Module):
    """Two Linears, four times as wide in between, or ``parts`` times less than that."""

    def __init__(self, hidden: int, parts: int = 1) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, 4 * hidden // parts)
        self.w2 = nn.Linear(4 * hidden // parts, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same shape, or to a plan's layout of it."""
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, hidden: int, heads: int, parts: int = 1) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, parts)
        self.ffn_norm = nn.LayerNorm(hidden)
        self.feed_forward = FeedForward(hidden, parts)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Model(nn.Module):
    """A stack of blocks."""

    def __init__(self, layers: int, hidden: int, heads: int, parts: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(hidden, heads, parts) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same shape."""
        for layer in self.layers:
            x = layer(x)
        return x
