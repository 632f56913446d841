"""Attention on the grid: the style for attention modules, and the paper's algorithm by itself.

In import order the main files are ``blocks`` (the algorithm), ``tokens`` (a module's inputs),
``call`` (what replaces its call of torch's attention), ``runner`` and ``style``. ``projections``
has the styles of the Linears inside.
"""

from .blocks import attention2d
from .projections import Projections, attention_projections
from .style import Attention2D

__all__ = ["Attention2D", "Projections", "attention2d", "attention_projections"]
