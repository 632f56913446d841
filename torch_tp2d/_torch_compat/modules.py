"""Of modules, and of the graphs that are made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import Graph

from .tensors import local_tensor


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


def begins_no_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let Dynamo make no graph that begins with a function, or with one that it calls.

    A graph that reaches the function has it as a part, unlike a function that is disabled.
    """
    dynamo = torch._C._dynamo.eval_frame
    skips = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skips, skips))
    return function


disable_dynamo = torch._disable_dynamo
"""``torch.compiler.disable`` without importing Dynamo, which takes a second and patches torch."""


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
