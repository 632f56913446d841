"""``torch.set_default_device``: nothing of the library's own is made where it says.

Found on a GPU, where models that made positions without saying where could not be given a derived
plan. Meta stands for the GPU: what lands there by mistake meets tensors of the CPU, which fails.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import torch_tp2d
from support import world
from support.fake import fake_grid
from support.models import RMSNorm, grid_mesh, relative
from torch_tp2d import Colwise2D, Rowwise2D, plan_for

VOCAB, HIDDEN = 11, 8


class Net(nn.Module):
    """With dropout, a norm of somebody's own, and code that the first forward looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(16, HIDDEN)
        self.norm, self.up, self.down = (
            RMSNorm(HIDDEN),
            nn.Linear(HIDDEN, 12),
            nn.Linear(12, HIDDEN),
        )
        self.drop, self.head = nn.Dropout(0.0), nn.Linear(HIDDEN, VOCAB)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: Tensor, places: Tensor | None = None) -> Tensor:
        places = torch.arange(ids.shape[1]) if places is None else places
        x = self.words(ids) + self.places(places)
        x = x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))
        self.seen += 1
        return self.head(x)


def _train() -> list[float]:
    mesh = grid_mesh(2, 2)
    torch.manual_seed(0)
    alone = Net().double()
    model = copy.deepcopy(alone)
    ids, places = torch.arange(20).view(4, 5) % VOCAB, torch.arange(5)
    plan = plan_for(model, mesh)
    with torch.device("meta"):
        torch_tp2d.parallelize_module(model, mesh, plan)
        found = []
        for _ in range(2):
            wanted, seen = alone(ids, places), model(ids, places)
            wanted.square().mean().backward()
            seen.square().mean().backward()
            found.append(relative(seen.detach(), wanted.detach()))
        found += [
            relative(ours.grad, one.grad)
            for ours, one in zip(model.parameters(), alone.parameters(), strict=True)
            if ours.grad is not None and one.grad is not None
        ]
        check = torch_tp2d.check_plan(copy.deepcopy(alone), mesh, plan, inputs=(ids, places))
        model.drop.p = 0.3
        model(ids, places).square().mean().backward()
    assert len(found) == 2 + len(list(alone.parameters()))
    return [*found, *check.gradients.values()]


def test_training_and_checking_a_plan() -> None:
    for found in world.run(4, _train):
        assert max(found) < 1e-12


def test_plans_and_descriptions() -> None:
    """Those of a model that says nothing of where its positions are."""
    net = Net()
    with fake_grid(2, 2) as mesh, torch.device("meta"):
        plan = plan_for(net, mesh)
        assert isinstance(plan["up"], Colwise2D) and isinstance(plan["down"], Rowwise2D)
        told = torch_tp2d.describe(net, (2, 2), plan, batch=4, seq=5)
    wanted = torch_tp2d.describe(net, (2, 2), plan, batch=4, seq=5)
    assert told.memory == wanted.memory
