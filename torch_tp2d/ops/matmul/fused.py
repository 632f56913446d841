"""``fused``: ``pipelined`` whose transfers along ``tp_col`` are one operator with their product.

torch has two such operators, which send and multiply by turns in symmetric memory:
``fused_all_gather_matmul`` and ``fused_matmul_reduce_scatter``. They take shards of one size;
others travel as ``pipelined`` sends them. So do weights and their gradients, which are no part of
it.

Not run on a GPU, and not timed: held against torch's reference implementation of the two on CPUs.
"""

from __future__ import annotations

from .collective import SQUARE, WHOLE, ab, abt, atb, atb_sum, prefetch
from .pipelined import backward, forward

__all__ = ["SQUARE", "WHOLE", "ab", "abt", "atb", "atb_sum", "backward", "forward", "prefetch"]
