"""GPT-2 in plain PyTorch: nothing in this file knows how many devices there are.

Shapes: B batch, S sequence, H hidden, V vocabulary. A parallel plan may hand each module a part
of its batch, sequence or heads, so every size is read from the tensor at hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of a GPT-2.

    Raises:
        ValueError: if ``n_head`` does not divide ``n_embd``.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd={self.n_embd} does not divide into n_head={self.n_head} heads: "
                f"choose a multiple of {self.n_head}"
            )


# The first two are for a laptop; the others are the models of Zhu and Dong, "Accelerated method
# for training large models based on a 2D tensor parallel strategy" (2025), table 3.
SIZES: dict[str, GPT2Config] = {
    "tiny": GPT2Config(n_embd=64, n_layer=2, n_head=4),
    "mini": GPT2Config(n_embd=256, n_layer=4, n_head=4),
    "0.54b": GPT2Config(n_embd=1280, n_layer=32, n_head=20),
    "1.2b": GPT2Config(n_embd=1536, n_layer=48, n_head=24),
    "2.5b": GPT2Config(n_embd=1920, n_layer=54, n_head=30),
    "4.2b": GPT2Config(n_embd=2304, n_layer=64, n_head=36),
}


class Attention(nn.Module):
    """Causal self-attention, ``[B, S, H] -> [B, S, H]``."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.head_dim = config.n_embd // config.n_head
        self.dropout = config.dropout
        self.q_proj = nn.Linear(config.n_embd, config.n_embd)
        self.k_proj = nn.Linear(config.n_embd, config.n_embd)
        self.v_proj = nn.Linear(config.n_embd, config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        # -1, not the number of heads: a device that holds some of the heads sees just those.
        q = self.q_proj(x).view(b, s, -1, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, s, -1, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, s, -1, self.head_dim).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """``[B, S, H] -> [B, S, H]`` through ``4 H`` features."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """One layer, ``[B, S, H] -> [B, S, H]``."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT2(nn.Module):
    """Token ids ``[B, S]`` to next-token logits ``[B, S, V]``; the head shares ``wte``'s weight.

    Args:
        config: the sizes.
        seed: of the initial weights. They depend on it and on the sizes alone, not on the
            global random state, so every process that builds the model holds the same one.
    """

    def __init__(self, config: GPT2Config, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        # On the meta device, where models too large for one device begin, nothing is there to fill.
        if not self.wte.weight.is_meta:
            self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """GPT-2's initial weights: N(0, 0.02), the residual branches' scaled down by depth."""
        generator = torch.Generator(self.wte.weight.device).manual_seed(seed)
        # Each of the 2 n_layer branches adds to the residual stream's variance.
        branch_std = 0.02 / math.sqrt(2 * self.config.n_layer)
        for name, parameter in self.named_parameters():
            if ".ln_" in f".{name}":
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                std = branch_std if name.endswith("c_proj.weight") else 0.02
                parameter.normal_(0.0, std, generator=generator)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.drop(self.wte(ids) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))
