"""Runs modules that mix the tokens of a sample on samples that are not split, or on all samples.

DTensor runs most modules that mix tokens correctly. The exceptions:

- Convolutions of a tensor that is split by length: DTensor exchanges edges by global ranks, and so
  hangs on a mesh of two dims.
- Attention with queries that are split by tokens, which DTensor refuses.
- Recurrences and norms over tokens: they mix in plain tensors, or run on a shard as if it were the
  global tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.overrides import TorchFunctionMode

from .._torch_compat.modules import forward_pre_hooks
from .._torch_compat.tensors import tree_leaves, tree_map_only
from .._tracing import in_graph
from ..mesh.grid import Grid, describe_mesh
from ..mesh.layouts import Layout
from .dtensors import to_dtensor
from .intercept import Intercept
from .local_math import parameters_inside, run_locally
from .masks import Masks
from .module_kinds import describe_module

__all__ = [
    "check_dropout",
    "pass_by_nothing",
    "run_mixing",
    "run_on_samples",
    "runs_alone",
]

_INSTANCE_NORMS = nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d
_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
_CONVOLUTIONS = frozenset(
    (
        *(torch.conv1d, torch.conv2d, torch.conv3d),
        *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
    )
)
_NOT_OF_DTENSORS = frozenset(
    ("batch_norm", "group_norm", "gru", "instance_norm", "lstm", "rnn_relu", "rnn_tanh")
)

_OF_SIZES = frozenset(("arange", "eye", "full", "linspace", "ones", "zeros"))
_DRAWN = frozenset(
    ("bernoulli", "bernoulli_", "dropout", "exponential_", "multinomial", "normal", "normal_")
    + ("rand_like", "randint_like", "randn_like", "random_", "uniform_")
)


def runs_alone(module: nn.Module) -> bool:
    """Whether a module of torch's mixes tokens and has to run on local tensors of full samples."""
    return isinstance(module, (nn.RNNBase, nn.GroupNorm, *_INSTANCE_NORMS, *_BATCH_NORMS))


def check_dropout(module: nn.Module, grid: Grid) -> None:
    """Refuse a recurrence with dropout between its layers.

    Raises:
        ValueError: for one on more than one rank, since its masks would differ over the ranks.
    """
    for inner in module.modules():
        if not isinstance(inner, nn.RNNBase) or grid.row.size * grid.col.size == 1:
            continue
        if inner.dropout and inner.num_layers > 1:
            raise ValueError(
                f"{describe_module(inner)} on mesh {describe_mesh(grid.mesh)}: its "
                f"dropout={inner.dropout} between its {inner.num_layers} layers is drawn inside "
                f"torch's operator, by each rank for itself: give it dropout=0.0, or make it "
                f"{inner.num_layers} recurrences of one layer with an nn.Dropout between them"
            )


def run_on_samples(
    module: nn.Module,
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    given: Tensor,
    x: DTensor,
    grid: Grid,
) -> Any:
    """Run a module that :func:`runs_alone` on this rank's samples.

    Args:
        given: the input as it stands in ``args`` or ``kwargs``.
        x: the same input as a DTensor on the grid.

    Returns:
        The module's output, with tensors as DTensors that are split by samples.
    """
    dim = _sample_dim(module, x)
    on_mesh = _of_samples(x, dim)
    samples = x.redistribute(placements=on_mesh)
    layout = grid.layout(samples, 0)

    def local(value: Any) -> Any:
        if value is given:
            return samples.to_local()
        if isinstance(value, tuple):
            return tuple(map(local, value))
        # Another tensor is a recurrence's initial state, which has its samples in dim 1.
        return _placed(value, x.shape[dim or 0], grid, _moved(on_mesh, 1), local=True)

    row, col = (isinstance(placement, Shard) for placement in layout)
    args, kwargs = tuple(map(local, args)), {name: local(value) for name, value in kwargs.items()}
    params = parameters_inside(module)
    y = run_locally(params, forward, args, kwargs, grid, shares=(row, col))

    def whole(value: Any, at: int | None) -> Any:
        if isinstance(value, tuple):
            return tuple(whole(one, 1) for one in value)
        shape = list(value.shape)
        if at is not None and dim is not None:
            shape[at] = x.shape[dim]
        there: Layout = (_at(layout[0], at), _at(layout[1], at))
        return to_dtensor(value, there, grid, shape)

    if isinstance(y, tuple):
        # The further outputs are a recurrence's final states, which have their samples in dim 1.
        return whole(y[0], dim), *(whole(one, 1) for one in y[1:])
    return whole(y, dim)


