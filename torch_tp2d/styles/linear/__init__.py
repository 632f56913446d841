"""The matmul styles: which layouts a Linear takes and gives, and which op computes it.

``styles`` has the three, each a rule and what is said of it; ``options`` and ``matmul`` what they
share, as they are written and as they are applied; ``runners`` what runs in place of a Linear.
"""

from .styles import Block2DParallel, Colwise2D, Rowwise2D

__all__ = ["Block2DParallel", "Colwise2D", "Rowwise2D"]
