"""Loads Hugging Face models straight into their shards on a grid.

transformers shards a model while it reads the checkpoint: a ``tp_plan`` names a style for each
module, and a rank reads from disk only the slices of parameters that it keeps. This module lets a
``tp_plan`` use the styles of torch_tp2d. :func:`from_pretrained` takes a plan as
:func:`torch_tp2d.parallelize_module` does; :func:`register` gives the styles names, for a
``tp_plan`` of strings.

transformers makes its own mesh, one axis of which is for tensor parallelism; the grid arranges the
ranks of that axis in rows and columns. Its FSDP2 and its pipelines want that axis for themselves,
so the grid has to consist of all ranks. For FSDP2 around a grid, apply the plan to a model on
``meta``, then ``fully_shard``, and load by ``torch.distributed.checkpoint``.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed.tensor as dt
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from .._tracing import eager_only
from ..mesh.grid import Grid, check_mesh, describe_mesh
from ..mesh.layouts import Layout
from ..parallelize.check import check_heads
from ..parallelize.dense import DenseParameters
from ..parallelize.first_forward import FirstForward
from ..parallelize.local_sizes import LocalSizes
from ..parallelize.plan import checked_entries, parallelize_module
from ..parallelize.resolve import Entry
from ..parallelize.ties import ties_of
from ..parallelize.written_buffers import WrittenBuffers
from ..plans import plan_for
from ..styles.base import GridStyle, place_parameter, tied_message
from ..styles.linear import Block2DParallel, Colwise2D, Rowwise2D
from ..styles.module_kinds import describe_module
from ..styles.norm import Norm2D
from ..styles.replicated import Replicate
from .saving import save_pretrained

__all__ = ["NAMES", "from_pretrained", "register", "save_pretrained"]

OLDEST, NEWEST = (5, 18), (5, 23)
"""The oldest and the newest version of transformers whose loader was seen to work."""


def check_version(found: str) -> None:
    """Refuse a version of transformers for which this module was not written.

    Raises:
        ImportError: naming the versions that work and the one that was found.
    """
    if not OLDEST <= tuple(int(part) for part in found.split(".")[:2]) <= NEWEST:
        oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
        raise ImportError(
            f"torch_tp2d.integrations.transformers hooks into the loader of transformers, which "
            f"changes; it works with {oldest} to {newest}, but this is {found}: install one that "
            f"works, or make the model and apply torch_tp2d.parallelize_module to it"
        )


check_version(transformers.__version__)

from transformers.distributed.configuration_utils import DistributedConfig  # noqa: E402
from transformers.distributed.tensor_parallel import (  # noqa: E402
    ALL_PARALLEL_STYLES,
    TensorParallelLayer,
)

Plan = Mapping[str, ParallelStyle | dt.Replicate]
_Tied = tuple[str, nn.Module, str]

NAMES: Mapping[str, Callable[[], GridStyle]] = {
    "colwise_2d": Colwise2D,
    "colwise_2d_gather_output": lambda: Colwise2D(output_layouts=(dt.Replicate(), dt.Replicate())),
    "rowwise_2d": Rowwise2D,
    "block_2d": Block2DParallel,
    "norm_2d": Norm2D,
    "replicate_2d": Replicate,
}
"""The names that :func:`register` registers, and their styles, with default arguments but for a
head's."""


