"""Applying a plan on the mesh: it is resolved, checked in full on all ranks, and then applied."""

from .plan import parallelize_module
from .table import LayoutRow, LayoutTable, layouts_of

__all__ = ["LayoutRow", "LayoutTable", "layouts_of", "parallelize_module"]
