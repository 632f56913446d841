"""Which module gets which style: those that a plan's keys name, and unnamed ones beside them."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import Any, NamedTuple

import torch.distributed.tensor as dt
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from .._torch_compat.modules import submodules_of
from ..styles.attention import Attention2D
from ..styles.base import GridStyle
from ..styles.dropout import OTHER_KINDS, Dropout2D, DropoutInside, rates_of
from ..styles.lifted import Lifted
from ..styles.linear import Block2DParallel, Colwise2D, Rowwise2D
from ..styles.module_kinds import describe_module, forward_of, is_conv1d, is_embedding, is_linear
from ..styles.own_dropout import CodeReader, Drops
from ..styles.replicated import Replicate
from .lora import is_adapted
from .lora import parts as adapted_parts

logger = logging.getLogger(__name__)


class Entry(NamedTuple):
    key: str
    name: str
    module: nn.Module
    parent: nn.Module | None
    style: ParallelStyle


def entries_of(module: nn.Module, plan: Any) -> list[Entry]:
    """A plan's entries, and entries for modules that it does not name but that need a style."""
    if isinstance(plan, ParallelStyle | dt.Replicate):
        plan = {"": plan}
    if not isinstance(plan, Mapping):
        raise TypeError(
            f"parallelize_plan is a ParallelStyle or a dict of module names and styles, not "
            f"{type(plan).__name__}"
        )
    entries = [entry for key, style in plan.items() for entry in _resolve(module, key, style)]
    entries += _unnamed_vectors(module, entries) + _unnamed_dropouts(module, entries)
    return entries + _dropping_inside(module, entries)


def _resolve(root: nn.Module, key: str, style: Any) -> Iterator[Entry]:
    """The modules that a plan key names, each with its style."""
    if isinstance(style, Mapping):
        for name, child, _ in _match(root, key):
            for inner_key, inner in style.items():
                for entry in _resolve(child, inner_key, inner):
                    full = ".".join(part for part in (name, entry.name) if part)
                    yield entry._replace(key=f"{key}.{inner_key}", name=full)
        return
    lifted = _lift(key, style)
    for name, child, parent in _match(root, key):
        if not is_adapted(child) or is_hook(lifted):
            yield Entry(key, name, child, parent, lifted)
            continue
        try:
            parts = list(adapted_parts(child, lifted))
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from None
        for part, module, part_style in parts:
            # The wrapper hands on its base layer's or a copy's output, which so takes its place.
            owner = child if part.startswith("lora_") else parent
            yield Entry(key, f"{name}.{part}", module, owner, part_style)


def _lift(key: str, style: Any) -> ParallelStyle:
    if isinstance(style, dt.Replicate):
        return Replicate()
    if isinstance(style, GridStyle):
        return style
    if not isinstance(style, ParallelStyle):
        raise TypeError(f"plan key {key!r}: expected a ParallelStyle, not {style!r}")
    try:
        return Lifted(style)
    except TypeError as error:
        raise TypeError(f"plan key {key!r}: {error}") from None


def _match(root: nn.Module, key: str) -> list[tuple[str, nn.Module, nn.Module | None]]:
    """``(name, module, parent)`` of the modules that ``key`` names under ``root``."""
    found: list[tuple[str, nn.Module, nn.Module | None]] = [("", root, None)]
    for token in key.split(".") if key else []:
        parents = [parent for _, parent, _ in found]
        found = [
            (f"{name}.{child}" if name else child, submodule, parent)
            for name, parent, _ in found
            for child, submodule in parent.named_children()
            if fnmatch(child, token)
        ]
        if not found and any(_is_pruned(parent, token) for parent in parents):
            return []
    if not found:
        names = [name for name, _ in root.named_modules() if name]
        near = difflib.get_close_matches(key, names, n=3, cutoff=0.3)
        raise ValueError(
            f"plan key {key!r} matches no module of {type(root).__name__}; the nearest names are "
            f"{near or names[:5]}"
        )
    # A module that layers share is one, whichever of them it is found in.
    first = {id(submodule): at for at, (_, submodule, _) in reversed(list(enumerate(found)))}
    return [match for at, match in enumerate(found) if first[id(match[1])] == at]


