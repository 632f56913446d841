"""A program's model, as it is written for one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torch_tp2d.ops.dropout import draw_key, drop, dropped

from .data import Attention, Block, Mlp, Model, Norm, Op

__all__ = ["LONGEST", "Net", "Stop", "build", "drop_as_one_device", "is_fused"]

LONGEST = 16
"""Positions that a position embedding has."""


class Stop(Exception):
    """What a model raises in the middle of a forward, where a program says so."""


def _save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _norm(norm: Norm | None, hidden: int) -> nn.Module | None:
    if norm is None:
        return None
    return nn.LayerNorm(hidden, bias=norm.bias) if norm.kind == "layer" else _rms_norm(hidden)


def _rms_norm(hidden: int) -> nn.RMSNorm:
    # Of one feature it is a sign but for its eps, and its gradient a matter of rounding.
    return nn.RMSNorm(hidden, eps=1.0 if hidden == 1 else None)


class Conv1D(nn.Module):
    """As Hugging Face's: a Linear that holds its weight transposed."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.empty(nx, nf)), nn.Parameter(torch.empty(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Swish(nn.Module):
    """An activation that learns."""

    def __init__(self, scalar: bool) -> None:
        super().__init__()
        # FSDP2 takes no scalars.
        self.beta = nn.Parameter(torch.empty(() if scalar else 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x * self.beta)


class Mix(nn.Module):
    """A residual that learns."""

    def __init__(self, hidden: int, scalar: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(hidden))
        self.share = nn.Parameter(torch.empty(() if scalar else 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * self.scale + y * self.share


class WholeDropout(nn.Module):
    """Dropout of one device that drops what it would on a grid."""

    p = 0.4

    def forward(self, x: Tensor) -> Tensor:
        return drop(x, dropped(draw_key(), self.p, [torch.arange(n) for n in x.shape]), self.p)


def _linear(width: int, out: int, bias: bool, conv: bool) -> nn.Module:
    return Conv1D(out, width) if conv else nn.Linear(width, out, bias=bias)


class MlpBody(nn.Module):
    def __init__(self, hidden: int, mlp: Mlp, scalar: bool) -> None:
        super().__init__()
        self.up = _linear(hidden, mlp.inner * (1 + mlp.fused), mlp.bias, mlp.conv)
        gated = mlp.gate and not mlp.fused
        self.gate = _linear(hidden, mlp.inner, False, mlp.conv) if gated else None
        self.scale = _linear(hidden, 1, mlp.bias, mlp.conv) if mlp.scale else None
        self.act = Swish(scalar) if mlp.beta else nn.GELU()
        self.fused = mlp.fused
        self.drop = nn.Dropout(WholeDropout.p) if mlp.dropout else nn.Identity()
        self.down = _linear(mlp.inner, hidden, mlp.bias, mlp.conv)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.fused:
            y, other = y.chunk(2, -1)
            y = self.act(y) * other
        else:
            y = self.act(y) if self.gate is None else self.act(y) * self.gate(x)
        if self.scale is not None:
            y = y * self.scale(x).sigmoid()
        return self.down(self.drop(y))


class AttentionBody(nn.Module):
    reference = False
    """Whether its dropout is that of one device."""

    def __init__(self, hidden: int, attention: Attention) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = attention.heads, attention.kv_heads
        self.head_dim, self.causal = attention.head_dim, attention.causal
        self.groups = attention.heads != attention.kv_heads
        width, kv_width = (n * self.head_dim for n in (self.num_heads, self.num_kv_heads))
        self.cross, self.dropout = attention.cross, WholeDropout.p * attention.dropout
        bias, conv = attention.bias, attention.conv
        self.fused = is_fused(attention)
        if self.fused:
            self.qkv = _linear(hidden, 3 * width, bias, conv)
        else:
            self.q = _linear(hidden, width, bias, conv)
            self.k = _linear(hidden, kv_width, bias, conv)
            self.v = _linear(hidden, kv_width, bias, conv)
        self.o = _linear(width, hidden, bias, conv)
        normed = bool(attention.qk_norm)
        self.q_norm = _rms_norm(self.head_dim) if normed else nn.Identity()
        self.k_norm = _rms_norm(self.head_dim) if normed else nn.Identity()

    def forward(
        self, x: Tensor, memory: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        seen = x if memory is None else memory
        if self.fused:
            parts = self.qkv(x).chunk(3, -1)
        else:
            parts = self.q(x), self.k(seen), self.v(seen)
        q, k, v = (y.view(*y.shape[:2], y.shape[-1] // self.head_dim, self.head_dim) for y in parts)
        q, k, v = (y.transpose(1, 2) for y in (self.q_norm(q), self.k_norm(k), v))
        if self.reference and self.dropout:
            y = self._dropped(q, k, v)
        else:
            causal = self.causal and not self.cross and bias is None
            y = F.scaled_dot_product_attention(
                q, k, v, bias, self.dropout, causal, enable_gqa=self.groups
            )
        return self.o(y.transpose(1, 2).flatten(2))

    def _dropped(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for x in (k, v))
        scores = q @ k.mT * self.head_dim**-0.5
        if self.causal and not self.cross:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, -torch.inf)
        index = [torch.arange(n) for n in scores.shape]
        mask = dropped(draw_key(), self.dropout, index)
        return drop(scores.softmax(-1), mask, self.dropout) @ v


def is_fused(attention: Attention) -> bool:
    """Whether q, k and v are one weight."""
    return attention.fused and attention.heads == attention.kv_heads and not attention.cross


class BlockModule(nn.Module):
    def __init__(self, hidden: int, block: Block, scalar: bool) -> None:
        super().__init__()
        mixes = isinstance(block, Mlp) and block.mix and block.residual
        self.mix = Mix(hidden, scalar) if mixes else None
        self.keyword = getattr(block, "keyword", False)
        self.cross = getattr(block, "cross", False)
        self.drop = nn.Dropout(WholeDropout.p) if block.dropout and not self.cross else None
        self.norm = _norm(block.norm, hidden)
        self.table = None
        if isinstance(block, Attention) and block.table:
            self.table = nn.Embedding(LONGEST + 1, 1 if block.one_for_all else block.heads)
        self.residual = block.residual
        self.pooled = getattr(block, "pooled", "")
        self.squeeze = nn.Linear(hidden, hidden) if self.pooled else None
        self.body: nn.Module = (
            MlpBody(hidden, block, scalar)
            if isinstance(block, Mlp)
            else AttentionBody(hidden, block)
        )

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        y = x if self.norm is None else self.norm(x)
        if self.table is not None:
            y = self.body(y, None, self._bias(x.shape[1]))
        else:
            y = self.body(y, memory) if self.cross else self.body(y)
        if self.drop is not None:
            y = self.drop(y)
        if self.squeeze is not None and x.ndim == 3:
            pooled = x.mean(1, keepdim=True) if self.pooled == "mean" else x.sum(1, keepdim=True)
            y = y * torch.sigmoid(self.squeeze(pooled))
        if self.mix is not None:
            return self.mix(x=x, y=y) if self.keyword else self.mix(x, y)
        return x + y if self.residual else y

    def _bias(self, length: int) -> Tensor:
        assert self.table is not None
        at = torch.arange(length)
        apart = (at[:, None] - at).clamp(-(LONGEST // 2), LONGEST // 2) + LONGEST // 2
        return self.table(apart).permute(2, 0, 1)[None]


class Scaled(nn.Embedding):
    """An embedding with a forward of its own."""

    def __init__(self, scale: float, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale


class Net(nn.Module):
    """A program's model. What a forward does beside computing is in ``control``."""

    def __init__(self, model: Model, scalar: bool) -> None:
        super().__init__()
        self.embed = self.positions = self.head = None
        if model.embed is not None:
            scale = model.embed.scale
            kind = nn.Embedding if scale == 1.0 else partial(Scaled, scale)
            self.embed = kind(model.embed.vocab, model.hidden)
            if model.embed.positions:
                self.positions = nn.Embedding(LONGEST, model.hidden)
        self.blocks = nn.ModuleList(
            BlockModule(model.hidden, block, scalar) for block in model.blocks
        )
        self.norm = _norm(model.norm, model.hidden)
        if model.head is not None:
            self.head = nn.Linear(model.hidden, model.head.features, bias=model.head.bias)
        self.control = Op()

    def forward(self, x: Tensor) -> Tensor:
        op, count = self.control, len(self.blocks)
        memory: Any = None
        if self.embed is not None:
            if any(block.cross for block in self.blocks):
                # Another stream of tokens, of another length.
                memory = self.embed(x.repeat(1, 2)[:, 1:].flip(1))
                first = self.blocks[0]
                memory = memory if first.cross else first(memory)
            length = x.shape[1]
            x = self.embed(x)
            if self.positions is not None:
                x = x + self.positions(torch.arange(length))
        skip, twice = (
            {index % count for index in which} if count else {} for which in (op.skip, op.twice)
        )
        for index, block in enumerate(self.blocks):
            # Backward hooks make plain zeros of the gradient of a DTensor that is not used.
            others = (memory,) if block.cross else ()
            for _ in range(1 + (index in twice)):
                if index in skip:
                    continue
                if op.mode == "full":
                    x = checkpoint(block, x, *others, use_reentrant=False)
                elif op.mode == "selective":
                    contexts = partial(create_selective_checkpoint_contexts, _save_products)
                    x = checkpoint(block, x, *others, use_reentrant=False, context_fn=contexts)
                else:
                    x = block(x, *others)
                if op.mode == "raise" and index == op.index % count:
                    raise Stop
        x = x if self.norm is None else self.norm(x)
        return x if self.head is None else self.head(x)


def build(model: Model, seed: int, scalar: bool) -> Net:
    """The model in fp64, of parameters that no rank could guess (no ones, no zeros)."""
    net = Net(model, scalar).double()
    if model.head is not None and model.head.tied:
        assert net.head is not None and net.embed is not None
        net.head.weight = net.embed.weight
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in net.named_parameters():
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            if param.ndim <= 1:
                param.copy_(noise * 0.3 + ("norm.weight" in name))
            else:
                param.copy_(noise / (1.0 if "embed" in name else param.shape[1] ** 0.5))
    return net


def drop_as_one_device(net: Net) -> None:
    """Have dropout drop what it drops on a grid."""
    for module in list(net.modules()):
        if isinstance(module, AttentionBody):
            module.reference = True
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Dropout):
                setattr(module, name, WholeDropout())
