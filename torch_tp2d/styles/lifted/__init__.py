"""Stock parallel styles on a 2-D mesh.

``style`` has :class:`Lifted` and the table of which style becomes which. ``sequence`` and
``prepare`` implement the stock styles that have no 2-D namesake.
"""

from .style import Lifted

__all__ = ["Lifted"]
