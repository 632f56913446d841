"""Predicts what a plan costs, and suggests which to choose."""

from .rates import Rates, assume

__all__ = ["Rates", "assume"]
