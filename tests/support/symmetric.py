"""torch's fused products on a CPU: its own reference implementations of them."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"


@cache
def on_cpu() -> torch.library.Library:
    """Register them for CPUs, for the rest of the process."""
    library = torch.library.Library("symm_mem", "IMPL")
    for name in NAMES:
        library.impl(name, getattr(symmetric_memory, f"_{name}_fallback"), "CPU")
    return library


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
