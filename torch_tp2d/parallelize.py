"""``parallelize_module``: a plan onto the mesh, checked as a whole before anything is changed."""

from __future__ import annotations

import copy
import difflib
import logging
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import Any, NamedTuple

import torch
import torch.distributed.tensor as dt
from torch import Tensor, nn
from torch.distributed._composable.contract import STATE_KEY as _COMPOSED
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from . import debug
from .agree import Fact, on_all_ranks
from .attention import Attention2D
from .base import GridStyle, refuse_transforms, take_off_grid, tied_message
from .dropout import OTHER_KINDS, Dropout2D, DropoutInside, rates_of
from .fused import check_fused
from .grid import Grid, check_mesh, describe_mesh
from .layouts import normalize
from .lift import Lifted
from .local import Local2D
from .lora import is_adapted
from .lora import parts as adapted_parts
from .planner.rates import assumed
from .recognise import HEAD_SIZES, describe_module, is_conv1d, is_embedding, is_linear
from .replicate import Replicate, WholeRunner
from .runtime.ahead import Forward
from .runtime.context import context_of
from .styles import Block2DParallel, Colwise2D, Rowwise2D
from .surroundings import Surroundings, is_of_features

__all__ = ["parallelize_module"]

logger = logging.getLogger(__name__)

_LOCALIZED = "_st_info"
"""On the plain tensors that DistributedDataParallel makes of DTensors, given a ``device_mesh``."""

Plan = ParallelStyle | dt.Replicate | Mapping[str, Any]


class _Entry(NamedTuple):
    key: str
    name: str
    module: nn.Module
    parent: nn.Module | None
    style: ParallelStyle


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: Plan | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """:func:`torch.distributed.tensor.parallel.parallelize_module` for a 2-D mesh.

    The same call, which also takes unmodified stock styles in the plan (see :class:`Lifted`),
    checks the whole plan on every rank before it changes or sends anything, keeps tied parameters
    tied, and puts every parameter on the one mesh. Of what the plan does not name but stands
    beside what it names, a module that holds only vectors (a norm) is replicated, as a stock plan
    leaves it, and dropout drops what one device would drop (:class:`Dropout2D`). An entry for a
    Linear that carries low-rank adapters of the ``peft`` library means the adapters too.

    Args:
        module: the model, or a part of it.
        device_mesh: a mesh named ``("tp_row", "tp_col")``: ``mesh["tp_row", "tp_col"]`` of a larger
            one. By default the mesh of the surrounding ``with mesh:``.
        parallelize_plan: a style for ``module`` itself, or a dict from module names (with ``*``,
            ``?`` and ``[]`` within a name; ``""`` is ``module``) to styles. The placement
            ``Replicate()`` stands for the style :class:`torch_tp2d.Replicate`. A key for a module
            that is None, as pruned for a pipeline stage, is passed over. None: nothing is done,
            with a warning, as in stock.
        src_data_rank: the index along each axis (of more than one rank) of the rank whose values
            are taken; ``None``: each rank keeps its part of its own, without communication.

    Returns:
        ``module``.

    Raises:
        TypeError: for a plan, style or module of the wrong kind.
        ValueError: for a mesh, a shape or an option that cannot work, for a key that matches no
            module, and for a module in DistributedDataParallel or FSDP1.

    Example::

        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp_row", "tp_col"))
        >>> parallelize_module(model, mesh, {
        ...     "layers.*.attention.w[qkv]": Colwise2D(),
        ...     "layers.*.attention.wo": Rowwise2D(output_layouts=Shard(1)),
        ...     "layers.*.ffn_norm": SequenceParallel(),
        ... })
    """
    mesh = _mesh_resources.get_current_mesh() if device_mesh is None else device_mesh
    if parallelize_plan is None:
        warnings.warn("no parallelize_plan is given, so nothing is parallelized", stacklevel=2)
        return module
    entries = _checked_entries(module, mesh, parallelize_plan, src_data_rank)
    ties = _ties(module)
    for entry in entries:
        entry.style.src_data_rank = src_data_rank
        entry.style._apply(entry.module, mesh)
    _tie_again(ties)
    _FirstForward.watch(module, mesh, ties)
    Forward(context_of(mesh)).watch(module)
    return module


def _check_source(rank: int | None, mesh: DeviceMesh) -> None:
    """Refuse a source that some axis does not have; torch's scatter may leave ranks waiting."""
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


