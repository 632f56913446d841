"""torch's fused products on a CPU: its own reference implementations of them."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from functorch.compile import make_boxed_func
from torch._inductor.compile_fx import view_to_reshape
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from support.compiled import Recorder

NAMES = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
SENT = {*NAMES, "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"}


@cache
def on_cpu() -> torch.library.Library:
    """Register them for CPUs, for the rest of the process."""
    library = torch.library.Library("symm_mem", "IMPL")
    for name in NAMES:
        library.impl(name, getattr(symmetric_memory, f"_{name}_fallback"), "CPU")
    return library


class FusedRecorder(Recorder):
    """Counts what is sent in the graphs, each of which Inductor's async-TP pass has gone over."""

    passes = True

    def record(self, graph: GraphModule, inputs: Any) -> Any:
        if self.passes:
            # The pass looks for NCCL, and this build of torch may have none.
            built = mock.patch.object(torch.distributed, "is_nccl_available", lambda: True)
            # As in Inductor, before its passes.
            view_to_reshape(graph)
            with built, symmetric_memory._test_mode():
                micro_pipeline_tp_pass(graph.graph)
            graph.recompile()
        names = (getattr(node.target, "_opname", "") for node in graph.graph.nodes)
        self.graphs.append(Counter(name for name in names if name in SENT))
        return make_boxed_func(graph.forward)


class Unfused(FusedRecorder):
    """Counts without the pass."""

    passes = False


class Calls(TorchDispatchMode):
    """How often each of the two, and each collective, is called."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._opname
        if func.namespace in ("symm_mem", "_c10d_functional") and name != "wait_tensor":
            self.count[name] += 1
        return func(*args, **(kwargs or {}))
