"""Every name of torch's that torch does not promise to keep, with what it is used for.

The rest of the package imports these from here, under torch's name without the underscore wherever
they are torch's as they stand. ``tests/arithmetic/test_torch_compat.py`` tries each of them, so
that a release of torch that moves one is named by the test of that name, and allows no private name
elsewhere.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_op
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.distributed.distributed_c10d import _get_default_timeout, _resolve_process_group
from torch.distributed.distributed_c10d import _set_pg_timeout as set_timeout
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

__all__ = [
    "NEEDS_VALUES",
    "REPLICATE",
    "SELECTIVE_MODES",
    "AutoDispatchBelowAutograd",
    "DisableTorchFunctionSubclass",
    "StridedShard",
    "TorchDispatchMode",
    "active_fake_mode",
    "adds_to_grad",
    "are_functorch_transforms_active",
    "at_end_of_backward",
    "backend_of",
    "c10d_collective_of",
    "c10d_functional",
    "collective_of",
    "current_autograd_node",
    "current_graph_task_id",
    "current_mesh",
    "default_timeout",
    "disable_current_modes",
    "disable_dynamo",
    "disabled_torch_function_impl",
    "dispatch_modes",
    "dtensor_of",
    "efficient_attention",
    "efficient_attention_backward",
    "fake_mode",
    "fake_world",
    "flash_attention",
    "flash_attention_backward",
    "flash_attention_for_cpu",
    "flash_attention_for_cpu_backward",
    "flex_attention_op",
    "flops_of",
    "forward_hooks",
    "forward_pre_hooks",
    "fused_all_gather_matmul",
    "fused_matmul_reduce_scatter",
    "fuses_products",
    "gloo_options",
    "has_replicate",
    "hooks_again",
    "is_mutable",
    "is_sharded_by_fsdp",
    "local_tensor",
    "make_wrapper_subclass",
    "nodes_made",
    "number_of_node",
    "parameters_of",
    "resolve_process_group",
    "root_mesh",
    "safe_softmax",
    "set_timeout",
    "spec_of",
    "submodules_of",
    "timeout_of",
    "tree_leaves",
    "tree_map_only",
    "version",
    "was_localized",
]

# Tensor subclasses and modes. Torch documents the two of them that have no underscore of their own,
# TorchDispatchMode and DisableTorchFunctionSubclass, under a private module.

make_wrapper_subclass = Tensor._make_wrapper_subclass
"""Makes a tensor of a shape and no storage: a deferred one, or logits that are flat by name."""

disabled_torch_function_impl: Any = torch._C._disabled_torch_function_impl
"""As ``__torch_function__`` leaves a subclass to ``__torch_dispatch__`` alone."""

DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""A context in which a subclass's ``__torch_function__`` can call torch without meeting itself."""

AutoDispatchBelowAutograd: Any = torch._C._AutoDispatchBelowAutograd
"""A context that passes over autograd's kernels, which cost more than the collectives do."""

# disable_current_modes: what the ranks tell each other is not counted, traced or checkpointed.

SELECTIVE_MODES = _CachingTorchDispatchMode, _CachedTorchDispatchMode
"""The modes in which selective checkpointing runs a region, and runs it again."""


def dispatch_modes() -> Sequence[Any]:
    """The dispatch modes that are entered: is a region of selective checkpointing among them?"""
    return _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else ()


# active_fake_mode: nothing travels while a model is traced with fake tensors.

are_functorch_transforms_active = torch._C._are_functorch_transforms_active
"""Whether a transform of torch.func runs, which the styles refuse."""


def version(x: Tensor) -> int:
    """How often a tensor was changed in place: whether what was made of it is still good."""
    return x._version


def fake_mode() -> Any:
    """The mode in which tensors have shapes and no values, those from outside it taken along."""
    return FakeTensorMode(allow_non_fake_inputs=True)


NEEDS_VALUES = DataDependentOutputException, DynamicOutputShapeException
"""What operators raise in that mode whose result, or its shape, is a matter of values."""


