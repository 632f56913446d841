"""A plan onto the mesh: resolved, checked as a whole on all ranks, and then applied."""

from .plan import parallelize_module

__all__ = ["parallelize_module"]
