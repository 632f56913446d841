"""Every private name of torch that the package uses, and what it is used for.

Under torch's name without the underscore where they are torch's unchanged. Each has a test in
``tests/arithmetic/test_torch_compat*.py``, whose name tells what a release of torch has moved;
``test_package.py`` allows no private names elsewhere.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch._guards import active_fake_mode as active_fake_mode
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_op
from torch._subclasses import fake_tensor
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.distributed.distributed_c10d import _set_pg_timeout as set_timeout
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.fx import Graph
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

# Tensor subclasses and modes. disable_current_modes hides what ranks tell each other about
# themselves; nothing is transferred under an active_fake_mode. TorchDispatchMode and
# DisableTorchFunctionSubclass are documented by torch, but under a private module.

make_wrapper_subclass = Tensor._make_wrapper_subclass
"""Makes a tensor that has a shape but no storage: a deferred one, or logits seen as flat."""

disabled_torch_function_impl: Any = torch._C._disabled_torch_function_impl
"""As ``__torch_function__`` of a subclass it leaves everything to ``__torch_dispatch__``."""

DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""A context in which a subclass's ``__torch_function__`` can call torch without recursion."""

AutoDispatchBelowAutograd: Any = torch._C._AutoDispatchBelowAutograd
"""A context that skips autograd's kernels, which take longer than the collectives themselves."""

SELECTIVE_MODES = _CachingTorchDispatchMode, _CachedTorchDispatchMode
"""The modes in which selective checkpointing runs a region, and recomputes it."""


def vmapped(x: Tensor) -> Tensor | None:
    """What ``torch.vmap`` was given of which ``x`` is an entry; None if it is no such entry."""
    if not torch._C._functorch.is_batchedtensor(x):
        return None
    whole: Tensor = torch._C._functorch.get_unwrapped(x)
    return whole


def dispatch_modes() -> Sequence[Any]:
    """The active dispatch modes, among which may be a region of selective checkpointing."""
    return _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else ()


are_functorch_transforms_active = torch._C._are_functorch_transforms_active
"""Whether a transform of torch.func is active, which the styles refuse."""


def apply_in_eager(function: type[torch.autograd.Function], x: Any, *others: Any) -> Any:
    """``function.apply``, that looks at ``x`` alone for what a transform of torch.func has left.

    A tensor that was made within one, and is used after it, would be taken for one without a graph.
    torch looks at every argument in Python, which together takes longer than a small product.
    """
    x = torch._C._functorch.unwrap_if_dead(x)
    return super(torch.autograd.Function, function).apply(x, *others)  # type: ignore[misc]


def version(x: Tensor) -> int | None:
    """How often a tensor was changed in place, to tell whether results from it are up to date.

    None for one made in inference mode, which does not count.
    """
    try:
        return x._version
    except RuntimeError:
        return None


def versions(x: Any) -> tuple[int | None, ...]:
    """:func:`version` of a tensor; of a DTensor its own and its shard's.

    Some changes of a DTensor count only for its shard.
    """
    inside = getattr(x, "_local_tensor", x)
    try:
        # Read here, as each call of a style asks several times.
        return (x._version,) if inside is x else (x._version, inside._version)
    except RuntimeError:
        return (version(x),) if inside is x else (version(x), version(inside))


def unviewed(x: Tensor) -> Tensor:
    """A result of an autograd function, which no backward needs, so that users may write into it.

    Autograd refuses that where what a function has made is a view. What is returned shares the
    memory, but is none. Not for graphs, in which Dynamo makes views of its own.
    """
    return x.data if x._is_view() else x


def fake_mode() -> Any:
    """The mode in which tensors have shapes but no values; it accepts real tensors as inputs."""
    return fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)


NEEDS_VALUES = fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException
"""What operators raise in that mode if their result, or its shape, depends on values."""


