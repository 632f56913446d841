"""torch's optimizers step each rank's shard as one device steps the whole, uneven sizes too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import SequenceParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from support import world
from support.marks import deep
from support.models import grid_mesh
from support.one_module import whole
from torch_tp2d import Colwise2D, Replicate, Rowwise2D, parallelize_module

VOCAB, WIDTH, STEPS = 9, 10, 3

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "RMSprop, centered": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "SGD, nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.reentrant: bool | None = None

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        y = self.norm(x)
        if self.reentrant is not None:
            y = checkpoint(self.mlp, y, use_reentrant=self.reentrant)
        else:
            y = self.mlp(y)
        return self.head(x + y)


def _pair(rows: int, columns: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    reference = Small().double()
    model = copy.deepcopy(reference)
    plan = {
        "embed": Rowwise2D(),
        "norm": Replicate(),
        "up": Colwise2D(),
        "down": Rowwise2D(),
        "head": Colwise2D(use_local_output=False),
    }
    return parallelize_module(model, grid_mesh(rows, columns), plan), reference


def _steps(
    rows: int, columns: int, name: str, averaged: bool, reentrant: bool | None
) -> dict[str, float]:
    """The largest difference of each parameter, of the average too."""
    pair = _pair(rows, columns)
    ids = torch.randint(0, VOCAB, (4, 6), generator=torch.Generator().manual_seed(1))
    averages = []
    for model in pair:
        model.reentrant = reentrant
        optimizer = OPTIMIZERS[name](model.parameters())
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if averaged else None
        for _ in range(STEPS):
            logits = model(ids)
            logits.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if average is not None:
                average.update_parameters(model)
        averages.append(model if average is None else average.module)
    return {
        name: (whole(ours) - theirs).abs().max().item()
        for ours_of, theirs_of in (pair, averages)
        for (name, ours), theirs in zip(
            ours_of.named_parameters(), theirs_of.parameters(), strict=True
        )
    }


@pytest.mark.parametrize(
    "grid",
    [(2, 1), deep((2, 2)), deep((2, 3)), deep((1, 4)), deep((4, 1))],
    ids=lambda g: f"{g[0]}x{g[1]}",
)
def test_an_optimizer_steps_as_on_one_device(grid: tuple[int, int]) -> None:
    for name in OPTIMIZERS:
        for found in world.run(grid[0] * grid[1], _steps, *grid, name, False, None):
            assert len(found) == 9
            assert not {p: value for p, value in found.items() if not value < 1e-10}, name


class _Gated(Small):
    """Two Linears share a gathered input, whose gradient is the sum of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 13)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.gate(x).relu())


def _steps_in_backward(rows: int, columns: int, by_node: bool) -> dict[str, float] | str:
    torch.manual_seed(0)
    reference = _Gated().double()
    model = copy.deepcopy(reference)
    token = {"input_layouts": Shard(1)}
    plan = {
        "embed": Rowwise2D(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": Colwise2D(**token),
        "gate": Colwise2D(**token),
        "down": Rowwise2D(output_layouts=Shard(1)),
        "head": Colwise2D(**token, use_local_output=False),
    }
    parallelize_module(model, grid_mesh(rows, columns), plan)
    ids = torch.randint(0, VOCAB, (4, 6), generator=torch.Generator().manual_seed(1))
    nodes = []
    for each in (reference, model):
        for param in each.parameters():
            optimizer = torch.optim.SGD([param], lr=0.1)

            def step(*_: Any, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            if by_node and each is model:
                nodes.append(get_gradient_edge(param).node)
                nodes[-1].register_hook(step)
            else:
                param.register_post_accumulate_grad_hook(step)
        for _ in range(STEPS):
            try:
                logits = each(ids)
                logits.square().mean().backward()
            except RuntimeError as error:
                return str(error)
    both = zip(model.named_parameters(), reference.parameters(), strict=True)
    return {name: (whole(ours) - theirs).abs().max().item() for (name, ours), theirs in both}


@pytest.mark.parametrize("grid", [(1, 2), (2, 1), deep((2, 2)), deep((1, 4))], ids=str)
def test_an_optimizer_may_step_in_backward(grid: tuple[int, int]) -> None:
    """As soon as a parameter's gradient is there, by PyTorch's recipe for it.

    On one row the gradient of an input that two Linears share was the product with weights that
    had been stepped meanwhile: wrong without an error.
    """
    for found in world.run(grid[0] * grid[1], _steps_in_backward, *grid, False):
        assert isinstance(found, dict)
        assert not {p: value for p, value in found.items() if not value < 1e-12}


def test_steps_by_hooks_that_are_not_seen_are_refused() -> None:
    """Those of autograd's own nodes: no list of a parameter's has them."""
    for found in world.run(2, _steps_in_backward, 1, 2, True):
        assert isinstance(found, str) and "register_post_accumulate_grad_hook" in found


def _outcome(model: nn.Module, ids: Tensor, name: str, foreach: bool) -> str:
    """What comes of a backward, if a parameter was stepped since the forward."""
    loss = model(ids).square().mean()
    param = dict(model.named_parameters())[name]
    param.grad = torch.ones_like(param)
    torch.optim.SGD([param], lr=0.5, foreach=foreach).step()
    model.zero_grad()
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return "raises"
    return "runs"


def _stepped_before_backward(rows: int, columns: int) -> dict[str, tuple[str, str, float]]:
    ids = torch.randint(0, VOCAB, (4, 6), generator=torch.Generator().manual_seed(1))
    found = {}
    for foreach in (False, True):
        for name, _ in Small().named_parameters():
            pair = _pair(rows, columns)
            for model in pair:
                model(ids).square().mean().backward()
                model.zero_grad()
            ours, theirs = (_outcome(model, ids, name, foreach) for model in pair)
            off = 0.0
            if ours == theirs == "runs":
                both = zip(pair[0].parameters(), pair[1].parameters(), strict=True)
                off = max((whole(p.grad) - q.grad).abs().max().item() for p, q in both)
            found[f"{name} {foreach}"] = ours, theirs, off
    return found


@pytest.mark.parametrize("grid", [(1, 2), (2, 1), deep((2, 2))], ids=str)
def test_a_step_between_forward_and_backward(grid: tuple[int, int]) -> None:
    """Refused wherever it is on one device.

    A norm computed on shards did not notice it, nor any module a step with ``foreach``: torch does
    not count those of DTensors. Gradients were wrong without an error.
    """
    for found in world.run(grid[0] * grid[1], _stepped_before_backward, *grid):
        assert len(found) == 18
        for name, (ours, theirs, off) in found.items():
            assert ours == theirs and off < 1e-12, (name, ours, theirs, off)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_averages_and_checkpoints(reentrant: bool | None) -> None:
    for found in world.run(4, _steps, 2, 2, "AdamW", True, reentrant):
        assert not {p: value for p, value in found.items() if not value < 1e-10}
