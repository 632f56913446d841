"""What torch does not promise to keep: where we use it, that it still does what we use it for.

One test for each name of ``torch_tp2d/_torch_compat.py``, so that a release of torch that takes one
away or changes it fails in the test of that name, and not somewhere in a model.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.parallel.ddp import _localize_dtensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from torch_tp2d import _torch_compat as compat

PACKAGE = Path(compat.__file__).parent
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77)
    )
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("tp_row", "tp_col"))
    dist.destroy_process_group()


CHECKS: dict[str, Callable[..., None]] = {}


def of(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The check of these names."""

    def note(check: Callable[..., None]) -> Callable[..., None]:
        CHECKS.update(dict.fromkeys(names, check))
        return check

    return note


@pytest.mark.parametrize("name", compat.__all__)
def test_it_does_what_it_is_for(name: str, mesh: DeviceMesh) -> None:
    CHECKS[name](mesh)


class _Named(Tensor):
    """A subclass that handles no function itself, and notes the operators that it meets."""

    met: list[str] = []
    __torch_function__ = compat.disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.met.append(str(func))
        return torch.zeros(())


@of("make_wrapper_subclass", "disabled_torch_function_impl")
def _(mesh: DeviceMesh) -> None:
    x: Tensor = compat.make_wrapper_subclass(
        _Named, torch.Size((2, 3)), dtype=torch.float64, device=CPU, requires_grad=True
    )
    assert isinstance(x, _Named) and x.shape == (2, 3) and x.dtype == torch.float64
    assert x.requires_grad
    _Named.met.clear()
    x.add(1)
    assert _Named.met == ["aten.add.Tensor"]


class _Counts(Tensor):
    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls += 1
        with compat.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@of("DisableTorchFunctionSubclass")
def _(mesh: DeviceMesh) -> None:
    x = torch.ones(2).as_subclass(_Counts)
    _Counts.calls = 0
    assert torch.add(x, 1).tolist() == [2, 2]
    assert _Counts.calls == 1


@of("AutoDispatchBelowAutograd")
def _(mesh: DeviceMesh) -> None:
    x = torch.ones(2, requires_grad=True)
    with compat.AutoDispatchBelowAutograd():
        assert torch.ops.aten.mul.Tensor(x, 2).grad_fn is None
    assert torch.ops.aten.mul.Tensor(x, 2).grad_fn is not None


