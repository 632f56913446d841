"""The ready plan of Hugging Face's T5, beside one device in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_tp2d
from support import world
from support.hf import TOLERANCE, Batch, causal_lm_batch, in_fp64, on_grid, train_beside
from support.marks import deep
from support.models import grid_mesh
from torch_tp2d.plans import t5_plan

transformers = pytest.importorskip("transformers")

VOCAB = 37
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_layers": 1}


def config(**sizes: Any) -> Any:
    given = {
        "vocab_size": VOCAB,
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
        # Few and near, so that both kinds of buckets are met in a short sequence.
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,
        "decoder_start_token_id": 0,
    }
    return transformers.T5Config(**{**given, **sizes})


def t5(**sizes: Any) -> Any:
    torch.manual_seed(0)
    return in_fp64(transformers.T5ForConditionalGeneration(config(**sizes)))


def batches(size: int, source: int, target: int) -> Any:
    """An encoder's tokens, every other time padded, and a decoder's of another length."""

    def batch(step: int) -> Batch:
        padded = step % 2 == 1
        inputs = causal_lm_batch(size, source, VOCAB, padded)(step)
        labels = causal_lm_batch(size, target, VOCAB, padded)(step + 7)["labels"]
        return {**inputs, "labels": labels}

    return batch


def seq2seq_truth(model: nn.Module, batch: Batch) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    shifted = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    logits = model(**inputs, decoder_input_ids=shifted).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def _train(
    rows: int, columns: int, lengths: tuple[int, int, int], options: Any, sizes: Any
) -> list[float]:
    worst = []
    for given in options:
        reference, model, _ = on_grid(lambda: t5(**sizes), rows, columns, **given)
        data = batches(*lengths)
        worst.append(train_beside(reference, model, data, truth=seq2seq_truth, steps=2).worst)
    return worst


BOTH = [{"row_dim": 0}, {"row_dim": 1}]


@pytest.mark.parametrize("rows,columns", [(1, 2), deep(2, 2), deep(1, 4), deep(4, 1)])
def test_t5(rows: int, columns: int) -> None:
    """A batch of 5, sequences of 7 and 5 and a vocabulary of 37, none of which divides."""
    sizes = {} if rows == columns else {"num_layers": 1}
    for worst in world.run(rows * columns, _train, rows, columns, (5, 7, 5), BOTH, sizes):
        assert max(worst) < TOLERANCE, worst


@pytest.mark.deep
@pytest.mark.parametrize(
    "rows,columns,lengths",
    [(2, 4, (3, 7, 5)), (4, 2, (6, 7, 10)), (2, 2, (4, 8, 8)), (2, 2, (3, 5, 7))],
)
def test_t5_on_more_grids(rows: int, columns: int, lengths: tuple[int, int, int]) -> None:
    for worst in world.run(rows * columns, _train, rows, columns, lengths, BOTH, {}):
        assert max(worst) < TOLERANCE, worst


@pytest.mark.deep
def test_gated_and_untied() -> None:
    for worst in world.run(4, _train, 2, 2, (3, 7, 5), BOTH[:1], GATED):
        assert max(worst) < TOLERANCE, worst


@pytest.mark.deep
def test_options() -> None:
    """Whole tokens along tp_col, and logits that are whole on every rank."""
    options = [{"sequence_parallel": False}, {"loss_parallel": False}]
    for worst in world.run(4, _train, 2, 2, (3, 7, 5), options, {"num_layers": 1}):
        assert max(worst) < TOLERANCE, worst


@pytest.mark.deep
def test_heads_that_do_not_divide() -> None:
    """Six heads on four columns leave the last without any.

    There scaled_dot_product_attention left the bias out of its graph, whose gradient the other
    columns went on to sum: they waited for ever.
    """
    sizes = {"num_heads": 6, "num_layers": 1}
    for worst in world.run(4, _train, 1, 4, (3, 7, 5), BOTH[:1], sizes):
        assert max(worst) < TOLERANCE, worst


@pytest.mark.deep
@pytest.mark.parametrize("rows,columns,heads", [(2, 2, 3), (1, 4, 6), (2, 2, 1)])
def test_more_heads_that_do_not_divide(rows: int, columns: int, heads: int) -> None:
    for worst in world.run(4, _train, rows, columns, (3, 7, 5), BOTH, {"num_heads": heads}):
        assert max(worst) < TOLERANCE, worst


def _computed_again() -> float:
    reference, model, _ = on_grid(t5, 2, 2)
    model.train()
    model.gradient_checkpointing_enable()
    data = batches(3, 7, 5)
    return train_beside(reference, model, data, truth=seq2seq_truth, steps=2).worst


@pytest.mark.deep
def test_activation_checkpointing() -> None:
    """The encoder is computed again when the decoder's sizes are under way."""
    assert max(world.run(4, _computed_again)) < TOLERANCE


def _names() -> None:
    reference, model, _ = on_grid(t5, 2, 2)
    whole = model.state_dict()
    assert list(whole) == list(reference.state_dict())
    for name, value in reference.state_dict().items():
        assert isinstance(whole[name], DTensor), name
        assert torch.equal(whole[name].full_tensor(), value), name
    words = [model.shared, model.encoder.embed_tokens, model.decoder.embed_tokens, model.lm_head]
    assert all(module.weight is words[0].weight for module in words)
    bias = model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    assert bias.placements == (Replicate(), Shard(1))


def test_names_and_ties_are_hugging_faces() -> None:
    world.run(4, _names)


def _messages() -> list[str]:
    mesh = grid_mesh(2, 2)
    ids = torch.zeros(2, 4, dtype=torch.long)
    messages = []
    for attention in ("eager", "sdpa"):
        model = t5(attn_implementation=attention)
        try:
            torch_tp2d.parallelize_module(model, mesh, t5_plan(model, mesh, row_dim=1))
            past = model(input_ids=ids, decoder_input_ids=ids).past_key_values
            model(input_ids=ids, decoder_input_ids=ids, past_key_values=past)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_errors() -> None:
    for eager, cache in world.run(4, _messages):
        assert "'eager'" in eager and "row_dim=0" in eager
        assert "past keys" in cache and "row_dim=0" in cache