def run_mixing(
    module: nn.Module,
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    x: DTensor,
    masks: Masks,
) -> Any:
    """Run any other module on DTensors, and give functions in it that mix tokens full samples.

    Args:
        masks: of the module, for the dropout in its code.
    """
    if not isinstance(module, nn.MultiheadAttention):
        plain = _plain_buffers(module)
        with _OnDTensors(module, masks):
            y = forward(*args, **kwargs)
        for owner, name in plain:
            # Made anew, of DTensors: it is saved, and used beside local tensors, as it was.
            if isinstance(made := getattr(owner, name), DTensor):
                setattr(owner, name, made.full_tensor())
        return y
    if not module.training or not module.dropout:
        return _attention_on_samples(module, forward, args, kwargs, x, masks.grid)
    with Intercept(masks.drop, masks.attention, masks.here):
        return _attention_on_samples(module, forward, args, kwargs, x, masks.grid)


def _plain_buffers(module: nn.Module) -> list[tuple[nn.Module, str]]:
    return [
        (owner, name)
        for owner in module.modules()
        for name, x in owner.named_buffers(recurse=False)
        if not isinstance(x, DTensor)
    ]


def _attention_on_samples(
    module: nn.MultiheadAttention,
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    x: DTensor,
    grid: Grid,
) -> tuple[DTensor, DTensor | None]:
    """Run attention on DTensors that are split by samples alone, and masks likewise.

    Raises:
        ValueError: for a local tensor of other tokens than ``x``'s, and for a mask per head.
    """
    dim = _sample_dim(module, x)
    kept = _of_samples(x, dim)
    bound = inspect.signature(nn.MultiheadAttention.forward).bind(module, *args, **kwargs).arguments
    gathered: dict[int, Tensor] = {}
    for name in ("query", "key", "value"):
        value = bound[name]
        if not isinstance(value, DTensor):
            raise ValueError(
                f"{describe_module(module)} on mesh {describe_mesh(grid.mesh)}: its {name} of "
                f"shape {tuple(value.shape)} is a local tensor of other tokens than its query of "
                f"{tuple(x.shape)}: hand it on as a DTensor (use_local_output=False), which says "
                f"how it is split"
            )
        if id(value) not in gathered:
            # Equal arguments stay the same tensor, which torch multiplies by all weights at once.
            gathered[id(value)] = value.redistribute(placements=kept)
        bound[name] = gathered[id(value)]
    if not module.training:
        # If query and key are one tensor, torch takes a fast path that DTensor does not support.
        bound["query"] = bound["query"].view_as(bound["query"])
    for name, at in (("key_padding_mask", 0), ("attn_mask", None)):
        if bound.get(name) is not None:
            bound[name] = _placed(bound[name], x.shape[dim or 0], grid, _moved(kept, at))
    if getattr(bound.get("attn_mask"), "ndim", 2) > 2 and grid.row.size * grid.col.size > 1:
        raise ValueError(
            f"{describe_module(module)} on mesh {describe_mesh(grid.mesh)}: an attn_mask of its "
            f"own for each sample and head, {tuple(bound['attn_mask'].shape)}, cannot be split: "
            f"use scaled_dot_product_attention in an own attention with Attention2D"
        )
    bound.pop("self")
    y, weights = forward(**bound)
    # By way of a local tensor: DTensor records wrong strides for a gradient that it sums in
    # backward, and torch's backward then fails to view it.
    return to_dtensor(y.to_local(), grid.layout(y, 0), grid, y.shape), weights


def pass_by_nothing(module: nn.Module) -> None:
    """Keep TransformerEncoderLayer from its fast path, which bypasses the modules inside.

    It takes that path only if the modules have no hooks, so this adds one that does nothing.
    """
    if isinstance(module, nn.MultiheadAttention) and not forward_pre_hooks(module):
        module.register_forward_pre_hook(_goes_on)


def _goes_on(module: nn.Module, args: Any) -> None:
    """A hook that does nothing."""


def _sample_dim(module: Any, x: Tensor) -> int | None:
    """The dim of the samples, if the module computes each by itself; else None."""
    if isinstance(module, nn.GroupNorm):
        return 0
    if isinstance(module, _INSTANCE_NORMS):
        return None if module.track_running_stats else 0
    if isinstance(module, _BATCH_NORMS) or x.ndim != 3:
        return None
    return 0 if module.batch_first else 1


def _of_samples(x: DTensor, dim: int | None) -> tuple[Placement, ...]:
    """Placements that split the samples alone, and them only if every rank gets as many.

    Torch views a rank's samples and their heads as one dim, and some of its norms and DTensor's
    convolutions fail on a rank without samples.
    """
    kept = [p if dim is not None and p == Shard(dim) else Replicate() for p in x.placements]
    return _dividing(x, kept)