def _checked_entries(
    module: nn.Module, mesh: DeviceMesh, plan: Any, src_data_rank: int | None = None
) -> list[_Entry]:
    """What is to be applied to which modules, with nothing of ``module``'s parameters changed."""
    check_mesh(mesh)
    with on_all_ranks(mesh) as facts:
        _check_source(src_data_rank, mesh)
        entries = _entries(module, plan)
        facts += _facts(module, mesh, entries, src_data_rank)
    # Apart from the above: a check may make the groups of a grid, which takes all ranks.
    with on_all_ranks(mesh):
        for entry in entries:
            _undo_default(entry)
        _check(entries, mesh)
        check_fused(module, [entry[1:] for entry in entries], mesh)
    return entries


def _entries(module: nn.Module, plan: Any) -> list[_Entry]:
    if isinstance(plan, ParallelStyle | dt.Replicate):
        plan = {"": plan}
    if not isinstance(plan, Mapping):
        raise TypeError(
            f"parallelize_plan is a ParallelStyle or a dict of module names and styles, not "
            f"{type(plan).__name__}"
        )
    entries = [entry for key, style in plan.items() for entry in _resolve(module, key, style)]
    _check_wrappers(module, entries)
    entries += _unnamed_vectors(module, entries) + _unnamed_dropouts(module, entries)
    return _with_neighbours(entries + _dropping_inside(module, entries))


def _facts(
    module: nn.Module, mesh: DeviceMesh, entries: list[_Entry], src_data_rank: int | None
) -> list[Fact]:
    """What decides which collectives a rank runs, from here to the end of training."""
    from . import __version__  # here, as the package imports this module first

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
    """A style as every rank writes it: one of the user's own may print an address."""
    kind = type(style)
    if kind.__module__.partition(".")[0] not in ("torch", __package__):
        return kind.__qualname__
    return re.sub(r" at 0x[0-9a-f]+", "", repr(style))


def _resolve(root: nn.Module, key: str, style: Any) -> Iterator[_Entry]:
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
        if not is_adapted(child) or _is_hook(lifted):
            yield _Entry(key, name, child, parent, lifted)
            continue
        try:
            parts = list(adapted_parts(child, lifted))
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from None
        for part, module, part_style in parts:
            # What the base layer hands on is what the module in its place hands on.
            owner = parent if part == "base_layer" else child
            yield _Entry(key, f"{name}.{part}", module, owner, part_style)


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
    return found


def _is_pruned(parent: nn.Module, token: str) -> bool:
    """Whether what ``token`` names in ``parent`` was taken out, as for a pipeline stage."""
    if isinstance(parent, nn.ModuleList | nn.ModuleDict) and not len(parent):
        return True
    # What never was a module is a plain attribute; a wildcard would find torch's own among them.
    if token in vars(parent):
        return vars(parent)[token] is None
    return any(child is None and fnmatch(name, token) for name, child in parent._modules.items())


_MEND = (
    "parallelize the bare model first, then shard it over the data-parallel axis by "
    "torch.distributed.fsdp.fully_shard(model, mesh=...), which takes DTensors"
)


def _data_parallel(module: nn.Module) -> str | None:
    """The name of a data-parallel wrapper that keeps parameters of its own, if this is one.

    Told by names, as importing FSDP1 takes time and nobody has one who has not imported it.
    """
    names = [kind.__name__ for kind in type(module).__mro__]
    for name in ("DistributedDataParallel", "FullyShardedDataParallel"):
        if name in names:
            return name
    states = module.__dict__.get(_COMPOSED, {}).values()
    if any(type(state).__module__ == "torch.distributed._composable.replicate" for state in states):
        return "torch.distributed._composable.replicate"
    return None


