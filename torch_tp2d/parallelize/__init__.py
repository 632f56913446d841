"""A plan onto the mesh: resolved, checked as a whole on all ranks, and then applied."""

from .plan import parallelize_module
from .table import LayoutRow, LayoutTable, layouts_of

__all__ = ["LayoutRow", "LayoutTable", "layouts_of", "parallelize_module"]
