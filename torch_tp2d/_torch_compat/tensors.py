"""Of tensors, autograd, operators and graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode as active_fake_mode
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_op
from torch._subclasses import fake_tensor
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor
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


def local_tensor(x: Any) -> Any:
    """A DTensor's local shard, without the autograd node of ``to_local()``; other tensors as is.

    Recognised by the attribute, since FSDP2 has parameter classes of its own.
    """
    return getattr(x, "_local_tensor", x)


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
