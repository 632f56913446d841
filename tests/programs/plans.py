"""The plan of a program's model for a grid, and which of its choices go together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import Placement

import torch_tp2d
from torch_tp2d import (
    Attention2D,
    Block2DParallel,
    Colwise2D,
    Dropout2D,
    Lifted,
    Local2D,
    Norm2D,
    Rowwise2D,
    attention_projections,
)

from .data import Attention, Block, How, Mlp, Model, Norm
from .models import is_fused

__all__ = ["Plan", "pair", "settled"]

_SIMPLE = ("whole", "tokens", "features")


def on_line(layout: str, row_dim: int, last: int = -1) -> tuple[Any, Any]:
    """A layout by name, as placements along and across the axis that a style acts on."""
    row = Shard(row_dim)
    return {
        "whole": (row, Replicate()),
        "tokens": (row, Shard(1)),
        "features": (row, Shard(last)),
        "hidden": (Shard(last), Shard(1)),
        "flat": (Shard(last), Replicate()),
        "everywhere": (Replicate(), Replicate()),
    }[layout]


def pair(layout: str, model: Model, last: int = -1) -> tuple[Any, Any]:
    """A layout by name, as placements ``(on tp_row, on tp_col)``."""
    across, along = on_line(layout, model.row_dim, last)
    if model.axes == "tp_row":
        return along, across
    return (across, along) if model.axes == "tp_col" else (along, along)


def settled(model: Model, fsdp: bool) -> Model:
    """A model of which the parts go together: what does not is as plain as it has to be."""
    if model.axes != "tp_col":
        # Stock styles alone, on whole features.
        stream = model.stream if model.stream in ("whole", "tokens") else "whole"
        model = replace(model, row_dim=0, stream=stream)
    if fsdp:
        # FSDP2 takes no parameter of which a rank holds nothing.
        model = replace(
            model,
            hidden=8,
            embed=model.embed and replace(model.embed, vocab=8),
            head=model.head and replace(model.head, features=8),
        )
    blocks = []
    for block in model.blocks:
        if fsdp and isinstance(block, Mlp):
            block = replace(block, inner=8, scale="")
        elif fsdp:
            block = replace(block, heads=8, kv_heads=4, head_dim=2)
        if isinstance(block, Attention):
            # Rows that hold parts of sequences ask for Attention2D, which takes q, k and v apart.
            whole = not model.row_dim
            cross = block.cross and model.embed is not None and (whole or not model.local)
            block = replace(block, fused=block.fused and whole, cross=cross)
            # Tables are for Attention2D, by which a model of local tokens does not say its length.
            ours = block.plan == "attention2d" and model.axes == "tp_col" and not model.local
            if not ours or block.fused or cross or (not model.embed and model.apply == "torch"):
                block = replace(block, table="")
            if block.table:
                block = replace(block, dropout=False)
            if block.dropout and (model.row_dim or model.apply == "torch"):
                # Of a module's own call, only Attention2D and our parallelize_module know.
                ours = block.plan == "attention2d" and model.axes == "tp_col"
                block = replace(block, dropout=ours and not block.fused)
        else:
            if model.axes != "tp_col":
                # Stock styles do not say that a gradient is a part.
                block = replace(block, scale="")
            if model.hidden == 1 or block.inner == 1:
                # DTensor cannot sum dims of size 1 into a scalar's gradient.
                block = replace(block, beta="", mix="")
            if model.local or model.row_dim or model.axes != "tp_col":
                # Of local tokens a rank has some; and one token is not split by rows.
                block = replace(block, pooled="")
        blocks.append(block)
    head = model.head
    if head is not None and head.tied and model.apply == "torch":
        head = replace(head, tied=False)
    return replace(model, blocks=tuple(blocks), head=head)


class Plan:
    """The plan of a model for a grid, and how what the model returns is laid out.

    Where a program's choices do not go together, the plainest that does is taken instead, so that
    every program has a plan and none is expected to be refused, but for the few of
    ``ranks.REFUSED``.
    """

    def __init__(self, model: Model, grid: tuple[int, int]) -> None:
        self.model, self.grid = model, grid
        rows, columns = grid
        self.columns = {"tp_col": columns, "tp_row": rows, "both": rows * columns}[model.axes]
        self.only_stock = model.axes != "tp_col"
        self.names_all = self.only_stock or model.apply == "torch"
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
        out = on_line(model.stream, model.row_dim)
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
            elif self.only_stock:
                style = f"stock_{style.removeprefix('stock_').replace('replicate', 'rowwise')}"
            if style.startswith("stock"):
                kind: Any = RowwiseParallel if style == "stock_rowwise" else ColwiseParallel
                stock = kind(
                    input_layouts=Replicate(),
                    output_layouts=layout[1],
                    use_local_output=model.local,
                )
                self.entries[name] = self._lifted(stock)
                continue
            kind = {"rowwise": Rowwise2D, "colwise": Colwise2D, "replicate": torch_tp2d.Replicate}
            self.entries[name] = kind[style](
                output_layouts=layout, use_local_output=model.local, row_dim=model.row_dim
            )

    def _lifted(self, stock: Any) -> Any:
        model = self.model
        if model.axes == "tp_col" and not model.row_dim and model.apply != "torch":
            return stock
        axes: Any = ("tp_row", "tp_col") if model.axes == "both" else model.axes
        return Lifted(stock, axes=axes, row_dim=model.row_dim)

    def _norm(self, name: str, norm: Norm | None, layout: str, local: bool) -> tuple[str, bool]:
        """Adds a norm's style; the layout that it hands on."""
        if norm is None:
            return layout, local
        model, row_dim, style = self.model, self.model.row_dim, norm.style
        if layout in ("hidden", "flat"):
            style = "norm2d"
        elif self.only_stock:
            kept = ("unnamed", "replicate", *(("sequence",) if layout == "tokens" else ()))
            style = style if style in kept else "declared"
        elif style == "local" and (layout != "whole" or row_dim):
            style = "unnamed"
        elif style == "sequence" and layout != "tokens":
            style = "norm2d"
        if style in ("unnamed", "replicate") and local:
            # Nothing tells such a norm how its local input lies.
            if layout == "features" or (layout == "tokens" and model.embed is None):
                style = "declared"
            # Nor, where torch applies the plan, on which axes the styles beside it act.
            if self.only_stock and model.apply == "torch":
                style = "declared"
        if style == "unnamed" and (self.names_all or (name == "norm" and model.apply != "whole")):
            style = "declared"
        if style != "norm2d" and layout == "features" and norm.kind == "rms":
            # torch's own RMSNorm on a DTensor that is split by features is an error of torch's.
            style = "norm2d"
        if style == "norm2d":
            out = norm.out if layout not in ("hidden", "flat") or norm.out != "features" else layout
            self.entries[name] = Norm2D(
                input_layouts=pair(layout, model),
                output_layouts=pair(out, model),
                use_local_output=norm.local,
                row_dim=row_dim,
            )
            return out, norm.local
        if style == "sequence":
            stock = SequenceParallel(use_local_output=norm.local)
            self.entries[name] = self._lifted(stock)
            return layout, norm.local
        if style == "replicate":
            self.entries[name] = torch_tp2d.Replicate(row_dim=row_dim)
        elif style == "declared":
            self.entries[name] = torch_tp2d.Replicate(
                input_layouts=pair(layout, model), row_dim=row_dim
            )
        elif style == "local":
            self.entries[name] = Local2D()
        return layout, local

    def _block(self, name: str, block: Block) -> None:
        model, stream, local = self.model, self.model.stream, self.model.local
        layout, normed = self._norm(f"{name}.norm", block.norm, stream, local)
        if isinstance(block, Attention):
            self._attention(f"{name}.body", block, layout, normed)
            if block.dropout and not block.cross:
                self._declare_dropout(f"{name}.drop", "declared", stream)
            if block.table:
                self.entries[f"{name}.table"] = self._table(block)
            return
        body, between = f"{name}.body", block.between
        after = block.after if stream in _SIMPLE and block.after else stream
        layout = self._around(body, block.prepare, layout, after)
        if not block.prepare and block.up.style in ("replicate", "local"):
            between = layout if layout in ("whole", "tokens") else between
        parts = 1
        if block.fused:
            # Two projections of which each is split, or none.
            splits = block.up.local and not block.inner % self.columns and not self.only_stock
            if between == "features":
                between, parts = ("features", 2) if splits else ("whole", 1)
        between, inner = self._linear(
            f"{body}.up", block.up, layout, between, block.up.local, parts=parts
        )
        if block.gate and not block.fused:
            self._linear(f"{body}.gate", block.up, layout, between, inner)
        if block.scale:
            self._scale(f"{body}.scale", block.scale, layout, between, inner)
        if block.dropout:
            self._declare_dropout(f"{body}.drop", block.dropout, between)
            self._declare_dropout(f"{name}.drop", block.dropout, stream)
        if block.beta:
            self._vectors(f"{body}.act", block.beta, between, inner)
        if after != stream:
            self._linear(f"{body}.down", block.down, between, after, block.down.local)
        else:
            self._linear(f"{body}.down", block.down, between, stream, local)
        if block.pooled:
            style = "replicate" if block.up.style == "local" else block.up.style
            self._linear(f"{name}.squeeze", replace(block.up, style=style), "whole", "whole", False)
        if block.mix and block.residual:
            of_stream = stream in ("whole", "tokens") and (stream == "whole" or model.embed)
            self._vectors(f"{name}.mix", block.mix if of_stream else "declared", stream, local)

    def _scale(self, name: str, style: str, layout: str, between: str, local: bool) -> None:
        """Adds the style of a gate of each token, which meets features in that layout."""
        model, out = self.model, "whole" if between == "features" else between
        grads = (Shard(model.row_dim), Partial()) if local and between == "features" else None
        kept = style == "replicate" and layout == out
        kind: Any = torch_tp2d.Replicate if kept else Colwise2D
        self.entries[name] = kind(
            input_layouts=pair(layout, model),
            output_layouts=pair(out, model),
            use_local_output=local,
            row_dim=model.row_dim,
            grad_layouts=grads,
        )

    def _vectors(self, name: str, style: str, layout: str, local: bool) -> None:
        """Adds a style for a module of scalars and vectors, as the user has written it."""
        model, row_dim = self.model, self.model.row_dim
        if style == "local" and (row_dim or self.only_stock or not local):
            style = "declared"
        if style == "local" and layout not in ("whole", "features"):
            style = "declared"
        if style == "unnamed" and not self.names_all:
            return
        if style == "local":
            self.entries[name] = Local2D(input_layouts=pair(layout, model))
        else:
            self.entries[name] = torch_tp2d.Replicate(
                input_layouts=pair(layout, model), row_dim=row_dim
            )

    def _declare_dropout(self, name: str, style: str, layout: str) -> None:
        if style == "declared" or self.names_all or layout in ("hidden", "flat"):
            self.entries[name] = Dropout2D(
                input_layouts=pair(layout, self.model), row_dim=self.model.row_dim
            )

    def _around(
        self, name: str, prepare: bool, layout: str, after: str, local: bool | None = None
    ) -> str:
        """Adds hooks that prepare a module's input, its output, or both; the layout inside."""
        model, row_dim = self.model, self.model.row_dim
        prepare = prepare and layout in _SIMPLE
        inputs: dict[str, Any] = dict(
            input_layouts=(on_line(layout, row_dim)[1],), desired_input_layouts=(Replicate(),)
        )
        outputs: dict[str, Any] = dict(
            output_layouts=(on_line(after, row_dim)[1],),
            desired_output_layouts=(on_line(model.stream, row_dim)[1],),
        )
        stock: Any = None
        if prepare and after != model.stream:
            stock = PrepareModuleInputOutput(
                **inputs, use_local_input=True, **outputs, use_local_output=model.local
            )
        elif prepare:
            stock = PrepareModuleInput(**inputs)
        elif after != model.stream:
            stock = PrepareModuleOutput(**outputs, use_local_output=model.local)
        if stock is not None:
            self.entries[name] = self._lifted(stock)
        return "whole" if prepare else layout

    def _attention(self, name: str, block: Attention, layout: str, local: bool) -> None:
        model, columns, plan = self.model, self.columns, block.plan
        row_dim, fused = model.row_dim, is_fused(block)
        if fused or self.only_stock or (block.cross and local):
            # Attention2D takes a second local stream for a mask, which is whole.
            divides = not (block.heads % columns or block.kv_heads % columns or row_dim)
            # Stock styles know of no parts.
            divides = divides and not (fused and self.only_stock)
            plan = "local" if divides and (fused or plan == "attention2d") else plan
            plan = plan if divides and plan != "attention2d" else "whole"
        elif row_dim or block.heads % columns or block.kv_heads % columns:
            plan = "attention2d"
        elif plan == "dtensor" and block.kv_heads == 1:
            # A view of split features as one head and its features leaves these split.
            plan = "attention2d"
        seen = model.stream if block.cross else None
        over_queries: Placement = Shard(2)
        over_keys: Placement = Shard(2)
        if plan == "attention2d":
            self.entries[name] = Attention2D(
                row_dim=row_dim,
                algorithm=block.algorithm if row_dim else "auto",
                input_layouts=pair(layout, model),
            )
            q, kv, o = attention_projections(
                block.heads,
                block.kv_heads,
                columns,
                row_dim=row_dim,
                output_layouts=pair(model.stream, model),
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
            if not block.cross:
                layout = self._around(name, block.prepare, layout, model.stream)
            elif block.prepare and layout in _SIMPLE and model.stream in _SIMPLE:
                have = tuple(on_line(where, row_dim)[1] for where in (layout, model.stream))
                self.entries[name] = self._lifted(
                    PrepareModuleInput(
                        input_layouts=have, desired_input_layouts=(Replicate(), Replicate())
                    )
                )
                layout = seen = "whole"
            between = "whole" if plan == "whole" else "features"
            if plan == "whole":
                over_queries = over_keys = Replicate()
            up = block.up
            if up.style in ("replicate", "local") and (plan != "whole" or layout != "whole"):
                up = replace(up, style="colwise")
            if fused:
                parts = 3 if plan == "local" else 1
                self._linear(f"{name}.qkv", up, layout, between, True, parts=parts)
            for part in "" if fused else "qkv":
                given = layout if seen is None or part == "q" else seen
                self._linear(f"{name}.{part}", up, given, between, plan != "dtensor")
            self._linear(f"{name}.o", block.down, between, model.stream, model.local)
        if block.qk_norm == "declared" or (block.qk_norm and self.names_all):
            for part, over in (("q", over_queries), ("k", over_keys)):
                heads: Any = Shard(row_dim), over
                heads = {"tp_row": heads[::-1], "both": (over, over)}.get(model.axes, heads)
                self.entries[f"{name}.{part}_norm"] = torch_tp2d.Replicate(
                    input_layouts=heads, row_dim=row_dim
                )

    def _table(self, block: Attention) -> Any:
        whole = Replicate(), Replicate()
        if block.table in ("whole", "dtensor"):
            local = block.table == "whole"
            return torch_tp2d.Replicate(
                output_layouts=whole, use_local_output=local, row_dim=self.model.row_dim
            )
        if block.table == "columns":
            return Colwise2D(output_layouts=whole, row_dim=self.model.row_dim)
        # Two-phase attention takes a bias of all heads.
        of_all = block.one_for_all or (self.model.row_dim and block.algorithm == "two_phase")
        splits = block.table == "heads" and not of_all and not block.heads % self.columns
        return Local2D(params={"weight": Shard(1)} if splits else None)

    def _algorithm(self, algorithm: str) -> str:
        oblong = self.grid[0] != self.grid[1]
        return "summa" if algorithm in ("bmr", "cannon") and oblong else algorithm

    def _linear(
        self, name: str, how: How, layout: str, out: str, local: bool, parts: int = 1
    ) -> tuple[str, bool]:
        """Adds a Linear's style; the layout that it hands on, and whether as local tensors."""
        model, row_dim, style = self.model, self.model.row_dim, how.style
        given, wanted = pair(layout, model), pair(out, model)
        simple = layout in _SIMPLE and out in _SIMPLE
        if parts > 1:
            style, local = "colwise", True
        if self.only_stock:
            style = "stock_rowwise" if style.endswith("rowwise") else "stock_colwise"
            out, simple = (out if simple else "whole"), True
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
            have, want = (on_line(where, row_dim)[1] for where in (layout, out))
            stock = kind(input_layouts=have, output_layouts=want, use_local_output=local)
            self.entries[name] = self._lifted(stock)
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
            parts=parts,
        )
        return out, local
