"""Debug mode: ranks compare collectives before they start, and replicated parameters afterwards.

``TP2D_DEBUG=1`` in the environment of every rank, or :func:`enable` on every rank, turns it on.

1. Before one of this library's collectives starts, the ranks of its axis exchange its
   description: op, sizes, dtype, and the layer that it is for. If the descriptions differ, or a
   rank does not arrive (it raised, ended or was stopped), every rank raises
   :class:`RanksDisagree` within the process group's timeout; the error names the rank, the layer
   and the collective.
2. At the end of the first backward, and of every n-th after it with ``TP2D_DEBUG=n``, parameters
   that are replicated along an axis are compared over the ranks of that axis, and so are their
   gradients. If some layer forgets to sum a gradient, the gradients differ between the ranks, and
   the copies of the parameter drift apart while the loss looks right.

The cost is one round trip between the ranks per collective. Collectives inside a compiled graph,
on fake tensors or on a fake process group are not compared, nor are those of DTensor and FSDP.
"""

from .collectives import RanksDisagree
from .switch import disable, enable, enable_by_environment, is_on, run_as_layer

__all__ = ["RanksDisagree", "disable", "enable", "is_on", "run_as_layer"]

enable_by_environment()