def _check_wrappers(root: nn.Module, entries: list[_Entry]) -> None:
    """Refuse modules whose gradients a wrapper of theirs is waiting for on other parameters.

    DistributedDataParallel averages the gradients of the parameters that it was given. Those that
    a plan puts in their place would not be averaged, without an error.
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


def _check(entries: list[_Entry], mesh: DeviceMesh) -> None:
    """Find every mistake that can be found before the first collective."""
    placed: dict[int, tuple[_Entry, tuple[Any, ...]]] = {}
    styled: dict[int, _Entry] = {}
    for entry in entries:
        style = entry.style
        if not isinstance(style, GridStyle):
            continue
        where = f"{entry.name!r}" if entry.name else "the module itself"
        try:
            grid = Grid(mesh, style.axes)
            style.check(entry.module, grid)
            _check_heads(entry, grid)
            if not _is_hook(style):
                before = styled.setdefault(id(entry.module), entry)
                if before is not entry:
                    raise ValueError(
                        f"both plan keys {before.key!r} and {entry.key!r} name this "
                        f"{describe_module(entry.module)}: keep one of them"
                    )
            for owner, name, layout in style.param_layouts(entry.module):
                param = getattr(owner, name)
                wanted = tuple(grid.placements(normalize(layout, param.ndim)))
                _, other = placed.setdefault(id(param), (entry, wanted))
                if other != wanted:
                    raise ValueError(tied_message(owner, name, wanted, other))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where} on mesh {describe_mesh(mesh)}: {error}") from None


def _is_hook(style: ParallelStyle) -> bool:
    return isinstance(style, GridStyle) and style.is_hook


def _check_heads(entry: _Entry, grid: Grid) -> None:
    """A projection into heads whose local output would split a head.

    The module around it views its local output as ``[..., -1, head_dim]``: with half a head that
    fails later, or mixes heads in silence.
    """
    style = entry.style.lifted if isinstance(entry.style, Lifted) else entry.style
    if not isinstance(style, Colwise2D) or not style.use_local_output or entry.parent is None:
        return
    if not (is_linear(entry.module) or is_conv1d(entry.module)):
        return
    if style.output_layouts[1] not in (dt.Shard(-1), dt.Shard(2)):
        return
    sizes = (getattr(entry.parent, name, None) for name in HEAD_SIZES)
    head = next((size for size in sizes if isinstance(size, int) and size > 0), None)
    features = _out_features(entry.module)
    one = getattr(entry.parent, "split_size", None)
    if isinstance(one, int) and features > one > 0 and features // one != style.parts:
        raise ValueError(
            f"{describe_module(entry.module)} is {features // one} projections of {one} features "
            f"side by side, and its module splits its output into them: a plain shard would mix "
            f"them up, give it parts={features // one}"
        )
    out = features // style.parts
    if head is None or out % head:
        return
    if (out // head) % grid.col.size:
        raise ValueError(
            f"{describe_module(entry.module)} projects into {out // head} heads of {head}, which "
            f"do not divide over {grid.col.name}={grid.col.size}: use a mesh whose "
            f"{grid.col.name} divides {out // head}, or the styles of attention_projections() with "
            f"Attention2D, or use_local_output=False; if it projects out of heads, Block2DParallel"
        )


def _covered(entries: list[_Entry]) -> set[int]:
    """Ids of the modules that a style runs, and of all within them."""
    covered = set()
    for entry in entries:
        if not _is_hook(entry.style):
            inside = getattr(entry.style, "places_inside", True)
            modules = entry.module.modules() if inside else [entry.module]
            covered |= {id(module) for module in modules}
    return covered


def _scopes(root: nn.Module, entries: list[_Entry]) -> set[str]:
    """Names of the modules within which a plan entry names something."""
    names = {id(module): name for name, module in root.named_modules()}
    scopes = set()
    for entry in entries:
        parts = names[id(entry.module)].split(".")
        scopes |= {".".join(parts[:depth]) for depth in range(len(parts))}
    return scopes


_LINEAR_STYLES = Block2DParallel, Colwise2D, Rowwise2D


def _row_dim(name: str, entries: list[_Entry]) -> int:
    """The token dim that tp_row splits at a module that no plan entry names: that of the nearest.

    Raises:
        ValueError: if those next to it in the tree of modules differ.
    """

    linear = [e for e in entries if isinstance(e.style, _LINEAR_STYLES)]
    row_dims = {entry.style.row_dim for entry in _nearest(name, linear)}
    if len(row_dims) > 1:
        raise ValueError(
            f"{name!r}: no plan entry names it, and which token dim tp_row splits there is not "
            f"known, as some of the plan's styles have row_dim 0 and others 1: name it, with a "
            f"style's row_dim"
        )
    return min(row_dims, default=0)


def _nearest(name: str, entries: list[_Entry]) -> list[_Entry]:
    """Those next to a module in the tree of modules."""

    def nearness(other: str) -> int:
        pairs = zip(name.split("."), other.split("."), strict=False)
        return next((depth for depth, (a, b) in enumerate(pairs) if a != b), 0)

    nearest = max((nearness(entry.name) for entry in entries), default=0)
    return [entry for entry in entries if nearness(entry.name) == nearest]


def _unnamed_vectors(root: nn.Module, entries: list[_Entry]) -> list[_Entry]:
    """Modules that hold only vectors and stand beside named ones, to be replicated.

    A stock plan leaves norms out where every rank runs them on the same tokens. Here rows hold
    different tokens, so their gradients have to be summed. What holds a matrix is not replicated
    unasked; the first forward refuses it.
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
            found.append(_Entry("", name, module, None, style))
    if found:
        logger.info("replicated, as no plan entry names them: %s", [e.name for e in found])
    return found


