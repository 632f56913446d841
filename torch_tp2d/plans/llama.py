"""Llama 2 of the PyTorch tutorial, and Hugging Face's Llama, Mistral and Qwen2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .losses import LossFunction, causal_lm_loss
from .parts import Parts, Plan, first_layer, inner_prefix

__all__ = ["is_tutorial_llama", "llama_plan"]


@dataclass(frozen=True)
class _Names:
    """What the modules of one shape are called in one code of it."""

    embedding: str
    attention_norm: str
    attention: str
    query: str
    key: str
    value: str
    out: str
    mlp_norm: str
    mlp: str
    into_mlp: tuple[str, str]
    out_of_mlp: str
    head: str


_HUGGING_FACE = _Names(
    embedding="embed_tokens",
    attention_norm="input_layernorm",
    attention="self_attn",
    query="q_proj",
    key="k_proj",
    value="v_proj",
    out="o_proj",
    mlp_norm="post_attention_layernorm",
    mlp="mlp",
    into_mlp=("gate_proj", "up_proj"),
    out_of_mlp="down_proj",
    head="lm_head",
)

_TUTORIAL = _Names(
    embedding="tok_embeddings",
    attention_norm="attention_norm",
    attention="attention",
    query="wq",
    key="wk",
    value="wv",
    out="wo",
    mlp_norm="ffn_norm",
    mlp="feed_forward",
    into_mlp=("w1", "w3"),
    out_of_mlp="w2",
    head="output",
)


def is_tutorial_llama(model: nn.Module) -> bool:
    """Whether a model is built as the Llama 2 of PyTorch's tensor parallel tutorial is."""
    names = {name for name, _ in model.named_modules()}
    return {"tok_embeddings", "layers.0.attention.wq", "layers.0.feed_forward.w3"} <= names


def llama_plan(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Plan:
    """A plan for Llama 2 of the PyTorch tutorial, or Hugging Face's Llama, Mistral or Qwen2.

    Heads are split over ``tp_col``. Where there are fewer key and value heads than columns, or
    numbers that do not divide, see :class:`torch_tp2d.Attention2D`. Without a head around it
    (``LlamaModel``) the model gives hidden states as a DTensor.

    Args:
        model: the model, not parallelized yet.
        mesh: named ``("tp_row", "tp_col")``.
        options: see :class:`Parts`. With ``loss_parallel`` a Hugging Face model computes
            its loss of ``labels`` by :func:`causal_lm_loss`; ``generate`` wants it False.

    Returns:
        A dict of module names and styles.

    Raises:
        ValueError: for an option that cannot work.

    Example::

        >>> plan = llama_plan(model, mesh["tp_row", "tp_col"])
        >>> parallelize_module(model, mesh["tp_row", "tp_col"], plan)
        >>> model(ids, labels=ids).loss.backward()
    """
    parts = Parts(**options)
    base = inner_prefix(model)
    names = _TUTORIAL if is_tutorial_llama(model) else _HUGGING_FACE
    layer = f"{base}layers.*"
    attention, mlp = f"{layer}.{names.attention}", f"{layer}.{names.mlp}"
    first = getattr(first_layer(model, f"{base}layers"), names.attention)
    num_heads, num_kv_heads = (
        getattr(first, name).weight.shape[0] // first.head_dim for name in (names.query, names.key)
    )
    heads = parts.attention(mesh, num_heads, num_kv_heads)
    plan: Plan = {
        f"{base}{names.embedding}": parts.embedding(),
        f"{layer}.{names.attention_norm}": parts.norm(),
        attention: heads.module,
        f"{attention}.{names.query}": heads.q,
        f"{attention}.{names.key}": heads.kv,
        f"{attention}.{names.value}": heads.kv,
        f"{attention}.{names.out}": heads.o,
        f"{layer}.{names.mlp_norm}": parts.norm(),
        f"{mlp}.{names.into_mlp[0]}": parts.colwise(),
        f"{mlp}.{names.into_mlp[1]}": parts.colwise(),
        f"{mlp}.{names.out_of_mlp}": parts.rowwise(),
        f"{base}norm": parts.norm(),
    }
    if hasattr(model, names.head):
        plan[names.head] = parts.head()
        if parts.loss_parallel and hasattr(model, "loss_function"):
            plan[""] = LossFunction(causal_lm_loss)
    return plan
