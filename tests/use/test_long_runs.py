"""What a long run must not gather: memory, live tensors, threads, open files, process groups."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from support import world
from support.marks import deep
from support.models import batch, grid_mesh, loss_of, parallelize, plan_2d, transformer
from torch_tp2d import Dropout2D
from torch_tp2d.comm import set_link_rate
from torch_tp2d.comm.groups import BACKEND
from torch_tp2d.mesh.grid import Grid

VOCAB, SEQUENCE, BATCH = 33, 13, 3
SPARE_FILES = 24
"""gloo closes sockets that it no longer needs when it comes to it: up to 18 seen, of any run."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body here takes long by intention; a collective still may not."""
    monkeypatch.setattr(world, "TIMEOUT", 3000.0)


@dataclass(frozen=True)
class Held:
    """What this process holds."""

    tensors: int
    groups: int
    threads: int
    files: int
    memory: int
    """Resident, in KiB."""

    @classmethod
    def now(cls) -> Held:
        # What a peer has not received yet is held here until it has.
        dist.barrier()
        gc.collect()
        return cls(
            tensors=sum(issubclass(type(x), Tensor) for x in gc.get_objects()),
            groups=len(dist.distributed_c10d._world.pg_map),
            threads=len(os.listdir("/proc/self/task")),
            files=len(os.listdir("/proc/self/fd")),
            memory=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
            >> 10,
        )

    def __sub__(self, other: Held) -> Held:
        mine, theirs = vars(self), vars(other)
        return Held(**{name: mine[name] - theirs[name] for name in mine})


