"""The matmul styles: which layouts a Linear takes and gives, and which op computes it.

``styles`` has the three styles. What they have in common is in ``options`` (their keyword
arguments) and ``matmul`` (how they are applied); ``runners`` has what runs in place of a Linear.
"""

from .styles import Block2DParallel, Colwise2D, Rowwise2D

__all__ = ["Block2DParallel", "Colwise2D", "Rowwise2D"]