def _unnamed_dropouts(root: nn.Module, entries: list[_Entry]) -> list[_Entry]:
    """Dropouts that stand beside or within what the plan names: their masks have to fit.

    By themselves they would drop the same elements of every shard, and leave the ranks' random
    generators in different states wherever shards are of different sizes.
    """
    named = {id(entry.module) for entry in entries if not _is_hook(entry.style)}
    covered, scopes = _covered(entries), _scopes(root, entries)
    found = []
    for name, module in root.named_modules():
        in_scope = id(module) in covered or name.rpartition(".")[0] in scopes
        if not name or not in_scope or id(module) in named or "_tp2d" in module.__dict__:
            continue
        if isinstance(module, OTHER_KINDS) and module.p:
            raise ValueError(
                f"{name!r}: {describe_module(module)} drops more than single elements, which is "
                f"not defined on shards here: use nn.Dropout in its place, or set its p to 0"
            )
        if isinstance(module, nn.Dropout) and type(module).forward is nn.Dropout.forward:
            style = Dropout2D(row_dim=_row_dim(name, entries))
            style.by_default = True
            parent = root.get_submodule(name.rpartition(".")[0])
            found.append(_Entry("", name, module, parent, style))
    return found


def _dropping_inside(root: nn.Module, entries: list[_Entry]) -> list[_Entry]:
    """Modules around styled Linears, without a style of their own, whose own code drops."""
    covered = _covered(entries)
    names = {id(module): name for name, module in root.named_modules()}
    around: dict[int, _Entry] = {}
    for entry in entries:
        parent = entry.parent
        if parent is None or id(parent) in covered or not rates_of(parent):
            continue
        linear = entry.style.lifted if isinstance(entry.style, Lifted) else entry.style
        if isinstance(linear, _LINEAR_STYLES):
            style = DropoutInside(linear.row_dim)
            around[id(parent)] = _Entry("", names[id(parent)], parent, parent, style)
    return list(around.values())


def _features(linear: Any) -> tuple[int, int]:
    """In and out."""
    first, second = linear.weight.shape
    return (first, second) if is_conv1d(linear) else (second, first)


def _out_features(linear: Any) -> int:
    return _features(linear)[1]


def _with_neighbours(entries: list[_Entry]) -> list[_Entry]:
    """Tell each style that has to know what the plan says of the tensors around its module."""
    beside = defaultdict(list)
    giving = set()
    for entry in entries:
        style = _unlifted(entry)
        if isinstance(style, Colwise2D) and not style.use_local_output:
            giving.add(id(entry.module))
        sharded = isinstance(style, _LINEAR_STYLES) and style.use_local_output
        if sharded and (is_linear(entry.module) or is_conv1d(entry.module)):
            width = _out_features(entry.module)
            beside[id(entry.parent)].append((width, style.output_layouts[1]))
    told = []
    for entry in entries:
        if isinstance(entry.style, Dropout2D | DropoutInside | Local2D | Replicate):
            # A copy: one plan entry may name modules in several places.
            style = copy.copy(entry.style)
            style.surroundings = _surroundings(entry.name, entries)
            if isinstance(style, Dropout2D | DropoutInside):
                style.beside = [*style.beside, *beside[id(entry.parent)]]
            entry = entry._replace(style=style)
        elif isinstance(entry.style, Lifted):
            entry = entry._replace(style=entry.style.beside(giving))
        told.append(entry)
    return told


def _unlifted(entry: _Entry) -> Any:
    return entry.style.lifted if isinstance(entry.style, Lifted) else entry.style


