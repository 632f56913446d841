"""A program's model, as it is written for one device, and its plan for a grid."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import Placement
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torch_tp2d
from torch_tp2d import (
    Attention2D,
    Block2DParallel,
    Colwise2D,
    Lifted,
    Local2D,
    Norm2D,
    Rowwise2D,
    attention_projections,
)

from .data import Attention, Block, How, Mlp, Model, Norm, Op

__all__ = ["LONGEST", "Net", "Plan", "Stop", "build", "pair"]

LONGEST = 16
"""Positions that a position embedding has."""

_SIMPLE = ("whole", "tokens", "features")


class Stop(Exception):
    """What a model raises in the middle of a forward, where a program says so."""


def _save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _norm(norm: Norm | None, hidden: int) -> nn.Module | None:
    if norm is None:
        return None
    return nn.LayerNorm(hidden, bias=norm.bias) if norm.kind == "layer" else nn.RMSNorm(hidden)


class MlpBody(nn.Module):
    def __init__(self, hidden: int, mlp: Mlp) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, mlp.inner, bias=mlp.bias)
        self.gate = nn.Linear(hidden, mlp.inner, bias=False) if mlp.gate else None
        self.down = nn.Linear(mlp.inner, hidden, bias=mlp.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(x))
        return self.down(y if self.gate is None else y * self.gate(x))


class AttentionBody(nn.Module):
    def __init__(self, hidden: int, attention: Attention) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = attention.heads, attention.kv_heads
        self.head_dim, self.causal = attention.head_dim, attention.causal
        self.groups = attention.heads != attention.kv_heads
        width, kv_width = (n * self.head_dim for n in (self.num_heads, self.num_kv_heads))
        self.q = nn.Linear(hidden, width, bias=attention.bias)
        self.k = nn.Linear(hidden, kv_width, bias=attention.bias)
        self.v = nn.Linear(hidden, kv_width, bias=attention.bias)
        self.o = nn.Linear(width, hidden, bias=attention.bias)
        normed = bool(attention.qk_norm)
        self.q_norm = nn.RMSNorm(self.head_dim) if normed else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim) if normed else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.view(*y.shape[:2], y.shape[-1] // self.head_dim, self.head_dim)
            for y in (self.q(x), self.k(x), self.v(x))
        )
        q, k, v = (y.transpose(1, 2) for y in (self.q_norm(q), self.k_norm(k), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.groups)
        return self.o(y.transpose(1, 2).flatten(2))


class BlockModule(nn.Module):
    def __init__(self, hidden: int, block: Block) -> None:
        super().__init__()
        self.norm = _norm(block.norm, hidden)
        self.residual = block.residual
        self.body: nn.Module = (
            MlpBody(hidden, block) if isinstance(block, Mlp) else AttentionBody(hidden, block)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x if self.norm is None else self.norm(x))
        return x + y if self.residual else y


class Net(nn.Module):
    """A program's model. What a forward does beside computing is in ``control``."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embed = self.positions = self.head = None
        if model.embed is not None:
            self.embed = nn.Embedding(model.embed.vocab, model.hidden)
            if model.embed.positions:
                self.positions = nn.Embedding(LONGEST, model.hidden)
        self.blocks = nn.ModuleList(BlockModule(model.hidden, block) for block in model.blocks)
        self.norm = _norm(model.norm, model.hidden)
        if model.head is not None:
            self.head = nn.Linear(model.hidden, model.head.features, bias=model.head.bias)
        self.control = Op()

    def forward(self, x: Tensor) -> Tensor:
        op, count = self.control, len(self.blocks)
        if self.embed is not None:
            length = x.shape[1]
            x = self.embed(x)
            if self.positions is not None:
                x = x + self.positions(torch.arange(length))
        skip, twice = (
            {index % count for index in which} if count else {} for which in (op.skip, op.twice)
        )
        for index, block in enumerate(self.blocks):
            for _ in range(1 + (index in twice)):
                if index in skip:
                    continue
                if op.mode == "full":
                    x = checkpoint(block, x, use_reentrant=False)
                elif op.mode == "selective":
                    contexts = partial(create_selective_checkpoint_contexts, _save_products)
                    x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
                else:
                    x = block(x)
                if op.mode == "raise" and index == op.index % count:
                    raise Stop
        x = x if self.norm is None else self.norm(x)
        return x if self.head is None else self.head(x)


def build(model: Model, seed: int) -> Net:
    """The model in fp64, of parameters that no rank could guess (no ones, no zeros)."""
    net = Net(model).double()
    if model.head is not None and model.head.tied:
        assert net.head is not None and net.embed is not None
        net.head.weight = net.embed.weight
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in net.named_parameters():
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            if param.ndim == 1:
                param.copy_(noise * 0.3 + ("norm.weight" in name))
            else:
                param.copy_(noise / (1.0 if "embed" in name else param.shape[1] ** 0.5))
    return net


