"""The style of modules that run unchanged on local tensors, between two styles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch.distributed.tensor as dt
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from ..mesh.grid import Grid
from ..mesh.layouts import Layout, as_layout, is_pair, row_layout
from .base import GridStyle, LayoutLike, Runner
from .local_runner import LocalRunner
from .module_kinds import describe_module
from .surroundings import UNKNOWN

__all__ = ["Local2D"]


class Local2D(GridStyle):
    """Run a module unchanged on this row's local tensors, with its own parameters on the mesh.

    It is for models that regroup tokens between modules, into windows of an image for instance, so
    that the first dim is not always the batch. Between the modules of such a model every tensor is
    local: this row's part of the batch, replicated along ``tp_col``. Only gradients move.

    ===============  ==============================  ==============================
    tensor           layout                          local shape
    ===============  ==============================  ==============================
    inputs, outputs  ``(Shard(0), Replicate())``     ``[B/R, ...]``, or ``[n B/R, ...]``
    parameters       ``(Replicate(), Replicate())``  full, or as ``params`` says
    ===============  ==============================  ==============================

    The module's own parameters are placed, not those of modules inside it. Each rank uses its
    shards of them as plain tensors; gradients are summed along ``tp_row``, whose ranks have
    different samples. Along ``tp_col`` all ranks compute the same with a replicated parameter,
    unless they see different tokens, heads or features: by ``input_layouts``, by the style that has
    handed out the input, by the tensors that the user's code has made it of, or by the plan. A
    module on split tokens has to take them one by one, and hands them on as they are split.

    A quantity that the user's code computes across samples from a local output covers this row's
    samples only. A mean over tokens is the row's mean, and a product of such means, such as a
    router's load-balancing loss, differs from one device's. Give a router
    ``use_local_output=False``: its logits are then a DTensor of the full batch, and so is the loss
    computed from them (``loss.full_tensor()`` before backward).

    Keyword Args:
        params: the placement on ``tp_col`` of parameters that are split there, by name: a table
            with a bias per head is ``Shard(1)`` if its dim 1 counts heads. ``Partial()`` is for
            what each rank has whole but applies to features, heads or tokens of which it has a
            part, as modules inside hand them on: the gradient is summed along ``tp_col``.
        input_layouts: layout of the first tensor. If it is a Shard on ``tp_col``, of heads for
            instance, gradients of replicated parameters are summed along ``tp_col`` too.
            ``(Replicate(), Replicate())`` says that the module's own parameters are applied to
            tensors that are replicated on every rank, such as a scale of the logits of all pairs
            in a batch: no gradient is summed. By default it is found as above, and is
            ``Replicate()`` on ``tp_col`` where the plan splits no tokens.
        use_local_output: hand on local tensors (True), or DTensors of the global shape with the
            batch in dim 0 (False), which the last such module needs for the loss; by default
            DTensors if an input is one. Several outputs may be a tuple, a list, a dict or what
            else torch's pytree knows.

    Raises:
        TypeError: for integer parameters; in forward, for outputs in a dataclass that is to hold
            DTensors and is not known to torch's pytree.
        ValueError: for a name in ``params`` that is no parameter of the module, or a dim that the
            parameter does not have; in the first forward, for a parameter that meets what is split
            along an axis on which its gradient is not summed, or what is whole on one where it is,
            and for features of several projections, side by side, that meet a parameter with a
            number for each; in forward, for a DTensor that is laid out otherwise, for a local
            tensor that a style has handed out in another layout, for an output with other tokens
            than an input that is split by tokens, and where the plan does not tell whether tokens,
            features or heads are split, if ``input_layouts`` are not given.

    Example::

        >>> plan = {"patches": Colwise2D(output_layouts=Replicate()),
        ...         "blocks.*.norm": Local2D(),
        ...         "blocks.*.attention.bias": Local2D(params={"table": Shard(1)}), ...}
    """

    places_inside = False

    def __init__(
        self,
        *,
        params: Mapping[str, Placement] | None = None,
        input_layouts: LayoutLike = None,
        use_local_output: bool | None = None,
    ) -> None:
        super().__init__()
        self.params = dict(params or {})
        self.input_layouts = (
            None if input_layouts is None else as_layout(input_layouts, row_layout(), row=Shard(0))
        )
        self.certain = is_pair(input_layouts)
        self.use_local_output = use_local_output
        self.surroundings = UNKNOWN

    def check(self, module: nn.Module, grid: Grid) -> None:
        super().check(module, grid)
        own = dict(module.named_parameters(recurse=False))
        for name, placement in self.params.items():
            if name not in own:
                raise ValueError(
                    f"{describe_module(module)} has no parameter {name!r} of its own; it has "
                    f"{sorted(own)}"
                )
            if not isinstance(placement, Shard | dt.Replicate | dt.Partial):
                raise ValueError(
                    f"{describe_module(module)}: {name} cannot be placed {placement}: use Shard, "
                    f"Replicate or Partial"
                )

    def param_layouts(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, Layout]]:
        for name, _ in module.named_parameters(recurse=False):
            placement = self.params.get(name)
            # A partial one is whole on every rank; its gradient is not.
            split = placement if isinstance(placement, Shard) else dt.Replicate()
            yield module, name, (dt.Replicate(), split)

    def runner(self, module: nn.Module, grid: Grid) -> Runner:
        return LocalRunner(self, module, grid)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(params={self.params}, input_layouts={self.input_layouts}, "
            f"use_local_output={self.use_local_output})"
        )