def _surroundings(name: str, entries: list[_Entry]) -> Surroundings:
    """What the entries of a plan say of the tensors that reach the module of this name."""
    parts = name.split(".")
    around = [".".join(parts[:depth]) for depth in range(len(parts))]
    split, streams, inputs, widths, in_attention = [], set(), set(), set(), False
    for entry in entries:
        style, module = _unlifted(entry), entry.module
        if isinstance(style, Attention2D):
            in_attention |= entry.name in around
        if not isinstance(style, _LINEAR_STYLES):
            continue
        takes, gives = style.input_layouts[1], style.output_layouts[1]
        if is_embedding(module):
            widths.add(int(module.weight.shape[1]))
            streams |= {gives} & _STREAMS
        elif is_linear(module) or is_conv1d(module):
            in_features, out_features = _features(module)
            if not is_of_features(takes):
                widths.add(in_features)
                inputs |= {takes} & _STREAMS
            if isinstance(style, Rowwise2D) and not is_of_features(gives):
                widths.add(out_features)
                streams |= {gives} & _STREAMS
            shares = style.grad_layouts is not None and style.grad_layouts[1].is_partial()
            beside = entry.name.rpartition(".")[0] in around[-2:]
            if beside and style.use_local_output and (is_of_features(gives) or shares):
                split.append(entry.name)
    prepared = [placement for above in reversed(around) for placement in _prepared(above, entries)]
    found = prepared[:1] or list(streams or inputs)
    stream = found[0] if len(found) == 1 and found[0] in _STREAMS else None
    linear = [e for e in entries if isinstance(_unlifted(e), _LINEAR_STYLES)]
    axes = frozenset(_unlifted(entry).axes for entry in _nearest(name, linear))
    return Surroundings(stream, frozenset(widths), tuple(split), in_attention, axes)


_STREAMS = {dt.Shard(1), dt.Replicate()}


def _prepared(name: str, entries: list[_Entry]) -> Iterator[Any]:
    """How an entry for the module of this name has its first input prepared, if one does."""
    for entry in entries:
        inputs = getattr(_unlifted(entry), "inputs", None) if entry.name == name else None
        if inputs is not None:
            given = (*(inputs.args or ()), *inputs.kwargs.values())
            yield from [one.want[1] for one in given if one is not None][:1]


def _undo_default(entry: _Entry) -> None:
    """Let a later plan entry restyle a module that an earlier call replicated by default."""
    module = entry.module
    runner = module.__dict__.get("_tp2d")
    if runner is None or _is_hook(entry.style):
        return
    if not runner.by_default:
        raise ValueError(
            f"{entry.name!r}: {describe_module(module)} has a style already "
            f"({runner.style}): name it in one plan entry"
        )
    take_off_grid(module)
    if not isinstance(runner, WholeRunner):
        return
    for owner in module.modules():
        for name, param in list(owner.named_parameters(recurse=False)):
            assert isinstance(param, DTensor)
            plain = nn.Parameter(param.to_local().detach(), requires_grad=param.requires_grad)
            owner.register_parameter(name, plain)


def _ties(root: nn.Module) -> list[list[tuple[str, nn.Module, str]]]:
    """Groups of ``(name, owner, attribute)`` that share one parameter."""
    owners = defaultdict(list)
    for prefix, module in root.named_modules():
        for name, param in module._parameters.items():
            if param is not None:
                owners[id(param)].append((f"{prefix}.{name}" if prefix else name, module, name))
    return [group for group in owners.values() if len(group) > 1]


def _tie_again(ties: list[list[tuple[str, nn.Module, str]]]) -> None:
    """Give a parent that holds a parameter of a module inside it, too, the placed one.

    No plan entry can name it alone, and it leaves the use of the parameter to the module inside:
    BERT's head holds its decoder's bias for the sake of its name in checkpoints.
    """
    for group in ties:
        for _, owner, attribute in group:
            if isinstance(owner._parameters[attribute], DTensor):
                continue
            inside = {id(module) for module in owner.modules()} - {id(owner)}
            for _, other, name in group:
                placed = other._parameters[name]
                if id(other) in inside and isinstance(placed, DTensor):
                    owner.register_parameter(attribute, placed)


