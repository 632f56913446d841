"""Losses of logits that are sharded over the 2-D mesh.

``vocab_parallel`` computes the loss; ``context`` has :func:`torch_tp2d.loss_parallel`, inside
which torch's own ``cross_entropy`` becomes that loss.
"""

from .context import loss_parallel
from .vocab_parallel import cross_entropy

__all__ = ["cross_entropy", "loss_parallel"]
