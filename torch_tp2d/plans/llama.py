"""Llama 2 of the PyTorch tutorial, and Hugging Face's Llama and decoders that are built like it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from ..parallelize.lora import plain
from ..styles.local import Local2D
from .experts import experts_plan
from .losses import LossFunction, causal_lm_loss
from .methods import AsTransformers
from .parts import Parts, Plan, first_layer, inner_prefix

__all__ = ["is_tutorial_llama", "llama_plan"]


@dataclass(frozen=True)
class _Names:
    """What one implementation of the architecture calls its modules."""

    embedding: str
    query: str
    key: str
    value: str
    out: str
    head: str


_HUGGING_FACE = _Names("embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "lm_head")
_TUTORIAL = _Names("tok_embeddings", "wq", "wk", "wv", "wo", "output")


def is_tutorial_llama(model: nn.Module) -> bool:
    """Whether a model is built as the Llama 2 of PyTorch's tensor parallel tutorial is."""
    names = {name for name, _ in model.named_modules()}
    return {"tok_embeddings", "layers.0.attention.wq", "layers.0.feed_forward.w3"} <= names


def llama_plan(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Plan:
    """A plan for Llama 2 of the PyTorch tutorial, or a Hugging Face decoder built like Llama.

    The latter are Llama, Mistral, Qwen2 and the other types that
    ``torch_tp2d.plans.PLANS`` maps to this function. Heads are split over ``tp_col``; for fewer
    key and value heads than columns, or numbers that do not divide, see
    :class:`torch_tp2d.Attention2D`. A base model without a head (``LlamaModel``) returns its hidden
    states as a DTensor.

    Args:
        model: the model, not parallelized yet.
        mesh: named ``("tp_row", "tp_col")``.
        options: see :class:`Parts`. With ``loss_parallel``, given ``labels``, a Hugging Face model
            computes its loss by :func:`causal_lm_loss`.

    Returns:
        A dict of module names and styles.

    Raises:
        ValueError: for an option that cannot work, for a feed-forward module none of whose Linears
            has a known name for the one that leads back into the residual stream, and for a mixture
            of experts with router noise or a router's loss.

    Example::

        >>> plan = llama_plan(model, mesh["tp_row", "tp_col"])
        >>> parallelize_module(model, mesh["tp_row", "tp_col"], plan)
        >>> model(ids, labels=ids).loss.backward()
    """
    parts = Parts(**options)
    base = inner_prefix(model)
    names = _TUTORIAL if is_tutorial_llama(model) else _HUGGING_FACE
    layers = f"{base}layers"
    first = first_layer(model, layers)
    plan: Plan = {f"{base}{names.embedding}": parts.embedding()}
    for name, module in first.named_children():
        where = f"{layers}.*.{name}"
        if hasattr(module, names.query):
            num_heads, num_kv_heads = (
                getattr(module, projection).weight.shape[0] // module.head_dim
                for projection in (names.query, names.key)
            )
            heads = parts.attention(mesh, num_heads, num_kv_heads)
            out = names.out if hasattr(module, names.out) else "dense"
            plan[where] = heads.module
            plan[f"{where}.{names.query}"] = heads.q
            plan[f"{where}.{names.key}"] = plan[f"{where}.{names.value}"] = heads.kv
            plan[f"{where}.{out}"] = heads.o
        elif hasattr(module, "experts"):
            plan |= experts_plan(model, where, parts.row_dim)
        elif any(isinstance(plain(part), nn.Linear) for part in module.children()):
            plan |= _mlp(module, where, parts)
        elif _is_norm(module):
            plan[where] = parts.norm()
    for name, module in model.get_submodule(base.rstrip(".")).named_children():
        if _is_norm(module):
            plan[f"{base}{name}"] = parts.norm()
    if hasattr(model, names.head):
        plan[names.head] = parts.head()
    if hasattr(model, "get_input_embeddings"):
        own = hasattr(model, names.head) and parts.loss_parallel
        plan[""] = LossFunction(causal_lm_loss) if own else AsTransformers()
    return plan


def _is_norm(module: nn.Module) -> bool:
    """Whether a module's parameters are all vectors; one without parameters needs no entry."""
    params = list(module.parameters())
    return bool(params) and all(param.ndim == 1 for param in params)


_BACK = frozenset(("down_proj", "w2", "c_proj", "fc2"))
"""Names of the Linear by which a feed-forward module leads back into the residual stream."""


def _mlp(module: nn.Module, where: str, parts: Parts) -> Plan:
    """The entries of a feed-forward module, whose gate and up projections may be fused."""
    parts_inside = {name: plain(part) for name, part in module.named_children()}
    linears = {name: part for name, part in parts_inside.items() if isinstance(part, nn.Linear)}
    back = next((name for name in linears if name in _BACK), None)
    if back is None:
        raise ValueError(
            f"{where} has the Linears {list(linears)}, none of which is called as what leads back "
            f"into the residual stream is, {sorted(_BACK)}: write its entries by hand"
        )
    width = linears[back].in_features
    plan: Plan = {
        f"{where}.{name}": parts.colwise(**_parts(linear.out_features, width))
        for name, linear in linears.items()
        if name != back
    }
    features = Shard(parts.row_dim), Shard(-1)
    for name, part in parts_inside.items():
        # An activation that learns a number or two for all features, as xIELU does.
        learned = list(part.parameters())
        if learned and all(param.numel() == 1 for param in learned):
            plan[f"{where}.{name}"] = Local2D(input_layouts=features)
    return {**plan, f"{where}.{back}": parts.rowwise()}


def _parts(out_features: int, width: int) -> dict[str, int]:
    return {"parts": out_features // width} if out_features > width else {}
