"""The layouts that a plan was resolved to, as a table that prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from .._torch_compat.modules import forward_hooks, forward_pre_hooks
from ..mesh.grid import Grid, describe_mesh
from ..mesh.layouts import TP_COL, Layout
from ..styles.base import Resolved

__all__ = ["LayoutRow", "LayoutTable", "layouts_of"]


@dataclass(frozen=True)
class LayoutRow:
    """What a style does with one module, as text. Layouts are ``(on tp_row, on tp_col)``."""

    module: str
    style: str
    axes: str
    """The mesh axes that act as the plan's ``tp_col``: ``tp_col`` itself, unless
    :class:`~torch_tp2d.Lifted` was given others."""
    input: str
    output: str
    weight: str
    """Placements of its weight, or of all its parameters if none is called ``weight``."""
    dataflow: str
    """Which operand of a matmul does not move; ``auto`` where the number of tokens decides."""
    algorithm: str
    told_by: str
    """What determined the layouts: ``entry``, the module's own plan entry or its defaults;
    ``plan``, what other entries say of the tensors there; ``sizes``, those of the tensors at the
    first forward."""


@dataclass(frozen=True)
class LayoutTable:
    """Rows in the order of ``named_modules()``; ``str(table)`` is the printed table."""

    mesh: str
    rows: tuple[LayoutRow, ...]

    def __iter__(self) -> Iterator[LayoutRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        shown = [field.name for field in fields(LayoutRow) if field.name != "axes"]
        lines = [[name.replace("_", " ") for name in shown]]
        for row in self.rows:
            on = "" if row.axes in ("", TP_COL) else f" on {row.axes}"
            lines.append([getattr(row, name) + on * (name == "style") for name in shown])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        aligned = [
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        return "\n".join([f"mesh {self.mesh}, layouts (on tp_row, on tp_col)", *aligned])


def layouts_of(model: nn.Module) -> LayoutTable:
    """The layouts that a plan was resolved to, module by module, for reading and for printing.

    Nothing is run and nothing decided: a layout that depends on tensors reads "at the first
    forward". For a module that no entry describes, the table shows the layout of tokens ``[batch,
    sequence, hidden]`` that the plan implies there; a tensor that comes straight from another style
    keeps that style's layout instead. Hooks (``PrepareModuleInput``) have rows of their own, which
    describe the first tensor that they prepare. For embeddings, ids of one dim are positions.

    Args:
        model: as :func:`torch_tp2d.parallelize_module` returned it, or a part of it.

    Raises:
        TypeError: if it is no module.
        ValueError: if no module in it has a style.

    Example::

        >>> print(torch_tp2d.layouts_of(parallelize_module(mlp, mesh, plan)))
        mesh (tp_row=2, tp_col=2), layouts (on tp_row, on tp_col)
        module  style      input          output         weight        dataflow           ...
        w1      Colwise2D  (S(0), R)      (S(0), S(-1))  (S(1), S(0))  output_stationary  ...
        w2      Rowwise2D  (S(0), S(-1))  (S(0), R)      (S(0), S(1))  input_stationary   ...
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"layouts_of takes a module, not {type(model).__name__}")
    found = [
        (name, module, runner) for name, module in model.named_modules() for runner in _of(module)
    ]
    if not found:
        raise ValueError(
            f"no module of {type(model).__name__} has a style: apply a plan to it first, by "
            f"torch_tp2d.parallelize_module(model, mesh, plan)"
        )
    grids: list[Grid] = [runner.grid for _, _, runner in found if hasattr(runner, "grid")]
    mesh = ", ".join(dict.fromkeys(describe_mesh(grid.mesh) for grid in grids))
    return LayoutTable(mesh, tuple(_row(*each) for each in found))


def _of(module: nn.Module) -> Iterator[Any]:
    """The runner of a styled module, and the plan's hooks around it."""
    if "_tp2d" in module.__dict__:
        yield module.__dict__["_tp2d"]
    for hook in (*forward_pre_hooks(module).values(), *forward_hooks(module).values()):
        if hasattr(hook, "resolved"):
            yield hook


def _row(name: str, module: nn.Module, runner: Any) -> LayoutRow:
    grid: Grid | None = getattr(runner, "grid", None)
    resolved: Resolved = runner.resolved()
    return LayoutRow(
        module=name or "(the model)",
        style=runner.style,
        axes="" if grid is None else str(grid.axes),
        input=_written(resolved.input, grid),
        output=_written(resolved.output, grid),
        weight=_placed(module) if resolved.runs_parameters else "",
        dataflow=resolved.dataflow,
        algorithm=resolved.algorithm,
        told_by=resolved.told_by,
    )


def _written(layout: Layout | str, grid: Grid | None) -> str:
    if isinstance(layout, str):
        return layout
    row, col = layout if grid is None else grid.on_mesh(layout)
    return f"({row}, {col})"


def _placed(module: nn.Module) -> str:
    """Placements of the weight, or of all parameters if none is called ``weight``."""
    params = dict(module.named_parameters())
    wanted = [params["weight"]] if "weight" in params else list(params.values())
    # After fully_shard, the placements on the data-parallel axes come before these two.
    placed = (p.placements[-2:] for p in wanted if isinstance(p, DTensor))
    return " or ".join(dict.fromkeys(f"({row}, {col})" for row, col in placed))
