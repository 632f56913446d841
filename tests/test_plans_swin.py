"""Hugging Face's Swin and the tutorial's Swin-UNet on a grid, beside one device in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hf
import pytest
import torch
import torch.nn.functional as F
import world
from hf import Batch, on_grid, train_beside
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

TOLERANCE = 1e-9


def swin(heads: tuple[int, ...] = (4, 8), classes: int = 0, **config: Any) -> nn.Module:
    """Two stages of two blocks, the second of each shifted, on images that windows do not fit."""
    from transformers import SwinConfig, SwinForImageClassification, SwinModel

    torch.manual_seed(0)
    made = SwinConfig(
        image_size=24,
        patch_size=2,
        num_channels=3,
        embed_dim=24,
        depths=(2, 2),
        num_heads=heads,
        window_size=4,
        drop_path_rate=0.0,
        initializer_range=0.3,
        num_labels=classes,
        **config,
    )
    model = (SwinForImageClassification if classes else SwinModel)(made).double()
    for name, param in model.named_parameters():
        if name.endswith(("bias", "table", "position_embeddings")):
            # transformers starts them at zero, where a wrong share of them does not show.
            nn.init.normal_(param, std=0.5)
    return model


def images(size: int) -> Callable[[int], Batch]:
    def batch(step: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        return {"pixel_values": torch.randn(size, 3, 24, 24, generator=generator).double()}

    return batch


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def feature_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Of all features and of the pooled ones, each image's with a weight of its own."""
    out = model(**batch)
    weight = 1 + torch.arange(batch["pixel_values"].shape[0], dtype=torch.float64)
    tokens, pooled = _whole(out.last_hidden_state), _whole(out.pooler_output)
    return (tokens.pow(2).mean((1, 2)) * weight).mean() + (pooled.sin().mean(1) * weight).mean()


def _train(rows: int, columns: int, sizes: list[int], heads: tuple[int, ...]) -> float:
    worst = 0.0
    for size in sizes:
        reference, model, _ = on_grid(lambda: swin(heads), rows, columns)
        seen = train_beside(
            reference, model, images(size), truth=feature_loss, loss=feature_loss, steps=1
        )
        worst = max(worst, seen.worst)
    return worst


@pytest.mark.parametrize("rows,columns", [(2, 2), (1, 4), (4, 1), (2, 4)])
def test_swin(rows: int, columns: int) -> None:
    assert max(world.run(rows * columns, _train, rows, columns, [4, 3], (4, 8))) < TOLERANCE
