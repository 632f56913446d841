"""The paper's two-phase attention: for DTensors, and as :class:`Attention2D` needs it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..._tracing import in_graph
from ...mesh.grid import Grid
from ...mesh.layouts import Layout, normalize
from ...ops.attention import Heads, Order, Spec, check_groups, gathered, ring, two_phase
from ..dtensors import to_dtensor
from .side_grads import with_whole_grad

__all__ = ["ACROSS", "SEQUENCE", "attention2d", "two_phase_on"]

ACROSS = ("ring", "gather", "two_phase")
SEQUENCE = 2
"""The dim of ``[batch, heads, sequence, features]``."""


def two_phase_on(
    tensors: tuple[Tensor, Tensor, Tensor],
    shapes: Sequence[Sequence[int]],
    layouts: tuple[Placement, Placement],
    mask: Tensor | None,
    spec: Spec,
    grid: Grid,
    *,
    shares: bool,
) -> Tensor:
    """The paper's attention of local queries, keys and values whose sequence tp_row splits.

    The scores of row i's queries and column j's keys are computed, and used, on rank (i, j).

    Args:
        tensors: queries, keys and values.
        shapes: their global shapes.
        layouts: the placements on tp_col of queries and output, and of keys and values.
        mask: for this row's queries and all keys.
        shares: where ``layouts`` replicate, gradients are handed back partial, not replicated.
    """
    (query, key, value), (query_shape, key_shape, value_shape) = tensors, shapes
    (on_query, on_key), row, col = layouts, grid.row, grid.col
    split, whole = Shard(SEQUENCE), Replicate()
    query = grid.redistribute(
        query,
        (split, on_query),
        (split, whole),
        shape=query_shape,
        partial_grad=(False, not (shares and on_query == whole)),
    )
    sizes = col.split(key_shape[SEQUENCE])
    start, count = sum(sizes[: col.index]), sizes[col.index]

    def of_this_column(x: Tensor, shape: Sequence[int]) -> Tensor:
        there = whole if shares and on_key == whole else split
        x = grid.redistribute(
            x, (split, on_key), (whole, there), shape=shape, partial_grad=(True, False)
        )
        return x.narrow(SEQUENCE, start, count) if there == whole else x

    key, value = of_this_column(key, key_shape), of_this_column(value, value_shape)
    if mask is not None and mask.shape[-1] != 1:
        mask = mask.narrow(-1, start, count)
    hidden = None
    if spec.causal:
        here = spec.order.positions(row.index, query.device)
        there = spec.order.positions(None, query.device)[start : start + count]
        hidden = here[:, None] < there
    out = two_phase(query, key, value, mask, hidden, spec.scale, spec.heads, col)
    shape = (*query_shape[:3], value_shape[3])
    return grid.redistribute(out, (split, Partial()), (split, on_query), shape=shape)


def attention2d(
    query: DTensor,
    key: DTensor,
    value: DTensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    algorithm: str = "two_phase",
    balanced: bool = False,
) -> DTensor:
    """The paper's two-phase attention on the grid, of DTensors in any layout.

    Block (i, j) of the scores is ``(QK^T)_ij = sum_t Q_it K_jt^T``. The softmax runs along a row of
    blocks, so its maximum and sum cross that mesh row. The output is ``O_ij = sum_t S_it V_tj``.
    The paper's blocks are ``(Shard(2), Shard(3))``: the sequence over ``tp_row``, the features of
    each head over ``tp_col``. Any sizes, numbers of heads and grids are possible. The blocks of the
    scores are not moved, as there are more scores than tokens. Instead queries are gathered along
    ``tp_col``, keys and values are brought to the column of their scores, and the output is
    reduce-scattered.

    Each rank holds 1/N of the scores, ``heads x queries/R x keys/C`` numbers, until backward. In
    forward it receives, in units of one rank's part of the queries, ``2 (C-1)`` and, for keys and
    values, ``2 (R-1) + 2 R (C-1)/C``. The ring, with heads over ``tp_col``, holds no scores and
    receives ``2 (R-1)``, so it is better if there are at least ``C`` heads. Two-phase attention is
    for fewer heads than columns.

    Args:
        query, key, value: ``[batch, heads, sequence, features]`` on a mesh
            ``("tp_row", "tp_col")``. Keys and values may have fewer heads than the queries, each
            for a group of query heads, and a sequence of another length.
        attn_mask: replicated on every rank, as ``scaled_dot_product_attention`` takes it. So is
            its gradient.
        is_causal: mask later tokens; not together with ``attn_mask``.
        scale: factor of the scores, by default ``features ** -0.5``.
        algorithm: ``"two_phase"``, ``"ring"`` or ``"gather"``, see :class:`Attention2D`.
        balanced: the sequence, and the mask, are in the order of :func:`balanced_order`.

    Returns:
        The output, placed as ``query``.

    Raises:
        TypeError: for anything but DTensors.
        ValueError: for shapes that do not fit, DTensors that are on different meshes or partial,
            an unknown algorithm, or a causal mask between sequences of different lengths.

    Source: TP2D (doi 10.11992/tis.202411023), section 2.

    Example::

        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp_row", "tp_col"))
        >>> q, k, v = (distribute_tensor(x, mesh, (Shard(2), Shard(3))) for x in (q, k, v))
        >>> attention2d(q, k, v, is_causal=True).placements
        (Shard(dim=2), Shard(dim=3))
    """
    tensors = query, key, value
    if not all(isinstance(x, DTensor) for x in tensors):
        raise TypeError(
            f"attention2d takes DTensors, not {[type(x).__name__ for x in tensors]}: "
            f"distribute_tensor or DTensor.from_local makes them"
        )
    if algorithm not in ACROSS:
        raise ValueError(f"algorithm is one of {list(ACROSS)}, not {algorithm!r}")
    shapes = [tuple(x.shape) for x in tensors]
    described = f"query, key and value of shapes {shapes[0]}, {shapes[1]} and {shapes[2]}"
    fits = all(len(shape) == 4 for shape in shapes) and (
        shapes[0][0] == shapes[1][0]
        and shapes[1][:3] == shapes[2][:3]
        and shapes[0][3] == shapes[1][3]
    )
    if not fits:
        raise ValueError(
            f"{described} are not [batch, heads, sequence, features] that fit each other"
        )
    (size, count, queries, features), keys = shapes[0], shapes[1][2]
    grid = Grid(query.device_mesh)
    if any(x.device_mesh != grid.mesh for x in tensors):
        raise ValueError("query, key and value are on different meshes: put them on one")
    if any(p.is_partial() for x in tensors for p in x.placements):
        raise ValueError(f"{described} are placed with partial sums: redistribute them first")
    check_groups(count, shapes[1][1])
    if is_causal and (attn_mask is not None or queries != keys):
        raise ValueError(
            f"is_causal is for a sequence that attends to itself, without a mask, but the "
            f"sequences are {queries} and {keys} long: pass one mask that says it all"
        )
    heads = Heads(count, shapes[1][1], grid.col)
    sizes = grid.row.split(queries)
    mask = None
    if attn_mask is not None:
        mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
        whole_mask = size, count, queries, keys
        if any(a not in (1, b) for a, b in zip(mask.shape, whole_mask, strict=True)):
            raise ValueError(
                f"a mask of shape {tuple(attn_mask.shape)} does not broadcast to {whole_mask}: "
                f"every rank passes the whole of it"
            )
        here = f"attention2d: a mask of shape {tuple(attn_mask.shape)}"
        mask = with_whole_grad(mask, (True, True), grid, here, of_user=in_graph())
        if mask.shape[2] != 1:
            mask = mask.narrow(2, sum(sizes[: grid.row.index]), sizes[grid.row.index])
    spec = Spec(
        axis=grid.row,
        order=Order.balanced(sizes) if balanced else Order.contiguous(sizes),
        keys=None if queries == keys else grid.row.split(keys),
        causal=is_causal,
        scale=features**-0.5 if scale is None else scale,
        heads=heads.index(of_all=algorithm == "two_phase"),
    )
    split, whole = Shard(SEQUENCE), Replicate()
    given = [normalize(grid.layout(x, 0), 4) for x in tensors]

    def brought(n: int, on_col: Placement) -> Tensor:
        layout: Layout = split, on_col
        x = tensors[n].to_local()
        sums = algorithm != "two_phase" and on_col == whole
        return grid.redistribute(x, given[n], layout, shape=shapes[n], partial_grad=(False, sums))

    if algorithm == "two_phase":
        # They keep their placements on tp_col, unless those split the sequence or the batch.
        on_query, on_key = (
            whole if layout[1] in (split, Shard(0)) else layout[1] for layout in given[:2]
        )
        local = brought(0, on_query), brought(1, on_key), brought(2, on_key)
        out = two_phase_on(local, shapes, (on_query, on_key), mask, spec, grid, shares=False)
    else:
        on_query, on_key = Shard(1), whole if heads.whole_key else Shard(1)
        q, k, v = brought(0, on_query), brought(1, on_key), brought(2, on_key)
        k, v = heads.own_key(k), heads.own_key(v)
        mask = None if mask is None else heads.own_query(mask)
        out = (ring if algorithm == "ring" else gathered)(q, k, v, mask, spec)
    shape = (*shapes[0][:3], shapes[2][3])
    out = grid.redistribute(out, (split, on_query), given[0], shape=shape)
    return to_dtensor(out, given[0], grid, shape)
