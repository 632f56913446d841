"""The runner of a module with replicated parameters: runs it on DTensors or on local shards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed.tensor as dt
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from .._torch_compat.modules import parameters_of
from .._torch_compat.tensors import tree_leaves, tree_map_only
from ..mesh.grid import Grid, describe_mesh
from ..mesh.handed import hand_out, said_of
from ..mesh.layouts import Layout, normalize, shards_dim
from ..runtime.prefetch import Prepared, prepare_parameters
from ..runtime.versions import guard_in_backward
from .base import AS_INPUT, AT_FIRST_FORWARD, Resolved, Runner, first_tensor
from .beside import WrittenInto, beside
from .canonical import canonical
from .compared_inputs import compare_over_ranks
from .dtensors import local_shards, shard_of, to_dtensor
from .local_math import (
    local_math,
    on_a_token,
    parameters_inside,
    run_locally,
    settle_after_backward,
    sum_grads,
)
from .masks import Masks
from .module_kinds import describe_module, is_conv1d, is_linear, needs_input
from .own_dropout import OwnDropout
from .provenance import check_handed, parts_asked
from .surroundings import UNKNOWN, Surroundings
from .whole_samples import pass_by_nothing, run_mixing, run_on_samples, runs_alone

__all__ = ["WHOLE", "WholeRunner"]

WHOLE: Layout = dt.Replicate(), dt.Replicate()


class WholeRunner(Runner):
    """Runs a module with replicated parameters on a DTensor made of its first argument.

    Args:
        declared: the layout of a local input; None to find it by the plan and the graph.
        wanted: the layout of the output; None for as the module gives it.
        enforce_input: redistribute a DTensor input to ``declared``.
        certain: the user declared the layout of a local input on both axes.
        grad_layouts: as in :class:`~torch_tp2d.Replicate`.
    """

    def installed(self, module: nn.Module) -> None:
        for param in module.parameters():
            # Those of functional_call may be made of others, whose gradients are settled.
            if param.requires_grad and param.is_leaf and isinstance(param, DTensor):
                settle_after_backward(param)
        pass_by_nothing(module)

    def __init__(
        self,
        style: str,
        module: nn.Module,
        grid: Grid,
        row_dim: int,
        declared: Layout | None,
        wanted: Layout | None,
        use_local_output: bool | None,
        *,
        enforce_input: bool = False,
        surroundings: Surroundings = UNKNOWN,
        certain: bool = False,
        grad_layouts: Layout | None = None,
    ) -> None:
        self.style, self.certain = style, certain
        self.grad_layouts = grad_layouts
        self.by = describe_module(module)
        self.here = f"{self.by} on mesh {describe_mesh(grid.mesh)}"
        self.surroundings = surroundings
        self.locally = local_math(module)
        # Of what is not on DTensors but is the same on every rank.
        self.masks = Masks(grid, row_dim, WHOLE, (), module)
        self.own = OwnDropout(module, Masks(grid, row_dim, None, (), module, surroundings))
        self.projects = is_linear(module) or is_conv1d(module)
        self.grid = grid
        self.row_dim = row_dim
        self.declared, self.wanted = declared, wanted
        self.use_local_output = use_local_output
        self.enforce_input = enforce_input

    def resolved(self) -> Resolved:
        output = AS_INPUT if self.wanted is None else self.wanted
        if self.declared is not None:
            return Resolved(self.declared, output)
        told = self.surroundings.told(self.row_dim, self.grid)
        if told is None:
            return Resolved(AT_FIRST_FORWARD, output, told_by="sizes")
        return Resolved(told, output, told_by="plan")

    def run(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = first_tensor(module, args, kwargs)
        x: Any = given
        was_local = not isinstance(x, DTensor)
        use_local = was_local if self.use_local_output is None else self.use_local_output
        if was_local:
            if self.surroundings.sees_heads(module, x, self.grid):
                own = self.own.replacing(forward, module)
                return run_locally(parameters_inside(module), own, args, kwargs, self.grid)
            declared = self.declared
            if declared is None:
                declared = self.grid.handed(x)
            if declared is None:
                self.surroundings.check_features(self.here, module, x, self.grid)
                declared = self.surroundings.layout(self.here, x, self.row_dim, self.grid)
            declared = normalize(declared, x.ndim)
            check_handed(x, declared, module, self.grid, certain=self.certain)
            parts = parts_asked(x, declared, module, self.grid)
            if any(parts) and Shard(x.ndim - 1) not in declared:
                # Then the parameters' gradients are parts too.
                shares = self._shares_of(x, declared, parts, use_local)
                params, own = parameters_inside(module), self.own.replacing(forward, module)
                y = run_locally(params, own, args, kwargs, self.grid, shares=shares)
                return self._with_note_of(x, y, declared, parts)
            as_given = self.wanted is None and self.grad_layouts is None
            if as_given and self._takes_tokens(x, declared):
                x = self.grid.without_stand_in(x, declared)
                shape = self.grid.shape_of(x, declared)
                y = self._locally(module, x, declared)
                # shape_of() started the question before the module ran; the answer came meanwhile.
                sizes = shape()[:-1]
                self._compare(module, given, declared)
                if use_local:
                    return self.grid.with_stand_in(y, declared, sizes, given=given, by=self.by)
                return to_dtensor(y, declared, self.grid, (*sizes, y.shape[-1]))
            if normalize(declared, x.ndim) == WHOLE and not self._holds_styles(module):
                self._compare(module, given, declared)
                params = parameters_inside(module)
                own = self.own.replacing(forward, module, self.masks)
                y = run_locally(params, own, args, kwargs, self.grid, shares=(False, False))
                y = tree_map_only(Tensor, self._of_whole, y)
                return self._outputs(module, y, given, x.shape, WHOLE)
            x = to_dtensor(x, declared, self.grid)
            self._compare(module, given, declared)
        elif x.device_mesh != self.grid.mesh:
            layout = self.grid.layout(x, self.row_dim)
            x = to_dtensor(x.to_local(), layout, self.grid)
        x = self._with_whole_features(canonical(x), given)
        if self.enforce_input and self.declared is not None:
            placements = self.grid.placements(normalize(self.declared, x.ndim))
            if tuple(x.placements) != tuple(placements):
                x = x.redistribute(placements=placements)
        layout = self.grid.layout(x, self.row_dim)
        if isinstance(module, nn.RMSNorm) and not self._takes_tokens(x, layout):
            raise ValueError(
                f"{self.here} was given a DTensor of shape {tuple(x.shape)} placed {layout}, whose "
                f"features are split: use torch_tp2d.Norm2D for a norm of split features"
            )
        if self._takes_tokens(x, layout):
            shard = shard_of(x, self.grid, needed=needs_input(module), kept=True)
            y = self._locally(module, shard, layout)
            y = to_dtensor(y, layout, self.grid, (*x.shape[:-1], y.shape[-1]))
        elif runs_alone(module):
            y = run_on_samples(module, forward, args, kwargs, given, x, self.grid)
        else:
            self.installed(module)

            def prepared(value: Any) -> Any:
                return x if value is given else beside(value, given, x, module, self.grid, layout)

            written = WrittenInto(given, x)
            args, kwargs = tuple(map(prepared, args)), {k: prepared(v) for k, v in kwargs.items()}
            y = run_mixing(module, forward, args, kwargs, x, self.masks)
            written.check(self.here)
        return self._outputs(module, y, given, x.shape, layout)

    def _of_whole(self, y: Tensor) -> DTensor:
        return y if isinstance(y, DTensor) else to_dtensor(y, WHOLE, self.grid, y.shape)

    def _outputs(
        self, module: nn.Module, y: Any, given: Tensor, shape: torch.Size, layout: Layout
    ) -> Any:
        """The outputs as they are handed on, whatever they are nested in.

        Those of the input's tokens are in its layout. The wanted layout is that of the first, and
        of others of the same tokens: a recurrence's states have their samples in another dim.

        Args:
            shape, layout: those of the input as a DTensor.
        """
        first = next((one for one in tree_leaves(y) if isinstance(one, DTensor)), None)
        by_features = Shard(len(shape) - 1) in normalize(layout, len(shape))

        def handed_on(one: DTensor) -> Tensor:
            assert first is not None
            if one is not first and (runs_alone(module) or one.shape[:-1] != first.shape[:-1]):
                return self._hand_on(one, given, None)
            # DTensor may have replicated it, as it does where a dim is too short for the mesh.
            alike = one.shape == shape or (one.shape[:-1] == shape[:-1] and not by_features)
            as_given = layout if alike else None
            return self._hand_on(one, given, as_given if self.wanted is None else self.wanted)

        return tree_map_only(DTensor, handed_on, y)

    def _hand_on(self, y: DTensor, given: Tensor, wanted: Layout | None) -> Tensor:
        """The output in the wanted layout, or as it is."""
        was_local = not isinstance(given, DTensor)
        use_local = was_local if self.use_local_output is None else self.use_local_output
        if wanted is not None:
            target = self.grid.placements(normalize(wanted, y.ndim))
            if tuple(y.placements) != target:
                y = y.redistribute(placements=target)
        if not use_local:
            return y
        y = canonical(y)
        layout = self.grid.layout(y, self.row_dim)
        shares = self._output_shares(given, layout)
        row, col = (
            dt.Partial() if share else placement
            for share, placement in zip(shares, layout, strict=True)
        )
        grads = self.grid.placements((row, col)) if any(shares) else None
        local = shard_of(y, self.grid, grad_placements=grads)
        return self.grid.with_stand_in(
            local, layout, self.grid.sizes_of(y), given=given, shares=shares, by=self.by
        )

    @staticmethod
    def _holds_styles(module: nn.Module) -> bool:
        """Whether a module inside has a style, which depends on the layout of its input."""
        return any("_tp2d" in m.__dict__ for m in module.modules() if m is not module)

    def _with_note_of(self, x: Tensor, y: Any, layout: Layout, parts: tuple[bool, bool]) -> Any:
        """An output of the tokens of ``x``, noted to be as ``x`` is."""
        if not isinstance(y, Tensor) or y.shape[:-1] != x.shape[:-1]:
            return y
        said = said_of(x)
        if said.layout is not None:
            return hand_out(y, said._replace(by=self.by))
        return self.grid.with_stand_in(y, layout, None, given=x, shares=parts, by=self.by)

    def _shares_of(
        self, x: Tensor, layout: Layout, shares: tuple[bool, bool], use_local: bool
    ) -> tuple[bool, bool]:
        """Along row and col, whether gradients of the parameters are partial, as those of ``x``.

        Args:
            shares: whether the maker of ``x`` sums its gradient.

        Raises:
            ValueError: unless the output is asked for as ``x`` is: local, in the same layout, and
                with such a gradient.
        """
        wanted = layout if self.wanted is None else self.wanted
        grads = layout if self.grad_layouts is None else self.grad_layouts
        as_given = use_local and normalize(wanted, x.ndim) == normalize(layout, x.ndim)
        both = list(zip((self.grid.row, self.grid.col), shares, grads, strict=True))
        if not as_given or any(p.is_partial() and a.size > 1 and not s for a, s, p in both):
            along = [axis.name for axis, share, _ in both if share]
            raise ValueError(
                f"{self.here} is given a local tensor of shape {tuple(x.shape)} in layout {layout} "
                f"whose gradient is a share of each rank's along {along}, as that of keys which do "
                f"not divide by the columns is: it can only hand on a local tensor in the same "
                f"layout with such a gradient, so leave out output_layouts, grad_layouts and "
                f"use_local_output"
            )
        row, col = (
            share or isinstance(placement, Shard)
            for share, placement in zip(shares, layout, strict=True)
        )
        return row, col

    def _output_shares(self, given: Tensor, layout: Layout) -> tuple[bool, bool]:
        """Along row and col, whether the gradient of a replicated local output is partial."""
        grads = self.grad_layouts
        if grads is None and not given.is_floating_point():
            # The output of replicated ids, such as positions, is added to each row's own tokens.
            grads = dt.Partial(), dt.Replicate()
        row, col = (
            isinstance(have, dt.Replicate) and want.is_partial()
            for have, want in zip(layout, layout if grads is None else grads, strict=True)
        )
        return row, col

    def _compare(self, module: nn.Module, x: Tensor, declared: Layout) -> None:
        ids = not x.is_floating_point()
        compare_over_ranks(x, declared, module, self.grid, certain=self.certain, to_all=ids)

    def _with_whole_features(self, x: DTensor, given: Tensor) -> DTensor:
        """A projection's input, redistributed so that its features are not split.

        With split features DTensor would hand on partial sums, and raise where the other dims do
        not divide. For an input that came as a DTensor, the axis that split the features splits
        tokens instead. One that came as a local tensor is gathered, as the tokens of its output
        would have to be.
        """
        if not self.projects:
            return x
        layout = normalize(self.grid.layout(x, self.row_dim), x.ndim)
        last, free = Shard(x.ndim - 1), list[Placement]()
        if isinstance(given, DTensor):
            free = [Shard(dim) for dim in range(x.ndim - 1) if Shard(dim) not in layout]
        row, col = (
            ((free.pop() if free else dt.Replicate()) if placement == last else placement)
            for placement in layout
        )
        if (row, col) == layout:
            return x
        local = self.grid.redistribute(x.to_local(), layout, (row, col), shape=x.shape)
        return to_dtensor(local, (row, col), self.grid, x.shape)

    def _takes_tokens(self, x: Tensor, layout: Layout) -> bool:
        """Whether the module takes tokens one by one, and ``layout`` does not split features."""
        if self.locally is None:
            return False
        row, col = normalize(layout, x.ndim)
        features = x.ndim - 1
        return not (shards_dim(row, features) or shards_dim(col, features))

    def _locally(self, module: Any, x: Tensor, layout: Layout) -> Tensor:
        """Run the module on a local shard, without the cost of DTensor's dispatch."""
        assert self.locally is not None
        axes = [
            axis
            for axis, placement in zip((self.grid.row, self.grid.col), layout, strict=True)
            if isinstance(placement, Shard) and axis.size > 1
        ]
        ready = prepare_parameters(module, self.prepare, self.grid.context)
        params = sum_grads((ready.weight, ready.bias), axes, self.grid.context)
        y = on_a_token(partial(self.locally, module), x, *params)
        if x.requires_grad:
            # As for torch, the bias counts for a norm only. What is parametrized is not read, which
            # would compute it again: the computed tensor is nobody's to change.
            weight, bias = map(parameters_of(module).get, ("weight", "bias"))
            of_linear = weight is not None and weight.ndim == 2
            guard_in_backward(y, [weight] if of_linear else [weight, bias])
        return y

    def prepare(self, module: nn.Module) -> Prepared:
        """The parameters' local shards, as the module's math takes them."""
        return Prepared(
            *local_shards(*(getattr(module, name, None) for name in ("weight", "bias")))
        )
