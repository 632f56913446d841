"""A plan held against one device, by whoever wrote it."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from support import world
from support.fake import fake_grid
from support.marks import deep
from support.models import grid_mesh, noise, plan_dtensor, transformer
from torch_tp2d import Colwise2D, Rowwise2D, check_plan, parallelize_module, planner
from torch_tp2d.planner.check_plan import PlanCheck
from torch_tp2d.planner.processes import on_processes


class Wide(nn.Module):
    """An activation of somebody's, which counts the features that it sees."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() / x.shape[-1]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.up, self.act, self.down = nn.Linear(8, 12), Wide(), nn.Linear(12, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.down(self.act(self.up(self.norm(x)))))


def _plan(*_: Any) -> Any:
    whole = {"output_layouts": Replicate()}
    return {
        "embed": Rowwise2D(**whole),
        "up": Colwise2D(),
        "down": Rowwise2D(**whole),
        "head": Colwise2D(output_layouts=(Replicate(), Replicate())),
    }


def _wrong(rows: int, columns: int) -> str:
    with pytest.raises(ValueError) as failed:
        check_plan(Model(), grid_mesh(rows, columns), _plan)
    return str(failed.value)


def _right(rows: int, columns: int) -> tuple[float, int]:
    model = Model()
    model.act = nn.ReLU()
    found = check_plan(model, grid_mesh(rows, columns), _plan)
    assert list(found.outputs) == ["embed", "norm", "up", "act", "down", "head"]
    assert next(model.parameters()).dtype == torch.float32, "the model is not changed"
    return found.worst, len(found.gradients)


def test_a_right_plan() -> None:
    for worst, gradients in world.run(4, _right, 2, 2):
        assert worst < 1e-12 and gradients == 9


class Gated(Model):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 24)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return self.head(x + self.down(gate.sigmoid() * up))


def _fused(rows: int, columns: int) -> PlanCheck:
    # As where links are measured, so that a Linear chooses its dataflow.
    planner.assume(planner.Rates(1e9, 1e9, 1e10))
    plan = {**_plan(), "up": Colwise2D(parts=2)}
    return check_plan(Gated(), grid_mesh(rows, columns), plan)


def test_parts_of_several_projections_are_not_compared() -> None:
    """What a column has of each was taken for one part of all, where a dataflow is chosen."""
    for found in world.run(4, _fused, 2, 2):
        assert found.worst < 1e-12 and "up" in found.unseen


def test_the_first_module_that_differs_is_named() -> None:
    """Its gradients are wrong too, of everything before it."""
    words = r"act is the first to differ, its output by 3.0e\+00; of 9 gradients"
    for said in world.run(4, _wrong, 1, 4):
        assert re.search(words, said), said


class Flat(nn.Module):
    """Tokens in one dim, as DTensor cannot put uneven parts of two."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1).relu().view(x.shape)


def _cannot_run(rows: int, columns: int) -> str:
    model = Model()
    model.act = Flat()
    plan = {**_plan(), "up": Colwise2D(use_local_output=False)}
    with pytest.raises(ValueError) as failed:
        check_plan(model, grid_mesh(rows, columns), plan)
    return str(failed.value)


def test_a_module_that_cannot_run_is_named() -> None:
    """DTensor's error said what is wrong, and nothing of where."""
    for said in world.run(4, _cannot_run, 2, 2):
        assert re.match("Model cannot run under the plan: act raised RuntimeError: .*flatten", said)


def _of_parts(rows: int, columns: int) -> float:
    """A block alone, whose output is this rank's part of the tokens."""
    mesh = grid_mesh(rows, columns)
    block = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
    x = distribute_tensor(noise(5, 7, 8), mesh, (Shard(0), Shard(1)))
    plan = {"0": Colwise2D(input_layouts=Shard(1)), "2": Rowwise2D(output_layouts=Shard(1))}
    return check_plan(block, mesh, plan, inputs=(x,)).worst


def test_a_block_alone() -> None:
    assert max(world.run(4, _of_parts, 2, 2)) < 1e-12


class Seen(nn.Module):
    """Images, of which a Conv2d makes patches: it takes no input of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(3, 8, 2, stride=2)
        self.up, self.down, self.guess = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.guess(x + self.down(self.up(x).relu()))


def _of_images(rows: int, columns: int, by_name: bool) -> float:
    images = noise(5, 3, 4, 6).float()
    inputs = {"images": images} if by_name else (images,)
    return check_plan(Seen(), grid_mesh(rows, columns), inputs=inputs).worst


@pytest.mark.parametrize("by_name", [True, False])
def test_a_plan_derived_from_inputs_in_fp32(by_name: bool) -> None:
    """The plan was derived from a forward of the copy in fp64 with the inputs in fp32."""
    assert max(world.run(4, _of_images, 2, 2, by_name)) < 1e-12


def test_ranks_of_its_own() -> None:
    found = check_plan(transformer(), (1, 2), plan_dtensor(), batch=3, seq=5, layers=1)
    assert found.worst < 1e-10 and not any("layers.1" in name for name in found.outputs)
    assert "gradients within" in str(found)


@pytest.mark.deep
def test_a_rank_of_its_own_fails() -> None:
    with pytest.raises(ValueError, match="on rank 0 of mesh .tp_row=1, tp_col=2.: ValueError"):
        check_plan(Model(), (1, 2), {"embad": Rowwise2D()})


def _leaves(mesh: Any, how: str) -> Any:
    if mesh.get_rank() == 1:
        if how == "exit":
            raise SystemExit(0)
        if how == "at once":
            os._exit(0)
        return lambda: None
    return mesh.get_rank()


@pytest.mark.parametrize(
    "how,said",
    [
        deep("exit", "on rank 1 of .*: SystemExit: 0"),
        deep("at once", "on rank 1 of .*: its process ended with 0 and without an answer"),
        deep("no pickle", "on rank 1 of .*: (AttributeError|PicklingError): .*lambda"),
    ],
)
def test_a_rank_that_does_not_answer(how: str, said: str) -> None:
    """The caller waited for ever where a process ended with 0: only other codes counted as ended.

    A forward that calls ``sys.exit()`` ended so, and a process whose answer cannot be pickled.
    """
    with pytest.raises(ValueError, match=said):
        on_processes((1, 2), _leaves, how)


def test_what_cannot_be_checked() -> None:
    with pytest.raises(ValueError, match="cannot be handed to other processes"):
        check_plan(Model(), (1, 2), lambda model, mesh: {})
    with pytest.raises(ValueError, match=r"DeviceMesh or \(R, C\), not \(4,\)"):
        check_plan(Model(), (4,))
    with torch.device("meta"), pytest.raises(ValueError, match="without values"):
        check_plan(Model(), (1, 2))
    with fake_grid(1, 2) as mesh:
        model = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh, {"0": Colwise2D()})
        with pytest.raises(ValueError, match="on a mesh already"):
            check_plan(model, mesh)
