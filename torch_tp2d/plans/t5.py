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

    For an ``nn.Embedding`` inside an attention module whose style is :class:`Attention2D`: the
    module looks up ids that it makes itself, and gets the numbers of this column's heads. All that
    crosses the wire is the table's gradient, summed along ``tp_row``.

    Keyword Args:
        whole: the module sees all heads, as where these do not divide over ``tp_col``; each rank
            computes a share of them, so the gradient is summed along ``tp_col`` too.

    Example::

        >>> plan["encoder.block.0.layer.0.SelfAttention.relative_attention_bias"] = HeadBias()
    """

    def __init__(self, *, whole: bool = False) -> None:
        super().__init__()
        self.layout: Layout = Replicate(), Replicate() if whole else Shard(1)

    def param_layouts(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, Layout]]:
        yield module, "weight", self.layout

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        return _HeadBiasRunner(self.layout, grid)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(whole={isinstance(self.layout[1], Replicate)})"


class _HeadBiasRunner(Runner):
    style = "HeadBias"

    def __init__(self, layout: Layout, grid: Grid) -> None:
        axes = zip((grid.row, grid.col), layout, strict=True)
        self.axes = [axis for axis, p in axes if isinstance(p, Replicate) and axis.size > 1]

    def run(self, module: Any, forward: Callable[..., Any], ids: Tensor) -> Tensor:
        (weight,) = SumGrads.apply(self.axes, local_shard(module.weight))
        return F.embedding(ids, weight)


def t5_plan(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Plan:
    parts = Parts(**options)
    config: Any = model.config
    columns = mesh["tp_col"].size()
    q, kv, o = attention_projections(
        config.num_heads,
        None,
        columns,
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
        plan[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"] = HeadBias(
            whole=config.num_heads % columns != 0
        )
        plan[f"{block}.layer.*.layer_norm"] = parts.norm()
        plan[f"{block}.layer.*.DenseReluDense.wi*"] = parts.colwise()
        plan[f"{block}.layer.*.DenseReluDense.wo"] = parts.rowwise()
        plan[f"{stack}.final_layer_norm"] = parts.norm()
    if hasattr(model, "lm_head"):
        plan["lm_head"] = parts.head()
        if parts.loss_parallel:
            plan[""] = LossOfLabels()
    return plan