def flops_of(op: Any, args: Any, kwargs: Any, out: Any) -> int:
    """What an operator multiplies and adds, by torch's own formulas; 0 for those without one."""
    from torch.utils.flop_counter import flop_registry, sdpa_flop_count

    packet = op._overloadpacket
    if op.namespace == "symm_mem":
        # Products of the whole that is gathered, or of what is summed after.
        whole, weights = (out[0], args[1]) if isinstance(out, tuple) else (args[0], [args[1]])
        return 2 * int(whole.numel()) * sum(int(weight.shape[-1]) for weight in weights)
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    if packet is flash_attention_for_cpu:
        return int(sdpa_flop_count(*(x.shape for x in args[:3])))
    if packet is flash_attention_for_cpu_backward:
        # Scores again, and four products for the gradients, for two in forward.
        return int(sdpa_flop_count(*(x.shape for x in args[1:4])) * 5 // 2)
    return 0


def is_mutable(op: Any) -> bool:
    """Whether an operator writes into an argument: not into a tensor that others share."""
    return bool(op._schema.is_mutable)


disable_dynamo = torch._disable_dynamo
"""``torch.compiler.disable``, without importing Dynamo, which takes a second and patches torch."""

# Autograd's engine

current_graph_task_id = torch._C._current_graph_task_id
"""The number of the backward that runs in this thread, -1 outside: what is under way is by it."""


def nodes_made() -> int:
    """How many nodes autograd has made in this thread: those of a module are numbered in a row."""
    return int(torch._C._autograd._get_sequence_nr())


def number_of_node() -> int | None:
    """Which of them is the one whose backward runs; None outside of backward."""
    node = current_autograd_node()
    return None if node is None else int(node._sequence_nr())


current_autograd_node: Any = torch._C._current_autograd_node
"""The node whose backward runs: which layer a collective is for, in debug mode."""


def adds_to_grad(x: Tensor) -> bool:
    """Whether the backward that runs adds to the ``.grad`` behind a tensor that requires one.

    That of torch.autograd.grad does not.
    """
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(x).node))
    except RuntimeError:
        # Raised of a leaf whose gradient is what torch.autograd.grad is asked for.
        return False


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have the backward that runs call this when it is over: what it started is awaited then."""
    Variable._execution_engine.queue_callback(call)


def hooks_again(param: Tensor, hook: Callable[..., None]) -> bool:
    """Whether a parameter has a post-accumulate hook, which then is set anew.

    ``to_empty()`` puts another tensor under a parameter, and hooks fire where they were set.
    """
    hooks = param._post_accumulate_grad_hooks
    if not hooks or hook not in hooks.values():
        return False
    param._post_accumulate_grad_hooks = hooks
    return True


# Operators. flex_attention_op is what an Intercept looks for: a mask that fits the grid's shards.

c10d_functional: Any = torch.ops._c10d_functional
"""The collectives that can be traced."""


def collective_of(op: Any) -> str:
    """``all_reduce`` of the functional collective's operator; ``""`` for what sends nothing.

    And ``fused_all_gather_matmul`` of an operator that sends and multiplies.
    """
    if op.namespace == "symm_mem":
        return str(op._opname)
    if op.namespace != "_c10d_functional" or op._opname in ("wait_tensor", "_wrap_tensor_autograd"):
        return ""
    return str(op._opname)


def c10d_collective_of(op: Any) -> str:
    """``allgather_base`` for one that is not functional, as FSDP2's are not; else ``""``."""
    return str(op._opname).strip("_") if op.namespace == "c10d" else ""


flash_attention_for_cpu: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_for_cpu_backward: Any = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
)
flash_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention
flash_attention_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward
efficient_attention: Any = torch.ops.aten._scaled_dot_product_efficient_attention
efficient_attention_backward: Any = torch.ops.aten._scaled_dot_product_efficient_attention_backward
"""Attention to one block of keys, with the logarithms by which blocks are merged."""


def fused_all_gather_matmul(
    shard: Tensor, weights: list[Tensor], dim: int, group: str
) -> tuple[Tensor, list[Tensor]]:
    """The whole of a tensor that an axis splits in ``dim``, and its products.

    By torch's operator in symmetric memory, which is not the library's before it is imported.
    """
    import torch.distributed._symmetric_memory  # noqa: F401

    op = torch.ops.symm_mem.fused_all_gather_matmul.default
    whole, products = op(shard, weights, dim, group)
    return whole, products


def fused_matmul_reduce_scatter(
    x: Tensor, weight: Tensor, reduce_op: str, dim: int, group: str
) -> Tensor:
    """A product summed over a group, of which this rank keeps its shard of ``dim``."""
    import torch.distributed._symmetric_memory  # noqa: F401

    op = torch.ops.symm_mem.fused_matmul_reduce_scatter.default
    total: Tensor = op(x, weight, reduce_op, dim, group)
    return total


def fuses_products(device_type: str) -> bool:
    """Whether torch has the two for a type of device, or somebody has registered them."""
    import torch.distributed._symmetric_memory  # noqa: F401

    key = torch._C._dispatch_key_for_device(device_type)
    return torch._C._dispatch_has_kernel_for_dispatch_key("symm_mem::fused_all_gather_matmul", key)


