"""Built-in plans: dicts of module names and styles, to be printed, edited and applied.

A plan function reads a model's module names and sizes and the grid, and returns the plan; it
changes nothing. Models are recognized by their module names and their ``config``, so that no model
library is imported here. For a model that is not listed, the plan is derived from what its forward
does.

Example::

    >>> plan = plan_for(model, mesh["tp_row", "tp_col"])
    >>> plan["lm_head"] = Colwise2D(output_layouts=(Replicate(), Replicate()))
    >>> parallelize_module(model, mesh["tp_row", "tp_col"], plan)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..mesh.grid import check_mesh
from .adapters import inside_peft
from .bert import bert_plan
from .derived import DerivedPlan, derived_plan
from .experts import WholeExperts
from .gpt2 import gpt2_plan
from .llama import is_tutorial_llama, llama_plan
from .losses import LossFunction, LossOfLabels, causal_lm_loss
from .methods import AsTransformers
from .parts import Parts, Plan
from .patterns import names_all
from .swin import image_classification_loss, swin_plan
from .t5 import t5_plan

__all__ = [
    "AsTransformers",
    "DerivedPlan",
    "LossFunction",
    "LossOfLabels",
    "Parts",
    "Plan",
    "WholeExperts",
    "bert_plan",
    "causal_lm_loss",
    "derived_plan",
    "gpt2_plan",
    "image_classification_loss",
    "llama_plan",
    "plan_for",
    "swin_plan",
    "t5_plan",
]

PLANS: Mapping[str, Callable[..., Plan]] = {
    "apertus": llama_plan,
    "arcee": llama_plan,
    "bert": bert_plan,
    "cohere": llama_plan,
    "cohere2": llama_plan,
    "ernie4_5": llama_plan,
    "exaone4": llama_plan,
    "gemma": llama_plan,
    "gemma2": llama_plan,
    "gemma3_text": llama_plan,
    "glm": llama_plan,
    "glm4": llama_plan,
    "gpt2": gpt2_plan,
    "granite": llama_plan,
    "helium": llama_plan,
    "hunyuan_v1_dense": llama_plan,
    "llama": llama_plan,
    "ministral": llama_plan,
    "mistral": llama_plan,
    "mixtral": llama_plan,
    "nanochat": llama_plan,
    "nemotron": llama_plan,
    "olmo": llama_plan,
    "olmo2": llama_plan,
    "olmo3": llama_plan,
    "olmoe": llama_plan,
    "phi": llama_plan,
    "qwen2": llama_plan,
    "qwen2_moe": llama_plan,
    "qwen3": llama_plan,
    "qwen3_moe": llama_plan,
    "seed_oss": llama_plan,
    "smollm3": llama_plan,
    "stablelm": llama_plan,
    "starcoder2": llama_plan,
    "swin": swin_plan,
    "t5": t5_plan,
}
"""The plan function of each ``config.model_type``."""


def plan_for(model: nn.Module, mesh: DeviceMesh, *, inputs: Any = None, **options: Any) -> Plan:
    """The built-in plan for a model on a grid, or one derived from the model's structure.

    Args:
        model: on any device, not parallelized yet. In a ``PeftModel`` the plan is that of the model
            inside it, whose entries cover the adapters of their layers.
        mesh: named ``("tp_row", "tp_col")``, as for :func:`torch_tp2d.parallelize_module`.
        inputs: example inputs for a model without a built-in plan, see :func:`derived_plan`.
        options: those of the plan function, see :class:`Parts`.

    Returns:
        A dict of module names and styles, to be edited at will. A derived plan prints as the
        reasons for its entries.

    Raises:
        TypeError: for an unknown option, or if ``mesh`` is not a mesh.
        ValueError: for a mesh or an option that cannot work with the model, and for a model without
            a built-in plan from whose structure none can be derived.
    """
    check_mesh(mesh)
    adapted = inside_peft(model)
    if adapted is not None:
        where, inner = adapted
        plan_inside = plan_for(inner, mesh, inputs=inputs, **options)
        return {f"{where}.{key}".rstrip("."): style for key, style in plan_inside.items()}
    kind = getattr(getattr(model, "config", None), "model_type", None)
    plan = PLANS.get(kind) if isinstance(kind, str) else None
    if plan is None and is_tutorial_llama(model):
        plan = llama_plan
    ready = None if plan is None else plan(model, mesh, **options)
    if ready is not None and names_all(ready, model):
        return ready
    # An unknown model, or another class of a known family, such as a classifier.
    try:
        return derived_plan(model, mesh, inputs=inputs, **options)
    except ValueError as error:
        why = str(error).rstrip(".")
        told = "without config.model_type" if kind is None else f"of model_type {kind!r}"
        raise ValueError(
            f"{type(model).__name__} ({told}) has no ready plan, and none can be derived: {why}. "
            f"(Ready are plans for the PyTorch tutorial's Llama 2 and, of Hugging Face, "
            f"{sorted(PLANS)}.)"
        ) from error
