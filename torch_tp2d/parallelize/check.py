"""Finds every mistake in a plan that can be found before anything is changed or sent."""

from __future__ import annotations

import re
from typing import Any

import torch.distributed.tensor as dt
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from .. import debug
from .._torch_compat.distributed import REPLICATE, has_replicate
from .._version import __version__
from ..mesh.grid import Grid, describe_mesh
from ..mesh.layouts import normalize
from ..planner.rates import assumed
from ..styles.attention import Attention2D
from ..styles.base import GridStyle, tied_message
from ..styles.linear import Colwise2D
from ..styles.module_kinds import HEAD_SIZES, HEADS, describe_module, is_conv1d, is_linear
from ..styles.surroundings import is_of_features
from .agree import Fact
from .resolve import LINEAR_STYLES, Entry, is_hook, out_features_of, unlifted


def check_source(rank: int | None, mesh: DeviceMesh) -> None:
    """Refuse a source rank that some axis does not have: torch's scatter may hang on it."""
    if rank is None:
        return
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise TypeError(f"src_data_rank is an int or None, not {rank!r}")
    count = min((size for size in mesh.shape if size > 1), default=1)
    if not 0 <= rank < count:
        raise ValueError(
            f"src_data_rank is the index along each axis of the rank whose values are taken: on "
            f"mesh {describe_mesh(mesh)} from 0 to {count - 1}, not {rank}"
        )


def facts_of(
    module: nn.Module, mesh: DeviceMesh, entries: list[Entry], src_data_rank: int | None
) -> list[Fact]:
    """The facts that decide which collectives a rank runs, from here to the end of training."""
    named = [
        ("version of torch_tp2d", __version__),
        ("mesh", f"{describe_mesh(mesh)} of ranks {mesh.mesh.tolist()}"),
        ("src_data_rank", repr(src_data_rank)),
        ("planner.assume()", assumed()),
        ("debug mode", "on" if debug.is_on() else "off"),
    ]
    named += [(f"entry for {entry.name!r}", _described(entry.style)) for entry in entries]
    for name, param in module.named_parameters():
        kind = "" if param.requires_grad else ", frozen"
        placed = f" placed {param.placements}" if isinstance(param, DTensor) else ""
        where = "meta " if param.is_meta else ""
        text = f"{where}{tuple(param.shape)} {param.dtype}{placed}{kind}"
        named.append((f"parameter {name!r}", text))
    return named


def _described(style: ParallelStyle) -> str:
    """A style in text that is the same on every rank: a user's own style may print an address."""
    kind = type(style)
    if kind.__module__.partition(".")[0] not in ("torch", "torch_tp2d"):
        return kind.__qualname__
    return re.sub(r" at 0x[0-9a-f]+", "", repr(style))


_MEND = (
    "parallelize the bare model first, then shard it over the data-parallel axis by "
    "torch.distributed.fsdp.fully_shard(model, mesh=...), which takes DTensors"
)


def _data_parallel(module: nn.Module) -> str | None:
    """The name of the data-parallel wrapper that ``module`` is, if it keeps its own parameters.

    Recognized by class names: importing FSDP1 takes time, and a user who has not imported it
    cannot have wrapped a module in it.
    """
    names = [kind.__name__ for kind in type(module).__mro__]
    for name in ("DistributedDataParallel", "FullyShardedDataParallel"):
        if name in names:
            return name
    return REPLICATE if has_replicate(module) else None


def check_wrappers(root: nn.Module, entries: list[Entry]) -> None:
    """Refuse a plan for modules inside a data-parallel wrapper that keeps the old parameters.

    DistributedDataParallel averages the gradients of the parameters that it was given. The
    gradients of the parameters with which a plan replaces them would silently not be averaged.
    """
    named = {id(entry.module) for entry in entries}
    for name, module in root.named_modules():
        wrapper = _data_parallel(module)
        if wrapper is not None and any(id(inner) in named for inner in module.modules()):
            where = repr(name) if name else "the module"
            raise ValueError(
                f"{where} is in {wrapper} already, which would go on with the parameters that it "
                f"was given: {_MEND}"
            )


