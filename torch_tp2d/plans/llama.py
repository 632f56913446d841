"""Llama 2 of the PyTorch tutorial, and Hugging Face's Llama, Mistral and Qwen2."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput

from .losses import LossFunction, causal_lm_loss
from .parts import Parts, Plan, inner_prefix

__all__ = ["llama_plan"]


def llama_plan(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Plan:
    parts = Parts(**options)
    base = inner_prefix(model)
    layer = f"{base}layers.*"
    plan: Plan = {
        f"{base}embed_tokens": parts.embedding(),
        f"{layer}.input_layernorm": parts.norm(),
        f"{layer}.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        f"{layer}.self_attn.q_proj": parts.colwise(),
        f"{layer}.self_attn.k_proj": parts.colwise(),
        f"{layer}.self_attn.v_proj": parts.colwise(),
        f"{layer}.self_attn.o_proj": parts.rowwise(),
        f"{layer}.post_attention_layernorm": parts.norm(),
        f"{layer}.mlp.gate_proj": parts.colwise(),
        f"{layer}.mlp.up_proj": parts.colwise(),
        f"{layer}.mlp.down_proj": parts.rowwise(),
        f"{base}norm": parts.norm(),
    }
    if base:
        plan["lm_head"] = parts.head()
        if parts.loss_parallel:
            plan[""] = LossFunction(causal_lm_loss)
    return plan
