"""Decoders of Hugging Face that are built as Llama is, each with something of its own."""

from __future__ import annotations

from typing import Any

import pytest

from support import world
from support.decoders import FAMILIES, VOCAB, decoder, in_fp64_throughout
from support.hf import Differences, causal_lm_batch, on_grid, train_beside
from support.marks import deep

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
    [(2, 2, FEW), *(deep(*grid, sorted(FAMILIES)) for grid in ((2, 2), (1, 4), (4, 1)))],
    ids=lambda value: f"{len(value)}families" if isinstance(value, list) else None,
)
def test_decoders_train_as_on_one_device(rows: int, columns: int, families: list[str]) -> None:
    """A batch of 5 and a sequence of 7, neither of which divides, and 33 words."""
    for found in world.run(rows * columns, _train, rows, columns, families):
        for family, seen in found.items():
            assert seen.worst < TOLERANCE, (family, seen)
