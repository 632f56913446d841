"""The runners of the matmul styles for modules that embed token ids or patches of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.overrides import TorchFunctionMode

from .._torch_compat.modules import parameters_of
from .._tracing import eager_only
from ..mesh.grid import Grid, describe_mesh
from ..mesh.layouts import STATIONARY, Layout, as_layout, is_pair, normalize
from ..ops.embedding import embedding2d
from ..ops.patches import patches
from ..runtime.versions import guard_in_backward
from .base import LayoutLike, Resolved, Runner, check_dims
from .boundary import Entry, Exit
from .dtensors import local_shards, to_dtensor
from .module_kinds import describe_module, is_embedding

if TYPE_CHECKING:
    from .linear.options import MatmulOptions

__all__ = ["EmbeddingRunner", "PatchRunner", "check_options"]


def check_options(module: Any) -> None:
    """Refuse options of ``nn.Embedding`` that a look-up on a grid does not support.

    Raises:
        ValueError: naming the option.
    """
    for option in ("max_norm", "sparse", "scale_grad_by_freq"):
        if getattr(module, option):
            raise ValueError(
                f"{describe_module(module)}: {option} is not supported for an embedding on a mesh: "
                f"make it without"
            )


class EmbeddingRunner(Runner):
    """Looks up ids in this rank's part of the vocabulary and redistributes the result.

    A subclass whose forward does more (a scale, an offset of positions) runs its forward on a
    DTensor of the result.
    """

    def __init__(
        self,
        style: str,
        module: Any,
        grid: Grid,
        *,
        weight: Layout,
        row_dim: int,
        given_in: LayoutLike,
        given_out: LayoutLike,
        default_col: Placement,
        use_local_output: bool,
        grad_layouts: Layout | None,
    ) -> None:
        self.style = style
        self.by = describe_module(module)
        self.here = f"{self.by} on mesh {describe_mesh(grid.mesh)}"
        self.grid = grid
        self.row_dim = row_dim
        self.does_more = not is_embedding(module)
        vocab, self.hidden = module.weight.shape
        # Ids are replicated everywhere unless a pair says otherwise.
        self.declared = as_layout(given_in, (Replicate(), Replicate()), row=Replicate())
        entered: Layout = Replicate(), Replicate()
        self.entry = Entry(
            grid, self.declared, entered, row_dim, certain=is_pair(given_in), given_to_all=True
        )
        self.given_out = given_out
        self.default_col = default_col
        self.use_local_output, self.grad_layouts = use_local_output, grad_layouts
        # An axis that splits the vocabulary leaves the result partial, one that splits the hidden
        # dim leaves it sharded there.
        on_row, on_col = (
            Partial() if p == Shard(0) else Shard(-1) if isinstance(p, Shard) else Replicate()
            for p in weight
        )
        self.result: Layout = on_row, on_col
        self.vocab_start = 0
        for axis, placement in zip((grid.row, grid.col), weight, strict=True):
            if isinstance(placement, Shard) and placement.dim == 0:
                self.vocab_start = sum(axis.split(vocab)[: axis.index])

    def resolved(self) -> Resolved:
        of_tokens, of_positions = self._output_layout(2), self._output_layout(1)
        if of_tokens == of_positions:
            return Resolved(self.declared, of_tokens, STATIONARY)
        others = ", ".join(map(str, self.grid.on_mesh(of_positions)))
        written = ", ".join(map(str, self.grid.on_mesh(of_tokens)))
        return Resolved(self.declared, f"({written}), of positions ({others})", STATIONARY)

    def _output_layout(self, dims: int) -> Layout:
        """The layout of the output for ids of so many dims.

        Ids of one dim are positions, ``[sequence]``, without a batch for tp_row to split.
        """
        row: Placement = Shard(self.row_dim)
        if dims == 1:
            row = Replicate() if self.row_dim == 0 else Shard(0)
        return as_layout(self.given_out, (row, self.default_col), row=row)

    def run(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Tensor:
        if not self.does_more:
            (ids,) = args
            return self._look_up(module, module.weight, ids, local=self.use_local_output)[0]
        looked_up: list[torch.Size] = []

        # Read once: a parametrized one is computed each time.
        weight = module.weight

        def look_up(ids: Tensor) -> Tensor:
            y, of = self._look_up(module, weight, ids, local=False)
            looked_up.append(of)
            return y

        # The rest of the module's own forward sees a DTensor of the global shape.
        y = cause = None
        try:
            with _LookUp(weight, look_up):
                y = forward(*args, **kwargs)
        except RuntimeError as error:
            cause = error
        if len(looked_up) != 1 or not isinstance(y, DTensor) or y.shape[-1] != self.hidden:
            raise ValueError(
                f"{describe_module(module)} on mesh {describe_mesh(self.grid.mesh)} looked up its "
                f"weight {len(looked_up)} times, but a forward of its own is to call "
                f"nn.Embedding's once, and to return [..., {self.hidden}] made of that by "
                f"operations that DTensor has: put an nn.Embedding in its place and do the rest in "
                f"the module around it"
            ) from cause
        if not self.use_local_output:
            return y
        wanted = normalize(self._output_layout(y.ndim - 1), y.ndim)
        local = y.redistribute(placements=self.grid.placements(wanted)).to_local()
        return self._exit(wanted, wanted, local=True).output(local, tuple(looked_up[0]))

    def _look_up(
        self, module: Any, weight: Tensor, x: Tensor, *, local: bool
    ) -> tuple[Tensor, torch.Size]:
        """The embeddings of ids, in the output's layout, and the shape of the ids."""
        check_dims(module, x, 1, "ids [tokens] or [batch, sequence]")
        ids = self.entry.shard(x, module)
        self._check_known(ids, weight.shape[0])
        wanted = self._told(ids.shape, local=local)
        (shard,) = local_shards(weight)
        y = embedding2d(ids, shard, self.vocab_start, module.padding_idx)
        return self._exit(self.result, wanted, local=local).output(y, tuple(ids.shape)), ids.shape

    def hand_on(self, embeds: Tensor) -> Tensor:
        """Hand on ``embeds`` in place of the result of a look-up, in the same layout.

        Args:
            embeds: ``[batch, sequence, hidden]``, replicated on every rank, as is its gradient.

        Raises:
            ValueError: for embeds of another shape, such as a rank's shard of the features.
        """
        if embeds.ndim != 3 or embeds.shape[-1] != self.hidden:
            raise ValueError(
                f"embeds in the place of ids on mesh {describe_mesh(self.grid.mesh)} are whole on "
                f"every rank, [batch, sequence, {self.hidden}], not {tuple(embeds.shape)}: pass "
                f"all of them, or a DTensor, which says how it is split"
            )
        sizes, whole = embeds.shape[:-1], (Replicate(), Replicate())
        wanted = self._told(sizes, local=self.use_local_output)
        return self._exit(whole, wanted, local=self.use_local_output).output(embeds, tuple(sizes))

    @eager_only
    def _check_known(self, ids: Tensor, vocab: int) -> None:
        """Refuse ids that no rank holds, where looking at them costs no wait for a device.

        Raises:
            IndexError: as torch does, on every rank, since all hold the same ids.
        """
        if type(ids) is not Tensor or ids.device.type != "cpu" or not ids.numel():
            return
        low, high = ids.aminmax()
        if low < 0 or high >= vocab:
            raise IndexError(
                f"{self.here} has no id {int(low if low < 0 else high)}: they are 0 to {vocab - 1}"
            )

    def _told(self, sizes: torch.Size, *, local: bool) -> Layout:
        """The output's layout for ids of ``sizes``, which are noted as those of the current tokens.

        Only ids ``[batch, sequence]`` are noted, and only if ``tp_row`` splits the output.

        Raises:
            ValueError: for local outputs of one sample and of several in one forward.
        """
        wanted, context = self._output_layout(len(sizes)), self.grid.context
        if len(sizes) != 2 or not isinstance(wanted[0], Shard):
            return wanted
        if local and wanted[0].dim == 0 and self.grid.row.size > 1 and context.running is not None:
            before = context.embedded
            if before is not None and before[0] != sizes[0] and 1 in (before[0], sizes[0]):
                raise ValueError(
                    f"{self.here} is given ids {tuple(sizes)} in a forward that embeds {before} "
                    f"too, but {self.grid.row.name} would split each of the two batches, of which "
                    f"one sample is on the first row alone: positions have no batch, so give ids "
                    f"of one dim, [sequence], or the module of the one sample "
                    f"output_layouts=(Replicate(), Replicate())"
                )
            context.embedded = tuple(sizes)
        context.tokens = tuple(sizes)
        return wanted

    def _exit(self, have: Layout, wanted: Layout, *, local: bool) -> Exit:
        grads = self.grad_layouts
        if grads is None and isinstance(wanted[0], Replicate):
            # Every row adds a replicated output to its own tokens, so its gradient is partial.
            grads = Partial(), wanted[1]
        return Exit(self.grid, have, wanted, self.hidden, local, grads, self.by)


