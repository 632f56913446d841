"""What the built-in plans are made of: the same few styles under the same options."""

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
    """The styles of an attention module and of its projections."""

    module: Attention2D
    q: Colwise2D
    kv: Colwise2D
    o: Rowwise2D


@dataclass(frozen=True)
class Parts:
    """The options that every built-in plan takes, and the styles that follow from them.

    Between modules activations are DTensors, so that a model's own code sees the global batch and
    sequence; inside attention and MLP they are local tensors.

    Args:
        sequence_parallel: shard the residual stream by sequence over ``tp_col`` (the token
            layout); else it is replicated along ``tp_col``.
        row_dim: the token dim that ``tp_row`` splits: 0 for the batch, 1 for the sequence.
        algorithm, dataflow, reshard_after_forward, regather_input, reduce_dtype: how the matrix
            products run, as in :class:`torch_tp2d.Colwise2D`.
        loss_parallel: leave the logits sharded over the vocabulary, as a DTensor, for
            :func:`torch_tp2d.cross_entropy`; else they are gathered on every rank.

    Raises:
        ValueError: for a ``row_dim`` that is not 0 or 1.

    Example::

        >>> plan = plan_for(model, mesh, sequence_parallel=False, loss_parallel=False)
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
        """The options that every Linear takes."""
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
        """An embedding of token ids ``[B, S]`` into the residual stream."""
        return Rowwise2D(
            output_layouts=layouts.pop("output_layouts", self.residual),
            use_local_output=False,
            row_dim=self.row_dim,
            **layouts,
        )

    def positions(self) -> Rowwise2D:
        """An embedding of position ids ``[1, S]``, the same for every sample of the batch."""
        on_row: Placement = Shard(1) if self.row_dim == 1 else Whole()
        return self.embedding(output_layouts=(on_row, self.residual))

    def norm(self) -> ParallelStyle:
        """A norm of the residual stream."""
        if self.sequence_parallel:
            return Lifted(SequenceParallel(), row_dim=self.row_dim)
        return Replicate(row_dim=self.row_dim)

    def colwise(self, **options: Any) -> Colwise2D:
        """A Linear from the residual stream into local heads or features."""
        return Colwise2D(
            row_dim=self.row_dim,
            **{"regather_input": self.regather_input, **self.linear, **options},
        )

    def rowwise(self, **options: Any) -> Rowwise2D:
        """A Linear from local heads or features back into the residual stream."""
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
        """An attention module, whose heads are split over the mesh columns.

        Args:
            num_kv_heads: number of key and value heads; None for as many as query heads.
            fused: how many projections are fused in one weight, side by side; if more than one,
                ``q`` is the style of the fused projection.
            options: those of :class:`torch_tp2d.Attention2D`.
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
        """A Linear from the residual stream to logits over a vocabulary."""
        if self.loss_parallel:
            return self.colwise(use_local_output=False)
        return self.colwise(output_layouts=(Whole(), Whole()))


def inner_prefix(model: nn.Module) -> str:
    """The prefix of the base model's names (``"model."``) in a Hugging Face model, or ``""``.

    It is ``""`` for a base model itself, and for a model that is not Hugging Face's.
    """
    name = getattr(model, "base_model_prefix", "")
    return f"{name}." if name and isinstance(getattr(model, name, None), nn.Module) else ""


def first_layer(model: nn.Module, name: str) -> Any:
    """The first layer of the list called ``name``; all its layers are built alike.

    Raises:
        ValueError: if the list is empty.
    """
    for layer in model.get_submodule(name).children():
        return layer
    raise ValueError(f"{type(model).__name__} has no layers in {name!r}: a plan would be empty")
