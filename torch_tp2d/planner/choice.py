"""Chooses what ``"auto"`` stands for: the algorithm and the dataflow of a Linear."""

from __future__ import annotations

from dataclasses import dataclass

from ..comm import FAST_PIECE_BYTES, ROUND_SECONDS
from ..mesh.layouts import STATIONARY, Layout, MatmulRule
from .cost import linear_traffic
from .rates import Rates

__all__ = ["LinearCase", "choose_algorithm", "choose_dataflow", "linear_seconds"]

ADVANTAGE = 0.9
"""Another dataflow is chosen if it takes at most this fraction of the time of the style's own."""


def choose_algorithm(ranks: int, goes_by_rates: bool, rates: Rates | None) -> str:
    """``pipelined`` if transfers take longer than splitting them into rounds costs.

    Args:
        ranks: those of the mesh; one has no transfers, and so nothing to overlap.
        goes_by_rates: the transport's attribute; if False, transfers are one round, which costs
            next to nothing.
        rates: those of the mesh; None if they are not known.
    """
    if ranks == 1:
        return "collective"
    if not goes_by_rates or rates is None:
        return "pipelined"
    slowest = min(rates.row, rates.col)
    return "pipelined" if slowest * ROUND_SECONDS < FAST_PIECE_BYTES else "collective"


@dataclass(frozen=True)
class LinearCase:
    """A Linear as its style lays it out on R x C ranks: its rule, layouts of X and Y, and sizes."""

    rule: MatmulRule
    takes: Layout
    gives: Layout
    in_features: int
    out_features: int
    rows: int
    columns: int


def linear_seconds(
    case: LinearCase,
    dataflow: str,
    tokens: int,
    itemsize: int,
    rates: Rates,
    *,
    backward: bool,
    keep_weight: bool,
) -> float:
    """Estimated seconds of a Linear: its products and its transfers, one after the other.

    That ``pipelined`` hides transfers is left out: for so few tokens that the dataflow is in
    question, transfers are too small to be split (measured at 200 Mbit/s, up to
    tokens = 2 hidden).

    Args:
        tokens: batch times sequence, over the grid.
        itemsize: bytes of an element.
        backward: count backward too.
        keep_weight: a gathered weight is kept for backward.
    """
    moved = linear_traffic(
        case.rule,
        dataflow,
        takes=case.takes,
        gives=case.gives,
        tokens=tokens,
        in_features=case.in_features,
        out_features=case.out_features,
        rows=case.rows,
        columns=case.columns,
        keep_weight=keep_weight,
    )
    passes = moved if backward else moved[:1]
    transfers = sum(part.row / rates.row + part.col / rates.col for part in passes)
    operations = (6 if backward else 2) * tokens * case.in_features * case.out_features
    return itemsize * transfers + operations / (case.rows * case.columns) / rates.flops


def choose_dataflow(
    case: LinearCase,
    tokens: int,
    itemsize: int,
    rates: Rates,
    *,
    backward: bool,
    keep_weight: bool = True,
) -> str:
    """The style's own dataflow, or ``"weight_stationary"`` if that is clearly faster."""
    own, stays = (
        linear_seconds(
            case, dataflow, tokens, itemsize, rates, backward=backward, keep_weight=keep_weight
        )
        for dataflow in (case.rule.dataflow, STATIONARY)
    )
    return STATIONARY if stays <= ADVANTAGE * own else case.rule.dataflow
