"""The styles of an attention module's projections, for the plan."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from ...comm import Axis
from ...ops.attention import Heads, check_groups
from ..base import LayoutLike
from ..linear import Colwise2D, Rowwise2D

__all__ = ["Projections", "attention_projections"]


class Projections(NamedTuple):
    """The styles of an attention module's projections."""

    q: Colwise2D
    kv: Colwise2D
    o: Rowwise2D


def attention_projections(
    num_heads: int,
    num_kv_heads: int | None,
    columns: int,
    *,
    row_dim: int = 0,
    whole_keys: bool = False,
    output_layouts: LayoutLike = None,
    use_local_output: bool = False,
    algorithm: str = "auto",
    dataflow: str = "auto",
    reshard_after_forward: bool | None = None,
    regather_input: bool = False,
    reduce_dtype: torch.dtype | None = None,
) -> Projections:
    """The styles of the projections inside a module whose style is :class:`Attention2D`.

    Heads that divide over ``tp_col`` are split over it. If the key and value heads do not divide,
    they are replicated on every rank; if the query heads do not, all heads are. Each rank uses
    replicated heads for a part of the attention only, so their gradients are partial and are
    summed.

    Args:
        num_heads: query heads of the model.
        num_kv_heads: key and value heads; None for as many as query heads.
        columns: the size of ``tp_col``.
        row_dim: the token dim that ``tp_row`` splits.
        whole_keys: with ``row_dim=1``, gather keys and values along ``tp_row`` as they leave their
            projections. It is for modules that do not call ``scaled_dot_product_attention`` and
            apply no positions to their keys, with ``Attention2D(algorithm="local")``.
        output_layouts: those of the output projection, ``Shard(1)`` by default: the token layout.
        use_local_output: that of the output projection.
        algorithm, dataflow, reshard_after_forward, reduce_dtype: those of all projections, as in
            :class:`torch_tp2d.Colwise2D`.
        regather_input: that of the query, key and value projections.

    Returns:
        ``(q, kv, o)``.

    Raises:
        ValueError: if the query heads are no multiple of the key and value heads, or for
            ``whole_keys`` without ``row_dim=1``, where rows hold full sequences anyway.

    Example::

        >>> q, kv, o = attention_projections(32, 8, mesh["tp_col"].size())
        >>> plan = {"layers.*.self_attn": Attention2D(),
        ...         "layers.*.self_attn.q_proj": q,
        ...         "layers.*.self_attn.[kv]_proj": kv,
        ...         "layers.*.self_attn.o_proj": o}
    """
    key_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_groups(num_heads, key_heads)
    if whole_keys and row_dim != 1:
        raise ValueError("whole_keys is for row_dim=1, where tp_row splits the sequence")
    heads = Heads(num_heads, key_heads, Axis("tp_col", (columns,), 0, ""))
    linear: dict[str, Any] = {
        "row_dim": row_dim,
        "algorithm": algorithm,
        "dataflow": dataflow,
        "reshard_after_forward": reshard_after_forward,
        "reduce_dtype": reduce_dtype,
    }

    def into_heads(whole: bool, over_row: bool) -> Colwise2D:
        outputs = Replicate() if over_row else Shard(row_dim), Replicate() if whole else Shard(-1)
        # Each rank uses a replicated output for its own queries, so its gradient is partial.
        grads = tuple(Partial() if isinstance(p, Replicate) else p for p in outputs)
        return Colwise2D(
            output_layouts=outputs, grad_layouts=grads, regather_input=regather_input, **linear
        )

    return Projections(
        into_heads(heads.whole_query, False),
        into_heads(heads.whole_key, whole_keys),
        Rowwise2D(
            input_layouts=Replicate() if heads.whole_query else Shard(-1),
            output_layouts=Shard(1) if output_layouts is None else output_layouts,
            use_local_output=use_local_output,
            **linear,
        ),
    )
