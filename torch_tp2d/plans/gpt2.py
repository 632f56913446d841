"""Hugging Face's GPT-2, whose queries, keys and values are one fused projection."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .losses import LossFunction, causal_lm_loss
from .methods import AsTransformers
from .parts import Parts, Plan, first_layer, inner_prefix

__all__ = ["gpt2_plan"]


def gpt2_plan(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Plan:
    """A plan for Hugging Face's ``GPT2LMHeadModel``, or for its ``GPT2Model``.

    Args:
        model: the model, not parallelized yet.
        mesh: named ``("tp_row", "tp_col")``.
        options: see :class:`Parts`. With ``loss_parallel``, given ``labels``, the model computes
            its loss by :func:`causal_lm_loss`.

    Returns:
        A dict of module names and styles.

    Raises:
        ValueError: for an option that cannot work, and for a model with cross-attention.

    Example::

        >>> plan = gpt2_plan(model, mesh["tp_row", "tp_col"])
        >>> parallelize_module(model, mesh["tp_row", "tp_col"], plan)
        >>> model(ids, labels=ids).loss.backward()
    """
    parts = Parts(**options)
    base = inner_prefix(model)
    block = first_layer(model, f"{base}h")
    if hasattr(block, "crossattention"):
        raise ValueError(
            f"{type(model).__name__}: there is no ready plan for GPT-2 with cross-attention "
            f"(config.add_cross_attention): write one by hand"
        )
    heads = parts.attention(mesh, block.attn.num_heads, fused=3)
    plan: Plan = {
        f"{base}wte": parts.embedding(),
        f"{base}wpe": parts.positions(),
        f"{base}h.*.ln_1": parts.norm(),
        f"{base}h.*.attn": heads.module,
        f"{base}h.*.attn.c_attn": heads.q,
        f"{base}h.*.attn.c_proj": heads.o,
        f"{base}h.*.ln_2": parts.norm(),
        f"{base}h.*.mlp.c_fc": parts.colwise(),
        f"{base}h.*.mlp.c_proj": parts.rowwise(),
        f"{base}ln_f": parts.norm(),
    }
    if hasattr(model, "lm_head"):
        plan["lm_head"] = parts.head()
    own = "lm_head" in plan and parts.loss_parallel
    plan[""] = LossFunction(causal_lm_loss) if own else AsTransformers()
    return plan
