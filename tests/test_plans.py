"""Ready plans of Hugging Face's causal language models, beside one device in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import world
from hf import TOLERANCE, Differences, causal_lm_batch, in_fp64, on_grid, train_beside

transformers = pytest.importorskip("transformers")

VOCAB = 33


def _causal_lm(family: str, **config: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32,
    }
    made = getattr(transformers, f"{family}Config")(**{**sizes, **config})
    return in_fp64(getattr(transformers, f"{family}ForCausalLM")(made))


def llama() -> Any:
    return _causal_lm("Llama")


def llama_grouped() -> Any:
    return _causal_lm("Llama", num_key_value_heads=2, attention_bias=True, mlp_bias=True)


def llama_odd() -> Any:
    """SmolLM2's heads: three query heads to a key head, neither a multiple of 2."""
    return _causal_lm("Llama", hidden_size=36, num_attention_heads=9, num_key_value_heads=3)


def mistral() -> Any:
    return _causal_lm("Mistral", num_key_value_heads=2, head_dim=6)


def qwen2() -> Any:
    """With biases on q, k and v only, and the head tied to the embedding."""
    return _causal_lm("Qwen2", num_key_value_heads=2, tie_word_embeddings=True)


def gpt2(heads: int = 4) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=32,
        n_embd=4 * heads,
        n_layer=2,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return in_fp64(transformers.GPT2LMHeadModel(config))


def gpt2_odd() -> Any:
    return gpt2(3)


EVEN, UNEVEN = (4, 8), (5, 7)
"""Batch and sequence."""


def _train(rows: int, columns: int, cases: list[tuple[Any, Any, dict[str, Any]]]) -> list[Any]:
    found = []
    for build, (size, sequence), options in cases:
        padded = options.pop("padded", False)
        reference, model, _ = on_grid(build, rows, columns, **options)
        batch = causal_lm_batch(size, sequence, VOCAB, padded)
        found.append((build.__name__, options, train_beside(reference, model, batch)))
    return found


def _check(answers: list[Any]) -> None:
    for found in answers:
        for name, options, seen in found:
            assert isinstance(seen, Differences)
            assert seen.worst < TOLERANCE, (name, options, seen)


GRIDS = [(2, 2), (1, 4), (4, 1), (2, 4)]


@pytest.mark.parametrize("rows,columns", GRIDS)
def test_every_model_trains_as_on_one_device(rows: int, columns: int) -> None:
    builders = [llama, llama_grouped, llama_odd, mistral, qwen2, gpt2, gpt2_odd]
    cases = [
        (build, UNEVEN if index % 2 else EVEN, {"padded": index > 2})
        for index, build in enumerate(builders)
    ]
    _check(world.run(rows * columns, _train, rows, columns, cases))
