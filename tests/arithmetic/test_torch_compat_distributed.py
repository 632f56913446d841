"""As ``test_torch_compat.py``, of process groups, meshes, DTensors and what is built on them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, loss_parallel
from torch.distributed.tensor.parallel.ddp import _localize_dtensor

from support.compat import Checks, Ops
from support.symmetric import on_cpu
from torch_tp2d._torch_compat import distributed, modules, tensors

CPU = torch.device("cpu")

CHECKS = Checks()
of = CHECKS.of


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77)
    )
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("tp_row", "tp_col"))
    dist.destroy_process_group()


@of("fake_world")
def _(mesh: DeviceMesh) -> None:
    group, hook = dist.group.WORLD, sys.excepthook
    names = set(dist.distributed_c10d._world.pg_names.values())
    starts = []
    for rank in (0, 5):
        with distributed.fake_world(6, rank) as first:
            starts.append(first)
            numbers = torch.arange(first, first + 6).view(2, 3)
            fake = DeviceMesh("cpu", numbers, mesh_dim_names=("tp_row", "tp_col"))
            assert fake != mesh and tuple(fake.get_coordinate() or ()) == divmod(rank, 3)
            assert not names & set(dist.distributed_c10d._world.pg_names.values())
            assert distributed.backend_of(fake.get_group(0), CPU).name() == "fake"
    assert starts[0] != starts[1]
    # All is as before.
    assert dist.group.WORLD is group and sys.excepthook is hook and dist.get_world_size() == 1
    assert names == set(dist.distributed_c10d._world.pg_names.values())
    dist.all_reduce(torch.ones(1), group=mesh.get_group(0))


@of("hooks_again")
def _(mesh: DeviceMesh) -> None:
    fired: list[None] = []

    def hook(_: Any) -> None:
        fired.append(None)

    module = nn.Linear(2, 2, bias=False, device="meta")
    module.weight = nn.Parameter(distribute_tensor(module.weight, mesh))
    assert not tensors.hooks_again(module.weight, hook)
    module.weight.register_post_accumulate_grad_hook(hook)
    module.to_empty(device="cpu")
    assert tensors.hooks_again(module.weight, hook)
    module.weight.to_local().sum().backward()
    assert len(fired) == 1


@of("c10d_functional", "collective_of")
def _(mesh: DeviceMesh) -> None:
    group = mesh.get_group(0)
    with Ops() as mode:
        ops, name = tensors.c10d_functional, group.group_name
        x = ops.wait_tensor.default(ops.all_reduce.default(torch.ones(2), "sum", name))
        y = ops.wait_tensor(ops.all_gather_into_tensor.default(x + 1, 1, name))
        z = ops.reduce_scatter_tensor.default(y, "sum", 1, name)
        w = ops.all_to_all_single.default(ops.wait_tensor.default(z), [2], [2], name)
        last = ops.wait_tensor(ops.broadcast.default(ops.wait_tensor.default(w), 0, name))
    assert last.tolist() == [2, 2]
    assert [found for found in map(tensors.collective_of, mode.seen) if found] == [
        "all_reduce",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_to_all_single",
        "broadcast",
    ]


@of("c10d_collective_of")
def _(mesh: DeviceMesh) -> None:
    with Ops() as mode:
        dist.all_gather_into_tensor(torch.empty(2), torch.ones(2), group=mesh.get_group(0))
    assert [tensors.c10d_collective_of(op) for op in mode.seen if op.namespace == "c10d"] == [
        "allgather_base"
    ]
    assert tensors.c10d_collective_of(torch.ops.aten.mm.default) == ""


@of("fused_all_gather_matmul", "fused_matmul_reduce_scatter", "fuses_products")
def _(mesh: DeviceMesh) -> None:
    assert tensors.fuses_products("cuda") and not tensors.fuses_products("mps")
    on_cpu()
    assert tensors.fuses_products("cpu")
    group = mesh.get_group(0).group_name
    x, weights = torch.randn(2, 3, 4), [torch.randn(4, 5), torch.randn(4, 6)]
    whole, products = tensors.fused_all_gather_matmul(x, weights, 1, group)
    torch.testing.assert_close(whole, x)
    for product, weight in zip(products, weights, strict=True):
        torch.testing.assert_close(product, x @ weight)
    total = tensors.fused_matmul_reduce_scatter(x, weights[0], "sum", 1, group)
    torch.testing.assert_close(total, products[0])
    gathers = torch.ops.symm_mem.fused_all_gather_matmul.default
    scatters = torch.ops.symm_mem.fused_matmul_reduce_scatter.default
    assert tensors.collective_of(gathers) == "fused_all_gather_matmul"
    assert tensors.collective_of(scatters) == "fused_matmul_reduce_scatter"
    assert tensors.flops_of(gathers, (x, weights), {}, (whole, products)) == 2 * 6 * 4 * 11
    assert tensors.flops_of(scatters, (x, weights[0]), {}, total) == 2 * 6 * 4 * 5


@of("root_mesh", "current_mesh")
def _(mesh: DeviceMesh) -> None:
    assert distributed.root_mesh(mesh["tp_col"]) is mesh and distributed.root_mesh(mesh) is mesh
    with mesh:
        assert distributed.current_mesh() is mesh


@of("resolve_process_group", "backend_of")
def _(mesh: DeviceMesh) -> None:
    group = mesh.get_group("tp_col")
    assert distributed.resolve_process_group(group.group_name) is group
    assert distributed.backend_of(group, CPU).name() == "gloo"
    assert distributed.backend_of(group, torch.device("meta")) is None


@of("timeout_of", "set_timeout", "default_timeout")
def _(mesh: DeviceMesh) -> None:
    world = dist.group.WORLD
    assert world is not None
    assert distributed.timeout_of(world, CPU) == timedelta(seconds=77)
    assert distributed.timeout_of(world, torch.device("meta")) is None
    group = dist.new_group([0], timeout=timedelta(seconds=5))
    distributed.set_timeout(timedelta(seconds=6), group)
    assert distributed.timeout_of(group, CPU) == timedelta(seconds=6)
    # Which is why a mesh's groups are given the world's.
    assert distributed.timeout_of(dist.new_group([0]), CPU) == distributed.default_timeout(group)
    assert distributed.default_timeout(group) == timedelta(minutes=30)


@of("gloo_options")
def _(mesh: DeviceMesh) -> None:
    devices = [dist.ProcessGroupGloo.create_default_device()]
    options = distributed.gloo_options(devices, 1, timedelta(seconds=9))
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)
    made: Any = group.options
    assert (made._threads, made._timeout) == (1, timedelta(seconds=9))


@of("StridedShard")
def _(mesh: DeviceMesh) -> None:
    placed = distributed.StridedShard(0, split_factor=3)
    assert isinstance(placed, distributed.StridedShard) and (placed.dim, placed.split_factor) == (
        0,
        3,
    )


@of("local_tensor", "spec_of", "dtensor_of")
def _(mesh: DeviceMesh) -> None:
    plain = torch.arange(6.0).view(2, 3)
    x = distribute_tensor(plain, mesh, (Shard(0), Replicate()))
    assert tensors.local_tensor(plain) is plain and distributed.spec_of(plain) is None
    local, spec = tensors.local_tensor(x), distributed.spec_of(x)
    assert type(local) is Tensor and torch.equal(local, plain)
    assert (spec.mesh, spec.placements, spec.shape) == (mesh, x.placements, x.shape)
    made = distributed.dtensor_of(local + 1, spec)
    assert isinstance(made, DTensor) and torch.equal(made.full_tensor(), plain + 1)
    assert distributed.spec_of(made) == spec and distributed.spec_of(made) is not spec


@of("guard_global_sizes")
def _(mesh: DeviceMesh) -> None:
    traced = 0

    def count(graph: Any, example: Any) -> Any:
        nonlocal traced
        traced += 1
        return graph

    def double(x: DTensor) -> Tensor:
        y = x * 2
        modules.guard_global_sizes()
        return y.to_local()

    run = torch.compile(double, backend=count, fullgraph=True)
    placed = [Replicate(), Shard(0)]
    for size in (5, 5, 6, 5):
        sizes = {"shape": torch.Size((size, 4)), "stride": (4, 1)}
        x = DTensor.from_local(torch.ones(3, 4), mesh, placed, run_check=False, **sizes)
        assert run(x).tolist() == [[2.0] * 4] * 3
    assert traced == 2


@of("spec_for")
def _(mesh: DeviceMesh) -> None:
    x = distribute_tensor(torch.zeros(2, 3, 5), mesh, (Shard(0), Replicate()))
    made = distributed.spec_for(mesh, x.placements, x.shape, x.stride(), x.dtype)
    assert made == distributed.spec_of(x)


@of("place_by_keyword")
def _(mesh: DeviceMesh) -> None:
    # What it is for: tests/collectives/test_attention_inputs.py.
    op = tensors.flash_attention_for_cpu.default
    assert DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op].static_kwargkey == [
        "attn_mask"
    ]


@of("REPLICATE", "has_replicate")
def _(mesh: DeviceMesh) -> None:
    module = nn.Linear(2, 2)
    assert not distributed.has_replicate(module)
    assert distributed.has_replicate(replicate(module))
    assert replicate.__module__ == distributed.REPLICATE


@of("deciding_layouts_within")
def _(mesh: DeviceMesh) -> None:
    inside: list[bool] = []
    met: list[tuple[str, bool]] = []

    @contextmanager
    def around() -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    class Meets(tensors.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            if DTensor in types:
                return NotImplemented
            met.append((func.name(), bool(inside)))
            return func(*args, **(kw or {}))

    with tensors.fake_mode():
        x = DTensor.from_local(torch.ones(2, 3), mesh, run_check=False)
        with Meets(), distributed.deciding_layouts_within(around):
            x.mul(x)
            # It has no rule of its own: DTensor tries what it is made of.
            nn.functional.hardswish(x)
        tried = [name for name, within in met if within]
        own = [name for name, within in met if not within and name.startswith("aten")]
        assert own == ["aten::mul.Tensor", "aten::hardswish"]
        assert set(own) | {"aten::clamp"} < {*tried}, tried
        # Its rule is by hand, and asks for the shapes alone.
        logits = DTensor.from_local(torch.ones(2, 3), mesh["tp_col"], [Shard(1)], run_check=False)
        target = DTensor.from_local(torch.ones(2).long(), mesh["tp_col"], run_check=False)
        met.clear()
        with Meets(), distributed.deciding_layouts_within(around), loss_parallel():
            nn.functional.cross_entropy(logits, target)
        assert met.count(("aten::_log_softmax", True)) == 1
        met.clear()
        with Meets():
            x.sub(x)
    assert met.count(("aten::sub.Tensor", False)) == 2
    left = vars(DTensor._op_dispatcher.sharding_propagator)
    assert not {name for name in left if name.endswith("non_cached")}


@of("is_sharded_by_fsdp")
def _(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    for module in model:
        assert not distributed.is_sharded_by_fsdp(module)
    fully_shard(model, mesh=mesh["tp_row"])
    assert [*map(distributed.is_sharded_by_fsdp, (model, *model))] == [False, True, False]


@of("was_localized")
def _(mesh: DeviceMesh) -> None:
    module = nn.Linear(2, 2, bias=False)
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh))
    assert not distributed.was_localized(module.weight)
    _localize_dtensor(module)
    assert distributed.was_localized(module.weight)


@pytest.mark.parametrize("name", CHECKS)
def test_it_does_what_it_is_for(name: str, mesh: DeviceMesh) -> None:
    CHECKS[name](mesh)


def test_a_style_is_applied_by_its_apply(mesh: DeviceMesh) -> None:
    """``ParallelStyle._apply`` is private by its name, and how torch has styles of one's own."""
    applied: list[Any] = []

    class Style(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            applied.append((module, device_mesh, self.src_data_rank))
            return module

    module = nn.Linear(2, 2)
    torch.distributed.tensor.parallel.parallelize_module(module, mesh, Style(), src_data_rank=None)
    assert applied == [(module, mesh, None)]
    assert ParallelStyle.__abstractmethods__ == {"_apply"}
