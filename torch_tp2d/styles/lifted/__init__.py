"""Stock parallel styles on a 2-D mesh.

``style`` has :class:`Lifted` and which style becomes which; ``sequence`` and ``prepare`` are those
that have no 2-D namesake.
"""

from .style import Lifted

__all__ = ["Lifted"]
