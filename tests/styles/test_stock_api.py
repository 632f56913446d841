"""What torch tests of its ``parallelize_module``, of ours: plans, wildcards, sources, wrappers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
)
from torch.nn.parallel import DistributedDataParallel

from support import world
from support.device import DEVICE
from support.fake import mesh_of, pretend
from support.marks import deep
from support.mistakes import refused
from support.models import grid_mesh, noise, relative
from support.one_module import no_difference, randomized, spread
from support.stock import BOTH, FEATURES, ROW, TOLERANCE, run_beside
from torch_tp2d import Colwise2D, Rowwise2D, parallelize_module
from torch_tp2d.mesh.layouts import Layout


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1, self.net2 = nn.Linear(10, 16), nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(torch.relu(self.net1(x)))


class _Square(nn.Module):
    """Two of one width, so that one style fits both."""

    def __init__(self) -> None:
        super().__init__()
        self.net1, self.net2 = nn.Linear(10, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net2(torch.relu(self.net1(x)))


class _Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Square() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _plans(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    found: dict[str, float] = {}
    for colwise, rowwise in ((ColwiseParallel, RowwiseParallel), (Colwise2D, Rowwise2D)):
        each = {key: colwise(output_layouts=Replicate()) for key in ("net*", "net?", "net[1-2]")}
        pair = {"net1": colwise(), "net2": rowwise()}
        around = PrepareModuleInputOutput(
            input_layouts=Replicate(),
            desired_input_layouts=Shard(0),
            output_layouts=Shard(0),
            desired_output_layouts=Replicate(),
        )
        rooted = {
            "": around,
            "net1": colwise(input_layouts=Shard(0)),
            "net2": rowwise(output_layouts=Shard(0)),
        }
        outer = nn.Sequential()
        outer.add_module("encoder", _Mlp())
        cases: dict[str, tuple[nn.Module, Any, Layout, Layout]] = {
            "pair": (_Mlp(), pair, ROW, ROW),
            "by name within a name": (outer, {"encoder.net1": pair["net1"]}, ROW, ROW),
            "a plan within a plan": (outer, {"encoder": pair}, ROW, ROW),
            "sequence parallel": (_Mlp(), {k: rooted[k] for k in pair}, BOTH, BOTH),
            "root": (_Mlp(), rooted, ROW, ROW),
            "two wildcards": (
                _Stacked(),
                {"layers.*.net[1]": colwise(), "layers.*.net[2]": rowwise()},
                ROW,
                ROW,
            ),
            "one style, Colwise": (nn.Linear(10, 16), colwise(), ROW, FEATURES),
            "one style, Rowwise": (nn.Linear(10, 16), rowwise(), FEATURES, ROW),
        }
        cases["by name within a name"][1]["encoder.net2"] = pair["net2"]
        cases |= {key: (_Mlp(), {key: style}, ROW, ROW) for key, style in each.items()}
        for name, (module, plan, given, taken) in cases.items():
            reference = randomized(copy.deepcopy(module))
            model = copy.deepcopy(reference)
            assert parallelize_module(model, mesh, plan) is model
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.25) for m in (reference, model)]
            x = noise(8, 10)
            differences = run_beside(reference, model, mesh, x, given, taken)
            for optimizer in optimizers:
                optimizer.step()
            for (key, param), ours in zip(
                reference.named_parameters(), model.parameters(), strict=True
            ):
                differences[f"{key} after a step"] = relative(ours.detach(), param.detach())
            with torch.inference_mode():
                y = model(spread(x, mesh, given).to_local())
                wanted = spread(reference(x), mesh, taken).to_local()
            differences["inference"] = relative(y, wanted)
            found |= {f"{name}, {colwise.__name__}: {k}": v for k, v in differences.items()}
    return found


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(1, 4), deep(4, 1)])
def test_plans(rows: int, columns: int) -> None:
    """Names, nesting, wildcards, one style, the root; trained for a step and in inference."""
    no_difference(world.run(4, _plans, rows, columns), TOLERANCE)


def _under_a_mesh() -> dict[str, float]:
    reference = randomized(nn.Linear(10, 16))
    model = copy.deepcopy(reference)
    with grid_mesh(2, 2) as mesh:
        parallelize_module(model, parallelize_plan=ColwiseParallel(output_layouts=Replicate()))
    return run_beside(reference, model, mesh, noise(8, 10), ROW, ROW)


def test_the_mesh_of_the_context() -> None:
    no_difference(world.run(4, _under_a_mesh), TOLERANCE)


def test_no_plan_warns_and_changes_nothing() -> None:
    """It was a TypeError, where stock warns and hands the module back."""
    with pretend(0, 4):
        mesh, model = mesh_of(2, 2), _Mlp()
        with pytest.warns(UserWarning, match="no parallelize_plan"):
            assert parallelize_module(model, mesh) is model
        assert not any(isinstance(param, DTensor) for param in model.parameters())
        model(torch.rand(3, 10))


# Modules that a pipeline stage does without.


class _Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings: nn.Module | None = None
        self.layers = nn.ModuleDict({"0": _Mlp()})
        self.norm, self.output = nn.LayerNorm(4), nn.Linear(4, 4)
        # torch remembers these as modules that are None, and the first as no module at all.
        self.norm = self.output = None


def test_modules_pruned_for_a_pipeline_stage() -> None:
    """A key for a module that is None is passed over; any other that matches nothing is not."""
    plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "norm": {"weight": ColwiseParallel()},
        "output.head": Colwise2D(),
        "layers.*.net1": Colwise2D(),
        "layers.*.net2": Rowwise2D(),
    }
    with pretend(0, 4):
        mesh, model = mesh_of(2, 2), _Stage()
        parallelize_module(model, mesh, plan)
        assert all(isinstance(param, DTensor) for param in model.layers.parameters())
        # A stage without a layer.
        model = _Stage()
        model.layers, model.output = nn.ModuleDict(), nn.Linear(4, 8)
        del plan["output.head"]
        parallelize_module(model, mesh, {**plan, "output": Colwise2D()})
        assert isinstance(model.output.weight, DTensor)

    def make(key: str) -> Callable[[], Any]:
        mesh, model = mesh_of(2, 2), _Stage()
        return lambda: parallelize_module(model, mesh, {key: Colwise2D()})

    for key in ("tok_embedding", "layers.*.net3", "layers.1.net1", "layers.*.net1.*"):
        refused((2, 2), ValueError, (key, "nearest"), lambda key=key: make(key))


# Where the values come from.


def _sources(rows: int, columns: int, source: int) -> list[bool]:
    mesh = grid_mesh(rows, columns)
    torch.manual_seed(dist.get_rank())
    model = _Mlp()
    own = copy.deepcopy(model)
    plan = {"net1": Colwise2D(), "net2": RowwiseParallel()}
    parallelize_module(model, mesh, plan, src_data_rank=source)
    pairs = zip(model.parameters(), own.parameters(), strict=True)
    return [bool((param.full_tensor() == mine).all()) for param, mine in pairs]


@pytest.mark.parametrize(
    "rows,columns,source,rank", [(1, 4, 3, 3), (4, 1, 2, 2), (2, 2, 1, 3), (1, 4, 0, 0)]
)
def test_src_data_rank(rows: int, columns: int, source: int, rank: int) -> None:
    """It counts along each axis. On a line of ranks an axis of one took no source but 0."""
    for index, same in enumerate(world.run(4, _sources, rows, columns, source)):
        assert same == [index == rank] * 4


@pytest.mark.parametrize(
    "shape,source,kind,words",
    [
        ((2, 2), 2, ValueError, ("from 0 to 1, not 2", "(tp_row=2, tp_col=2)")),
        ((1, 4), 4, ValueError, ("from 0 to 3, not 4",)),
        ((2, 2), -1, ValueError, ("from 0 to 1, not -1",)),
        ((1, 1), 1, ValueError, ("from 0 to 0, not 1",)),
        ((2, 2), "0", TypeError, ("int or None", "'0'")),
    ],
)
def test_a_source_that_is_not_there(
    shape: tuple[int, int], source: Any, kind: Any, words: tuple[str, ...]
) -> None:
    """gloo said "invalid root rank", after the module had been changed, or left ranks waiting."""

    def make() -> Callable[[], Any]:
        mesh, model = mesh_of(*shape), nn.Linear(4, 4)
        return lambda: parallelize_module(model, mesh, Colwise2D(), src_data_rank=source)

    refused(shape, kind, words, make)


# Data parallelism by other means.


def _slices() -> tuple[DeviceMesh, DeviceMesh]:
    mesh = init_device_mesh(DEVICE, (2, 1, 2), mesh_dim_names=("dp", "tp_row", "tp_col"))
    return mesh["dp"], mesh["tp_row", "tp_col"]


def _wrapped(how: str) -> str:
    data, grid = _slices()
    dist.barrier()  # A rank that is refused at once would leave before others are connected.
    model: Any = _Mlp()
    plan = {"net1": Colwise2D(), "net2": Rowwise2D()}
    try:
        if how == "plan inside DDP":
            model = DistributedDataParallel(model, process_group=data.get_group())
            parallelize_module(model, grid, {f"module.{key}": plan[key] for key in plan})
        elif how == "DDP around, by its mesh":
            parallelize_module(model, grid, plan)
            model = DistributedDataParallel(model, device_mesh=data)
        elif how == "DDP around, by its group":
            parallelize_module(model, grid, plan)
            model = DistributedDataParallel(model, process_group=data.get_group())
        elif how == "composable DDP":
            parallelize_module(model, grid, plan)
            model = replicate(model, process_group=data.get_group())
        elif how == "fully_shard":
            parallelize_module(model, grid, plan)
            model = fully_shard(model, mesh=data)
        model(torch.rand(4, 10)).sum().backward()
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return "ran"


@pytest.mark.parametrize(
    "how,words",
    [
        ("plan inside DDP", ("the module is in DistributedDataParallel", "fully_shard")),
        ("DDP around, by its mesh", ("net1.weight", "DistributedDataParallel", "fully_shard")),
        # Refused by torch itself, on a line too, when it is made.
        ("DDP around, by its group", ("c10d.broadcast_",)),
        ("composable DDP", ("_composable.replicate", "fully_shard")),
        ("fully_shard", ("ran",)),
    ],
)
def test_data_parallel_wrappers(how: str, words: tuple[str, ...]) -> None:
    """Within DDP a plan's parameters were averaged by nobody, in silence, as in stock."""
    for message in world.run(4, _wrapped, how):
        assert all(word in message for word in words), message


