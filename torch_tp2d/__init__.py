"""Two-dimensional tensor parallelism for PyTorch, as ParallelStyles for ``parallelize_module``.

A stock tensor-parallel plan becomes a 2-D plan by renaming two classes: ``ColwiseParallel`` to
:class:`Colwise2D` and ``RowwiseParallel`` to :class:`Rowwise2D`, on ``mesh["tp_row", "tp_col"]``.
"""

from . import _requirements, debug  # noqa: F401  torch's version is checked first
from ._version import __version__ as __version__
from .comm.counter import CommCounter
from .loss import cross_entropy, loss_parallel
from .mesh.no_sync import no_sync
from .mesh.tokens import token_sizes
from .ops.attention import balanced_order, sharding  # noqa: F401  sharding registers a rule
from .parallelize import layouts_of, parallelize_module
from .planner.check_plan import check_plan
from .planner.describe import describe
from .planner.suggest import suggest
from .plans import plan_for
from .styles.attention import Attention2D, attention2d, attention_projections
from .styles.base import GridStyle
from .styles.dropout import Dropout2D
from .styles.lifted import Lifted
from .styles.linear import Block2DParallel, Colwise2D, Rowwise2D
from .styles.local import Local2D
from .styles.norm import Norm2D
from .styles.replicated import Replicate

__all__ = [
    "Attention2D",
    "Block2DParallel",
    "Colwise2D",
    "CommCounter",
    "Dropout2D",
    "GridStyle",
    "Lifted",
    "Local2D",
    "Norm2D",
    "Replicate",
    "Rowwise2D",
    "attention2d",
    "attention_projections",
    "balanced_order",
    "check_plan",
    "cross_entropy",
    "debug",
    "describe",
    "layouts_of",
    "loss_parallel",
    "no_sync",
    "parallelize_module",
    "plan_for",
    "suggest",
    "token_sizes",
]
