"""torch's fused products on a CPU: its own reference implementations of them."""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed._symmetric_memory as symmetric_memory

NAMES = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"


@cache
def on_cpu() -> torch.library.Library:
    """Register them for CPUs, for the rest of the process."""
    library = torch.library.Library("symm_mem", "IMPL")
    for name in NAMES:
        library.impl(name, getattr(symmetric_memory, f"_{name}_fallback"), "CPU")
    return library