def _dividing(x: DTensor, placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """``placements`` if they split ``x`` evenly, else replicated ones."""
    parts = [1] * x.ndim
    for placement, size in zip(placements, x.device_mesh.shape, strict=True):
        if isinstance(placement, Shard):
            parts[placement.dim] *= size
    divides = all(size % of == 0 for size, of in zip(x.shape, parts, strict=True))
    return tuple(placements) if divides else (Replicate(),) * len(placements)


def _moved(placements: Sequence[Placement], dim: int | None) -> tuple[Placement, ...]:
    """The placements for a tensor that has its samples in dim ``dim``, or None for no samples."""
    return tuple(_at(placement, dim) for placement in placements)


def _at(placement: Placement, dim: int | None) -> Placement:
    return Replicate() if dim is None or not isinstance(placement, Shard) else Shard(dim)


def _placed(
    value: Any, samples: int, grid: Grid, placements: Sequence[Placement], *, local: bool = False
) -> Any:
    """Redistribute a further tensor argument, replicated on every rank or a DTensor.

    A local tensor that a style has handed out, such as another recurrence's states, is in the
    layout in which it was.

    Raises:
        ValueError: for any other local tensor that does not hold all samples.
    """
    if not isinstance(value, Tensor):
        return value
    handed = None if isinstance(value, DTensor) else grid.handed(value)
    if handed is not None:
        value = to_dtensor(value, handed, grid)
    if not isinstance(value, DTensor):
        dims = {p.dim for p in placements if isinstance(p, Shard)}
        if any(value.shape[dim] != samples for dim in dims):
            raise ValueError(
                f"a local tensor of shape {tuple(value.shape)} on mesh {describe_mesh(grid.mesh)} "
                f"is not of all {samples} samples, by which it is to be split: give it whole, the "
                f"same on every rank, or as a DTensor"
            )
        value = to_dtensor(value, (Replicate(), Replicate()), grid, value.shape)
    value = value.redistribute(placements=placements)
    return value.to_local() if local else value


class _OnDTensors(TorchFunctionMode):
    """Inside it, functions are called on DTensors in the form that DTensor supports.

    Functions that mix tokens get full samples, and dropout has the masks of the grid. Plain tensors
    beside a DTensor become replicated DTensors if they are made of buffers and sizes alone: the
    module's code sees global sizes, so those tensors are the same on every rank.

    Raises:
        ValueError: for a function that DTensor does not support, naming the module.
    """

    def __init__(self, module: nn.Module, masks: Masks) -> None:
        super().__init__()
        self._module, self._grid, self._masks = module, masks.grid, masks
        self._dropping = Intercept(masks.drop, self._attention, masks.here)
        # Told apart by "is": Dynamo guards an id(), so that each new input had a graph of its own.
        self._whole: list[Tensor] = list(module.buffers())

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(isinstance(x, DTensor) for x in given):
            if name in _NOT_OF_DTENSORS:
                raise self._refusal(name)
            if any(map(self._is_whole, given)):
                args, kwargs = tree_map_only(Tensor, self._on_mesh, (args, kwargs))
            if func in _CONVOLUTIONS:
                args, kwargs = _split_by(args, kwargs, 1)
            elif func is F.scaled_dot_product_attention:
                args, kwargs = _split_by(args, kwargs, 2)
            if in_graph():
                return self._dropping.replaced(func)(*args, **kwargs)
            try:
                return self._dropping.replaced(func)(*args, **kwargs)
            except NotImplementedError as error:  # What DTensor raises of operators that it lacks.
                raise self._refusal(name) from error
        out = self._dropping.replaced(func)(*args, **kwargs)
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if name in _DRAWN:
            self._whole = [one for one in self._whole if not any(one is x for x in made)]
        elif name in _OF_SIZES or (given and all(map(self._is_whole, given))):
            self._whole += made
        return out

    def _refusal(self, name: str) -> ValueError:
        return ValueError(
            f"{describe_module(self._module)} on mesh {describe_mesh(self._grid.mesh)}: it calls "
            f"{name}, which torch does not have for tensors that are split over a mesh. Name the "
            f"module inside that calls it in the plan, with a Replicate() of its own"
        )

    def _is_whole(self, x: Tensor) -> bool:
        return any(x is one for one in self._whole)

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Attention with dropout, if any, of queries and keys of the same samples and heads."""
        given: Any = (query, key, value)
        p = args[1] if len(args) > 1 else kwargs.get("dropout_p")
        if p and all(isinstance(x, DTensor) for x in given):
            given, _ = _split_by(given, {}, 2)
            at = given[0].placements
            if all(x.shape[:2] == query.shape[:2] for x in given):
                given = [x.redistribute(placements=at) for x in given]
        return self._masks.attention(*given, *args, **kwargs)

    def _on_mesh(self, x: Tensor) -> Tensor:
        if not self._is_whole(x):
            return x
        return to_dtensor(x, (Replicate(), Replicate()), self._grid, x.shape)


def _split_by(
    args: Sequence[Any], kwargs: Mapping[str, Any], dims: int
) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments, with their DTensors split along the first ``dims`` dims alone."""

    def gathered(x: DTensor) -> DTensor:
        split = [
            p
            if isinstance(p, Replicate) or (isinstance(p, Shard) and p.dim < dims)
            else Replicate()
            for p in x.placements
        ]
        kept = _dividing(x, split)
        return x if kept == tuple(x.placements) else x.redistribute(placements=kept)

    mapped: Callable[..., Any] = tree_map_only
    split: tuple[Sequence[Any], dict[str, Any]] = mapped(DTensor, gathered, (args, kwargs))
    return split