def _leaves_some_empty(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh: DeviceMesh
) -> bool:
    """Whether some rank holds nothing of a tensor that is not empty itself."""
    smallest = list(shape)
    for placement, count in zip(placements, mesh.shape, strict=True):
        if isinstance(placement, dt.Shard):
            size = smallest[placement.dim]
            smallest[placement.dim] = max(0, size - (count - 1) * -(-size // count))
    return 0 in smallest and 0 not in shape


class _FirstForward:
    """Checks a model once, when it first runs: by then every part of the plan has been applied."""

    def __init__(
        self,
        mesh: DeviceMesh,
        ties: list[list[tuple[str, nn.Module, str]]],
        placed: list[tuple[str, str]],
    ) -> None:
        self.mesh = mesh
        self.ties = ties
        self.placed = placed

    @classmethod
    def watch(
        cls, module: nn.Module, mesh: DeviceMesh, ties: list[list[tuple[str, nn.Module, str]]]
    ) -> None:
        for name, submodule in module.named_modules():
            runner = submodule.__dict__.get("_tp2d")
            if runner is not None:
                runner.name = name
        placed = [
            (prefix, name)
            for prefix, owner in module.named_modules()
            for name, param in owner._parameters.items()
            if isinstance(param, DTensor)
        ]
        module.register_forward_pre_hook(cls(mesh, ties, placed), prepend=True)

    def __deepcopy__(self, memo: Any) -> _FirstForward:
        return self

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        refuse_transforms(module)
        self._check_placed(module)
        self._check_empty(module)
        plain = [
            f"{name} {tuple(param.shape)}"
            for name, param in module.named_parameters()
            if param.requires_grad and not isinstance(param, DTensor)
        ]
        if plain:
            raise ValueError(
                f"{type(module).__name__} on mesh {describe_mesh(self.mesh)}: no plan entry names "
                f"the modules of {plain[:5]}{'...' if len(plain) > 5 else ''}, so they would be "
                f"dense on every rank and their gradients wrong: name each with a style, "
                f"torch_tp2d.Replicate() if it is to be whole on every rank, or freeze it"
            )
        for group in self.ties:
            params = [owner._parameters[attribute] for _, owner, attribute in group]
            if any(param is not params[0] for param in params):
                names = [name for name, _, _ in group]
                raise ValueError(
                    f"{names} were one parameter when the plan was applied and no longer are "
                    f"(to_empty() on a meta model unties them): tie them again, "
                    f"{names[1]} = {names[0]}, before the optimizer is made"
                )
        for submodule in module.modules():
            runner = submodule.__dict__.get("_tp2d")
            if runner is not None:
                runner.installed(submodule)
        # All is well: the check has done its work, for this module though not for its copies.
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is self]:
            del hooks[key]

    def _check_empty(self, module: nn.Module) -> None:
        """Refuse parameters of which FSDP2 is to reduce the gradients, and some rank holds none.

        It raises there, in backward, and leaves the other ranks waiting.
        """
        names = (kind.__name__ for inner in module.modules() for kind in type(inner).__mro__)
        if "FSDPModule" not in names:
            return
        for name, param in module.named_parameters():
            if not isinstance(param, DTensor) or not param.requires_grad:
                continue
            if _leaves_some_empty(tuple(param.shape), param.placements[-2:], self.mesh):
                raise ValueError(
                    f"{name} of shape {tuple(param.shape)}, placed {param.placements[-2:]}, leaves "
                    f"some ranks of mesh {describe_mesh(self.mesh)} without elements, which FSDP2 "
                    f"does not take: use a larger size there, or fewer rows or columns"
                )

    def _check_placed(self, module: nn.Module) -> None:
        """Refuse a model that DistributedDataParallel or FSDP1 has taken the DTensors out of."""
        wrapper = _data_parallel(module)
        for prefix, name in self.placed:
            try:
                owner = module.get_submodule(prefix)
            except AttributeError:
                continue  # Wrapped or replaced since.
            param = owner._parameters.get(name)
            # FSDP1 leaves a view of its own in the parameter's place.
            hidden = param is None and isinstance(owner.__dict__.get(name), Tensor)
            if wrapper is None and not hidden and not hasattr(param, _LOCALIZED):
                continue
            where = f"{prefix}.{name}" if prefix else name
            raise ValueError(
                f"{type(module).__name__} on mesh {describe_mesh(self.mesh)}: {where}, a DTensor "
                f"when the plan was applied, is not the module's own parameter any more, as "
                f"{wrapper or 'DistributedDataParallel(device_mesh=...) and FSDP1'} make it: "
                f"{_MEND}"
            )