class FullyShardedDataParallel(nn.Module):
    """What FSDP1 does to a module's parameters, as far as a CPU can have it: it needs a GPU."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module
        for inner in module.modules():
            for name, param in list(inner.named_parameters(recurse=False)):
                del inner._parameters[name]
                object.__setattr__(inner, name, param.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self._fsdp_wrapped_module(x)


def test_fsdp1() -> None:
    """A norm without its weight would go on; FSDP1 has no parameters in their place in forward."""
    plan = {"net1": Colwise2D(), "net2": Rowwise2D()}

    def around() -> Callable[[], Any]:
        model = _Mlp()
        parallelize_module(model, mesh_of(2, 2), plan, src_data_rank=None)
        wrapped = FullyShardedDataParallel(model)
        return lambda: wrapped(torch.rand(4, 10))

    def inside() -> Callable[[], Any]:
        mesh, model = mesh_of(2, 2), nn.Sequential(FullyShardedDataParallel(_Mlp()))
        return lambda: parallelize_module(
            model, mesh, {f"0._fsdp_wrapped_module.{key}": plan[key] for key in plan}
        )

    refused((2, 2), ValueError, ("net1.weight", "FSDP1", "fully_shard"), around)
    refused((2, 2), ValueError, ("'0' is in FullyShardedDataParallel", "fully_shard"), inside)
