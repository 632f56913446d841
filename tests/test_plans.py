"""Ready plans of Hugging Face's causal language models, beside one device in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import world
from hf import TOLERANCE, causal_lm_batch, on_grid, train_beside

transformers = pytest.importorskip("transformers")


def llama(**config: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 33,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **config})).double()


def _llama(rows: int, columns: int, size: int, sequence: int) -> Any:
    reference, model, _ = on_grid(llama, rows, columns)
    return train_beside(reference, model, causal_lm_batch(size, sequence, 33))


@pytest.mark.parametrize("rows,columns", [(2, 2), (1, 4), (4, 1)])
def test_llama(rows: int, columns: int) -> None:
    for size, sequence in ((4, 8), (5, 7)):
        for seen in world.run(rows * columns, _llama, rows, columns, size, sequence):
            assert seen.worst < TOLERANCE, seen