def from_pretrained(
    model_class: Any,
    path: str,
    mesh: DeviceMesh,
    plan: Plan | Callable[[nn.Module], Plan] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """``model_class.from_pretrained(path, **kwargs)`` on a grid; no rank ever holds the full model.

    It does the same as loading the model and calling :func:`torch_tp2d.parallelize_module`, except
    that each rank reads only its shards of a safetensors checkpoint. The same checks are made,
    before anything is read.

    Args:
        model_class: a model class of transformers or one of its ``Auto`` classes.
        path: a folder or a name, as transformers takes it.
        mesh: named ``("tp_row", "tp_col")``, of all ranks.
        plan: module names and styles, or a function that returns them for the model (which it gets
            on ``meta``); by default :func:`torch_tp2d.plans.plan_for`.
        kwargs: those of transformers: ``dtype``, ``config``, ``revision``, ...

    Returns:
        The model in eval mode, as transformers leaves it.

    Raises:
        TypeError: for arguments by which transformers would place the model itself, and for those
            that :func:`torch_tp2d.parallelize_module` refuses.
        ValueError: for a mesh of only some of the ranks, and for what parallelize_module refuses.

    Example::

        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp_row", "tp_col"))
        >>> model = from_pretrained(AutoModelForCausalLM, path, mesh, dtype=torch.float32)
        >>> model(input_ids=ids, labels=ids).loss.backward()    # every rank passes all of ids
    """
    check_mesh(mesh)
    taken = {"device_map", "device_mesh", "distributed_config", "tp_plan", "tp_size"} & set(kwargs)
    if taken:
        raise TypeError(f"{sorted(taken)} place a model without a grid: leave them out")
    world = torch.distributed.get_world_size()
    if mesh.size() != world:
        raise ValueError(
            f"the mesh {describe_mesh(mesh)} has {mesh.size()} of {world} ranks, but transformers "
            f"loads a model on all of them: make a grid of {world}"
        )
    skeleton = _on_meta(model_class, path, kwargs)
    chosen = plan(skeleton) if callable(plan) else plan
    if chosen is None:
        chosen = plan_for(skeleton, mesh)
    if mesh.size() == 1:
        # transformers ignores a tp_plan if there is one rank.
        return parallelize_module(model_class.from_pretrained(path, **kwargs), mesh, chosen)
    entries = checked_entries(skeleton, mesh, chosen)
    ties = ties_of(skeleton)
    config = DistributedConfig(tp_size=world, tp_plan=_by_turns(skeleton, mesh, entries, ties))
    model: nn.Module = model_class.from_pretrained(path, distributed_config=config, **kwargs)
    for entry in entries:
        # The entry for the model itself, which no rule of transformers can name.
        if not entry.name:
            entry.style._apply(model, mesh)
    FirstForward.watch(model, mesh, [[_found(model, tied) for tied in group] for group in ties])
    WrittenBuffers.watch(model, mesh)
    LocalSizes.watch(model, mesh)
    return model


def _on_meta(model_class: Any, path: str, kwargs: Mapping[str, Any]) -> nn.Module:
    """The model that ``from_pretrained`` is going to make, on the meta device."""
    config = kwargs.get("config")
    if not isinstance(config, transformers.PretrainedConfig):
        config, _ = transformers.AutoConfig.from_pretrained(
            path, return_unused_kwargs=True, **kwargs
        )
    make = getattr(model_class, "from_config", getattr(model_class, "_from_config", None))
    assert make is not None
    with torch.device("meta"):
        model = make(config)
    assert isinstance(model, nn.Module)
    return model


def _found(model: nn.Module, tied: _Tied) -> _Tied:
    """Find a tied parameter of the skeleton in the loaded model."""
    name, _, attribute = tied
    return name, model.get_submodule(name.rpartition(".")[0]), attribute


class _AsTied(ParallelStyle):
    """Places a tied parameter of a module without a plan entry as the other modules place it."""

    def __init__(self, name: str, layout: Layout) -> None:
        super().__init__()
        self.name = name
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        place_parameter(module, self.name, Grid(device_mesh), self.layout, self.src_data_rank)
        return module


def _as_tied(entries: list[Entry], ties: list[list[_Tied]]) -> Iterator[tuple[str, ParallelStyle]]:
    """Names and styles for modules without a style whose parameter is tied to a styled module's.

    transformers loads a tied parameter into the one of its modules that it finds first, so each of
    them has to place it.
    """
    layouts = {
        (owner, name): layout
        for entry in entries
        if isinstance(entry.style, GridStyle)
        for owner, name, layout in entry.style.param_layouts(entry.module)
    }
    for group in ties:
        layout = next((layouts[o, a] for _, o, a in group if (o, a) in layouts), None)
        for name, owner, attribute in group:
            if layout is not None and (owner, attribute) not in layouts:
                yield name.rpartition(".")[0], _AsTied(attribute, layout)


def _generic(name: str) -> str:
    """A module's name with ``*`` for its numbers, as in the rules of transformers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _by_turns(
    skeleton: Any, mesh: DeviceMesh, entries: list[Entry], ties: list[list[_Tied]]
) -> dict[str, str]:
    """Make a ``tp_plan`` of registered styles that apply the entries.

    A rule of transformers is for a module of every layer, but an entry of ours is for one module.
    Its loader visits modules in the model's order, which is the skeleton's, so the styles of a rule
    are applied one after the other in that order.
    """
    styles: dict[str, list[ParallelStyle]] = defaultdict(list)
    for entry in entries:
        styles[entry.name].append(entry.style)
    for name, style in _as_tied(entries, ties):
        styles[name].append(style)
    # The model's own rules are all overridden; where we have no entry, by one that does nothing.
    rules = {_generic(name) for name in styles if name} | set(skeleton.tp_plan)
    turns = defaultdict(list)
    for name, _ in skeleton.named_modules():
        if name and _generic(name) in rules:
            turns[_generic(name)].append(styles.get(name, []))
    plan = {}
    for rule in rules:
        plan[rule] = f"torch_tp2d {rule}"
        _register(plan[rule], _AppliedByLoader(mesh, iter(turns[rule])))
    return plan


def _register(name: str, style: TensorParallelLayer) -> None:
    registry: Any = ALL_PARALLEL_STYLES
    registry.register(name, style)


class _AppliedByLoader(TensorParallelLayer):
    """The style that transformers' loader gets: it applies our styles to modules on ``meta``.

    The loader calls ``shard_param`` for each parameter of a module, then ``install_forward`` for
    the module, and then fills the DTensors that it finds.

    Args:
        turns: the styles for the modules that the loader visits, in that order.
    """

    def __init__(self, mesh: DeviceMesh, turns: Iterator[list[ParallelStyle]]) -> None:
        self.mesh = mesh
        self.turns = turns

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Do nothing: ``install_forward`` places the parameters of a module."""

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        theirs, ours = mesh.mesh.flatten().tolist(), self.mesh.mesh.flatten().tolist()
        if theirs != ours:
            raise ValueError(
                f"{describe_module(module)}: the grid {describe_mesh(self.mesh)} is of ranks "
                f"{ours}, but transformers shards this model over ranks {theirs}: load it with "
                f"tp_size={self.mesh.size()} and no other parallelism on {self.mesh.size()} ranks"
            )
        for style in next(self.turns):
            style.src_data_rank = None
            self.apply(style, module)
        return module

    def apply(self, style: ParallelStyle, module: nn.Module) -> None:
        style._apply(module, self.mesh)


def register(mesh: DeviceMesh, styles: Mapping[str, GridStyle] | None = None) -> None:
    """Let a ``tp_plan`` of transformers name the styles of torch_tp2d, on a grid.

    ``"colwise_2d"``, ``"rowwise_2d"``, ``"block_2d"``, ``"norm_2d"`` and ``"replicate_2d"`` are
    the styles with their default arguments; ``"colwise_2d_gather_output"`` is for a head whose
    logits are gathered on every rank. The ``tp_plan`` has to name every module with parameters,
    norms too, and to override every rule of the model's own ``tp_plan``; the model's first forward
    refuses what is left out. For styles with arguments, give a plan to :func:`from_pretrained`,
    which checks it before it reads anything.

    Args:
        mesh: named ``("tp_row", "tp_col")``, of all ranks. A later call replaces it for models
            that are loaded from then on.
        styles: further names and their styles.

    Raises:
        TypeError, ValueError: for a mesh with other axes, and for a style that is not of
            torch_tp2d. Raised by transformers' ``from_pretrained``: for a module that the style
            cannot parallelize, and for a world of another size. Raised by the first forward: for
            modules that no rule names, and for heads that the grid would split.

    Example::

        >>> register(mesh)
        >>> plan = {
        ...     "model.embed_tokens": "rowwise_2d",
        ...     "model.layers.*.input_layernorm": "replicate_2d",
        ...     "model.layers.*.self_attn.q_proj": "colwise_2d",
        ...     "model.layers.*.self_attn.o_proj": "rowwise_2d",
        ...     ...,
        ...     "lm_head": "colwise_2d_gather_output",
        ... }
        >>> model = AutoModelForCausalLM.from_pretrained(
        ...     path, distributed_config=DistributedConfig(tp_size=mesh.size(), tp_plan=plan))
    """
    check_mesh(mesh)
    named = {name: make() for name, make in NAMES.items()} | dict(styles or {})
    for name, style in named.items():
        if not isinstance(style, GridStyle):
            raise TypeError(f"{name!r}: expected a style of torch_tp2d, not {style!r}")
        _register(name, _AppliedByName(mesh, repeat([style])))


class _AppliedByName(_AppliedByLoader):
    """Applies a style by its registered name, and has the model's first forward check it."""

    def apply(self, style: ParallelStyle, module: nn.Module) -> None:
        before = copy.copy(module)
        super().apply(style, module)
        _FirstCall.of(module, _Named(before, style, self.mesh, dict(_placements(module))))


class _Named(NamedTuple):
    before: nn.Module
    """A copy of the module before the style was applied, which tells its class."""
    style: ParallelStyle
    mesh: DeviceMesh
    placements: dict[str, tuple[Placement, ...]]


def _placements(module: nn.Module) -> Iterator[tuple[str, tuple[Placement, ...]]]:
    for name, param in module.named_parameters():
        yield name, param.placements if isinstance(param, dt.DTensor) else ()


class _FirstCall:
    """Checks a model whose modules were named one by one, when it is first called.

    No rule of transformers can name the model itself, so this is the first time that we see it.
    """

    waiting: WeakKeyDictionary[nn.Module, _Named] = WeakKeyDictionary()
    handle: RemovableHandle | None = None

    @classmethod
    def of(cls, module: nn.Module, named: _Named) -> None:
        cls.waiting[module] = named
        if cls.handle is None:
            cls.handle = register_module_forward_pre_hook(cls.check)

    @classmethod
    @eager_only
    def check(cls, model: nn.Module, args: Any) -> None:
        if not isinstance(model, transformers.PreTrainedModel):
            return
        found = [(name, module) for name, module in model.named_modules() if module in cls.waiting]
        for name, module in found:
            before, style, mesh, placements = cls.waiting[module]
            parent = model.get_submodule(name.rpartition(".")[0])
            assert isinstance(style, GridStyle)
            try:
                check_heads(Entry(name, name, before, parent, style), Grid(mesh, style.axes))
                for parameter, have in _placements(module):
                    if have != placements[parameter]:
                        raise ValueError(
                            tied_message(module, parameter, placements[parameter], have)
                        )
            except ValueError as error:
                raise ValueError(f"{name!r} on mesh {describe_mesh(mesh)}: {error}") from None
        for mesh in {cls.waiting[module].mesh for _, module in found}:
            for name, param in model.named_parameters():
                if isinstance(param, dt.DTensor) and param.device_mesh != mesh:
                    raise ValueError(
                        f"{name} is on mesh {describe_mesh(param.device_mesh)} by a rule of the "
                        f"model's own tp_plan, but others are on {describe_mesh(mesh)}: name its "
                        f"module in the tp_plan too"
                    )
            FirstForward(mesh, [], [])(model, args)
            DenseParameters.watch(model, mesh)
        for _, module in found:
            del cls.waiting[module]
        if not cls.waiting and cls.handle is not None:
            cls.handle.remove()
            cls.handle = None
