"""``fused``: ``pipelined``, with each transfer along ``tp_col`` and its product in one operator.

torch has two such operators, which alternate between sending and multiplying in symmetric memory:
``fused_all_gather_matmul`` and ``fused_matmul_reduce_scatter``. They take shards of one size;
others are transferred as by ``pipelined``. So are weights and their gradients, which these
operators do not handle.

Tested against torch's reference implementations on CPUs, and on four ranks of one GPU; not timed.
"""

from __future__ import annotations

from .collective import SQUARE, WHOLE, ab, abt, atb, atb_sum, prefetch
from .pipelined import backward, forward

__all__ = ["SQUARE", "WHOLE", "ab", "abt", "atb", "atb_sum", "backward", "forward", "prefetch"]
