"""What is in compiled graphs after Inductor's async tensor parallelism has gone over them."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from functorch.compile import make_boxed_func
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch.fx import GraphModule

from support.compiled import Recorder
from support.symmetric import NAMES

SENT = {*NAMES, "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"}


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