def made(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A tied transformer with dropout, embeddings, stock norms, linears in both ways."""
    model = transformer(VOCAB, dropout_p=0.1)
    names = "dropout", "layers.*.attention.resid_dropout", "layers.*.feed_forward.resid_dropout"
    dropout = {name: Dropout2D(input_layouts=Shard(1)) for name in names}
    parallelize(model, mesh, plan_2d() | dropout)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    torch.manual_seed(number)
    ids, target = batch(BATCH, SEQUENCE + number % 3, VOCAB, seed=number)
    loss = loss_of(model(ids), target)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _long(warm_up: int, steps: int) -> Held:
    """What was gathered after the warm-up; every tenth step is followed by an evaluation."""
    model, optimizer = made(grid_mesh(2, 2))
    start = None
    for number in range(steps + 1):
        if number == warm_up:
            start = Held.now()
        stepped(model, optimizer, number)
        if number % 10 == 0:
            model.eval()
            with torch.no_grad():
                model(batch(1, 5, VOCAB, seed=number)[0])
            model.train()
    assert start is not None
    return Held.now() - start


@pytest.mark.parametrize("warm_up,steps,mebibytes", [(6, 8, 8), deep(200, 2000, 16)])
def test_a_long_run_gathers_nothing(warm_up: int, steps: int, mebibytes: int) -> None:
    for gathered in world.run(4, _long, warm_up, steps, fresh=True):
        assert gathered.tensors == gathered.groups == gathered.threads == 0, gathered
        assert gathered.files <= SPARE_FILES, gathered
        assert gathered.memory < mebibytes * 1024, gathered


def _only_mesh(_: DeviceMesh) -> list[Any]:
    mesh = grid_mesh(2, 2)
    for group in mesh.get_all_groups():
        # As DTensor does, for the norm of the gradients.
        dist.all_reduce(torch.zeros(1), group=group)
    return []


def _on_own_mesh(_: DeviceMesh) -> list[Any]:
    model, optimizer = made(grid_mesh(2, 2))
    stepped(model, optimizer, 0)
    return [weakref.ref(model)]


def _on_one_mesh(mesh: DeviceMesh) -> list[Any]:
    model, optimizer = made(mesh)
    stepped(model, optimizer, 0)
    return [weakref.ref(model)]


def _left_alone(mesh: DeviceMesh) -> list[Any]:
    """A model that never ran backward, one without a graph, one that failed on its way."""
    seen = []
    for kind in ("no backward", "no graph", "fails"):
        model, _ = made(mesh)
        seen.append(weakref.ref(model))
        if kind == "fails":
            model.norm.register_forward_pre_hook(_fail)
        ids, target = batch(BATCH, SEQUENCE, VOCAB)
        try:
            with torch.set_grad_enabled(kind != "no graph"):
                loss_of(model(ids), target)
        except ArithmeticError:
            assert kind == "fails"
    return seen


def _fail(*_: Any) -> None:
    raise ArithmeticError


def _many(make: Callable[[DeviceMesh], list[Any]], count: int) -> tuple[Held, int]:
    """What ``count`` of them leave after the first two, and how many models live on."""
    mesh = grid_mesh(2, 2)
    models: list[Any] = []
    start = None
    for number in range(count + 2):
        if number == 2:
            start = Held.now()
        models += make(mesh)
    assert start is not None
    return Held.now() - start, sum(model() is not None for model in models)


def _many_of_each(count: int) -> list[tuple[Held, int]]:
    return [_many(make, count) for make in (_only_mesh, _on_own_mesh, _on_one_mesh, _left_alone)]


@pytest.mark.parametrize("count", [deep(3), deep(50)])
def test_models_and_meshes_that_are_dropped_leave_what_torch_leaves_of_a_mesh(count: int) -> None:
    """torch keeps the two groups of every ``init_device_mesh`` until the world is destroyed.

    Ours, which are by ranks, are made once: on one mesh nothing stays at all. Symptom, once: up to
    eight weights that were gathered ahead outlived their model, as did what dropout counts for
    every mesh.
    """
    nothing = Held(0, 0, 0, 0, 0)
    for (of_a_mesh, _), on_own, *on_one in world.run(4, _many_of_each, count, fresh=True):
        assert of_a_mesh.groups == 2 * count
        for make, (left, alive), allowed in [
            ("on a mesh of its own", on_own, of_a_mesh),
            ("on one mesh", on_one[0], nothing),
            ("left alone", on_one[1], nothing),
        ]:
            assert alive == 0, (make, left)
            assert left.tensors <= 0, (make, left)
            assert left.groups == allowed.groups, (make, left, allowed)
            assert left.threads <= allowed.threads, (make, left, allowed)
            assert left.files <= allowed.files + SPARE_FILES, (make, left, allowed)
            assert left.memory - allowed.memory < 8 * 1024, (make, left, allowed)


def _worlds(folder: Path, count: int) -> tuple[list[list[float]], list[int], Held]:
    """Of ``count`` worlds: the losses of two steps, in how many pieces a large transfer is sent.

    And what was gathered after the second of them. In each the links are found to be fast.
    """
    rank = dist.get_rank()
    losses, pieces, start = [], [], None
    for number in range(count):
        if number == 2:
            start = Held.now()
        mesh = grid_mesh(2, 2)
        model, optimizer = made(mesh)
        losses.append([stepped(model, optimizer, step) for step in range(2)])
        column = Grid(mesh).col
        pieces.append(column.pieces(2**20, torch.float32))
        set_link_rate(1e9, column)
        del mesh, model, optimizer, column
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group(
            BACKEND,
            init_method=f"file://{folder}/{number}",
            rank=rank,
            world_size=4,
            timeout=timedelta(seconds=60),
        )
    assert start is not None
    return losses, pieces, Held.now() - start


@pytest.mark.parametrize("count", [deep(3), deep(20)])
def test_worlds_made_and_destroyed_in_one_process(tmp_path: Path, count: int) -> None:
    """As after a failure that was caught: the same losses, and nothing left of the world before.

    Not what was measured of its links either, which was kept by the names of groups. Those come
    again in the next world, where a rank whose process is new would not have known: it would have
    cut what it sends and receives otherwise than the others do.
    """
    for losses, pieces, gathered in world.run(4, _worlds, tmp_path, count, fresh=True):
        assert all(these == losses[0] for these in losses), losses
        assert all(count == pieces[0] for count in pieces), pieces
        assert gathered.tensors == gathered.groups == gathered.threads == 0, gathered
        assert gathered.files <= SPARE_FILES, gathered
        assert gathered.memory < 8 * 1024, gathered
