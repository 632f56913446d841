"""Attention over a sequence that is sharded along an axis: schedules on local shards.

===============  =================================================================  =============
algorithm        what moves                                                         scores held
===============  =================================================================  =============
``ring``         keys and values around the axis, each block attended to while      a kernel's
                 the next is on the wire
``gather``       keys and values, all at once                                       a kernel's
``two_phase``    queries along one axis, keys and values along the other, and       1/N of them
                 the maxima and sums of the softmax
===============  =================================================================  =============

All of them know which positions of the sequence each rank holds (:class:`.order.Order`), so that
causal attention needs no mask tensor.
"""

from .heads import Heads, check_groups
from .order import Order, balanced_order
from .ring import Spec, gathered, ring
from .two_phase import two_phase

__all__ = [
    "Heads",
    "Order",
    "Spec",
    "balanced_order",
    "check_groups",
    "gathered",
    "ring",
    "two_phase",
]
