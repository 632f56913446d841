"""Whether a local tensor, and its gradient, is whole or this rank's part, told by what made it.

A style hands out what is whole along an axis for a gradient that is whole as well, the same on
every rank; by ``grad_layouts`` of Partial() for each rank's part, which it sums. The user's code
may combine it with features or tokens that are split along the axis, as a gate of each token with
the features of a feed-forward layer: then it hands back a part. And what it makes of tokens that
are split, a mean over them, is of this rank's part of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from .. import debug
from .._tracing import in_graph
from ..mesh.axes import names_of, on_mesh
from ..mesh.grid import Grid, describe_mesh
from ..mesh.handed import Handed, notes_of, said_of
from ..mesh.layouts import TP_COL, TP_ROW, Layout, normalize, same_layout
from .mixed_tokens import tell_mixed
from .module_kinds import describe_module

__all__ = [
    "check_handed",
    "check_made_of",
    "names_split",
    "names_whole",
    "parts_asked",
    "parts_kept",
]


def check_handed(
    x: Tensor,
    declared: Layout,
    module: nn.Module,
    grid: Grid,
    *,
    certain: bool = False,
    takes_fused: bool = False,
) -> None:
    """Refuse a local tensor that a style has handed out in another layout than is declared.

    And one that is made of such: :func:`check_made_of`.

    Args:
        takes_fused: the module may take features of several projections, of each a part.

    Raises:
        ValueError: on every rank alike.
    """
    misfit = _misfit(x, declared, grid)
    if misfit is not None:
        handed, wanted = misfit
        raise ValueError(
            f"{describe_module(module)} on mesh {describe_mesh(grid.mesh)} takes a local tensor in "
            f"layout {wanted}, but the module before it hands on one of shape {tuple(x.shape)} in "
            f"layout {handed}: give one of them the other's input_layouts or output_layouts "
            f"(PrepareModuleInput gathers for several), or hand on a DTensor, which knows its own: "
            f"use_local_output=False"
        )
    watch = grid.context.watch
    if watch is not None:
        layout = normalize(declared, x.ndim)
        there = on_mesh(layout, grid.axes)
        elsewhere = "" if certain else watch.lies_elsewhere(x, there)
        held = watch.holds(x, there, certain=certain, takes_fused=takes_fused)
        # Only then: what describes a module computes what is parametrized of it.
        given = elsewhere or held
        given = given and (
            f"{describe_module(module)} on mesh {describe_mesh(grid.mesh)} takes a local tensor in "
            f"layout {layout}, but is given one of shape {tuple(x.shape)}"
        )
        if elsewhere:
            raise ValueError(
                f"{given} {elsewhere}: write what moves the dims as a module under "
                f"torch_tp2d.Replicate(), have the module before it hand on a DTensor, which knows "
                f"its dims (use_local_output=False), or say by input_layouts how it lies"
            )
        if held:
            watch.refuses(given + held)
    check_made_of([x], declared, module, grid, certain=certain)


def _misfit(x: Tensor, declared: Layout, grid: Grid) -> tuple[Layout, Layout] | None:
    """The layouts ``(handed, declared)``, if a style has handed ``x`` out in another one.

    None if the layouts agree, or if no style has handed ``x`` out. The same on every rank.
    """
    _, layout, _, axes, *_ = said_of(x)
    if layout is None or axes is None:
        return None
    if axes == grid.axes and same_layout(layout, declared):
        return None
    handed, declared = (
        on_mesh(normalize(layout, x.ndim), of)
        for layout, of in ((layout, axes), (declared, grid.axes))
    )
    pairs = zip(grid.mesh.shape, handed, declared, strict=True)
    differs = any(size > 1 and have != want for size, have, want in pairs)
    # Where both axes shard one dim, styles on swapped axes nest the shards in opposite order.
    nested = isinstance(handed[0], Shard) and handed[0] == handed[1]
    turned = nested and 1 not in grid.mesh.shape and TP_ROW in (axes, grid.axes)
    return (handed, declared) if differs or (turned and axes != grid.axes) else None


def check_made_of(
    values: Sequence[Tensor],
    layout: Layout,
    module: nn.Module,
    grid: Grid,
    *,
    certain: bool = False,
) -> None:
    """Refuse local tensors that are made of what is whole where they are split, or the reverse.

    What is whole along an axis and meets what is split there would be given this rank's part of its
    gradient, and nobody would sum it. And what is made of this rank's part of tokens, a mean over
    them or the first of them, is not whole.

    The graph is looked through when the module first takes such tensors, in debug mode each time.

    Args:
        values: what ``module`` is given, all in ``layout``.
        certain: the user declared the layout on both axes. Then what is made of a part may be
            whole, by sums of the user's own.

    Raises:
        ValueError: on every rank. In a compiled graph, and without gradients, nothing is told; nor
            of what an autograd Function has made, which may send by itself.
    """
    if in_graph():
        return
    before = grid.context.followed.get(module, ())
    if layout in before and not debug.is_on():
        return
    learning = [x for x in values if x.requires_grad]
    if not learning or not torch.is_grad_enabled():
        return
    if layout not in before:
        grid.context.followed[module] = (*before, layout)
    layout = normalize(layout, learning[0].ndim)
    split, whole = (_names(layout, kind, grid) for kind in (Shard, Replicate))
    for x in learning:
        if said_of(x).layout is not None:
            continue
        if grid.context.watch is not None:
            tell_mixed(x, layout, module, grid, grid.context.watch)
            if certain:
                grid.context.watch.declared(x, on_mesh(layout, grid.axes))
        for note in notes_of(x, beyond_functions=False)[0]:
            if along := names_whole(note) & split:
                raise ValueError(
                    f"{_made(x, layout, module, grid, note)}, whole along {_listed(along)}: each "
                    f"rank has a part of its gradient there, which that module does not sum. "
                    f"{_mend(note, along)}"
                )
            if (along := names_split(note) & whole) and not certain:
                raise ValueError(
                    f"{_made(x, layout, module, grid, note)}, of which each rank has a part along "
                    f"{_listed(along)}: it would have to be gathered before it is used so. Give "
                    f"the module that hands it out "
                    f"output_layouts that are whole there, PrepareModuleInput to a module around, "
                    f"or have it hand on a DTensor (use_local_output=False). If it is still split, "
                    f"say so by input_layouts; if your own code has gathered or summed it, by a "
                    f"pair, input_layouts={layout}"
                )


def parts_asked(x: Tensor, layout: Layout, module: nn.Module, grid: Grid) -> tuple[bool, bool]:
    """Along row and col, whether what ``x`` is made of is to be given this rank's part.

    It is whole there, and its maker sums its gradient: what takes ``x`` must not sum it too. Each
    column uses only some of the key heads where these do not divide by the columns, and each row
    adds the positions to its own tokens only.

    Args:
        layout: the layout of ``x``, which ``module`` is given.

    Raises:
        ValueError: if ``x`` is also made of what is to be given a whole gradient.
    """
    row, col = grid.several
    row = row if layout[0].is_replicate() else frozenset()
    col = col if layout[1].is_replicate() else frozenset()
    if not (row or col):
        return False, False
    said = said_of(x)
    if in_graph() or said.layout is not None:
        return not row.isdisjoint(said.shares), not col.isdisjoint(said.shares)
    notes, _ = notes_of(x, beyond_functions=False)
    asked = frozenset().union(*(note.shares for note in notes)) & (row | col)
    for note in notes if asked else ():
        if along := names_whole(note) & asked:
            raise ValueError(
                f"{_given(x, layout, module, grid)} made of one whose maker sums its gradient "
                f"along {_listed(along)}, and of one that {_handed_out(note)}, whose maker does "
                f"not. {_mend(note, along)}"
            )
    return not row.isdisjoint(asked), not col.isdisjoint(asked)


def parts_kept(
    x: Tensor, have: Layout, want: Layout | None, module: nn.Module, grid: Grid
) -> tuple[bool, bool]:
    """:func:`parts_asked` of a local tensor that goes from one layout to another.

    Args:
        want: None if it becomes a DTensor, whose gradient is whole.

    Raises:
        ValueError: if its layout changes where it is to be given a part.
    """
    parts = parts_asked(x, have, module, grid)
    stays = (False, False) if want is None else [a == b for a, b in zip(have, want, strict=True)]
    if any(part and not stay for part, stay in zip(parts, stays, strict=True)):
        raise ValueError(
            f"{_given(x, have, module, grid)} of whose gradient each rank has a part, as of the "
            f"gradient of positions, which its maker sums: it cannot become a DTensor, or one in "
            f"layout {want}. Have its maker hand on a DTensor (use_local_output=False)"
        )
    return parts


def _names(layout: Layout, kind: type, grid: Grid) -> frozenset[str]:
    """The names of the mesh's axes of several ranks along which a layout places so."""
    pairs = zip(grid.several, layout, strict=True)
    return frozenset().union(*(names for names, p in pairs if isinstance(p, kind)))


