"""Losses of logits that lie on the 2-D mesh.

``vocab_parallel`` has the loss, ``context`` the one that torch's own calls become inside
:func:`torch_tp2d.loss_parallel`.
"""

from .context import loss_parallel
from .vocab_parallel import cross_entropy

__all__ = ["cross_entropy", "loss_parallel"]
