"""Code between styled modules that mixes tokens of which each rank has a part: refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from support import world
from support.marks import deep
from support.models import grid_mesh
from support.one_module import gradients
from torch_tp2d import Colwise2D, Rowwise2D, parallelize_module

WIDTH, VOCAB, LAYERS = 6, 11, 2

MIXES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda x: x.flip(1),
    "token shift": lambda x: x + F.pad(x, (0, 0, 1, -1)),
    "running sum": lambda x: x.cumsum(1) / 8,
    "centred": lambda x: x - x.mean(1, keepdim=True),
    "Fourier": lambda x: torch.fft.fft(x, dim=1).real / 8,
    "softmax over tokens": lambda x: x.softmax(1),
    "pooled": lambda x: x + F.avg_pool1d(x.mT, 3, 1, 1).mT,
    "attention": lambda x: x + (x @ x.mT).softmax(-1) @ x,
}
TAKES_ONE_BY_ONE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "heads": lambda x: x.unflatten(-1, (2, 3)).flip(2).flatten(2),
    "transposed": lambda x: 2 * x.mT.contiguous().mT,
    "chunks": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "gate": lambda x: torch.where(x > 0, x, 0.1 * x),
}


class Model(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.up = nn.ModuleList(nn.Linear(WIDTH, 8) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(8, WIDTH) for _ in range(LAYERS))
        self.between = between

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for up, down in zip(self.up, self.down, strict=True):
            x = self.between(x) + down(up(x).relu())
        y: Tensor = self.head(x)
        return y


def _said(rows: int, columns: int, length: int) -> dict[str, str]:
    mesh, said = grid_mesh(rows, columns), {}
    ids = torch.randint(0, VOCAB, (4, length), generator=torch.Generator().manual_seed(1))
    for stream in (Shard(1), Replicate()):
        for name, between in {**MIXES, **TAKES_ONE_BY_ONE}.items():
            model = Model(between).double()
            reference = copy.deepcopy(model)
            plan = {
                "embed": Rowwise2D(input_layouts=Replicate(), output_layouts=stream),
                "up.*": Colwise2D(input_layouts=stream),
                "down.*": Rowwise2D(output_layouts=stream),
                "head": Colwise2D(input_layouts=stream, use_local_output=False),
            }
            parallelize_module(model, mesh, plan)
            try:
                with torch.no_grad():
                    # Without a graph only names tell; the next forward is the first that has one.
                    model(ids)
                for y in (model(ids).full_tensor(), reference(ids)):
                    F.cross_entropy(y.flatten(0, 1), ids.flatten()).backward()
                worst = max(gradients(reference, model).values())
                answer = f"differs by {worst > 1e-10}"
            except ValueError as error:
                answer = str(error)
            said[f"{name}, {stream}"] = answer
    return said


@pytest.mark.parametrize(
    "rows,columns,length", [(1, 2, 8), deep(2, 2, 8), deep(2, 2, 7), deep(1, 4, 8), deep(2, 3, 6)]
)
def test_tokens_mixed_between_modules(rows: int, columns: int, length: int) -> None:
    """Each rank mixed the tokens of its own part, in silence, and handed them on as they are split.

    Sizes fit, no module of the plan took part, and debug mode looked into Local2D's modules only.
    """
    for said in world.run(rows * columns, _said, rows, columns, length):
        for name in MIXES:
            message = said.pop(f"{name}, {Shard(1)}")
            assert message.startswith("Model: "), (name, message)
            there = "each was made of others of the same part" in message
            # A rank with a single token, or none, only knows it from the others.
            there = there or "tokens of which each rank has a part are mixed" in message
            # At once, with file and line.
            assert there or f"in {__file__}:" in message, (name, message)
        assert set(said.values()) == {"differs by False"}, said