class _LookUp(TorchFunctionMode):
    """Inside it, look-ups in one weight, ``F.embedding`` or indexing, call ``look_up`` instead."""

    def __init__(self, weight: Tensor, look_up: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.look_up = weight, look_up

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.embedding and args[1] is self.weight:
            return self.look_up(args[0])
        if func is Tensor.__getitem__ and args[0] is self.weight:
            ids = args[1]
            if isinstance(ids, slice):
                rows = range(*ids.indices(self.weight.shape[0]))
                ids = torch.arange(rows.start, rows.stop, rows.step, device=self.weight.device)
            if isinstance(ids, Tensor) and not ids.is_floating_point() and ids.dtype != torch.bool:
                return self.look_up(ids)
        return func(*args, **(kwargs or {}))


class PatchRunner(Runner):
    """Splits this row's images into patches, and computes this column's features of each patch."""

    def __init__(self, style: MatmulOptions, module: Any, grid: Grid, weight: Layout) -> None:
        self.style = style.rule.style
        self.grid = grid
        self.weight_layout, self.weight_shape = weight, tuple(module.weight.shape)
        given_in, given_out, _ = style.given_layouts
        # Images are replicated, as an embedding's ids are, unless a pair says otherwise.
        self.declared = as_layout(given_in, (Replicate(), Replicate()), row=Replicate())
        own: Layout = Shard(0), Replicate()
        self.entry = Entry(grid, self.declared, own, certain=is_pair(given_in), given_to_all=True)
        self.wanted_out = as_layout(given_out, (Shard(0), Shard(1)), row=Shard(0))
        self.use_local_output = style.use_local_output

    def resolved(self) -> Resolved:
        return Resolved(self.declared, self.wanted_out)

    def run(self, module: Any, forward: Any, x: Tensor) -> Tensor:
        grid = self.grid
        if isinstance(x, DTensor):
            batch = x.shape[0]
        else:
            batch = grid.extent(x, 0, self.declared)
        # Later modules know the batch size by this. The tokens per image change on the way.
        grid.context.tokens = (batch,)
        x = self.entry.shard(x, module)
        summed: Layout = Replicate(), Shard(0)
        weight, bias = local_shards(module.weight, module.bias)
        weight = grid.redistribute(
            weight,
            self.weight_layout,
            summed,
            shape=self.weight_shape,
            partial_grad=(True, False),
        )
        if bias is not None:
            bias = grid.redistribute(bias, summed, summed, partial_grad=(True, False))
        y = F.linear(patches(x, *module.kernel_size), weight.flatten(1), bias).permute(0, 3, 1, 2)
        if x.requires_grad:
            guard_in_backward(y, [parameters_of(module).get("weight")])
        shape = (batch, self.weight_shape[0], *y.shape[2:])
        y = grid.redistribute(y, (Shard(0), Shard(1)), self.wanted_out, shape=shape)
        if not self.use_local_output:
            return to_dtensor(y, self.wanted_out, grid, shape)
        if self.wanted_out[0] == Shard(0) and not grid.row.split(batch)[grid.row.index]:
            y = torch.cat([y, y.new_zeros(1, *y.shape[1:])])
        return y