def flops_of(op: Any, args: Any, kwargs: Any, out: Any) -> int:
    """An operator's floating-point operations by torch's formulas; 0 for those without one."""
    from torch.utils.flop_counter import flop_registry, sdpa_flop_count

    packet = op._overloadpacket
    if op.namespace == "symm_mem":
        # Products of the gathered tensor, or those that are reduced afterwards.
        whole, weights = (out[0], args[1]) if isinstance(out, tuple) else (args[0], [args[1]])
        return 2 * int(whole.numel()) * sum(int(weight.shape[-1]) for weight in weights)
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    if packet is flash_attention_for_cpu:
        return int(sdpa_flop_count(*(x.shape for x in args[:3])))
    if packet is flash_attention_for_cpu_backward:
        # Five products, the scores and four for the gradients, where forward has two.
        return int(sdpa_flop_count(*(x.shape for x in args[1:4])) * 5 // 2)
    return 0


def is_mutable(op: Any) -> bool:
    """Whether an operator writes into an argument, which then must not be one that others use."""
    return bool(op._schema.is_mutable)


def begins_no_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let Dynamo make no graph that begins with a function, or with one that it calls.

    A graph that reaches the function has it as a part, unlike a function that is disabled.
    """
    dynamo = torch._C._dynamo.eval_frame
    skips = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skips, skips))
    return function


def guard_global_sizes() -> None:
    """Let a graph that is being traced hold for DTensors of these global sizes only.

    Of an input that is a DTensor Dynamo compares the shard's sizes, which can be the same on one
    rank and others on another: that rank alone would run the graph of another length.
    """
    from torch._dynamo.comptime import comptime  # here, as it imports Dynamo

    comptime(_guard_inputs)


def _guard_inputs(tracing: Any) -> None:
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource

    output = tracing._ComptimeContext__tx.output
    if output.current_tracer is output.root_tracer:
        # Those that are used later only, too.
        _make_inputs(output.root_tx.symbolic_locals.values())
    for node in output.root_tracer.graph.find_nodes(op="placeholder"):
        given = node.meta.get("grapharg")
        if given is None or not isinstance(given.example, DTensor):
            continue
        if isinstance(given.example, torch.nn.Parameter):
            continue
        sizes = AttrSource(AttrSource(given.source, "_spec"), "shape")
        install_guard(sizes.make_guard(GuardBuilder.EQUALS_MATCH))
        traced = node.meta["example_value"]
        for size in (*traced.shape, *local_tensor(traced).shape):
            int(size)  # A symbol, as a size becomes once it has changed, is one no more.


def _make_inputs(variables: Iterable[Any]) -> None:
    """Make inputs of the graph of the DTensors among a frame's variables, or held by one."""
    from torch._dynamo.variables import LazyVariableTracker

    for variable in variables:
        if not isinstance(variable, LazyVariableTracker) or variable.is_realized():
            continue
        value = variable.peek_value()
        if isinstance(value, DTensor):
            variable.realize()
        elif type(value) in (tuple, list, dict):
            held = value.values() if isinstance(value, dict) else value
            if any(isinstance(x, DTensor) for x in held):
                made: Any = variable.realize()
                _make_inputs(made.items.values() if isinstance(value, dict) else made.items)


disable_dynamo = torch._disable_dynamo
"""``torch.compiler.disable`` without importing Dynamo, which takes a second and patches torch."""

# Autograd's engine

current_graph_task_id = torch._C._current_graph_task_id
"""The number of the backward that runs in this thread, the key of its state; -1 outside of one."""


def nodes_made() -> int:
    """How many nodes autograd has made in this thread. A module's have consecutive numbers."""
    return int(torch._C._autograd._get_sequence_nr())


def number_of_node() -> int | None:
    """The number, among :func:`nodes_made`, of the node whose backward runs; None outside."""
    node = current_autograd_node()
    return None if node is None else int(node._sequence_nr())


current_autograd_node: Any = torch._C._current_autograd_node
"""The node whose backward runs, by which debug mode tells the layer of a collective."""


def outputs_of(node: Any) -> list[tuple[int, ...]]:
    """The shapes of the outputs of a node's function: it is called with a gradient for each."""
    return [tuple(one.shape) for one in node._input_metadata]


def adds_to_grad(x: Tensor) -> bool:
    """Whether the running backward adds to the ``.grad`` of a tensor, or of those it is made of.

    The backward of torch.autograd.grad does not.
    """
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(x).node))
    except RuntimeError:  # For a leaf whose gradient torch.autograd.grad is asked for.
        return False


def asked_alone(x: Tensor) -> bool:
    """Whether the running backward is to return the gradient of ``x``, and goes no further there.

    That of torch.autograd.grad does, if it is asked for nothing that ``x`` was made of.
    """

    def executes(node: Any) -> bool:
        try:
            return bool(torch._C._will_engine_execute_node(node))
        except RuntimeError:  # As above.
            return True

    below = [] if x.grad_fn is None else [node for node, _ in x.grad_fn.next_functions if node]
    return bool(below) and executes(x.grad_fn) and not any(map(executes, below))


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have the running backward call this at its end, to await what it has started."""
    Variable._execution_engine.queue_callback(call)


def hooks_of(x: Tensor) -> dict[int, Any] | None:
    """A tensor's hooks, which run when its gradient comes; None if it has never had any."""
    return x._backward_hooks


