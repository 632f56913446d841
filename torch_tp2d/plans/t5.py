"""Hugging Face's T5: ``T5ForConditionalGeneration``, ``T5Model`` and ``T5EncoderModel``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from ..attention import Attention2D, attention_projections
from ..grid import Grid
from ..layouts import Layout
from ..replicate import SumGrads
from ..styles import GridStyle, Runner, local_shard
from .losses import LossOfLabels
from .parts import Parts, Plan

__all__ = ["HeadBias", "t5_plan"]


class HeadBias(GridStyle):
    """A table ``[buckets, heads]`` of what is added to each head's scores: heads over ``tp_col``.

    An ``nn.Embedding`` inside an attention module, which looks up ids of its own (of the tokens
    at hand), the numbers of this column's heads. Where the heads do not divide over ``tp_col`` the
    table is whole, as is what the module sees. Only the table's gradient crosses the wire, along
    ``tp_row``.
    """

    def _layout(self, module: Any, columns: int) -> Layout:
        divides = module.embedding_dim % columns == 0
        return Replicate(), Shard(1) if divides else Replicate()

    def param_layouts(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, Layout]]:
        yield module, "weight", (Replicate(), Shard(1))

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        return _HeadBiasRunner(grid)


class _HeadBiasRunner(Runner):
    style = "HeadBias"

    def __init__(self, grid: Grid) -> None:
        self.axes = [axis for axis in (grid.row,) if axis.size > 1]

    def run(self, module: Any, forward: Callable[..., Any], ids: Tensor) -> Tensor:
        (weight,) = SumGrads.apply(self.axes, local_shard(module.weight))
        return F.embedding(ids, weight)


def t5_plan(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Plan:
    parts = Parts(**options)
    config: Any = model.config
    q, kv, o = attention_projections(
        config.num_heads,
        None,
        mesh["tp_col"].size(),
        row_dim=parts.row_dim,
        output_layouts=parts.residual,
    )
    plan: Plan = {"shared": parts.embedding()}
    for stack in ("encoder", "decoder"):
        if not hasattr(model, stack):
            continue
        block = f"{stack}.block.*"
        kinds = ["layer.0.SelfAttention"]
        if stack == "decoder":
            kinds.append("layer.1.EncDecAttention")
        plan[f"{stack}.embed_tokens"] = parts.embedding()
        for attention in kinds:
            plan[f"{block}.{attention}"] = Attention2D(row_dim=parts.row_dim)
            plan[f"{block}.{attention}.q"] = q
            plan[f"{block}.{attention}.k"] = kv
            plan[f"{block}.{attention}.v"] = kv
            plan[f"{block}.{attention}.o"] = o
        # The first block's; the others are handed what it made of it.
        plan[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"] = HeadBias()
        plan[f"{block}.layer.*.layer_norm"] = parts.norm()
        plan[f"{block}.layer.*.DenseReluDense.wi*"] = parts.colwise()
        plan[f"{block}.layer.*.DenseReluDense.wo"] = parts.rowwise()
        plan[f"{stack}.final_layer_norm"] = parts.norm()
    if hasattr(model, "lm_head"):
        plan["lm_head"] = parts.head()
        if parts.loss_parallel:
            plan[""] = LossOfLabels()
    return plan