def names_whole(note: Handed) -> frozenset[str]:
    """The mesh axes along which a tensor was handed out whole, for a whole gradient."""
    return _placed(note, Replicate) - note.shares


def names_split(note: Handed) -> frozenset[str]:
    """The mesh axes along which each rank was handed out a part."""
    return _placed(note, Shard)


def _placed(note: Handed, kind: type) -> frozenset[str]:
    if note.layout is None or note.axes is None:
        return frozenset()
    layout = on_mesh(normalize(note.layout, note.ndim), note.axes)
    pairs = zip((TP_ROW, TP_COL), layout, strict=True)
    return frozenset(name for name, p in pairs if isinstance(p, kind))


def _given(x: Tensor, layout: Layout, module: nn.Module, grid: Grid) -> str:
    return (
        f"{describe_module(module)} on mesh {describe_mesh(grid.mesh)} is given a local tensor of "
        f"shape {tuple(x.shape)} in layout {layout},"
    )


def _made(x: Tensor, layout: Layout, module: nn.Module, grid: Grid, note: Handed) -> str:
    return f"{_given(x, layout, module, grid)} made of one that {_handed_out(note)}"


def _handed_out(note: Handed) -> str:
    return f"{note.by or 'a module of the plan'} has handed out in layout {note.layout}"


def _listed(names: frozenset[str]) -> str:
    return " and ".join(sorted(names))


def _mend(note: Handed, along: frozenset[str]) -> str:
    assert note.layout is not None and note.axes is not None
    pairs = zip(names_of(note.axes), note.layout, strict=True)
    row, col = ("Partial()" if of & (along | note.shares) else repr(p) for of, p in pairs)
    return (
        f"Give the module that hands it out, or the first of a chain of such, "
        f"grad_layouts=({row}, {col}), which torch_tp2d.Replicate and Colwise2D have, or have it "
        f"and the others hand on DTensors (use_local_output=False)"
    )
