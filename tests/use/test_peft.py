"""``plan_for`` on models that ``peft`` has adapted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from support import world
from support.hf import causal_lm_batch, in_fp64
from support.marks import deep
from support.models import grid_mesh, relative
from torch_tp2d import parallelize_module
from torch_tp2d.plans import plan_for

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.deep  # Importing peft takes longer than all the rest.

VOCAB = 33


def _llama() -> Any:
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": VOCAB, "intermediate_size": 20, "num_hidden_layers": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def _classifier() -> Any:
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": VOCAB, "intermediate_size": 20, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_labels=3, pad_token_id=0)
    return transformers.LlamaForSequenceClassification(config)


def _gpt2() -> Any:
    sizes = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts))


def _bart() -> Any:
    sizes = {"vocab_size": VOCAB, "d_model": 16, "max_position_embeddings": 32}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 1, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 24}
    dropouts = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    config = transformers.BartConfig(**sizes, **dropouts)
    return transformers.BartForConditionalGeneration(config)


ALL_OF_LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: list[tuple[Any, dict[str, Any]]] = [
    (_llama, {"target_modules": ALL_OF_LLAMA, "modules_to_save": ["lm_head", "norm"]}),
    (_llama, {"target_modules": ["gate_proj", "up_proj"], "modules_to_save": ["embed_tokens"]}),
    (_gpt2, {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}),
    (_classifier, {"target_modules": ALL_OF_LLAMA, "modules_to_save": ["score"]}),
    (_bart, {"target_modules": ["q_proj", "v_proj", "fc1", "fc2"]}),
]


def _adapted(build: Any, how: dict[str, Any]) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=3, lora_alpha=5, lora_dropout=0.0, init_lora_weights=False, **how)
    return in_fp64(get_peft_model(build(), config))


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return logits.full_tensor() if hasattr(logits, "full_tensor") else logits


def _trained(rows: int, columns: int) -> dict[str, float]:
    seen: dict[str, float] = {}
    for build, how in CASES:
        reference = _adapted(build, how)
        model = copy.deepcopy(reference)
        mesh = grid_mesh(rows, columns)
        parallelize_module(model, mesh, plan_for(model, mesh, loss_parallel=False))
        both = (reference, model)
        optimizers = [
            torch.optim.AdamW([p for p in part.parameters() if p.requires_grad], lr=1e-2)
            for part in both
        ]
        for step in range(3):
            ids = causal_lm_batch(4, 6, VOCAB)(step)["input_ids"] % (VOCAB - 1) + 1
            logits = [_logits(part, ids) for part in both]
            seen[f"{build.__name__} {step} logits"] = relative(*(x.detach() for x in logits))
            for outcome in logits:
                labels = torch.arange(outcome[..., 0].numel()) % outcome.shape[-1]
                F.cross_entropy(outcome.flatten(0, -2), labels).backward()
            for (name, a), b in zip(reference.named_parameters(), model.parameters(), strict=True):
                assert (a.grad is None) is (b.grad is None), name
                # Keys' biases have no gradient but for rounding: softmax takes them away.
                if a.grad is not None and not name.endswith("k_proj.bias"):
                    seen[f"{build.__name__} {step} {name}"] = relative(b.grad, a.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return {name: value for name, value in seen.items() if not value < 1e-10}


@pytest.mark.parametrize("rows,columns", [deep(2, 2), deep(1, 4)])
def test_plans_for_adapted_models(rows: int, columns: int) -> None:
    """It read "has no attribute layers", as the model is two modules further in.

    Adapted projections were not seen in a feed-forward, and no plan was derived past adapters.
    """
    pytest.importorskip("peft")
    for wrong in world.run(rows * columns, _trained, rows, columns):
        assert not wrong


def _prompted(rows: int, columns: int) -> dict[str, float]:
    from peft import PromptTuningConfig, get_peft_model

    torch.manual_seed(0)
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    reference = in_fp64(get_peft_model(_llama(), config))
    model = copy.deepcopy(reference)
    mesh = grid_mesh(rows, columns)
    parallelize_module(model, mesh, plan_for(model, mesh, loss_parallel=False))
    ids = causal_lm_batch(4, 6, VOCAB)(0)["input_ids"]
    wanted, found = (_logits(part, ids) for part in (reference, model))
    wanted.sin().sum().backward()
    found.sin().sum().backward()
    seen = {"logits": relative(found.detach(), wanted.detach())}
    for (name, a), b in zip(reference.named_parameters(), model.parameters(), strict=True):
        if a.requires_grad:
            seen[name] = relative(b.grad, a.grad)
    assert len(seen) == 2
    return {name: value for name, value in seen.items() if not value < 1e-10}


def test_a_learned_prompt() -> None:
    """The layers are as they were, and the prompt is whole on every rank."""
    pytest.importorskip("peft")
    for wrong in world.run(4, _prompted, 2, 2):
        assert not wrong
