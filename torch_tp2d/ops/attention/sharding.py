"""The sharding rule that DTensor lacks for attention on a CPU.

DTensor has rules for the fused attention kernels of GPUs, but not for the one that
``scaled_dot_product_attention`` uses on a CPU, and its fallback mixes plain masks with DTensors.
Batch and heads are independent, so shards of either need no communication.

Importing this module registers the rule with DTensor, which has one table of rules per process: it
applies to every DTensor, where torch alone would raise.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from ..._torch_compat.distributed import place_by_keyword
from ..._torch_compat.tensors import flash_attention_for_cpu, flash_attention_for_cpu_backward

__all__: list[str] = []

_BATCH, _HEADS = 0, 1


def _alike(inputs: int, outputs: int, mask: Any, query: Any) -> list[Any]:
    """Rules that place all tensors alike: replicated, sharded by batch, or sharded by heads.

    A sharded sequence is refused, as it is by DTensor without this rule. Gathering it would be
    right for DTensors in general, but wrong under ``context_parallel``, which computes a sharded
    sequence by a ring.
    """
    axes = zip(query.placements, query.mesh.shape, strict=True)
    # On a mesh axis of one rank any dim is accepted: views may change it, and nothing is split.
    if any(isinstance(p, Shard) and p.dim not in (_BATCH, _HEADS) and n > 1 for p, n in axes):
        raise NotImplementedError(
            f"attention on a CPU with a query placed {tuple(query.placements)}: only batch and "
            f"heads may be split, as (batch, heads, sequence, features) has them"
        )
    if mask is not None:
        _check_mask(mask, query)
    rules = []
    for placement in (Replicate(), Shard(_BATCH), Shard(_HEADS)):
        dropout_and_causal = [None, None]
        masks = [] if mask is None else [_mask(mask, placement)]
        rules.append(([placement] * outputs, [placement] * inputs + dropout_and_causal + masks))
    return rules


def _mask(spec: Any, placement: Any) -> Any:
    """The placement of a mask: sharded like the query, except in dims that it broadcasts."""
    if not isinstance(placement, Shard):
        return placement
    from_end = 4 - placement.dim
    dim = spec.ndim - from_end
    return Shard(dim) if dim >= 0 and spec.shape[dim] > 1 else Replicate()


def _check_mask(mask: Any, query: Any) -> None:
    """Refuse a mask that is not placed as the query: DTensor moves no argument given by keyword.

    Raises:
        ValueError: on every rank, since all know the placements.
    """
    axes = list(zip(query.placements, mask.placements, query.mesh.shape, strict=True))
    wanted = [_mask(mask, placement) for placement, _, _ in axes]
    if any(have != want for (_, have, n), want in zip(axes, wanted, strict=True) if n > 1):
        raise ValueError(
            f"attention with a query placed {tuple(query.placements)} and a mask of shape "
            f"{tuple(mask.shape)} placed {tuple(mask.placements)}: redistribute the mask to "
            f"{tuple(wanted)} first, as torch moves no argument that is given by keyword"
        )


@register_sharding(flash_attention_for_cpu.default)
def _forward(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: Any = None,
    scale: float | None = None,
) -> Any:
    return _alike(3, 2, attn_mask, query)


@register_sharding(flash_attention_for_cpu_backward.default)
def _backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    dropout_p: float,
    is_causal: bool,
    attn_mask: Any = None,
    scale: float | None = None,
) -> Any:
    return _alike(6, 3, attn_mask, query)


# What it has found for one mask would hold for a mask placed otherwise.
place_by_keyword(flash_attention_for_cpu.default, "attn_mask")
place_by_keyword(flash_attention_for_cpu_backward.default, "attn_mask")