def check_entries(entries: list[Entry], mesh: DeviceMesh) -> None:
    """Raise for any mistake in an entry that can be found before the first collective."""
    placed: dict[int, tuple[Entry, tuple[Any, ...]]] = {}
    styled: dict[int, Entry] = {}
    for entry in entries:
        style = entry.style
        if not isinstance(style, GridStyle):
            continue
        where = f"{entry.name!r}" if entry.name else "the module itself"
        try:
            grid = Grid(mesh, style.axes)
            style.check(entry.module, grid)
            check_heads(entry, grid)
            check_attention(entry, entries, grid)
            if not is_hook(style):
                before = styled.setdefault(id(entry.module), entry)
                if before is not entry:
                    raise ValueError(
                        f"both plan keys {before.key!r} and {entry.key!r} name this "
                        f"{describe_module(entry.module)}: keep one of them"
                    )
            for owner, name, layout in style.param_layouts(entry.module):
                param = getattr(owner, name)
                wanted = tuple(grid.placements(normalize(layout, param.ndim)))
                first, other = placed.setdefault(id(param), (entry, wanted))
                if other != wanted:
                    raise ValueError(
                        _around(first, entry) or tied_message(owner, name, wanted, other)
                    )
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where} on mesh {describe_mesh(mesh)}: {error}") from None


def _around(first: Entry, entry: Entry) -> str:
    """What is wrong if one of two entries' modules is inside the other; else empty."""
    for outer, inner in ((first, entry), (entry, first)):
        if outer.module is not inner.module and inner.module in set(outer.module.modules()):
            return (
                f"{describe_module(inner.module)} is inside {outer.name or 'the module itself'!r}, "
                f"and {type(outer.style).__name__} places the parameters of modules inside, too: "
                f"name one of them, or give the outer one torch_tp2d.Local2D(), which places its "
                f"own alone"
            )
    return ""


def check_heads(entry: Entry, grid: Grid) -> None:
    """Refuse a projection into heads whose local output would end inside a head.

    The module around it views its local output as ``[..., -1, head_dim]``. With half a head, that
    fails later or silently mixes heads.
    """
    style = unlifted(entry)
    if not isinstance(style, Colwise2D) or not style.use_local_output or entry.parent is None:
        return
    if not (is_linear(entry.module) or is_conv1d(entry.module)):
        return
    if style.output_layouts[1] not in (dt.Shard(-1), dt.Shard(2)):
        return
    sizes = (getattr(entry.parent, name, None) for name in HEAD_SIZES)
    head = next((size for size in sizes if isinstance(size, int) and size > 0), None)
    features = out_features_of(entry.module)
    one = getattr(entry.parent, "split_size", None)
    counted = isinstance(style.parts, int)
    if counted and isinstance(one, int) and features > one > 0 and features // one != style.parts:
        raise ValueError(
            f"{describe_module(entry.module)} is {features // one} projections of {one} features "
            f"side by side, and its module splits its output into them: a plain shard would mix "
            f"them up, give it parts={features // one}"
        )
    for out in style.part_sizes(features):
        if head is None or out % head or (out // head) % grid.col.size == 0:
            continue
        raise ValueError(
            f"{describe_module(entry.module)} projects into {out // head} heads of {head}, which "
            f"do not divide over {grid.col.name}={grid.col.size}: use a mesh whose "
            f"{grid.col.name} divides {out // head}, or the styles of attention_projections() with "
            f"Attention2D, or use_local_output=False; if it projects out of heads, Block2DParallel"
        )


def check_attention(entry: Entry, entries: list[Entry], grid: Grid) -> None:
    """Refuse attention that a module's own code computes while mesh rows split the sequence.

    Each row would silently attend to its own keys alone. A module that is given gathered keys, or
    DTensors, is let through, as its code may be written for them.
    """
    parent, style = entry.parent, unlifted(entry)
    if parent is None or grid.row.size == 1 or not isinstance(style, LINEAR_STYLES):
        return
    if style.row_dim != 1 or not any(type(getattr(parent, name, None)) is int for name in HEADS):
        return
    inside = f"{entry.name}."
    if any(
        isinstance(other.style, Attention2D)
        and (not other.name or inside.startswith(f"{other.name}."))
        for other in entries
    ):
        return
    beside = [unlifted(other) for other in entries if other.parent is parent]
    linears = [other for other in beside if isinstance(other, LINEAR_STYLES)]
    # All but the output projection, which takes split features from the attention.
    into = [linear for linear in linears if not is_of_features(linear.input_layouts[1])]
    if all(linear.output_layouts[0] == dt.Shard(1) and linear.use_local_output for linear in into):
        where = entry.name.rpartition(".")[0]
        raise ValueError(
            f"{grid.row.name}={grid.row.size} splits sequences (row_dim=1), and {where!r}, "
            f"{describe_module(parent)}, would attend to the keys of one row alone: name it in the "
            f"plan with Attention2D(row_dim=1), or split the batch, row_dim=0"
        )