def _is_pruned(parent: nn.Module, token: str) -> bool:
    """Whether the child that ``token`` names in ``parent`` was removed, as for a pipeline stage."""
    if isinstance(parent, nn.ModuleList | nn.ModuleDict) and not len(parent):
        return True
    # A child that was None from the start is a plain attribute. Those are looked up by exact name
    # only, as a wildcard would match torch's own attributes among them.
    if token in vars(parent):
        return vars(parent)[token] is None
    children = submodules_of(parent).items()
    return any(child is None and fnmatch(name, token) for name, child in children)


def is_hook(style: ParallelStyle) -> bool:
    return isinstance(style, GridStyle) and style.is_hook


def _covered(entries: list[Entry]) -> set[int]:
    """Ids of the modules that a style runs, and of those inside whose parameters it places."""
    covered = set()
    for entry in entries:
        if not is_hook(entry.style):
            inside = getattr(entry.style, "places_inside", True)
            modules = entry.module.modules() if inside else [entry.module]
            covered |= {id(module) for module in modules}
    return covered


def _scopes(root: nn.Module, entries: list[Entry]) -> set[str]:
    """Names of all modules that contain a module named by a plan entry."""
    names = {id(module): name for name, module in root.named_modules()}
    scopes = set()
    for entry in entries:
        parts = names[id(entry.module)].split(".")
        scopes |= {".".join(parts[:depth]) for depth in range(len(parts))}
    return scopes


LINEAR_STYLES = Block2DParallel, Colwise2D, Rowwise2D


def unlifted(entry: Entry) -> Any:
    """An entry's style; for a stock style, the 2-D style that it was lifted to."""
    return entry.style.lifted if isinstance(entry.style, Lifted) else entry.style


def _row_dim(name: str, entries: list[Entry]) -> int:
    """The token dim that tp_row splits at an unnamed module: that of the nearest entries.

    Raises:
        ValueError: if the nearest entries in the tree of modules differ.
    """
    known = [e for e in entries if isinstance(unlifted(e), LINEAR_STYLES)]
    known = known or [e for e in entries if hasattr(unlifted(e), "row_dim")]
    row_dims = {unlifted(entry).row_dim for entry in nearest(name, known)}
    if len(row_dims) > 1:
        raise ValueError(
            f"{name!r}: no plan entry names it, and which token dim tp_row splits there is not "
            f"known, as some of the plan's styles have row_dim 0 and others 1: name it, with a "
            f"style's row_dim"
        )
    return min(row_dims, default=0)


def nearest(name: str, entries: list[Entry]) -> list[Entry]:
    """The entries that are nearest to the module of this name in the tree of modules."""

    def nearness(other: str) -> int:
        pairs = zip(name.split("."), other.split("."), strict=False)
        return next((depth for depth, (a, b) in enumerate(pairs) if a != b), 0)

    nearest = max((nearness(entry.name) for entry in entries), default=0)
    return [entry for entry in entries if nearness(entry.name) == nearest]


def _unnamed_vectors(root: nn.Module, entries: list[Entry]) -> list[Entry]:
    """Entries that replicate unnamed modules with only vectors, where they stand beside named ones.

    A stock plan leaves norms out where every rank runs them on the same tokens. Here mesh rows hold
    different tokens, so their gradients have to be summed. A module that holds a matrix is not
    replicated by default; the first forward refuses it.
    """
    covered, scopes = _covered(entries), _scopes(root, entries)
    found = []
    for name, module in root.named_modules():
        params = list(module.parameters(recurse=False))
        parent = name.rpartition(".")[0]
        if not name or id(module) in covered or parent not in scopes or list(module.children()):
            continue
        if is_embedding(module) or is_linear(module) or not params:
            continue
        if all(p.ndim <= 1 and not isinstance(p, DTensor) for p in params):
            style = Replicate(row_dim=_row_dim(name, entries))
            style.by_default = True
            found.append(Entry("", name, module, None, style))
    if found:
        logger.info("replicated, as no plan entry names them: %s", [e.name for e in found])
    return found


