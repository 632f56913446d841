"""Hugging Face's BERT: ``BertForMaskedLM`` and ``BertModel``."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..styles.linear import Colwise2D
from ..styles.norm import Norm2D
from .losses import LossOfLabels
from .methods import AsTransformers
from .parts import Parts, Plan, inner_prefix

__all__ = ["bert_plan"]


def bert_plan(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Plan:
    """The plan of a BERT encoder, with its pooler or its head for masked tokens.

    Args:
        model: a ``BertModel`` or ``BertForMaskedLM``.
        mesh: named ``("tp_row", "tp_col")``.
        options: see :class:`Parts`.

    Returns:
        A dict of module names and styles.

    Raises:
        ValueError: for an option that cannot work.

    Example::

        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp_row", "tp_col"))
        >>> parallelize_module(model, mesh, bert_plan(model, mesh))
        >>> model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    """
    parts = Parts(**options)
    base = inner_prefix(model)
    inner: Any = getattr(model, base.rstrip("."), model) if base else model
    embeddings, layer = f"{base}embeddings", f"{base}encoder.layer.*"
    attention, q, kv, o = parts.attention(mesh, inner.config.num_attention_heads)
    plan: Plan = {
        f"{embeddings}.word_embeddings": parts.embedding(),
        f"{embeddings}.token_type_embeddings": parts.embedding(),
        f"{embeddings}.position_embeddings": parts.positions(),
        f"{embeddings}.LayerNorm": parts.norm(),
        f"{layer}.attention.self": attention,
        f"{layer}.attention.self.query": q,
        f"{layer}.attention.self.key": kv,
        f"{layer}.attention.self.value": kv,
        f"{layer}.attention.output.dense": o,
        f"{layer}.attention.output.LayerNorm": parts.norm(),
        f"{layer}.intermediate.dense": parts.colwise(),
        f"{layer}.output.dense": parts.rowwise(),
        f"{layer}.output.LayerNorm": parts.norm(),
    }
    if getattr(inner, "pooler", None) is not None:
        # Its input is one token of each sequence, [B, H], so tp_row can only split the batch.
        plan[f"{base}pooler.dense"] = Colwise2D(use_local_output=False, **parts.linear)
    if hasattr(model, "cls"):
        predictions = "cls.predictions"
        plan[f"{predictions}.transform.dense"] = parts.colwise(use_local_output=False)
        plan[f"{predictions}.transform.LayerNorm"] = Norm2D(
            row_dim=parts.row_dim, use_local_output=False
        )
        plan[f"{predictions}.decoder"] = parts.head()
    own = hasattr(model, "cls") and parts.loss_parallel
    plan[""] = LossOfLabels() if own else AsTransformers()
    return plan