class _Ops(compat.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@of("TorchDispatchMode", "disable_current_modes", "dispatch_modes", "is_mutable")
def _(mesh: DeviceMesh) -> None:
    assert list(compat.dispatch_modes()) == []
    with _Ops() as mode:
        assert list(compat.dispatch_modes()) == [mode]
        x = torch.zeros(2)
        x.add_(1)
        with compat.disable_current_modes():
            x.mul_(2)
    assert [str(op) for op in mode.seen] == ["aten.zeros.default", "aten.add_.Tensor"]
    assert [compat.is_mutable(op) for op in mode.seen] == [False, True]


@of("SELECTIVE_MODES")
def _(mesh: DeviceMesh) -> None:
    found = []

    def body(x: Tensor) -> Tensor:
        found.append([type(mode) for mode in compat.dispatch_modes()])
        return x.sin()

    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.sin.default])

    x = torch.ones(2, requires_grad=True)
    checkpoint(body, x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert found == [[mode] for mode in compat.SELECTIVE_MODES]


@of("active_fake_mode")
def _(mesh: DeviceMesh) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert compat.active_fake_mode() is None
    with FakeTensorMode() as mode:
        assert compat.active_fake_mode() is mode


@of("fake_mode")
def _(mesh: DeviceMesh) -> None:
    outside = torch.ones(2, 3)
    with compat.fake_mode():
        made = torch.ones(4, 2) @ outside
    assert type(made) is not Tensor and made.shape == (4, 3)
    assert made.untyped_storage().nbytes() == 48


@of("fake_world")
def _(mesh: DeviceMesh) -> None:
    group, hook = dist.group.WORLD, sys.excepthook
    names = set(dist.distributed_c10d._world.pg_names.values())
    starts = []
    for rank in (0, 5):
        with compat.fake_world(6, rank) as first:
            starts.append(first)
            numbers = torch.arange(first, first + 6).view(2, 3)
            fake = DeviceMesh("cpu", numbers, mesh_dim_names=("tp_row", "tp_col"))
            assert fake != mesh and tuple(fake.get_coordinate() or ()) == divmod(rank, 3)
            assert not names & set(dist.distributed_c10d._world.pg_names.values())
            assert compat.backend_of(fake.get_group(0), CPU).name() == "fake"
    assert starts[0] != starts[1]
    # All is as before.
    assert dist.group.WORLD is group and sys.excepthook is hook and dist.get_world_size() == 1
    assert names == set(dist.distributed_c10d._world.pg_names.values())
    dist.all_reduce(torch.ones(1), group=mesh.get_group(0))


@of("nodes_made", "number_of_node")
def _(mesh: DeviceMesh) -> None:
    x = torch.ones(2, requires_grad=True)
    before, seen = compat.nodes_made(), []
    y = x * 2
    between = compat.nodes_made()
    y.register_hook(lambda _: seen.append(compat.number_of_node()))
    (y + 1).sum().backward()
    assert compat.number_of_node() is None
    assert seen == [before] and before < between < compat.nodes_made()


@of("flops_of")
def _(mesh: DeviceMesh) -> None:
    a, b, q = torch.ones(2, 3), torch.ones(3, 5), torch.ones(1, 2, 8, 4)
    op = torch.ops.aten.mm.default
    assert compat.flops_of(op, (a, b), {}, a @ b) == 2 * 2 * 3 * 5
    op = compat.flash_attention_for_cpu.default
    assert compat.flops_of(op, (q, q, q), {}, op(q, q, q)) == 2 * 2 * 8 * 8 * 4 * 2
    assert compat.flops_of(torch.ops.aten.neg.default, (a,), {}, -a) == 0


@of("are_functorch_transforms_active")
def _(mesh: DeviceMesh) -> None:
    seen = []

    def body(x: Tensor) -> Tensor:
        seen.append(compat.are_functorch_transforms_active())
        return x.sum()

    body(torch.ones(2))
    torch.func.grad(body)(torch.ones(2))
    assert seen == [False, True]


@of("disable_dynamo")
def _(mesh: DeviceMesh) -> None:
    compiling = []

    @compat.disable_dynamo
    def inner(x: Tensor) -> Tensor:
        compiling.append(torch.compiler.is_compiling())
        return x + 1

    def outer(x: Tensor) -> Tensor:
        return inner(x * 2) * 3

    assert torch.compile(outer, backend="eager")(torch.ones(1)).item() == 9
    assert compiling == [False]


@of("tree_leaves", "tree_map_only")
def _(mesh: DeviceMesh) -> None:
    x, y = torch.zeros(1), torch.ones(2)
    tree = [x, {"a": (y, 3)}]
    assert [id(leaf) for leaf in compat.tree_leaves(tree)] == [id(x), id(y), id(3)]
    assert compat.tree_map_only(Tensor, torch.numel, tree) == [1, {"a": (2, 3)}]


@of("version")
def _(mesh: DeviceMesh) -> None:
    x = torch.ones(2)
    before = compat.version(x)
    x[:1].mul_(2)
    assert compat.version(x) == before + 1


@of("current_graph_task_id", "current_autograd_node", "at_end_of_backward")
def _(mesh: DeviceMesh) -> None:
    events: list[Any] = []

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            events.append((compat.current_graph_task_id(), compat.current_autograd_node()))
            compat.at_end_of_backward(lambda: events.append("end"))
            return grad

    x = torch.ones(2, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    y = Node.apply(x)
    for _ in range(2):
        y.sum().backward(retain_graph=True)
    (first, node), *between, (second, _), _, _ = events
    assert between == ["gradient", "end"] and events[-2:] == between
    assert -1 not in (first, second) and first != second and node is y.grad_fn
    assert compat.current_graph_task_id() == -1


@of("hooks_again")
def _(mesh: DeviceMesh) -> None:
    fired: list[None] = []

    def hook(_: Any) -> None:
        fired.append(None)

    module = nn.Linear(2, 2, bias=False, device="meta")
    module.weight = nn.Parameter(distribute_tensor(module.weight, mesh))
    assert not compat.hooks_again(module.weight, hook)
    module.weight.register_post_accumulate_grad_hook(hook)
    module.to_empty(device="cpu")
    assert compat.hooks_again(module.weight, hook)
    module.weight.to_local().sum().backward()
    assert len(fired) == 1


@of("c10d_functional", "collective_of")
def _(mesh: DeviceMesh) -> None:
    group = mesh.get_group(0)
    with _Ops() as mode:
        ops, name = compat.c10d_functional, group.group_name
        x = ops.wait_tensor.default(ops.all_reduce.default(torch.ones(2), "sum", name))
        y = ops.wait_tensor(ops.all_gather_into_tensor.default(x + 1, 1, name))
        z = ops.reduce_scatter_tensor.default(y, "sum", 1, name)
        w = ops.all_to_all_single.default(ops.wait_tensor.default(z), [2], [2], name)
        last = ops.wait_tensor(ops.broadcast.default(ops.wait_tensor.default(w), 0, name))
    assert last.tolist() == [2, 2]
    assert [found for found in map(compat.collective_of, mode.seen) if found] == [
        "all_reduce",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_to_all_single",
        "broadcast",
    ]


def _attention() -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Query, key and value, the output of a causal attention, and their gradients from its sum."""
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.randn(1, 2, 4, 8, generator=generator).double().requires_grad_() for _ in range(3)
    ]
    scores = given[0] @ given[1].mT * 0.3
    hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)
    out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ given[2]
    return [x.detach() for x in given], out.detach(), list(torch.autograd.grad(out.sum(), given))


@of("flash_attention_for_cpu", "flash_attention_for_cpu_backward")
def _(mesh: DeviceMesh) -> None:
    given, wanted, wanted_grads = _attention()
    out, log = compat.flash_attention_for_cpu(*given, 0.0, True, attn_mask=None, scale=0.3)
    torch.testing.assert_close(out, wanted)
    first = (given[0][:, :, 0] * given[1][:, :, 0]).sum(-1) * 0.3
    torch.testing.assert_close(log[:, :, 0], first)
    grads = compat.flash_attention_for_cpu_backward(
        *(torch.ones_like(out), *given, out, log, 0.0, True), attn_mask=None, scale=0.3
    )
    for grad, wanted_grad in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(grad, wanted_grad)


@of("flash_attention", "flash_attention_backward")
def _(mesh: DeviceMesh) -> None:
    """Of CUDA: here only that they take what we give."""
    names = {
        compat.flash_attention: ("query", "key", "value", "dropout_p", "is_causal"),
        compat.flash_attention_backward: ("grad_out", "query", "key", "value", "out", "logsumexp"),
    }
    for op, first in names.items():
        arguments = [argument.name for argument in op.default._schema.arguments]
        assert tuple(arguments[: len(first)]) == first and "scale" in arguments
    if not torch.cuda.is_available():
        return
    given, wanted, wanted_grads = _attention()
    given = [x.cuda().half() for x in given]
    out, log, *_ = compat.flash_attention(*given, 0.0, True, False, scale=0.3)
    unused = torch.empty(0, dtype=torch.uint64, device="cuda")
    grads = compat.flash_attention_backward(
        *(torch.ones_like(out), *given, out, log, None, None, 4, 4, 0.0, True, unused, unused),
        scale=0.3,
    )
    close: dict[str, Any] = {"atol": 0.02, "rtol": 0.02, "check_dtype": False}
    for ours, theirs in zip((out, *grads), (wanted, *wanted_grads), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, **close)


@of("safe_softmax")
def _(mesh: DeviceMesh) -> None:
    scores = torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]])
    assert compat.safe_softmax(scores, -1, torch.float32).tolist() == [[0.5, 0.5], [0, 0]]


@of("flex_attention_op")
def _(mesh: DeviceMesh) -> None:
    from torch.overrides import TorchFunctionMode

    met: list[Any] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is compat.flex_attention_op:
                met.append(next(x for x in args[4] if isinstance(x, Tensor)).shape)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, 3, 8, 8)
    mask = create_block_mask(lambda b, h, q, k: q >= k, 2, None, 8, 8, device="cpu")
    with Mode():
        flex_attention(x, x, x, block_mask=mask)
    # What is asked of a mask is how many batches and heads it is for.
    assert met and all(shape[:2] == (2, 1) for shape in met)


@of("c10d_collective_of")
def _(mesh: DeviceMesh) -> None:
    with _Ops() as mode:
        dist.all_gather_into_tensor(torch.empty(2), torch.ones(2), group=mesh.get_group(0))
    assert [compat.c10d_collective_of(op) for op in mode.seen if op.namespace == "c10d"] == [
        "allgather_base"
    ]
    assert compat.c10d_collective_of(torch.ops.aten.mm.default) == ""


@of("root_mesh", "current_mesh")
def _(mesh: DeviceMesh) -> None:
    assert compat.root_mesh(mesh["tp_col"]) is mesh and compat.root_mesh(mesh) is mesh
    with mesh:
        assert compat.current_mesh() is mesh


@of("resolve_process_group", "backend_of")
def _(mesh: DeviceMesh) -> None:
    group = mesh.get_group("tp_col")
    assert compat.resolve_process_group(group.group_name) is group
    assert compat.backend_of(group, CPU).name() == "gloo"
    assert compat.backend_of(group, torch.device("meta")) is None


@of("timeout_of", "set_timeout", "default_timeout")
def _(mesh: DeviceMesh) -> None:
    world = dist.group.WORLD
    assert world is not None
    assert compat.timeout_of(world, CPU) == timedelta(seconds=77)
    assert compat.timeout_of(world, torch.device("meta")) is None
    group = dist.new_group([0], timeout=timedelta(seconds=5))
    compat.set_timeout(timedelta(seconds=6), group)
    assert compat.timeout_of(group, CPU) == timedelta(seconds=6)
    # Which is why a mesh's groups are given the world's.
    assert compat.timeout_of(dist.new_group([0]), CPU) == compat.default_timeout(group)
    assert compat.default_timeout(group) == timedelta(minutes=30)


@of("gloo_options")
def _(mesh: DeviceMesh) -> None:
    devices = [dist.ProcessGroupGloo.create_default_device()]
    options = compat.gloo_options(devices, 1, timedelta(seconds=9))
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)
    made: Any = group.options
    assert (made._threads, made._timeout) == (1, timedelta(seconds=9))


@of("StridedShard")
def _(mesh: DeviceMesh) -> None:
    placed = compat.StridedShard(0, split_factor=3)
    assert isinstance(placed, compat.StridedShard) and (placed.dim, placed.split_factor) == (0, 3)


@of("local_tensor", "spec_of", "dtensor_of")
def _(mesh: DeviceMesh) -> None:
    plain = torch.arange(6.0).view(2, 3)
    x = distribute_tensor(plain, mesh, (Shard(0), Replicate()))
    assert compat.local_tensor(plain) is plain and compat.spec_of(plain) is None
    local, spec = compat.local_tensor(x), compat.spec_of(x)
    assert type(local) is Tensor and torch.equal(local, plain)
    assert (spec.mesh, spec.placements, spec.shape) == (mesh, x.placements, x.shape)
    made = compat.dtensor_of(local + 1, spec)
    assert isinstance(made, DTensor) and torch.equal(made.full_tensor(), plain + 1)
    assert compat.spec_of(made) == spec and compat.spec_of(made) is not spec


@of("parameters_of", "submodules_of", "forward_pre_hooks", "forward_hooks")
def _(mesh: DeviceMesh) -> None:
    module = nn.Linear(2, 2, bias=False)
    assert compat.parameters_of(module) == {"weight": module.weight, "bias": None}
    parent = nn.Module()
    parent.inner, parent.pruned = module, None
    parent.register_module("gone", None)
    assert compat.submodules_of(parent) == {"inner": module, "gone": None}

    def hook(*_: Any) -> None:
        raise AssertionError("taken off")

    module.register_forward_pre_hook(hook)
    module.register_forward_hook(hook)
    for hooks in (compat.forward_pre_hooks(module), compat.forward_hooks(module)):
        assert list(hooks.values()) == [hook]
        hooks.clear()
    module(torch.ones(1, 2))


@of("REPLICATE", "has_replicate")
def _(mesh: DeviceMesh) -> None:
    module = nn.Linear(2, 2)
    assert not compat.has_replicate(module)
    assert compat.has_replicate(replicate(module))
    assert replicate.__module__ == compat.REPLICATE


@of("was_localized")
def _(mesh: DeviceMesh) -> None:
    module = nn.Linear(2, 2, bias=False)
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh))
    assert not compat.was_localized(module.weight)
    _localize_dtensor(module)
    assert compat.was_localized(module.weight)


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


# Where else private names are

OF_OTHERS = {"_attn_implementation", "_from_config"}
"""transformers' own: how a config names its attention, and how a model is made of a config."""
OF_PYTHON = {"_replace"}
"""A NamedTuple's, public for all its underscore."""


def _own_names(trees: list[ast.Module]) -> set[str]:
    """Names with an underscore that the package itself makes."""
    own = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                own.add(node.attr)
    return own


def _private(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Private names of others in a file: imported, read from an object, or asked for by a string.

    What is on a tensor of the user's begins with ``_tp2d``.
    """

    def foreign(name: str) -> bool:
        private = name.startswith("_") and not name.startswith(("__", "_tp2d")) and len(name) > 1
        return private and name not in own | OF_OTHERS | OF_PYTHON

    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [part for part in node.value.split(".") if node.value.isascii()]
            names = [part for part in names if part.isidentifier()] if " " not in node.value else []
        yield from (f"line {node.lineno}: {name}" for name in names if foreign(name))


def test_nothing_else_uses_a_private_name_of_torch() -> None:
    trees = {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    compat_tree = trees.pop("_torch_compat.py")
    own = _own_names(list(trees.values()))
    found = {name: list(_private(tree, own)) for name, tree in trees.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert len(list(_private(compat_tree, own))) > 20, "the search finds what is there"


def test_all_that_is_wrapped_is_used_and_checked() -> None:
    used = {
        alias.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("_torch_compat")
        for alias in node.names
    }
    assert used == set(compat.__all__) == CHECKS.keys()


# What importing the package changes

_IMPORTING = """
import ast, importlib, pathlib, sys, warnings, logging
package = pathlib.Path(sys.argv[1])
for path in package.rglob("*.py"):
    if "integrations" in path.parts:
        continue
    for node in ast.walk(ast.parse(path.read_text())):
        named = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in named:
            if name.partition(".")[0] != "torch_tp2d":
                importlib.import_module(name)
import torch
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as modules

def contents(value):
    if isinstance(value, dict):
        return {repr(key): id(item) for key, item in value.items()}
    return sorted(map(repr, value)) if isinstance(value, (list, set)) else id(value)

def state():
    seen = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "torch" or module is None or not hasattr(module, "__file__"):
            continue
        for key, value in list(vars(module).items()):
            seen[f"{name}.{key}"] = contents(value)
            if isinstance(value, type) and value.__module__ == name:
                for inner, item in list(vars(value).items()):
                    seen[f"{name}.{key}.{inner}"] = contents(item)
    rules = DTensor._op_dispatcher.sharding_propagator
    seen.update({f"DTensor rules {key}": contents(value) for key, value in vars(rules).items()})
    seen["dtype"], seen["grad"] = torch.get_default_dtype(), torch.is_grad_enabled()
    seen["threads"], seen["device"] = torch.get_num_threads(), torch.get_default_device()
    seen["random"] = torch.random.get_rng_state().tolist()
    seen["warnings"], seen["handlers"] = list(warnings.filters), list(logging.root.handlers)
    seen["logging"] = logging.root.level, logging.getLogger("torch").level
    return seen

state()  # Which imports what torch imports when it is looked at.
before = state()
import torch_tp2d
after = state()
del before["torch.jit._builtins._builtin_table"]  # By id, of every operator that there is.
for key in sorted(before):
    had, has = before[key], after.get(key)
    if had != has:
        grown = isinstance(has, (dict, list)) and set(had) < set(has)
        print(f"{key}: {sorted(set(has) - set(had)) if grown else 'changed'}")
"""


def test_importing_the_package_changes_nothing_of_torch() -> None:
    """But what three modules register by names of our own, and DTensor's two rules, as they say.

    ``torch.compiler.disable`` as a decorator imported Dynamo, which puts a function of its own in
    the place of ``torch.manual_seed``.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _IMPORTING, str(PACKAGE)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == "" and done.returncode == 0
    rules = "_scaled_dot_product_flash_attention_for_cpu"
    for line in done.stdout.lower().splitlines():
        where, new = line.split(": ", 1)
        for entry in ast.literal_eval(new) if new != "changed" else [new]:
            ours = "torch_tp2d" in entry or "gloo_in_order" in entry
            assert ours or (where.startswith("dtensor rules") and rules in entry), line
    assert all(name in done.stdout for name in ("torch_tp2d::arrived", "gloo_in_order", rules))


STATE = {
    # Numbers of fake ranks; and torch's own, exchanged for a while and put back.
    "_torch_compat.py": {"_first_fake_rank", "_world", "excepthook"},
    "comm/axis.py": {"_links"},  # Rates of links, by process group.
    "comm/groups.py": {"_groups"},  # Process groups of our own, by world.
    "comm/transfers.py": {"watch"},  # Debug mode's hook on every transfer.
    "debug.py": {"_every", "_layers", "_passes", "_watches"},  # Debug mode, on or off.
    "integrations/transformers.py": {"handle", "waiting"},  # Modules until a model is called.
    "planner/rates.py": {"_assumed", "_known"},  # Rates of machines, by mesh.
    "runtime/context.py": {"_contexts"},  # A mesh's context, by mesh.
    "styles/base.py": {"_classes"},  # Classes made, by style and class.
}
"""What the package remembers outside any object of the user's, by file."""

UNCHANGING = {
    "MatmulRule",
    "Struct",
    "Surroundings",
    "Transport",
    "_Names",
    "field",
    "frozenset",
    "getLogger",
}
"""What is called to make a value that nobody writes into."""


def _kept(tree: ast.Module) -> Iterator[str]:
    """Names at the top of a module or class that hold something which can be written into.

    A table that is annotated as a Mapping is not: mypy refuses to write into it.
    """
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    displays = ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for node in (node for body in bodies for node in body):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        (target,) = node.targets if isinstance(node, ast.Assign) else (node.target,)
        name, value = ast.unparse(target), node.value
        table = isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation)[:8] == "Mapping["
        made = isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1]
        if isinstance(value, displays) and not table and name != "__all__":
            yield name
        elif made and made not in UNCHANGING:
            yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in {"cls"} | imported:
                yield node.attr


def test_what_the_package_remembers_is_known() -> None:
    """State of a step has its place in a :class:`~torch_tp2d.runtime.context.Context`."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for name in _kept(ast.parse(path.read_text())):
            found.setdefault(str(path.relative_to(PACKAGE)), set()).add(name)
    # Debug mode sets it from outside.
    found["debug.py"].remove("watch")
    found["comm/transfers.py"] = {"watch"}
    assert found == STATE
