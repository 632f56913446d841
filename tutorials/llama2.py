"""Llama 2 in plain PyTorch: nothing in this file knows how many devices there are.

The modules bear the names of Meta's release, so PyTorch's tensor-parallel plans for it fit as they
are. Shapes: B batch, S sequence, H hidden, D of a head, V vocabulary. A parallel plan may hand each
module a part of its batch or heads, so every size is read from the tensor at hand.

Source: Touvron et al., "Llama 2" (arXiv 2307.09288), section 2.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Llama2Config:
    """Sizes of a Llama 2.

    Attributes:
        dim: H, the width of the residual stream.
        n_kv_heads: heads of keys and values, each shared by ``n_heads / n_kv_heads`` heads of
            queries; None: as many as of queries.
        ffn_dim: features inside the feed-forward layer; None: 8/3 of ``dim``, rounded up to a
            multiple of ``multiple_of``.

    Raises:
        ValueError: if the heads do not divide ``dim`` into even parts, or ``n_kv_heads`` not
            ``n_heads``.
    """

    vocab_size: int = 32000
    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int | None = None
    ffn_dim: int | None = None
    multiple_of: int = 256
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        if self.dim % (2 * self.n_heads):
            raise ValueError(
                f"dim={self.dim} does not divide into n_heads={self.n_heads} heads of an even "
                f"size, as rotary positions need: choose a multiple of {2 * self.n_heads}"
            )
        if self.n_heads % self.kv_heads:
            raise ValueError(
                f"n_kv_heads={self.n_kv_heads} does not divide n_heads={self.n_heads}: choose one "
                f"of its divisors"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def ffn_features(self) -> int:
        if self.ffn_dim is not None:
            return self.ffn_dim
        return -(-8 * self.dim // (3 * self.multiple_of)) * self.multiple_of


# The first two are for a laptop; the others are Meta's, table 1 of the paper.
SIZES: dict[str, Llama2Config] = {
    "tiny": Llama2Config(dim=64, n_layers=2, n_heads=8, n_kv_heads=4, multiple_of=32),
    "mini": Llama2Config(dim=256, n_layers=4, n_heads=8, n_kv_heads=4, multiple_of=32),
    "7b": Llama2Config(dim=4096, n_layers=32, n_heads=32),
    "13b": Llama2Config(dim=5120, n_layers=40, n_heads=40),
    "70b": Llama2Config(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28672),
}

OUTPUTS = ["tok_embeddings", "layers.0.attention_norm", "layers.0.attention.wq"]
OUTPUTS += ["layers.0.attention.wk", "layers.0.feed_forward.w1", "layers.0", "output"]
"""Modules whose outputs differ in kind, each of them worth a look on a grid."""


def rotary_table(seq: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Cosines and then sines of every position's angles, ``[S, D]`` in fp32.

    Source: Su et al., "RoFormer" (arXiv 2104.09864), equation 15.
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    positions = torch.arange(seq, device=device, dtype=torch.float32)
    angles = torch.outer(positions, theta**-exponents)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turns each pair of neighbouring features of ``x`` ``[B, S, heads, D]`` by its angle."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    # As [S, 1, D/2], the same for every head; in fp32 where x is of lower precision.
    cos, sin = table.unsqueeze(1).chunk(2, dim=-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions, ``[B, S, H] -> [B, S, H]``.

    Keys and values may have fewer heads than queries, each then serving a group of them (grouped-
    query attention).
    """

    def __init__(self, config: Llama2Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_features = config.kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_features, bias=False)
        self.wv = nn.Linear(config.dim, kv_features, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        b, s, _ = x.shape
        # -1, not the number of heads: a device that holds some of the heads sees just those.
        q = rotate(self.wq(x).view(b, s, -1, self.head_dim), table).transpose(1, 2)
        k = rotate(self.wk(x).view(b, s, -1, self.head_dim), table).transpose(1, 2)
        v = self.wv(x).view(b, s, -1, self.head_dim).transpose(1, 2)
        shared = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU, ``[B, S, H] -> [B, S, H]`` (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: Llama2Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_features, bias=False)
        self.w2 = nn.Linear(config.ffn_features, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """One layer, ``[B, S, H] -> [B, S, H]``."""

    def __init__(self, config: Llama2Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama2(nn.Module):
    """Token ids ``[B, S]`` to next-token logits ``[B, S, V]``.

    Args:
        config: the sizes.
        seed: of the initial weights. They depend on it and on the sizes alone, not on the device
            or the global random state, so every process that builds the model holds the same one.

    Example::

        >>> model = Llama2(SIZES["tiny"], seed=0)
        >>> model(torch.zeros(2, 16, dtype=torch.long)).shape
        torch.Size([2, 16, 32000])
    """

    def __init__(self, config: Llama2Config, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        # On the meta device, where models too large for one device begin, nothing is there to fill.
        if not self.norm.weight.is_meta:
            self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Norms at one, the rest N(0, 0.02), the residual branches' scaled down by depth."""
        generator = torch.Generator("cpu").manual_seed(seed)
        # Each of the 2 n_layers branches adds to the residual stream's variance.
        branch_std = 0.02 / math.sqrt(2 * self.config.n_layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            std = branch_std if name.endswith(("wo.weight", "w2.weight")) else 0.02
            parameter.copy_(torch.randn(parameter.shape, generator=generator, device="cpu") * std)

    def forward(self, ids: Tensor) -> Tensor:
        config = self.config
        table = rotary_table(ids.shape[1], config.head_dim, config.rope_theta, ids.device)
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, table)
        return self.output(self.norm(x))
