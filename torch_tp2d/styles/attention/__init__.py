"""Attention on the grid: the style for attention modules, and the paper's algorithm by itself.

Each file knows those before it: ``blocks`` (the algorithm), ``tokens`` (what a module is given),
``call`` (what it gets for its call of torch's attention), ``runner`` and ``style``;
``projections`` has the styles of the Linears inside.
"""

from .blocks import attention2d
from .projections import Projections, attention_projections
from .style import Attention2D

__all__ = ["Attention2D", "Projections", "attention2d", "attention_projections"]
