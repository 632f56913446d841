"""What a plan costs, and which to choose."""

from .rates import Rates, assume

__all__ = ["Rates", "assume"]