safe_softmax: Any = torch.ops.aten._safe_softmax
"""Zeros where nothing is seen, as ``scaled_dot_product_attention`` has it."""

# Meshes and process groups. set_timeout: torch leaves those of a mesh at the default.


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that this one is a slice of: all slices share what is known of a step."""
    return mesh._get_root_mesh()


def current_mesh() -> DeviceMesh:
    """The mesh of the surrounding ``with mesh:``, as for torch's own ``parallelize_module``."""
    return _mesh_resources.get_current_mesh()


_first_fake_rank = itertools.count(1 << 16)


@contextmanager
def fake_world(ranks: int, rank: int) -> Iterator[int]:
    """A default process group in which nothing travels, whatever group the process has.

    torch keeps its groups in one object, which is exchanged for the while, and in a registry of
    names, to which those of the fake groups are added and from which they are taken again.

    Its ranks begin at a number that no other mesh of the process begins at: DTensor remembers the
    meshes that it has seen, and takes one for another of the same ranks.

    Args:
        ranks: how many, as far as a mesh goes.
        rank: the one of them that this process plays.

    Yields:
        The number of the first of them.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    before, hook, first = c10d._world, sys.excepthook, next(_first_fake_rank)
    here: Any = SimpleNamespace(
        default_pg=None,
        pg_map={},
        pg_names={},
        pg_group_ranks={},
        pg_backend_config={},
        pg_to_tag={},
        tags_to_pg={},
        pg_coalesce_state={},
        comms=[],
        # Names that torch gives to no group of the process' own.
        group_count=1 << 30,
    )
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
    """The group of a name, by which the functional collectives know it."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """What sends a device's tensors for a group: gloo's own object, say. None if nothing does."""
    if torch.device(device.type) not in group._device_types:
        return None
    return group._get_backend(device)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """How long a group's transfers may take; None for a backend that does not say."""
    options = getattr(backend_of(group, device), "options", None)
    return getattr(options, "_timeout", None)


def default_timeout(group: dist.ProcessGroup) -> timedelta:
    """What a group of this kind has if nobody gave it a timeout."""
    return _get_default_timeout(dist.get_backend(group))


def gloo_options(devices: Sequence[Any], threads: int, timeout: timedelta) -> Any:
    """Options of a gloo group with a number of worker threads, which torch sets to two."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = list(devices)
    options._threads = threads
    options._timeout = timeout
    return options


# DTensor. A StridedShard is what flattening a sequence that does not divide leaves in placements.


def local_tensor(x: Any) -> Any:
    """A DTensor's shard itself, without the autograd node of ``to_local()``; others are their own.

    Told by the attribute, as FSDP2 has parameters of classes of its own.
    """
    return getattr(x, "_local_tensor", x)


def spec_of(x: Any) -> Any:
    """Where a DTensor lies and what it is a part of; None for other tensors."""
    return getattr(x, "_spec", None)


def dtensor_of(local: Tensor, spec: Any) -> DTensor:
    """A shard as a DTensor, without the checks of ``from_local`` that outlast a small product."""
    # A spec of its own: torch changes them in place.
    own = object.__new__(type(spec))
    own.__dict__.update(spec.__dict__)
    return DTensor(local, own, requires_grad=False)


# Modules, and how data parallelism wraps them


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters by name, None among them, found without a search."""
    return module._parameters


def submodules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module's children by name, with those that are None: pruned for a pipeline stage."""
    return module._modules


def forward_pre_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """What runs before a module: a user's may change parameters, ours is taken off a copy."""
    return module._forward_pre_hooks


def forward_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """What runs after a module: a user's may change parameters."""
    return module._forward_hooks


REPLICATE = "torch.distributed._composable.replicate"


def has_replicate(module: nn.Module) -> bool:
    """Whether the composable ``replicate`` has a module's gradients averaged."""
    states = module.__dict__.get(STATE_KEY, {}).values()
    return any(type(state).__module__ == REPLICATE for state in states)


def is_sharded_by_fsdp(module: nn.Module) -> bool:
    """Whether FSDP2 shards parameters of the module's own: it follows what is loaded there."""
    hooks = module._load_state_dict_post_hooks.values()
    return any(hook.__module__.startswith("torch.distributed.fsdp.") for hook in hooks)


def was_localized(param: Any) -> bool:
    """Whether DistributedDataParallel, given a ``device_mesh``, made a DTensor plain."""
    return hasattr(param, "_st_info")
