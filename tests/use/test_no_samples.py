"""A batch without samples, as a last one may be: gradients are zeros, and training goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from support import world
from support.marks import deep
from support.models import batch, grid_mesh, loss_of, relative
from torch_tp2d import Colwise2D, Rowwise2D, parallelize_module

VOCAB, WIDTH, INNER = 11, 12, 17
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name} for name in ("collective", "pipelined", "summa", "cannon")},
    "weight stationary": {"dataflow": "weight_stationary"},
}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + y


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
    return nn.Sequential(embedding, _Block(), _Block(), head).double()


def _plan(tokens: Any, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "0": Rowwise2D(input_layouts=Replicate(), output_layouts=tokens),
        "*.up": Colwise2D(input_layouts=tokens, **options),
        "*.down": Rowwise2D(output_layouts=tokens, **options),
        "3": Colwise2D(input_layouts=tokens, use_local_output=False),
    }


def _steps(model: Any) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for samples in (3, 0, 2):
        ids, target = batch(samples, 5, VOCAB)
        y = model(ids)
        (loss_of(y, target) if samples else y.sum()).backward()
        if not samples:
            assert y.shape == (0, 5, VOCAB)
            of_none = [param.grad.clone() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return of_none


def _none(rows: int, columns: int) -> dict[str, float]:
    mesh, differ = grid_mesh(rows, columns), {}
    for name, options in OPTIONS.items():
        for tokens in (Replicate(), Shard(1)):
            if name == "cannon" and rows != columns:
                continue
            reference, model = _model(), _model()
            parallelize_module(model, mesh, _plan(tokens, options))
            _steps(reference)
            assert not any(grad.to_local().any() for grad in _steps(model)), name
            pairs = zip(model.parameters(), reference.parameters(), strict=True)
            differ[f"{name} {tokens}"] = max(relative(a.detach(), b.detach()) for a, b in pairs)
    return differ


@pytest.mark.parametrize("rows,columns", [(2, 1), deep(2, 2), deep(1, 4), deep(4, 1), deep(2, 3)])
def test_a_batch_without_samples(rows: int, columns: int) -> None:
    """Whether to keep a weight was a division by no samples, a ZeroDivisionError on every rank."""
    for differ in world.run(rows * columns, _none, rows, columns):
        assert max(differ.values()) < 1e-11, differ
