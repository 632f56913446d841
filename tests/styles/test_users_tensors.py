"""What a style notes of a tensor is kept on one of its own, never on a tensor of the user's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import torch_tp2d
from support import world
from support.models import grid_mesh, noise
from torch_tp2d import Colwise2D, Local2D, Rowwise2D, parallelize_module

WIDTH = 6


class _HandsOn(nn.Module):
    """Returns tensors that it was given or keeps: its inputs, a buffer, one made at first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2, 4, WIDTH))
        self.made: Tensor | None = None

    def forward(self, x: Tensor, beside: Tensor) -> tuple[Tensor, ...]:
        if self.made is None:
            self.made = x.detach().cos()
        return x, beside, self.table, self.made


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.between = _HandsOn()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, beside: Tensor) -> Tensor:
        x, *_ = self.between(self.down(self.up(x).relu()), beside)
        y: Tensor = self.out(x)
        return y


STYLES = {
    "Local2D": Local2D(),
    "Local2D of DTensors": Local2D(use_local_output=False),
    "Replicate": torch_tp2d.Replicate(),
    "Replicate to full samples": torch_tp2d.Replicate(output_layouts=(Shard(0), Replicate())),
}


def _noted_on(rows: int, columns: int, gradients: bool) -> list[str]:
    found = []
    for name, style in STYLES.items():
        mesh, model = grid_mesh(rows, columns), _Model().double()
        plan = {
            "up": Colwise2D(),
            "down": Rowwise2D(output_layouts=(Shard(0), Replicate())),
            "between": style,
            "out": Colwise2D(input_layouts=(Shard(0), Replicate()), use_local_output=False),
        }
        parallelize_module(model, mesh, plan)
        row = mesh.get_local_rank("tp_row")
        x = noise(2, 4, WIDTH, seed=row).requires_grad_(gradients)
        beside = noise(2, 4, WIDTH, seed=row)
        with torch.set_grad_enabled(gradients):
            y = model(x, beside)
        if gradients:
            y.full_tensor().sin().sum().backward()
        users = {"x": x, "beside": beside, "made": model.between.made}
        users |= dict(model.named_buffers()) | dict(model.named_parameters())
        found += [
            f"{name} {at}: {said}"
            for at, tensor in users.items()
            for said in getattr(tensor, "__dict__", {})
            if said.startswith("_tp2d")
        ]
    return found


@pytest.mark.parametrize("gradients", [True, False])
def test_no_note_stays_on_what_a_module_keeps(gradients: bool) -> None:
    """A table that a module keeps and hands out under Local2D had the note of its last use.

    It was set on the very tensor that the module returned, for whoever takes that next.
    """
    for found in world.run(4, _noted_on, 2, 2, gradients):
        assert found == []
