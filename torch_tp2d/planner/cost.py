"""How many elements a Linear receives per device, by dataflow: pure arithmetic.

For ``Y[M, N] = X[M, K] @ W[N, K]^T`` on R x C = ``tp_row`` x ``tp_col``, M the tokens of the whole
grid. An all-gather or a reduce-scatter of a tensor along an axis of size A gives each device
``(A-1)/A`` of its elements, and so does the all-to-all that takes it from one layout to another.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch.distributed.tensor import Shard

from ..layouts import STATIONARY, MatmulRule

__all__ = ["Traffic", "linear_traffic"]

Stream = Literal["token", "transposed"]


class Traffic(NamedTuple):
    """Elements that a device receives."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def linear_traffic(
    rule: MatmulRule,
    dataflow: str,
    *,
    tokens: int,
    in_features: int,
    out_features: int,
    rows: int,
    columns: int,
    keep_weight: bool = False,
    stream: Stream = "token",
) -> Traffic:
    """Elements received per device by one Linear, with no bias, forward and backward.

    ====================  =============================================================
    dataflow              forward
    ====================  =============================================================
    output stationary     ``(C-1)/C M/R K + (R-1)/R K N/C`` (Colwise2D, Block2DParallel)
    input stationary      ``(R-1)/R K N/C + (C-1)/C M/R N`` (Rowwise2D)
    weight stationary     ``(C-1)/C M K/R + (R-1)/R M N/C`` (Colwise2D, Block2DParallel),
                          ``(R-1)/R M K/C + (C-1)/C M N/R`` (Rowwise2D)
    ====================  =============================================================

    Backward moves the same for the tokens. A weight that moved moves again, unless it was kept,
    and its gradient does; one that stays has a gradient that stays.

    Colwise2D takes the residual stream (tokens over both axes or, transposed, tokens over
    ``tp_col`` and hidden over ``tp_row``) and gives the feature layout, Rowwise2D the other way
    round, Block2DParallel the feature layout to both. A dataflow whose own residual stream is not
    ``stream`` pays ``(R-1)/R`` of a shard for the way from one to the other, each way.

    Where tokens are whole instead of split (``(Shard(-1), Replicate())`` for a single token,
    ``(Replicate(), Shard(-1))`` between the two Linears of an MLP) the producer all-reduces, twice
    what it would reduce-scatter, and the consumer gathers nothing: between one producer and one
    consumer, as much in sum.

    Args:
        rule: the style's, :data:`torch_tp2d.layouts.COLWISE`, ``ROWWISE`` or ``BLOCK``.
        dataflow: the rule's own, or ``"weight_stationary"``.
        tokens: M, batch times sequence, of the whole grid.
        keep_weight: the gathered weight is kept for backward (``reshard_after_forward=False``).
        stream: the layout of the residual stream; means nothing for Block2DParallel.

    Raises:
        ValueError: for a dataflow that the rule does not have.

    Exact where the sizes divide; elsewhere shards are padded on the wire.

    Example::

        >>> linear_traffic(COLWISE, "weight_stationary", tokens=1, in_features=4096,
        ...                out_features=4096, rows=2, columns=2, stream="transposed")
        Traffic(forward=2048.0, backward=2048.0)
    """
    if dataflow not in (rule.dataflow, STATIONARY):
        raise ValueError(
            f'{rule.style} has dataflow "{rule.dataflow}" or "{STATIONARY}", not {dataflow!r}'
        )
    on_row, on_col = (rows - 1) / rows, (columns - 1) / columns
    stays = dataflow == STATIONARY
    takes_stream = rule.gathers_input
    residual = tokens * (in_features if takes_stream else out_features)
    inner = tokens * (out_features if takes_stream else in_features)
    # On tp_col the residual stream is gathered, or summed; on tp_row the weight or the rest.
    moved = on_col * residual / rows
    if stays:
        moved += on_row * inner / columns
    if takes_stream and isinstance(rule.input_col, Shard):
        # The feature layout: tp_col has to gather the features before tp_row can split them.
        moved += on_row * residual / rows if stays else 0
    elif stays != (stream == "transposed"):
        moved += on_row * residual / (rows * columns)
    weight = 0 if stays else on_row * in_features * out_features / columns
    return Traffic(moved + weight, moved + weight * (1 if keep_weight else 2))
