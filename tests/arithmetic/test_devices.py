"""What a step does on NCCL's transport, without a GPU: every rank's record (``support/record.py``).

Meta tensors stand for a GPU's: whatever mixes them with a CPU's, asks for a value, or makes a
tensor of a list is a fault, as it is an error there or stops the stream.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

import torch_tp2d
from support.decoders import VOCAB
from support.marks import deep
from support.record import Collective, Record, Recorder, as_rank, disagreement
from support.steps import EVEN, PLANS, UNEVEN, Case, Step, llama_odd, ready, record, token_ids
from torch_tp2d import (
    Attention2D,
    Block2DParallel,
    Colwise2D,
    Lifted,
    Norm2D,
    Rowwise2D,
    attention_projections,
)
from torch_tp2d.mesh.extents import ask_sizes
from torch_tp2d.mesh.grid import Grid

QUICK = {"llama odd"}
ON_ONE_RANK = {"gpt2", "llama rows split sequences"}


def check(records: list[Record]) -> None:
    """Of every rank of a grid: nothing that a GPU stops for, and ranks that fit each other."""
    for one in records:
        assert not one.faults
    assert not disagreement(records)


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(3, 2)])
@pytest.mark.parametrize("name", [name if name in QUICK else deep(name) for name in PLANS])
def test_ready_plans(name: str, rows: int, columns: int) -> None:
    check([record(PLANS[name], rank, rows, columns) for rank in range(rows * columns)])


@pytest.mark.parametrize(
    "name",
    [name if name in ON_ONE_RANK else deep(name) for name in PLANS if name not in QUICK],
)
def test_other_ready_plans_on_one_rank(name: str) -> None:
    """Whether all ranks fit each other is a deep case.

    Index tensors of fused q, k and v, put back on the CPU, were found by deep cases alone: of the
    quick plans none has fused heads that divide.
    """
    assert not record(PLANS[name], 3, 2, 2).faults


@pytest.mark.deep
def test_a_row_without_tokens() -> None:
    """A piece of nothing came from a column without tokens, and was asked for its one place.

    On NCCL's transport, where sequences are split over rows of which one has none: its ranks
    raised, and those of the other rows would have waited.
    """
    case = PLANS["gpt2 rows split sequences"]
    check([record(case, rank, 3, 2) for rank in range(6)])


@pytest.mark.parametrize("rows,columns", [deep(4, 4), deep(2, 8)])
def test_more_ranks(rows: int, columns: int) -> None:
    """Most of which have no tokens in some dim, or fewer heads than others."""
    case = ready(llama_odd, UNEVEN)
    check([record(case, rank, rows, columns) for rank in range(rows * columns)])


def test_the_size_exchange_copies_nothing_to_the_device() -> None:
    """Symptom: a model without an embedding copied a list from the host in every style's call.

    Cause: ``torch.tensor([size], device=...)``, which on a GPU waits for the copy as well.
    """
    with as_rank(0, 2, 2) as mesh, Recorder() as recorder:
        ask_sizes(3, Grid(mesh).col, torch.device("meta")).wait()
    assert not recorder.record.faults


class Stack(nn.Module):
    """Linears with dropout and a norm between, by any style."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.norm, self.dropout = nn.LayerNorm(16), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(self.dropout(torch.relu(self.up(x)))))


def stack(plan: dict[str, Any], layout: tuple[Any, Any]) -> Case:
    """A block by itself, given local tensors of which no embedding has said the sizes."""

    def apply(mesh: DeviceMesh, device: str) -> Step:
        with torch.device(device):
            model = nn.Sequential(Stack(), Stack())
        torch_tp2d.parallelize_module(model, mesh, {f"*.{key}": x for key, x in plan.items()})
        shape = [*EVEN, 16]
        for placement, size in zip(layout, mesh.shape, strict=True):
            shape[placement.dim] //= size
        torch_tp2d.token_sizes(mesh, EVEN)
        x = torch.zeros(shape, device=device, requires_grad=True)
        return lambda: model(x).sum()

    return apply


TOKENS, FEATURES = (Shard(0), Shard(1)), (Shard(0), Shard(-1))
ALGORITHMS = ("pipelined", "collective", "summa", "bmr", "cannon")


def blocks(**options: Any) -> Case:
    style = {"input_layouts": Shard(-1), "output_layouts": Shard(-1)}
    plan = {
        "up": Block2DParallel(**options),
        "down": Block2DParallel(**options),
        "norm": Norm2D(**style),
    }
    return stack(plan, FEATURES)


