"""What the ready plans are made of: the same few styles under the same options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate as Whole
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel
from torch.distributed.tensor.placement_types import Placement

from ..mesh.grid import check_mesh
from ..mesh.layouts import TP_COL, check_row_dim
from ..styles.attention import Attention2D, attention_projections
from ..styles.lifted import Lifted
from ..styles.linear import Colwise2D, Rowwise2D
from ..styles.replicated import Replicate

__all__ = ["AttentionParts", "Parts", "Plan", "first_layer", "inner_prefix"]

Plan = dict[str, ParallelStyle]


class AttentionParts(NamedTuple):
    """The styles of an attention module and of the projections inside."""

    module: Attention2D
    q: Colwise2D
    kv: Colwise2D
    o: Rowwise2D


@dataclass(frozen=True)
class Parts:
    """The options that every ready plan takes, and the styles that follow from them.

    Between modules activations are DTensors, so that a model's own code sees the global batch and
    sequence; inside attention and MLP they are local.

    Args:
        sequence_parallel: split the residual stream by sequence over ``tp_col`` (the token
            layout); else it is whole along ``tp_col``.
        row_dim: the token dim that ``tp_row`` splits: 0 the batch, 1 the sequence.
        algorithm, dataflow, reshard_after_forward, regather_input, reduce_dtype: of the matrix
            products, as in :class:`torch_tp2d.Colwise2D`.
        loss_parallel: leave the logits split over the vocabulary, a DTensor, for
            :func:`torch_tp2d.cross_entropy`; else every rank gets them whole.

    Raises:
        ValueError: for a ``row_dim`` that is not 0 or 1.
    """

    sequence_parallel: bool = True
    row_dim: int = 0
    algorithm: str = "auto"
    dataflow: str = "auto"
    reshard_after_forward: bool | None = None
    regather_input: bool = False
    reduce_dtype: torch.dtype | None = None
    loss_parallel: bool = True

    def __post_init__(self) -> None:
        check_row_dim(self.row_dim)

    @property
    def linear(self) -> dict[str, Any]:
        """The options of every Linear."""
        return {
            "algorithm": self.algorithm,
            "dataflow": self.dataflow,
            "reshard_after_forward": self.reshard_after_forward,
            "reduce_dtype": self.reduce_dtype,
        }

    @property
    def residual(self) -> Placement:
        """The residual stream's layout on ``tp_col``."""
        return Shard(1) if self.sequence_parallel else Whole()

    def embedding(self, **layouts: Any) -> Rowwise2D:
        """Of token ids ``[B, S]``, into the residual stream."""
        return Rowwise2D(
            output_layouts=layouts.pop("output_layouts", self.residual),
            use_local_output=False,
            row_dim=self.row_dim,
            **layouts,
        )

    def positions(self) -> Rowwise2D:
        """Of position ids ``[1, S]``, the same for the whole batch."""
        on_row: Placement = Shard(1) if self.row_dim == 1 else Whole()
        return self.embedding(output_layouts=(on_row, self.residual))

    def norm(self) -> ParallelStyle:
        """Of the residual stream."""
        if self.sequence_parallel:
            return Lifted(SequenceParallel(), row_dim=self.row_dim)
        return Replicate(row_dim=self.row_dim)

    def colwise(self, **options: Any) -> Colwise2D:
        """From the residual stream into local heads or features."""
        return Colwise2D(
            row_dim=self.row_dim,
            **{"regather_input": self.regather_input, **self.linear, **options},
        )

    def rowwise(self, **options: Any) -> Rowwise2D:
        """From local heads or features back into the residual stream."""
        return Rowwise2D(
            output_layouts=self.residual,
            use_local_output=False,
            row_dim=self.row_dim,
            **self.linear,
            **options,
        )

    def attention(
        self,
        mesh: DeviceMesh,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        fused: int = 1,
        **options: Any,
    ) -> AttentionParts:
        """An attention module, of whose heads each column computes its share.

        Args:
            num_kv_heads: key and value heads; None for as many as of queries.
            fused: how many projections ``q`` does at once, side by side: its style is for all.
            options: of :class:`torch_tp2d.Attention2D`.
        """
        check_mesh(mesh)
        columns = mesh[TP_COL].size()
        q, kv, o = attention_projections(
            num_heads,
            num_kv_heads,
            columns,
            row_dim=self.row_dim,
            output_layouts=self.residual,
            use_local_output=False,
            regather_input=self.regather_input,
            **self.linear,
        )
        if fused > 1 and num_heads % columns == 0:
            q = self.colwise(parts=fused)
        style = Attention2D(
            row_dim=self.row_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, **options
        )
        return AttentionParts(style, q, kv, o)

    def head(self) -> Colwise2D:
        """From the residual stream to logits over a vocabulary."""
        if self.loss_parallel:
            return self.colwise(use_local_output=False)
        return self.colwise(output_layouts=(Whole(), Whole()))


def inner_prefix(model: nn.Module) -> str:
    """``"model."`` of a Hugging Face model with a head around its base model, else ``""``."""
    name = getattr(model, "base_model_prefix", "")
    return f"{name}." if name and isinstance(getattr(model, name, None), nn.Module) else ""


def first_layer(model: nn.Module, name: str) -> Any:
    """The first of the layers called ``name``, after which the others are made.

    Raises:
        ValueError: if there are none.
    """
    for layer in model.get_submodule(name).children():
        return layer
    raise ValueError(f"{type(model).__name__} has no layers in {name!r}: a plan would be empty")