def hooks_again(param: Tensor, hook: Callable[..., None]) -> bool:
    """Whether a parameter has this post-accumulate hook; if so its hooks are set anew.

    ``to_empty()`` swaps the tensor of a parameter, but hooks fire only on the one they were set on.
    """
    hooks = param._post_accumulate_grad_hooks
    if not hooks or hook not in hooks.values():
        return False
    param._post_accumulate_grad_hooks = hooks
    return True


def hooked_in_backward(param: Tensor) -> bool:
    """Whether hooks run once a parameter's gradient is there, which may change the parameter."""
    return bool(param._post_accumulate_grad_hooks)


top_saved_tensors_default_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
"""The hooks by which tensors are saved, as checkpointing sets them; None if they are kept."""

# Operators; flex_attention_op is what an Intercept gives a mask for the grid's shards.
c10d_functional: Any = torch.ops._c10d_functional
"""The functional collectives, which can be traced."""


def collective_of(op: Any) -> str:
    """The name of a functional collective, such as ``all_reduce``; ``""`` for other operators.

    Operators that transfer and multiply are included, such as ``fused_all_gather_matmul``.
    """
    if op.namespace == "symm_mem":
        return str(op._opname)
    if op.namespace != "_c10d_functional" or op._opname in ("wait_tensor", "_wrap_tensor_autograd"):
        return ""
    return str(op._opname)


def c10d_collective_of(op: Any) -> str:
    """The name of a c10d collective, as FSDP2 uses, such as ``allgather_base``; else ``""``."""
    return str(op._opname).strip("_") if op.namespace == "c10d" else ""


_aten = torch.ops.aten
flash_attention_for_cpu: Any = _aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_for_cpu_backward: Any = _aten._scaled_dot_product_flash_attention_for_cpu_backward
flash_attention: Any = _aten._scaled_dot_product_flash_attention
flash_attention_backward: Any = _aten._scaled_dot_product_flash_attention_backward
efficient_attention: Any = _aten._scaled_dot_product_efficient_attention
efficient_attention_backward: Any = _aten._scaled_dot_product_efficient_attention_backward
"""Attention to one block of keys, whose lse is needed to merge blocks."""


def fused_all_gather_matmul(
    shard: Tensor, weights: list[Tensor], dim: int, group: str
) -> tuple[Tensor, list[Tensor]]:
    """Gather a tensor that is sharded in ``dim``, and multiply it by each of ``weights``.

    By torch's operator in symmetric memory, which is registered by the import below.
    """
    import torch.distributed._symmetric_memory  # noqa: F401

    op = torch.ops.symm_mem.fused_all_gather_matmul.default
    whole, products = op(shard, weights, dim, group)
    return whole, products


def fused_matmul_reduce_scatter(
    x: Tensor, weight: Tensor, reduce_op: str, dim: int, group: str
) -> Tensor:
    """A product reduce-scattered over a group: this rank gets its shard of the sum in ``dim``."""
    import torch.distributed._symmetric_memory  # noqa: F401

    op = torch.ops.symm_mem.fused_matmul_reduce_scatter.default
    total: Tensor = op(x, weight, reduce_op, dim, group)
    return total


def fuses_products(device_type: str) -> bool:
    """Whether the two fused operators are registered for a device type, by torch or otherwise."""
    import torch.distributed._symmetric_memory  # noqa: F401

    key = torch._C._dispatch_key_for_device(device_type)
    return torch._C._dispatch_has_kernel_for_dispatch_key("symm_mem::fused_all_gather_matmul", key)


safe_softmax: Any = _aten._safe_softmax
"""Softmax with zeros for rows of ``-inf`` only, as in ``scaled_dot_product_attention``."""

# Meshes and process groups. set_timeout: torch gives a mesh's groups the default timeout.


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that this one is a slice of: all slices of it have one :class:`Context`."""
    return mesh._get_root_mesh()


def current_mesh() -> DeviceMesh:
    """The mesh of the surrounding ``with mesh:``, as torch's ``parallelize_module`` takes it."""
    return _mesh_resources.get_current_mesh()


_first_fake_rank = itertools.count(1 << 16)


