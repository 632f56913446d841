"""Checkpoints: saved on one grid and loaded on any other, whole state dicts, killed while saving.

Truth is one device that trains without a break. Everything is AdamW's in fp64, and sizes do not
divide: 33 words, 10 features, 3 heads.
"""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import newest_checkpoint, step_folder
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._pytree import tree_map_only

import torch_tp2d
from support import world
from support.decoder import Block, plan_of, rope_tables
from support.device import DEVICE
from support.marks import deep
from support.models import DOUBLE, batch, grid_mesh, loss_of, relative
from torch_tp2d import Colwise2D, Lifted, Rowwise2D

TOLERANCE = 1e-10
VOCAB, HIDDEN, HEADS, HEAD_DIM, SEQUENCE = 33, 10, 3, 4, 7

Grid = tuple[int, int, int]
"""Replicas by FSDP2, rows, columns."""

GRIDS: list[Grid] = [(1, 1, 1), (1, 1, 2), (1, 2, 1), (1, 2, 2), (1, 1, 4), (1, 4, 1)]
REPLICAS: list[Grid] = [(2, 2, 1), (2, 1, 2)]
LARGER: list[Grid] = [(1, 2, 3), (1, 3, 2), (2, 2, 2)]


class Tied(nn.Module):
    """A decoder with one table for its embedding and its head."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList([Block(HIDDEN, HEADS, HEADS, HEAD_DIM) for _ in range(2)])
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        self.to(DOUBLE)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        rope = rope_tables(torch.arange(x.shape[1]).expand(x.shape[:2]), HEAD_DIM)
        for block in self.blocks:
            x = block(x, rope=rope)
        return self.head(self.norm(x))


class Training:
    """A model, its AdamW, and the mesh that they are on; one device where there is none."""

    def __init__(self, grid: Grid | None = None, seed: int = 0) -> None:
        self.model = Tied(seed)
        self.replicas, self.replica = 1, 0
        if grid is not None:
            self._place(*grid)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def _place(self, replicas: int, rows: int, columns: int) -> None:
        plan = plan_of(HEADS, HEADS, columns) | {"norm": Lifted(SequenceParallel())}
        if replicas == 1:
            torch_tp2d.parallelize_module(self.model, grid_mesh(rows, columns), plan)
            return
        mesh = mesh_of(replicas, rows, columns)
        torch_tp2d.parallelize_module(self.model, mesh["tp_row", "tp_col"], plan)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(self.model, mesh=mesh["dp"])
        self.replicas, self.replica = replicas, mesh.get_local_rank("dp")

    def steps(self, *numbers: int) -> Training:
        for number in numbers:
            ids, target = (x.chunk(self.replicas) for x in batch(4, SEQUENCE, VOCAB, seed=number))
            loss_of(self.model(ids[self.replica]), target[self.replica]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def state(self) -> dict[str, Any]:
        """This rank's part of weights and optimizer state, as torch names it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path, **kwargs: Any) -> None:
        dcp.save(self.state(), checkpoint_id=folder, **kwargs)

    def load(self, folder: Path) -> Training:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return self

    def save_whole(self, path: Path) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = {
            "model": get_model_state_dict(self.model, options=options),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=options),
        }
        if dist.get_rank() == 0:
            # torch 2.12 gathers columns that do not divide into a view, whose elements its own
            # broadcast_from_rank0 then sends in the wrong order.
            torch.save(tree_map_only(Tensor, Tensor.contiguous, state), path)

    def load_whole(self, path: Path) -> Training:
        """From rank 0, which alone reads the file."""
        state: dict[str, Any] = {"model": {}, "optimizer": {}}
        if dist.get_rank() == 0:
            state = torch.load(path, weights_only=True)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(self.model, state["model"], options=options)
        set_optimizer_state_dict(
            self.model, self.optimizer, optim_state_dict=state["optimizer"], options=options
        )
        return self

    def away_from(self, wanted: Training) -> float:
        """The largest relative difference of any parameter and anything AdamW keeps of it."""
        worst = 0.0
        pairs = zip(self.model.parameters(), wanted.model.parameters(), strict=True)
        for ours, theirs in pairs:
            worst = max(worst, relative(ours.detach(), theirs.detach()))
            kept, wanted_of_it = self.optimizer.state[ours], wanted.optimizer.state[theirs]
            assert set(kept) == set(wanted_of_it) == {"step", "exp_avg", "exp_avg_sq"}
            worst = max(worst, *(relative(kept[key], wanted_of_it[key]) for key in kept))
        return worst


def mesh_of(replicas: int, rows: int, columns: int) -> DeviceMesh:
    return init_device_mesh(
        DEVICE, (replicas, rows, columns), mesh_dim_names=("dp", "tp_row", "tp_col")
    )


def name_of(grid: Grid) -> str:
    return "x".join(map(str, grid))


def by_size(grids: list[Grid]) -> dict[int, list[Grid]]:
    """What one start of that many processes can host."""
    sizes = {math.prod(grid) for grid in grids}
    return {size: [grid for grid in grids if math.prod(grid) == size] for size in sizes}


def _save_on(grids: list[Grid], folder: Path) -> dict[str, float]:
    wanted = Training().steps(0, 1)
    seen = {}
    for grid in grids:
        training = Training(grid).steps(0, 1)
        training.save(folder / name_of(grid))
        training.save_whole(folder / f"{name_of(grid)}.pt")
        seen[name_of(grid)] = training.away_from(wanted)
    return seen


