"""Local2D: a module on this row's local tensors, beside one device in fp64, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import torch_tp2d
from support import world
from support.marks import deep
from support.models import grid_mesh, noise, relative
from support.one_module import feed, gradients, no_difference, spread
from torch_tp2d import Local2D, parallelize_module

WIDTH, VOCAB = 6, 11
ROW, TOKENS = (Shard(0), Replicate()), (Shard(0), Shard(1))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Checkpointed(Scale):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(super().forward, x, use_reentrant=self.reentrant)
        return torch.tanh(checkpoint(super().forward, torch.tanh(y), use_reentrant=self.reentrant))


def _pair(module: nn.Module, mesh: DeviceMesh, plan: Any) -> tuple[nn.Module, nn.Module]:
    reference = module.double()
    return reference, parallelize_module(copy.deepcopy(reference), mesh, plan)


def _checkpointed(rows: int, columns: int) -> dict[str, float]:
    mesh, found = grid_mesh(rows, columns), {}
    all_of_it = torch_tp2d.Replicate(input_layouts=(Replicate(), Replicate()))
    for style, layout in ((Local2D(), ROW), (all_of_it, (Replicate(), Replicate()))):
        for reentrant in (False, True):
            if reentrant and style is all_of_it:
                continue
            module = Checkpointed()
            module.reentrant = reentrant
            reference, model = _pair(module, mesh, style)
            x = noise(4, 5, WIDTH)
            theirs, ours = x.clone().requires_grad_(), feed(x, mesh, layout, "local")
            for part, leaf in ((reference, theirs), (model, ours)):
                for _ in range(2):
                    y = part(leaf) + part(leaf * 2)
                    y.square().sum().backward()
            assert "scale" not in vars(model) and isinstance(model.scale, DTensor)
            mine = spread(theirs.grad, mesh, layout).to_local()
            case = f"{type(style).__name__} {reentrant}"
            found[f"{case} input"] = relative(ours.grad, mine)
            found |= {f"{case} {k}": v for k, v in gradients(reference, model).items()}
    return found


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(1, 2)])
def test_checkpointing_inside_a_module_that_runs_locally(rows: int, columns: int) -> None:
    """The recomputation met the parameters as DTensors: "mixed torch.Tensor and DTensor".

    The local ones were in place during forward only.
    """
    no_difference(world.run(rows * columns, _checkpointed, rows, columns), 1e-10)


class Broken(Scale):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        torch._dynamo.graph_break()
        return F.gelu(super().forward(y))


def _compiled(kinds: tuple[str, ...]) -> dict[str, float]:
    mesh, found = grid_mesh(2, 1), {}
    for kind in kinds:
        last = {"fullgraph": Scale, "broken": Broken, "checkpointed": Checkpointed}[kind]
        reference, model = _pair(last(), mesh, Local2D())
        model.compile(backend="aot_eager", fullgraph=kind == "fullgraph")
        x = noise(4, 5, WIDTH)
        for step in range(2):
            ours, theirs = feed(x, mesh, ROW, "local"), x.clone().requires_grad_()
            model(ours).square().sum().backward()
            reference(theirs).square().sum().backward()
            mine = spread(theirs.grad, mesh, ROW).to_local()
            found[f"{kind} {step} input"] = relative(ours.grad, mine)
            found |= {f"{kind} {step} {k}": v for k, v in gradients(reference, model).items()}
    return found


@pytest.mark.parametrize("kinds", [("fullgraph", "broken"), deep(("checkpointed",))])
def test_compiled(kinds: tuple[str, ...]) -> None:
    """With fullgraph it raised; otherwise backward did, "guessed its metadata incorrectly".

    Dynamo cannot trace object.__delattr__, by which the local parameters were taken out of place,
    and ran what sums their gradients outside the graph, from where a deferred sum came into it.
    """
    no_difference(world.run(2, _compiled, kinds), 1e-10)
