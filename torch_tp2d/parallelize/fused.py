"""Finds projections that are fused in one weight, by what the modules that follow them take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle

from ..mesh.grid import Grid, describe_mesh
from ..styles.lifted import Lifted
from ..styles.linear import Block2DParallel, Colwise2D, Rowwise2D
from ..styles.module_kinds import (
    HEAD_SIZES,
    HEADS,
    describe_module,
    head_counts,
    is_conv1d,
    is_linear,
)

__all__ = ["check_fused"]

_SPLIT = Shard(-1), Shard(2)


class _Linear(NamedTuple):
    name: str
    """Its name under the root module."""
    parent: str
    module: nn.Module
    owner: nn.Module
    """The parent module; ``parent`` is its name."""
    style: Any
    columns: int

    @property
    def features(self) -> tuple[int, int]:
        """Sizes of the input and output features."""
        weight: Any = self.module.weight
        out, into = reversed(weight.shape) if is_conv1d(self.module) else weight.shape
        return into, out

    def __str__(self) -> str:
        return f"{self.name!r}, {describe_module(self.module)},"


def check_fused(
    root: nn.Module,
    styled: Iterable[tuple[str, nn.Module, nn.Module | None, ParallelStyle]],
    mesh: DeviceMesh,
) -> None:
    """Refuse a plain ``Colwise2D`` for a weight that holds several fused projections.

    One Linear may hold queries, keys and values, or the two projections of a gated MLP. A plain
    shard of it belongs to one of them, or to two, where the module expects a shard of each: the
    result has the right shape and wrong values. A fused projection is recognized by the module that
    takes its output, which takes several times fewer features.

    Args:
        styled: name, module, parent and style of each module that a plan names.

    Raises:
        ValueError: naming both modules and the number of parts, unless the style says ``parts=1``.
    """
    linears = list(_linears(root, styled, mesh))
    for linear in linears:
        style = linear.style
        plain = not isinstance(style, Colwise2D) or not style.use_local_output
        if plain or linear.columns == 1 or style.output_layouts[1] not in _SPLIT:
            continue
        if style.says_parts and (style.parts == 1 or isinstance(style.parts, tuple)):
            continue
        takers = _takers(linear, linears)
        why = _fused_heads(linear, takers) or _fused_parts(linear, takers)
        if why:
            raise ValueError(f"{linear} on mesh {describe_mesh(mesh)}, {why}")


def _linears(
    root: nn.Module,
    styled: Iterable[tuple[str, nn.Module, nn.Module | None, ParallelStyle]],
    mesh: DeviceMesh,
) -> Iterator[_Linear]:
    names = {id(module): name for name, module in root.named_modules()}
    for name, module, parent, entry_style in styled:
        style: Any = entry_style.lifted if isinstance(entry_style, Lifted) else entry_style
        if parent is None or id(parent) not in names or not isinstance(style, _STYLES):
            continue
        # An adapter's Linears are split as its base layer is, and that is checked.
        if (is_linear(module) or is_conv1d(module)) and ".lora_" not in name:
            columns = Grid(mesh, style.axes).col.size
            yield _Linear(name, names[id(parent)], module, parent, style, columns)


_STYLES = Block2DParallel, Colwise2D, Rowwise2D


def _takers(linear: _Linear, linears: list[_Linear]) -> list[_Linear]:
    """The Linears that take features split over ``tp_col``, beside this one or one level above."""
    takers = [
        other
        for other in linears
        if other.style.input_layouts[1] in _SPLIT and not _side_by_side(linear, other)
    ]
    beside = [other for other in takers if other.parent == linear.parent]
    if beside or not linear.parent:
        return beside
    above = linear.parent.rpartition(".")[0]
    return [
        t for t in takers if t.parent == above or t.parent.rpartition(".")[0] == above != t.parent
    ]


def _side_by_side(linear: _Linear, other: _Linear) -> bool:
    """Whether two Linears may take the same input, so that neither takes the other's output."""
    if not isinstance(other.style, Colwise2D):
        return False
    split = linear.style.input_layouts[1] in _SPLIT
    return other is linear or (split and linear.features[0] == other.features[0])


def _fused_heads(linear: _Linear, takers: list[_Linear]) -> str:
    """Why a projection of more query heads than key heads looks fused; empty if it does not."""
    if not any(hasattr(linear.owner, name) for name in (*HEADS, *HEAD_SIZES)):
        # Not attention: a Hugging Face MLP has the config too, which counts the attention's heads.
        return ""
    query, key = head_counts(linear.owner)
    _, out = linear.features
    for taker in takers:
        into, _ = taker.features
        if query is None or key is None or key >= query or into % query or out == into:
            continue
        head, parts = into // query, linear.style.parts
        counted = f"{query} query and {key} key heads of {head}, as {taker} takes {into} features"
        if out == (query + 2 * key) * head:
            return (
                f"has {out} features, as many as queries, keys and values of {counted}: a shard "
                f"over {linear.columns} columns would mix them up, and parts of one size do so "
                f"too. Give it parts=({query * head}, {key * head}, {key * head}), which shares "
                f"out each, or output_layouts=Replicate(); parts=1 says that its features are in "
                f"another order, heads that belong together side by side"
            )
        if out == 2 * key * head and parts != 2:
            return (
                f"has {out} features, as many as keys and values of {counted}: {_mend(linear, 2)}"
            )
    return ""


def _fused_parts(linear: _Linear, takers: list[_Linear]) -> str:
    """Why a projection looks like several of one size; empty if it does not."""
    _, out = linear.features
    widths = {taker.features[0]: taker for taker in takers}
    fitting = [into for into in widths if out % into == 0]
    if not fitting or out in widths:
        return ""
    into = max(fitting)
    count = out // into
    if linear.style.parts in (count, *(out // other for other in fitting)):
        return ""
    return (
        f"has {out} features, but {widths[into]} beside it takes {into}, so it looks like {count} "
        f"projections side by side: {_mend(linear, count)}"
    )


def _mend(linear: _Linear, count: int) -> str:
    stock = "" if type(linear.style) is Colwise2D else " of a Colwise2D in its place"
    return (
        f"a shard over {linear.columns} columns would mix them up. Give it parts={count}{stock}, "
        f"which shares out each, or output_layouts=Replicate(); parts=1 says that it is one "
        f"projection, or that what belongs together is side by side"
    )