def _go_on(grid: Grid, files: list[Path]) -> dict[str, float]:
    """Another seed's weights, replaced by those of each checkpoint, and two more steps."""
    wanted = Training().steps(0, 1, 2, 3)
    seen = {}
    for file in files:
        training = Training(grid, seed=1)
        load = training.load_whole if file.suffix else training.load
        seen[f"{file.name} to {name_of(grid)}"] = load(file).steps(2, 3).away_from(wanted)
    return seen


def _along(origins: dict[Grid, list[str]], folder: Path) -> dict[str, float]:
    """Every grid saves, then every grid loads what is named; the differences from one device."""
    worst: dict[str, float] = {}
    for size, grids in by_size(list(origins)).items():
        worst.update(world.run(size, _save_on, grids, folder)[0])
    for grid, names in origins.items():
        files = [folder / name for name in names]
        for start in range(0, len(files), 6):
            worst.update(world.run(math.prod(grid), _go_on, grid, files[start : start + 6])[0])
    return worst


def test_from_one_grid_to_another(tmp_path: Path) -> None:
    """Weights and AdamW's state go on as if nothing had happened.

    Each grid loads what one of other sizes has saved, in parts, and what another has put together
    on rank 0 (``torch.save``, read with ``weights_only=True``, handed out by rank 0).
    """
    ring = [(1, 1, 1), (1, 2, 1), (1, 1, 2)]
    names = [name_of(grid) for grid in ring]
    origins = {grid: [names[i - 1], f"{names[i - 2]}.pt"] for i, grid in enumerate(ring)}
    worst = _along(origins, tmp_path)
    assert len(worst) == 3 * len(ring)
    assert max(worst.values()) < TOLERANCE, worst


@pytest.mark.deep
def test_from_every_grid_to_every_other(tmp_path: Path) -> None:
    """2x3 and 3x2 too, and FSDP2's replicas of 2x1, 1x2 and 2x2."""
    grids = GRIDS + REPLICAS + LARGER
    names = [name_of(grid) for grid in grids]
    names += [f"{name}.pt" for name in names]
    worst = _along({grid: names for grid in grids}, tmp_path)
    assert len(worst) == len(grids) + 2 * len(grids) ** 2
    assert max(worst.values()) < TOLERANCE, worst


def _whole_onto_replicas(kind: str, from_rank_0: bool) -> tuple[float, str]:
    """A whole state dict set under FSDP2: the largest difference, what it raised."""
    torch.manual_seed(0)
    wanted, model = (nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6)) for _ in range(2))
    if kind == "stock":
        mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    else:
        mesh = mesh_of(2, 2, 1)
        plan = {"0": Colwise2D(), "1": Rowwise2D()}
        torch_tp2d.parallelize_module(model, mesh["tp_row", "tp_col"], plan)
    fully_shard(model, mesh=mesh["dp"])
    given = dict(wanted.state_dict()) if dist.get_rank() == 0 or not from_rank_0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
    try:
        set_model_state_dict(model, given, options=options)
    except AssertionError as error:
        return 0.0, repr(error)
    pairs = zip(model.parameters(), wanted.parameters(), strict=True)
    return max(relative(ours.detach(), theirs.detach()) for ours, theirs in pairs), ""


@pytest.mark.parametrize("kind", ["ours", deep("stock")])
def test_a_whole_state_dict_goes_onto_fsdp2_by_broadcast_from_rank_0(kind: str) -> None:
    """Without ``broadcast_from_rank0`` torch ends in a bare AssertionError, with stock TP too.

    FSDP2 cuts dim 0, which the plan has cut already, into a ``_StridedShard``; its scatter (in
    ``distribute_tensor``) asserts that all parts are alike, which they are not where the dim does
    not divide over both axes. What rank 0 broadcasts each rank cuts for itself.
    """
    assert world.run(4, _whole_onto_replicas, kind, True) == [(0.0, "")] * 4
    assert world.run(4, _whole_onto_replicas, kind, False) == [(0.0, "AssertionError()")] * 4


class KilledWriting(DefaultSavePlanner):
    """Rank 1's process is killed with two of its tensors written."""

    written = 0

    def resolve_data(self, write_item: WriteItem) -> Any:
        self.written += 1
        if self.written == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


class KilledFinishing(dcp.FileSystemWriter):
    """Rank 0's process is killed when all tensors are written and the metadata is not."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        (self.path / ".metadata.tmp").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)


def _killed_while_saving(folder: Path, finishing: bool) -> None:
    training = Training((1, 2, 2)).steps(0, 1)
    training.save(step_folder(folder, 2))
    training.steps(2)
    last = step_folder(folder, 3)
    if finishing:
        training.save(last, storage_writer=KilledFinishing(last))
    else:
        training.save(last, planner=KilledWriting())


def _resumed(folder: Path) -> tuple[str, float]:
    training = Training((1, 1, 2), seed=1)
    found = newest_checkpoint(folder, torch.device("cpu"))
    assert found is not None
    training.load(found).steps(2, 3)
    return found.name, training.away_from(Training().steps(0, 1, 2, 3))


@pytest.mark.parametrize("finishing", [False, deep(True)], ids=["writing", "finishing"])
def test_killed_while_saving(tmp_path: Path, finishing: bool) -> None:
    """The last whole checkpoint is found, and training goes on from it, on another grid.

    DCP writes the metadata last, under another name, and then renames it. Each checkpoint needs a
    folder of its own: saved over another, half of it would be read by the other's metadata.
    """
    with pytest.raises(world.RankFailed, match="the process died|closed by peer"):
        world.run(4, _killed_while_saving, tmp_path, finishing)
    assert step_folder(tmp_path, 3).is_dir()
    for name, difference in world.run(2, _resumed, tmp_path):
        assert name == step_folder(tmp_path, 2).name
        assert difference < TOLERANCE