@contextmanager
def fake_world(ranks: int, rank: int) -> Iterator[int]:
    """A default process group that transfers nothing, whatever group the process has.

    torch keeps its groups in one object, which is replaced meanwhile, and in a registry of names,
    from which the fake groups' names are removed at the end.

    The ranks begin at a number at which no other mesh of the process begins: DTensor caches the
    meshes that it has seen, and would take this one for another of the same ranks.

    Args:
        ranks: the number of ranks of the mesh.
        rank: which of them this process is.

    Yields:
        The number of the first rank.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    before, hook, first = c10d._world, sys.excepthook, next(_first_fake_rank)
    kinds = "map names group_ranks backend_config to_tag coalesce_state"
    tables: Any = {name: {} for name in ("tags_to_pg", *(f"pg_{kind}" for kind in kinds.split()))}
    # So that names differ from those of the process's own groups.
    here: Any = SimpleNamespace(default_pg=None, comms=[], group_count=1 << 30, **tables)
    c10d._world = here
    try:
        size = first + ranks
        dist.init_process_group("fake", store=FakeStore(), rank=first + rank, world_size=size)
        yield first
    finally:
        for name in here.pg_names.values():
            c10d._unregister_process_group(name)
        c10d._world = before
        c10d._update_default_pg(before.default_pg)
        sys.excepthook = hook


def resolve_process_group(name: str) -> dist.ProcessGroup:
    """The process group of a name, by which the functional collectives refer to it."""
    return c10d._resolve_process_group(name)  # type: ignore[arg-type]


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend of a group for a device, such as a ProcessGroupGloo; None if there is none."""
    if torch.device(device.type) not in group._device_types:
        return None
    return group._get_backend(device)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The timeout of a group's transfers; None for a backend that has no such option."""
    options = getattr(backend_of(group, device), "options", None)
    return getattr(options, "_timeout", None)


def default_timeout(group: dist.ProcessGroup) -> timedelta:
    """The timeout of a group of this backend that was given none."""
    return c10d._get_default_timeout(dist.get_backend(group))


def gloo_options(devices: Sequence[Any], threads: int, timeout: timedelta) -> Any:
    """Options of a gloo group with ``threads`` worker threads, where torch's groups have two."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = list(devices)
    options._threads = threads
    options._timeout = timeout
    return options


# DTensor. StridedShard: the placement that DTensor gives a flattened sequence of uneven shards.


def local_tensor(x: Any) -> Any:
    """A DTensor's local shard, without the autograd node of ``to_local()``; other tensors as is.

    Recognised by the attribute, since FSDP2 has parameter classes of its own.
    """
    return getattr(x, "_local_tensor", x)


def spec_of(x: Any) -> Any:
    """A DTensor's spec: its mesh, placements and global shape; None for other tensors."""
    return getattr(x, "_spec", None)


def place_by_keyword(op: Any, name: str) -> None:
    """Let DTensor's cache of an operator's placements look at a keyword argument."""
    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op].static_kwargkey = [name]


def spec_for(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> Any:
    """The spec of a DTensor."""
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, dtype))


def dtensor_of(local: Tensor, spec: Any) -> DTensor:
    """A shard as a DTensor, without ``from_local``'s checks, which take longer than a product."""
    # A copy of the spec, as torch changes specs in place.
    own = object.__new__(type(spec))
    own.__dict__.update(spec.__dict__)
    # Without __init__, which does nothing but tell torch.export.
    return DTensor.__new__(DTensor, local, own, requires_grad=False)


# Modules, and how data parallelism wraps them


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters by name, including those that are None."""
    return module._parameters


def submodules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module's children by name, including those that are None, pruned for pipeline stages."""
    return module._modules


def forward_pre_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """Hooks before a module's forward: a user's may change parameters, ours leave a copy's."""
    return module._forward_pre_hooks


def forward_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """Hooks after a module's forward: a user's may change parameters."""
    return module._forward_hooks


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile``, or the module's own ``compile()``, compiles its calls."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def graph_pass(run: Callable[[Graph], None], *files: str) -> Any:
    """A pass of Inductor's own: ``run`` changes each graph, as it says in these source files."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Pass(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            run(graph)

        def uuid(self) -> Any:
            return get_hash_for_files(files)

    return Pass()


def constant_in_graphs(function: Callable[[], bool]) -> Callable[[], bool]:
    """Let Dynamo call a function when it traces, as ``torch.compiler.assume_constant_result`` does.

    Which imports Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


REPLICATE = "torch.distributed._composable.replicate"


def has_replicate(module: nn.Module) -> bool:
    """Whether the composable ``replicate`` averages a module's gradients."""
    states = module.__dict__.get(STATE_KEY, {}).values()
    return any(type(state).__module__ == REPLICATE for state in states)


def is_sharded_by_fsdp(module: nn.Module) -> bool:
    """Whether FSDP2 shards a module's own parameters, and so follows a ``load_state_dict``."""
    hooks = module._load_state_dict_post_hooks.values()
    return any(hook.__module__.startswith("torch.distributed.fsdp.") for hook in hooks)


def was_localized(param: Any) -> bool:
    """Whether DistributedDataParallel, with a ``device_mesh``, made a DTensor parameter plain."""
    return hasattr(param, "_st_info")
