"""Debug mode: what the ranks are about to do is compared before they do it, and copies after.

``TP2D_DEBUG=1`` in the environment of every rank, or :func:`enable` on every rank, turns it on.

1. Before a collective of ours starts, the ranks of its axis tell each other which it is: op,
   sizes, dtype, and the layer that it is for. If they differ, or a rank does not come (it raised,
   ended or was stopped), every rank raises :class:`RanksDisagree` within the process group's
   timeout, which names the rank, the layer and the collective.
2. At the end of the first backward, and of every n-th after it with ``TP2D_DEBUG=n``, parameters
   that are whole along an axis are compared over the ranks of that axis, and so are their
   gradients: those of a parameter that some layer forgets to sum differ, and the copies of it
   drift apart while the loss looks right.

It costs a round trip between the ranks for each collective. What runs inside a compiled graph, on
fake tensors or on a fake process group is not compared; nor are collectives of DTensor and FSDP.
"""

from .collectives import RanksDisagree
from .switch import disable, enable, enable_by_environment, is_on, run_as_layer

__all__ = ["RanksDisagree", "disable", "enable", "is_on", "run_as_layer"]

enable_by_environment()