def pair(layout: str, row_dim: int, last: int = -1) -> tuple[Any, Any]:
    """A layout by name, as placements ``(on tp_row, on tp_col)``."""
    row = Shard(row_dim)
    return {
        "whole": (row, Replicate()),
        "tokens": (row, Shard(1)),
        "features": (row, Shard(last)),
        "hidden": (Shard(last), Shard(1)),
        "flat": (Shard(last), Replicate()),
        "everywhere": (Replicate(), Replicate()),
    }[layout]


class Plan:
    """The plan of a model for a grid, and how what the model returns is laid out.

    Where a program's choices do not go together, the plainest that does is taken instead, so that
    every program has a plan and none is expected to be refused, but for the few in ``use.REFUSED``.
    """

    def __init__(self, model: Model, grid: tuple[int, int]) -> None:
        self.model, self.grid = model, grid
        self.entries: dict[str, Any] = {}
        stream, local = model.stream, model.local
        if model.embed is not None:
            self._embedding()
        for index, block in enumerate(model.blocks):
            self._block(f"blocks.{index}", block)
        layout, local = self._norm("norm", model.norm, stream, local)
        if model.head is not None:
            how, out = model.head.how, model.head.out
            if model.head.tied:
                assert model.embed is not None
                stock = model.embed.style.startswith("stock") and stream in _SIMPLE
                other = "rowwise" if model.embed.style.endswith("colwise") else "colwise"
                how = replace(how, style=f"stock_{other}" if stock else other)
            if layout in _SIMPLE and how.style.startswith("stock") and out == "everywhere":
                out = "whole"
            layout, local = self._linear("head", how, layout, out, how.local)
        self.out, self.local = layout, local

    def _embedding(self) -> None:
        model, embed = self.model, self.model.embed
        assert embed is not None
        out = pair(model.stream, model.row_dim)
        # Positions have no batch: what splits the sequence splits their first dim.
        own = tuple(Replicate() if p == Shard(0) else Shard(0) if p == Shard(1) else p for p in out)
        for name, style, layout in (
            ("embed", embed.style, out),
            ("positions", embed.positions, own),
        ):
            if not style:
                continue
            if model.stream not in _SIMPLE:
                style = style.removeprefix("stock_")
            if style.startswith("stock"):
                kind: Any = RowwiseParallel if style == "stock_rowwise" else ColwiseParallel
                stock = kind(
                    input_layouts=Replicate(),
                    output_layouts=layout[1],
                    use_local_output=model.local,
                )
                self.entries[name] = Lifted(stock, row_dim=1) if model.row_dim else stock
                continue
            kind = {"rowwise": Rowwise2D, "colwise": Colwise2D, "replicate": torch_tp2d.Replicate}
            self.entries[name] = kind[style](
                output_layouts=layout, use_local_output=model.local, row_dim=model.row_dim
            )

    def _norm(self, name: str, norm: Norm | None, layout: str, local: bool) -> tuple[str, bool]:
        """Adds a norm's style; the layout that it hands on."""
        if norm is None:
            return layout, local
        model, row_dim, style = self.model, self.model.row_dim, norm.style
        if layout in ("hidden", "flat"):
            style = "norm2d"
        elif style == "local" and (layout != "whole" or row_dim):
            style = "unnamed"
        elif style == "sequence" and layout != "tokens":
            style = "norm2d"
        if style in ("unnamed", "replicate") and local:
            # Nothing tells such a norm how its local input lies.
            if layout == "features" or (layout == "tokens" and model.embed is None):
                style = "declared"
        if style != "norm2d" and layout == "features" and norm.kind == "rms":
            # torch's own RMSNorm on a DTensor that is split by features is an error of torch's.
            style = "norm2d"
        if style == "norm2d":
            out = norm.out if layout not in ("hidden", "flat") or norm.out != "features" else layout
            self.entries[name] = Norm2D(
                input_layouts=pair(layout, row_dim),
                output_layouts=pair(out, row_dim),
                use_local_output=norm.local,
                row_dim=row_dim,
            )
            return out, norm.local
        if style == "sequence":
            stock = SequenceParallel(use_local_output=norm.local)
            self.entries[name] = Lifted(stock, row_dim=1) if row_dim else stock
            return layout, norm.local
        if style == "replicate":
            self.entries[name] = torch_tp2d.Replicate(row_dim=row_dim)
        elif style == "declared":
            self.entries[name] = torch_tp2d.Replicate(
                input_layouts=pair(layout, row_dim), row_dim=row_dim
            )
        elif style == "local":
            self.entries[name] = Local2D()
        return layout, local

    def _block(self, name: str, block: Block) -> None:
        stream, local = self.model.stream, self.model.local
        layout, _ = self._norm(f"{name}.norm", block.norm, stream, local)
        if isinstance(block, Attention):
            self._attention(f"{name}.body", block, layout)
            return
        layout = self._prepare(f"{name}.body", block, layout)
        body, between = f"{name}.body", block.between
        if not block.prepare and block.up.style in ("replicate", "local"):
            between = layout if layout in ("whole", "tokens") else between
        between, inner = self._linear(f"{body}.up", block.up, layout, between, block.up.local)
        if block.gate:
            self._linear(f"{body}.gate", block.up, layout, between, inner)
        self._linear(f"{body}.down", block.down, between, stream, local)

    def _prepare(self, name: str, block: Block, layout: str) -> str:
        if not block.prepare or layout not in _SIMPLE:
            return layout
        row_dim = self.model.row_dim
        stock = PrepareModuleInput(
            input_layouts=(pair(layout, row_dim)[1],), desired_input_layouts=(Replicate(),)
        )
        self.entries[name] = Lifted(stock, row_dim=1) if row_dim else stock
        return "whole"

    def _attention(self, name: str, block: Attention, layout: str) -> None:
        model, columns, plan = self.model, self.grid[1], block.plan
        row_dim = model.row_dim
        if row_dim or block.heads % columns or block.kv_heads % columns:
            plan = "attention2d"
        elif plan == "dtensor" and block.kv_heads == 1:
            # A view of split features as one head and its features leaves these split.
            plan = "attention2d"
        over_queries: Placement = Shard(2)
        over_keys: Placement = Shard(2)
        if plan == "attention2d":
            self.entries[name] = Attention2D(
                row_dim=row_dim,
                algorithm=block.algorithm if row_dim else "auto",
                input_layouts=pair(layout, row_dim),
            )
            q, kv, o = attention_projections(
                block.heads,
                block.kv_heads,
                columns,
                row_dim=row_dim,
                output_layouts=pair(model.stream, row_dim),
                use_local_output=model.local,
                algorithm=self._algorithm(block.up.algorithm),
            )
            self.entries |= {f"{name}.q": q, f"{name}.k": kv, f"{name}.v": kv, f"{name}.o": o}
            # What does not divide is whole in the module.
            if block.heads % columns:
                over_queries = over_keys = Replicate()
            elif block.kv_heads % columns:
                over_keys = Replicate()
        else:
            layout = self._prepare(name, block, layout)
            between = "whole" if plan == "whole" else "features"
            if plan == "whole":
                over_queries = over_keys = Replicate()
            up = block.up
            if up.style in ("replicate", "local") and (plan != "whole" or layout != "whole"):
                up = replace(up, style="colwise")
            for part in "qkv":
                self._linear(f"{name}.{part}", up, layout, between, plan != "dtensor")
            self._linear(f"{name}.o", block.down, between, model.stream, model.local)
        if block.qk_norm == "declared":
            for part, over in (("q", over_queries), ("k", over_keys)):
                self.entries[f"{name}.{part}_norm"] = torch_tp2d.Replicate(
                    input_layouts=(Shard(row_dim), over), row_dim=row_dim
                )

    def _algorithm(self, algorithm: str) -> str:
        oblong = self.grid[0] != self.grid[1]
        return "summa" if algorithm in ("bmr", "cannon") and oblong else algorithm

    def _linear(self, name: str, how: How, layout: str, out: str, local: bool) -> tuple[str, bool]:
        """Adds a Linear's style; the layout that it hands on, and whether as local tensors."""
        row_dim, style = self.model.row_dim, how.style
        given, wanted = pair(layout, row_dim), pair(out, row_dim)
        simple = layout in _SIMPLE and out in _SIMPLE
        if style == "replicate" and layout == out and layout in ("whole", "tokens"):
            self.entries[name] = torch_tp2d.Replicate(
                input_layouts=given, use_local_output=local, row_dim=row_dim
            )
            return out, local
        if style == "local" and layout == out == "whole" and not row_dim:
            self.entries[name] = Local2D(use_local_output=local)
            return out, local
        if style.startswith("stock") and simple:
            kind: Any = ColwiseParallel if style == "stock_colwise" else RowwiseParallel
            stock = kind(input_layouts=given[1], output_layouts=wanted[1], use_local_output=local)
            self.entries[name] = Lifted(stock, row_dim=1) if row_dim else stock
            return out, local
        kind = {"rowwise": Rowwise2D, "stock_rowwise": Rowwise2D, "block": Block2DParallel}.get(
            style, Colwise2D
        )
        algorithm, dataflow = self._algorithm(how.algorithm), how.dataflow
        if dataflow == "own":
            dataflow = kind.rule.dataflow
        if dataflow == "weight_stationary" and algorithm != "collective":
            algorithm = "auto"
        self.entries[name] = kind(
            input_layouts=given,
            output_layouts=wanted,
            use_local_output=local,
            row_dim=row_dim,
            dataflow=dataflow,
            algorithm=algorithm,
            reshard_after_forward=how.reshard,
            regather_input=(
                how.regather and kind is Colwise2D and algorithm in ("auto", "pipelined")
            ),
        )
        return out, local
