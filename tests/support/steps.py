"""A step of a model by its ready plan, and what a rank does in it (``support/record.py``)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import torch_tp2d
from support.decoders import SIZES, VOCAB
from support.record import Record, Recorder, as_rank
from torch_tp2d import plan_for

transformers = pytest.importorskip("transformers")

Step = Callable[[], Any]
Case = Callable[[DeviceMesh, str], Step]
"""Applies a plan to a model on a device, and returns what runs a step's forward to its loss."""

EVEN, UNEVEN = (4, 8), (5, 7)


def token_ids(size: tuple[int, int], device: str) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int64, device=device)


def _llama(**config: Any) -> Any:
    sizes = {**SIZES, "attention_dropout": 0.1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **config}))


def llama_odd() -> Any:
    """Three query heads to a key head, neither a multiple of 2."""
    return _llama(hidden_size=36, num_attention_heads=9, num_key_value_heads=3)


def _qwen2() -> Any:
    config = transformers.Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return transformers.Qwen2ForCausalLM(config)


def _gpt2(heads: int = 4) -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=4 * heads, n_layer=2, n_head=heads
    )
    assert config.resid_pdrop and config.embd_pdrop and config.attn_pdrop
    return transformers.GPT2LMHeadModel(config)


def _bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    assert config.hidden_dropout_prob and config.attention_probs_dropout_prob
    return transformers.BertForMaskedLM(config)


def _t5() -> Any:
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    assert config.dropout_rate
    return transformers.T5ForConditionalGeneration(config)


def _swin() -> Any:
    config = transformers.SwinConfig(
        image_size=18,
        patch_size=2,
        embed_dim=24,
        depths=(2, 2),
        num_heads=(4, 8),
        window_size=4,
        num_labels=3,
        drop_path_rate=0.0,
    )
    return transformers.SwinForImageClassification(config)


def ready(
    build: Callable[[], Any],
    size: tuple[int, int] = EVEN,
    edit: Callable[[dict[str, Any], Any, DeviceMesh], None] | None = None,
    **options: Any,
) -> Case:
    """A model by its ready plan."""

    def apply(mesh: DeviceMesh, device: str) -> Step:
        with torch.device(device):
            model = build().train()
        plan = plan_for(model, mesh, **options)
        if edit is not None:
            edit(plan, model, mesh)
        torch_tp2d.parallelize_module(model, mesh, plan)
        batch: dict[str, torch.Tensor] = {}
        if model.config.model_type == "swin":
            batch["pixel_values"] = torch.zeros(size[0], 3, 18, 18, device=device)
            batch["labels"] = torch.zeros(size[0], dtype=torch.int64, device=device)
        else:
            batch["input_ids"] = batch["labels"] = token_ids(size, device)
        if options.get("loss_parallel", True):
            return lambda: model(**batch).loss
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        return lambda: model(**inputs).logits.sum()

    return apply


PLANS = {
    "llama": ready(_llama),
    "llama pipelined": ready(_llama, UNEVEN, algorithm="pipelined"),
    "llama collective": ready(_llama, UNEVEN, algorithm="collective"),
    "llama odd": ready(llama_odd, UNEVEN),
    "qwen2": ready(_qwen2),
    "gpt2": ready(_gpt2),
    "gpt2 odd": ready(lambda: _gpt2(3), UNEVEN),
    "bert": ready(_bert, UNEVEN),
    "t5": ready(_t5, UNEVEN),
    "swin": ready(_swin),
    "llama rows split sequences": ready(llama_odd, UNEVEN, row_dim=1),
    "gpt2 rows split sequences": ready(_gpt2, UNEVEN, row_dim=1),
    "bert rows split sequences": ready(_bert, UNEVEN, row_dim=1),
    "t5 rows split sequences": ready(_t5, UNEVEN, row_dim=1),
    "whole streams": ready(_llama, UNEVEN, sequence_parallel=False),
    "whole logits": ready(_gpt2, loss_parallel=False),
}


@cache
def record(case: Case, rank: int, *shape: int) -> Record:
    """What a rank does in its second step, forward and backward: the order is known then."""
    with as_rank(rank, *shape) as mesh:
        step = case(mesh, "meta")
        step().backward()
        with Recorder() as recorder:
            step().backward()
    return recorder.record
