"""Two-dimensional tensor parallelism for PyTorch, as ParallelStyles for ``parallelize_module``.

A stock tensor-parallel plan becomes a 2-D plan by renaming two classes: ``ColwiseParallel`` to
:class:`Colwise2D` and ``RowwiseParallel`` to :class:`Rowwise2D`, on ``mesh["tp_row", "tp_col"]``.
"""

from .counter import CommCounter
from .dropout import Dropout2D
from .lift import Lifted
from .loss import cross_entropy
from .ops import attention as _attention  # noqa: F401  registers a sharding rule
from .parallelize import parallelize_module
from .replicate import Replicate
from .styles import Block2DParallel, Colwise2D, GridStyle, Norm2D, Rowwise2D

__version__ = "0.1.0"

__all__ = [
    "Block2DParallel",
    "Colwise2D",
    "CommCounter",
    "Dropout2D",
    "GridStyle",
    "Lifted",
    "Norm2D",
    "Replicate",
    "Rowwise2D",
    "cross_entropy",
    "parallelize_module",
]
