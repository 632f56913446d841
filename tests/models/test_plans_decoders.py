"""Decoders of Hugging Face that are built as Llama is, each with something of its own."""

from __future__ import annotations

from typing import Any

import pytest

import torch_tp2d
from support import world
from support.decoders import FAMILIES, VOCAB, decoder, in_fp64_throughout
from support.fake import fake_grid
from support.hf import Differences, causal_lm_batch, on_grid, train_beside
from support.marks import deep
from torch_tp2d.plans import WholeExperts, plan_for

TOLERANCE = 1e-10

FEW = ["Qwen3", "Gemma2", "Glm4"]
"""Norms of heads, scaled embeddings, norms after, fused projections."""


def _train(rows: int, columns: int, families: list[str], **options: Any) -> dict[str, Differences]:
    found = {}
    with in_fp64_throughout():
        for family in families:
            reference, model, _ = on_grid(lambda: decoder(family), rows, columns, **options)  # noqa: B023
            data = causal_lm_batch(5, 7, VOCAB)
            found[family] = train_beside(reference, model, data, steps=2)
    return found


@pytest.mark.parametrize(
    "rows,columns,families",
    [(1, 2, FEW), *(deep(*grid, sorted(FAMILIES)) for grid in ((2, 2), (1, 4), (4, 1)))],
    ids=lambda value: f"{len(value)}families" if isinstance(value, list) else None,
)
def test_decoders_train_as_on_one_device(rows: int, columns: int, families: list[str]) -> None:
    """A batch of 5 and a sequence of 7, neither of which divides, and 33 words."""
    for found in world.run(rows * columns, _train, rows, columns, families):
        for family, seen in found.items():
            assert seen.worst < TOLERANCE, (family, seen)


def _few_tokens(rows: int, columns: int) -> dict[str, Differences]:
    found = {}
    with in_fp64_throughout():
        for options in ({}, {"row_dim": 1}, {"sequence_parallel": False}):
            reference, model, _ = on_grid(lambda: decoder("Mixtral"), rows, columns, **options)
            data = causal_lm_batch(1, 5, VOCAB)
            found[str(options)] = train_beside(reference, model, data, steps=2)
    return found


@pytest.mark.parametrize("rows,columns", [deep(2, 2), deep(4, 1)])
def test_experts_on_ranks_without_tokens(rows: int, columns: int) -> None:
    """Gradients of whole weights are summed over all ranks: none may be missing."""
    for found in world.run(rows * columns, _few_tokens, rows, columns):
        assert max(seen.worst for seen in found.values()) < TOLERANCE, found


def test_what_a_router_computes_of_all_tokens_is_refused() -> None:
    model = decoder("Mixtral")
    with fake_grid(2, 2) as mesh:
        for change, message in (
            ({"router_jitter_noise": 0.1}, "router_jitter_noise draws for each token"),
            ({"output_router_logits": True}, "load-balancing loss .* of all tokens"),
        ):
            model.config.update(change)
            with pytest.raises(ValueError, match=message):
                plan_for(model, mesh)
            model.config.update({name: type(value)(0) for name, value in change.items()})
        plan = plan_for(model, mesh)
        assert isinstance(plan["model.layers.*.mlp"], WholeExperts)
        torch_tp2d.parallelize_module(model, mesh, plan)
        ids = causal_lm_batch(4, 4, VOCAB)(0)["input_ids"]
        with pytest.raises(ValueError, match="load-balancing loss .* of all tokens"):
            model(ids, output_router_logits=True)