def _unnamed_dropouts(root: nn.Module, entries: list[Entry]) -> list[Entry]:
    """Entries for the dropouts beside or inside the modules that the plan names.

    Without a style they would drop the same elements of every shard, and leave the ranks' random
    generators in different states wherever shards have different sizes.
    """
    named = {id(entry.module) for entry in entries if not is_hook(entry.style)}
    covered, scopes = _covered(entries), _scopes(root, entries)
    found = []
    for name, module in root.named_modules():
        around = _around(root, name, scopes)
        in_scope = id(module) in covered or around is not None
        if not name or not in_scope or id(module) in named or "_tp2d" in module.__dict__:
            continue
        if isinstance(module, OTHER_KINDS) and module.p:
            raise ValueError(
                f"{name!r}: {describe_module(module)} drops more than single elements, which is "
                f"not defined on shards here: use nn.Dropout in its place, or set its p to 0"
            )
        if isinstance(module, nn.Dropout) and forward_of(module) is nn.Dropout.forward:
            style = Dropout2D(row_dim=_row_dim(name, entries))
            style.by_default = True
            parent = root.get_submodule(name.rpartition(".")[0] if around is None else around)
            found.append(Entry("", name, module, parent, style))
    return found


def _around(root: nn.Module, name: str, scopes: set[str]) -> str | None:
    """The scope that a module stands in, maybe in a container without parameters; else None."""
    above = name.rpartition(".")[0]
    while above not in scopes:
        if any(True for _ in root.get_submodule(above).parameters()):
            return None
        above = above.rpartition(".")[0]
    return above


def _dropping_inside(root: nn.Module, entries: list[Entry]) -> list[Entry]:
    """Entries for modules without a style that compute dropout in their own code.

    Raises:
        ValueError: for an ``nn.Dropout`` with a forward of its own that calls no dropout of torch.
    """
    covered, scopes = _covered(entries), _scopes(root, entries)
    attend = [f"{entry.name}." for entry in entries if isinstance(entry.style, Attention2D)]
    linears = {id(e.parent): e for e in entries if isinstance(unlifted(e), LINEAR_STYLES)}
    reader = CodeReader()
    found = []
    for name, module in root.named_modules():
        around = name if name in scopes else _around(root, name, scopes) if name else None
        is_covered = id(module) in covered
        if around is None and not is_covered:
            continue
        drops = reader.drops_of(module)
        if isinstance(module, nn.Dropout) and drops is None and module.p:
            raise ValueError(
                f"{name!r}: {describe_module(module)} has a forward of its own, which calls no "
                f"dropout of torch, so what it drops on shards is not known: use nn.Dropout in its "
                f"place, have it call F.dropout, or set its p to 0"
            )
        # Attention2D replaces what modules inside it call, too.
        if around is None or is_covered or any(f"{name}.".startswith(a) for a in attend):
            continue
        linear = linears.get(id(module))
        if linear is not None:
            rates = rates_of(module)
            drops = drops or (Drops() if rates else None)
            drops = drops and drops._replace(rates=tuple({*drops.rates, *rates}))
        elif "_tp2d" in module.__dict__:
            continue
        if drops is None:
            continue
        row_dim = _row_dim(name, entries) if linear is None else unlifted(linear).row_dim
        parent = root.get_submodule(around)
        found.append(Entry("", name, module, parent, DropoutInside(row_dim, drops)))
    return found


def features_of(linear: Any) -> tuple[int, int]:
    """Sizes of a Linear's input and output features."""
    first, second = linear.weight.shape
    return (first, second) if is_conv1d(linear) else (second, first)


def out_features_of(linear: Any) -> int:
    return features_of(linear)[1]