class Attends(nn.Module):
    """Causal attention of its own making, 9 heads of queries and 3 of keys."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.dropout = 9, 3, dropout
        self.q, self.o = nn.Linear(36, 36), nn.Linear(36, 36)
        self.k, self.v = nn.Linear(36, 12), nn.Linear(36, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True, dropout_p=self.dropout
        )
        return self.o(y.transpose(1, 2).flatten(2))


def attends(algorithm: str = "auto", dropout: float = 0.0, row_dim: int = 1) -> Case:
    """Of a sequence that rows split, by an algorithm."""

    def apply(mesh: DeviceMesh, device: str) -> Step:
        with torch.device(device):
            model = nn.Sequential(nn.Embedding(VOCAB, 36), Attends(dropout), nn.Linear(36, VOCAB))
        columns, whole = mesh.shape[1], algorithm == "local"
        q, kv, o = attention_projections(9, 3, columns, row_dim=row_dim, whole_keys=whole)
        plan = {
            "0": Rowwise2D(row_dim=row_dim, output_layouts=Shard(1), use_local_output=False),
            "1": Attention2D(row_dim=row_dim, algorithm=algorithm),
            "1.q": q,
            "1.[kv]": kv,
            "1.o": o,
            "2": Colwise2D(row_dim=row_dim, use_local_output=False),
        }
        torch_tp2d.parallelize_module(model, mesh, plan)
        ids = token_ids(UNEVEN, device)
        return lambda: torch_tp2d.cross_entropy(model(ids), ids)

    return apply


def pairs(**options: Any) -> Case:
    plan = {
        "up": Colwise2D(input_layouts=Shard(1), **options),
        "down": Rowwise2D(output_layouts=Shard(1), **options),
        "norm": SequenceParallel(use_local_output=True),
    }
    return stack(plan, TOKENS)


OPERATIONS = {
    **{name: pairs(algorithm=name) for name in ALGORITHMS},
    "gathered again": pairs(algorithm="pipelined", reshard_after_forward=True),
    "pairs fused with what moves": pairs(algorithm="fused"),
    "pairs that stay": pairs(dataflow="weight_stationary"),
    **{f"{name} of blocks": blocks(algorithm=name) for name in ALGORITHMS},
    "blocks that stay": blocks(dataflow="weight_stationary"),
    **{f"attention by {name}": attends(name) for name in ("ring", "gather", "two_phase", "local")},
    "attention with dropout": attends(dropout=0.1),
    "attention of whole sequences": attends(row_dim=0),
}


OFTEN = {"pipelined", "pairs that stay", "summa of blocks", "attention by ring"}


@pytest.mark.parametrize("name", [name if name in OFTEN else deep(name) for name in OPERATIONS])
def test_algorithms_dataflows_and_attention(name: str) -> None:
    check([record(OPERATIONS[name], rank, 2, 2) for rank in range(4)])


# Whether the ranks fit each other


def _started(*order: tuple[tuple[int, ...], int]) -> Record:
    return Record(
        [Collective((ranks, 0), "all_reduce", "float32", (n, "sum"), n) for ranks, n in order]
    )


def test_the_check_of_the_order_finds_what_is_wrong() -> None:
    """Another size, a swapped pair, one too few, splits that do not fit, and a cycle of groups."""
    a, b, c = (0, 1), (1, 2), (0, 2)
    good = [_started((a, 1), (c, 1)), _started((a, 1), (b, 1)), _started((b, 1), (c, 1))]
    assert not disagreement(good)
    assert "collective 0" in disagreement([_started((a, 1)), _started((a, 2))])
    swapped = [_started((a, 1), (a, 2)), _started((a, 2), (a, 1))]
    assert "collective 0" in disagreement(swapped)
    assert "collective 1" in disagreement([_started((a, 1), (a, 1)), _started((a, 1))])
    assert "only [0]" in disagreement([_started((a, 1)), _started()])
    # Each of three ranks starts first what the next one starts last.
    cycle = [_started((a, 1), (c, 1)), _started((b, 1), (a, 1)), _started((c, 1), (b, 1))]
    assert "waits for itself" in disagreement(cycle)

    def exchange(sends: tuple[int, int], receives: tuple[int, int]) -> Record:
        return Record([Collective((a, 0), "all_to_all_single", "int64", (sends, receives), 8)])

    assert not disagreement([exchange((0, 2), (0, 1)), exchange((1, 0), (2, 0))])
    assert "collective 0" in disagreement([exchange((0, 2), (0, 1)), exchange((2, 0), (2, 0))])


BOTH = ("tp_row", "tp_col")


def _stage(rank: int) -> Record:
    """What a rank does of two pipeline stages, the first of which has both axes as one line.

    Two batches, all forwards first. What a stage hands on goes to the rank of the next one that is
    at the same place in its grid.
    """
    with as_rank(rank, 2, 2, 2) as mesh:
        first = mesh.get_local_rank("dp") == 0
        line = {
            "0": Lifted(ColwiseParallel(), axes=BOTH),
            "1": Lifted(RowwiseParallel(), axes=BOTH),
        }
        place = rank % 4
        handed = Collective(((place, place + 4), 0), "send", "float32", (128,), 512)
        if first:
            with torch.device("meta"):
                model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
            torch_tp2d.parallelize_module(model, mesh[BOTH], line)
            x = torch.zeros(*EVEN, 16, device="meta", requires_grad=True)
            step: Step = lambda: model(x).sum()  # noqa: E731
        else:
            step = pairs()(mesh[BOTH], "meta")
        with Recorder() as recorder:
            events, losses = recorder.record.events, []
            for _ in range(2):
                events += [] if first else [handed]
                losses.append(step())
                events += [handed] if first else []
            for loss in losses:
                events += [handed] if first else []
                loss.backward()
                events += [] if first else [handed]
    return recorder.record


def test_pipeline_stages_that_use_other_groups() -> None:
    records = [_stage(rank) for rank in range(8)]
    line = {one.group[0] for record in records for one in record.collectives}
    assert (0, 1, 2, 3) in line and (4, 5, 6, 7) not in line
    check(records)


def test_a_group_of_some_ranks_does_not_wait_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Symptom: on NCCL, with ``init_process_group(device_id=)``, a style on both axes of a pipeline
    stage's grid would have hung: found by reading, as the others of the world were not there.

    Cause: torch makes a group of a bound world by splitting the world's communicator, for which
    NCCL waits for all its ranks, and ``use_local_synchronization`` does not change that.
    """
    splits: list[Any] = []
    monkeypatch.setattr(distributed_c10d, "_get_split_source", splits.append)
    with as_rank(0, 2, 2, 2) as mesh:
        world = dist.group.WORLD
        assert world is not None
        world.bound_device_id = torch.device("cuda", 0)
        line = Grid(mesh[BOTH], BOTH).col
        assert line.size == 4 and not splits
        assert world.bound_device_id == torch.device("cuda", 0)
