"""Decoders of Hugging Face that are built as Llama is, each with something of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

__all__ = ["FAMILIES", "SIZES", "VOCAB", "decoder", "in_fp64_throughout", "waved"]

VOCAB = 33
ATTENTION: dict[str, Any] = {"head_dim": 4, "sliding_window": 4}

EXPERTS: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "decoder_sparse_step": 1,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "Apertus": {},
    "Arcee": {},
    "Cohere": {"logit_scale": 0.3},
    "Cohere2": {"sliding_window": 4},
    "Ernie4_5": {"head_dim": 4},
    "Exaone4": {"sliding_window": 4},
    "Gemma": {"head_dim": 4},
    # Its attention is not scaled_dot_product_attention, so that heads have to divide.
    "Gemma2": {**ATTENTION, "query_pre_attn_scalar": 4, "num_key_value_heads": 4},
    "Gemma3Text": {**ATTENTION, "query_pre_attn_scalar": 4},
    "Glm": {"head_dim": 4},
    "Glm4": {"head_dim": 4},
    "Granite": {
        "embedding_multiplier": 2.0,
        "logits_scaling": 1.5,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.4,
    },
    "Helium": {"head_dim": 4},
    "HunYuanDenseV1": {"head_dim": 4},
    "Ministral": ATTENTION,
    "Mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "NanoChat": {},
    "Nemotron": {},
    "Olmo": {},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 4},
    "Olmoe": {"num_experts": 5, "num_experts_per_tok": 2},
    "Phi": {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 20},
    "Qwen3": {},
    "Qwen3Moe": {**EXPERTS, "head_dim": 4},
    "SeedOss": {"head_dim": 4, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "SmolLM3": {},
    "StableLm": {"use_qkv_bias": True},
    "Starcoder2": {"embedding_dropout": 0.0, "residual_dropout": 0.0, "attention_dropout": 0.0},
}
"""By the names of their classes, what of their configs is small, or not the default."""


@contextmanager
def in_fp64_throughout() -> Iterator[None]:
    """transformers computes norms and rotary tables in fp32, whatever their input."""
    to, as_float = Tensor.to, Tensor.float

    def kept(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        wanted = args[0] if args else kwargs.get("dtype")
        if x.dtype == torch.float64 and wanted == torch.float32:
            return x
        return to(x, *args, **kwargs)

    Tensor.to, Tensor.float = kept, lambda x: kept(x, torch.float32)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.to, Tensor.float = to, as_float  # type: ignore[method-assign]


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
"""Of a Llama, tiny."""


def decoder(family: str, **other: Any) -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{family}Config")(**{**sizes, **FAMILIES[family], **other})
    kind = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")
    model = kind(config)
    if any(".experts." in name for name, _ in model.named_parameters()):
        # torch's grouped product has no fp64.
        model.set_experts_implementation("eager")
    return waved(model)


def waved(model: Any) -> Any:
    """The model in fp64, its parameters changed so that what begins as zeros or ones shows."""
    for number, param in enumerate(model.double().parameters()):
        wave = torch.sin(torch.arange(param.numel(), dtype=torch.float64) + number)
        param.data.add_(0.05 * wave.view_as(param))
    return model
