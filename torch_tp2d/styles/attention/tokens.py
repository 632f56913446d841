"""The inputs of an attention module on the grid: which tokens and heads of them it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn.attention.flex_attention import BlockMask

from ..._tracing import in_graph, static
from ...mesh.grid import describe_mesh
from ...mesh.handed import Handed, hand_out, made_of, notes_of, said_of
from ...mesh.layouts import TP_COL, TP_ROW, Layout, normalize
from ..gathered_inputs import gather_for_module
from ..module_kinds import describe_module
from ..provenance import check_handed, parts_kept
from .flex import Share, own_blocks
from .side_grads import with_whole_grad

if TYPE_CHECKING:
    from .runner import AttentionRunner

__all__ = ["Tokens"]


class Tokens:
    """The tokens of one call of an attention module, and the arguments as this rank is given them.

    Args:
        hidden: the module's hidden states, before they are gathered.
    """

    def __init__(self, runner: AttentionRunner, module: nn.Module, hidden: Tensor) -> None:
        self.runner, self.module, self.hidden = runner, module, hidden
        self.grid, self.row_dim = runner.grid, runner.row_dim
        self.shape: tuple[int, int] | None = None
        self._extents: dict[int, int] = {}
        self.keys: int | None = None
        if isinstance(hidden, DTensor) and hidden.device_mesh == self.grid.mesh:
            self.shape = static(hidden.shape[0]), static(hidden.shape[1])
            # A model may have several streams of tokens; this one is the current one now.
            self.grid.context.tokens = self.shape

    def extent(self, dim: int) -> int:
        """Global size of the batch (dim 0) or the sequence (dim 1) of the hidden states."""
        if self.shape is not None:
            return self.shape[dim]
        if dim not in self._extents:
            if isinstance(self.hidden, DTensor):
                layout, local = self.grid.layout(self.hidden, self.row_dim), self.hidden.to_local()
            else:
                layout, local = self.declared, self.hidden
            tokens = self.grid.without_stand_in(local, layout)
            self._extents[dim] = self.grid.extent(tokens, dim, layout)
        return self._extents[dim]

    def _ask(self, dim: int) -> None:
        """Make sure of :meth:`extent`, before what this rank holds decides whether it is needed.

        The ranks may have to ask each other for it, all of them. In a graph none asks.
        """
        if not in_graph():
            self.extent(dim)

    @property
    def declared(self) -> Layout:
        return self.runner.declared

    @property
    def lengths(self) -> tuple[int, int]:
        """Global lengths of the sequences of queries and of keys."""
        queries = self.extent(1)
        return queries, queries if self.keys is None else self.keys

    def enter(self, value: Any, name: str) -> Any:
        """An argument in the form in which the module sees it on this rank."""
        if isinstance(value, tuple | list):
            entered = [self.enter(item, name) for item in value]
            named = isinstance(value, tuple) and type(value) not in (tuple, torch.Size)
            return type(value)(*entered) if named else type(value)(entered)
        if isinstance(value, dict):
            return {key: self.enter(item, name) for key, item in value.items()}
        if isinstance(value, BlockMask):
            return self._own_blocks(value, name)
        if not isinstance(value, Tensor):
            return value
        if value is self.hidden:
            return self._gather(value)
        if not (isinstance(value, DTensor) and value.is_floating_point() and value.ndim == 3):
            return self._cut(value, name)
        if value.shape[0] != self.hidden.shape[0] or name in self.runner.whole_inputs:
            return self._cut(value, name)
        widths = self.runner.widths
        if widths and value.shape[-1] not in widths:
            # A bias of each sample [batch, queries, keys].
            return self._cut(value, name)
        # A DTensor [batch, sequence, hidden] beside the hidden states: the states to attend to.
        self.keys = static(value.shape[1])
        row = self.grid.row
        if self.row_dim == 1 and not all(row.split(self.keys)):
            raise ValueError(
                f"{describe_module(self.module)}: {name} of shape {tuple(value.shape)} leaves "
                f"some of {row.name}={row.size} without keys: use row_dim=0 or fewer rows"
            )
        return self._gather(value)

    def _gather(self, x: Tensor) -> Tensor:
        """This row's tokens, gathered along ``tp_col``."""
        shape: Sequence[int] | None = None
        parts, row = (False, False), Shard(static(self.row_dim))
        if isinstance(x, DTensor):
            layout = normalize(self.grid.layout(x, self.row_dim), x.ndim)
            shape = tuple(x.shape) if x.device_mesh == self.grid.mesh else None
            x = x.to_local()
        else:
            check_handed(x, self.declared, self.module, self.grid)
            layout = normalize(self.declared, x.ndim)
            parts = parts_kept(x, layout, (row, layout[1]), self.module, self.grid)
            x = self.grid.without_stand_in(x, layout)
        if layout[0] != row:
            x = self.grid.redistribute(x, layout, (row, layout[1]), shape=shape)
            layout = row, layout[1]
        return gather_for_module(x, layout, self.runner.by, self.grid, shape, parts)

    def _cut(self, x: Tensor, name: str) -> Tensor:
        """This row's and column's part of an input that covers all tokens and heads."""
        dims = self.runner.whole_inputs.get(name)
        if dims is None:
            dims = self._dims_by_sizes(x, name)
        elif len(dims) != x.ndim:
            raise ValueError(
                f"{describe_module(self.module)}: {name} has shape {tuple(x.shape)}, but "
                f"whole_inputs says that its dims are {dims}"
            )
        on_row = self._part(x, name, dims, "sequence" if self.row_dim else "batch")
        on_col = self._part(x, name, dims, "heads")
        if isinstance(x, DTensor):
            x = x.redistribute(placements=self.grid.placements((on_row, on_col)))
            # Rows have different tokens and columns different heads, so the gradient is partial
            # along an axis that replicates the input.
            grads = [Partial() if p == Replicate() else p for p in (on_row, on_col)]
            local = x.to_local(grad_placements=grads if x.is_floating_point() else None)
            if isinstance(on_row, Shard) and not local.shape[on_row.dim] and x.shape[on_row.dim]:
                # For the stand-in token of an empty shard. In a bool mask it is seen.
                one = [1 if d == on_row.dim else n for d, n in enumerate(local.shape)]
                seen = local.new_full(one, local.dtype == torch.bool)
                local = torch.cat([local, seen], on_row.dim)
            return self._as_partial(local) if local.requires_grad else local
        if x.requires_grad and name in self.runner.summed_inputs:
            x = self._as_partial(x.view_as(x))
        elif x.requires_grad:
            self._check_samples(x, name)
            partial = self._has_all(x, name, dims, on_row, on_col)
            x = with_whole_grad(x, partial, self.grid, self._named(x, name))
        for axis, placement in ((self.grid.row, on_row), (self.grid.col, on_col)):
            if isinstance(placement, Shard):
                sizes = axis.split(x.shape[placement.dim])
                start, count = sum(sizes[: axis.index]), sizes[axis.index]
                if not count:
                    # One element, for the stand-in token of an empty shard.
                    start, count = 0, 1
                x = x.narrow(placement.dim, start, count)
        return x

    def _as_partial(self, x: Tensor) -> Tensor:
        """Note of ``x`` that the gradient which it is given may be this rank's part."""
        return hand_out(x, Handed(axes=self.grid.axes, shares=frozenset((TP_ROW, TP_COL))))

    def _check_samples(self, x: Tensor, name: str) -> None:
        """Refuse what a module has made for other samples than the hidden states', split by rows.

        A table of relative positions looked up for ``[queries, keys]``, which the rows would share
        out as if they were samples, would fit on some ranks and leave them waiting for the others.

        Raises:
            ValueError: on every rank.
        """
        if self.row_dim == 1 or self.grid.row.size == 1:
            return
        for note in made_of(x):
            by_rows = note.axes == self.grid.axes and note.layout and note.layout[0] == Shard(0)
            if by_rows and note.sizes is not None and note.sizes[0] != self.extent(0):
                raise ValueError(
                    f"{self._named(x, name)} is made of {note.sizes} tokens, of which "
                    f"{self.grid.row.name} gives each row its part of dim 0, but the hidden states "
                    f"are {self.extent(0)} samples: give the module that makes it "
                    f"output_layouts=(Replicate(), Replicate())"
                )

    def _has_all(
        self,
        x: Tensor,
        name: str,
        dims: Sequence[str | None],
        on_row: Placement,
        on_col: Placement,
    ) -> tuple[bool, bool]:
        """Along row and col, whether this rank uses a part of ``x``, of which it has all.

        Raises:
            ValueError: for one that may be a bias of the scores or the input of a projection.
        """

        def is_part(what: str, placement: Placement) -> bool:
            return placement == Replicate() and what in dims and x.shape[dims.index(what)] != 1

        row = not is_part("sequence" if self.row_dim else "batch", on_row)
        unsaid = said_of(x).layout is None
        if not row and self.grid.row.size > 1 and unsaid and not notes_of(x)[0]:
            raise ValueError(
                f"{self._named(x, name)} learns, and is of this row's tokens, though no module of "
                f"the plan has made it: pass it whole, or a DTensor"
            )
        col = not (is_part("heads", on_col) and self._splits_heads)
        if x.ndim <= 3 and x.shape[-1] in self.runner.widths:
            # The projection's style sums along the axes on which it is declared replicated.
            row, col = isinstance(on_row, Shard), False
            if said_of(x).layout is None and x.shape[-1] == self.lengths[1]:
                raise ValueError(
                    f"{self._named(x, name)} learns, and may be a bias of {self.lengths[1]} keys "
                    f"or what a projection of {x.shape[-1]} features takes: pass a DTensor"
                )
        return row, col

    @property
    def _splits_heads(self) -> bool:
        """Whether each column is given its own heads of a tensor that has all."""
        heads = self.runner.heads
        two_phase = self.row_dim == 1 and self.runner.algorithm == "two_phase"
        return not two_phase and (heads is None or not heads.whole_query)

    def _named(self, x: Tensor, name: str) -> str:
        return (
            f"{describe_module(self.module)} on mesh {describe_mesh(self.grid.mesh)}: {name} of "
            f"shape {tuple(x.shape)}"
        )

    def _dims_by_sizes(self, x: Tensor, name: str) -> tuple[str | None, ...]:
        """What the dims of an input are that ``whole_inputs`` does not name.

        Raises:
            ValueError: for a bias of each head, or of each sample, where there are as many of both.
        """
        heads = None if self.runner.heads is None else self.runner.heads.query
        queries, keys = self.lengths
        if x.ndim == 1 and x.shape[0] == heads != queries:
            return ("heads",)
        if x.ndim in (2, 3):
            self._ask(0)
        if x.ndim == 2 and x.shape[0] != queries and tuple(x.shape) == (self.extent(0), keys):
            if x.is_floating_point() or x.dtype == torch.bool:
                # It hides keys of samples, and each rank has all keys.
                return "batch", None
        batches = heads is not None and heads > 1 and x.ndim == 3
        if batches and tuple(x.shape) == (heads, queries, keys) and heads == self.extent(0):
            raise ValueError(
                f"{describe_module(self.module)} on mesh {describe_mesh(self.grid.mesh)}: {name} "
                f"of shape {tuple(x.shape)} is of each sample or of each head, which are {heads} "
                f"both: say what its dims are: Attention2D(whole_inputs={{{name!r}: "
                f'("heads", "sequence", None)}}), or ("batch", "sequence", None)'
            )
        return _dims_of(x)

    def _own_blocks(self, mask: BlockMask, name: str) -> BlockMask:
        """This row's and column's part of a BlockMask of ``flex_attention``."""
        row, heads = self.grid.row, self.runner.heads
        where = f"{describe_module(self.module)} on mesh {describe_mesh(self.grid.mesh)}: {name}"
        if self.row_dim == 1 and row.size > 1:
            raise ValueError(
                f"{where} is a BlockMask of shape {mask.shape}, but {row.name} splits the "
                f"sequence, over which flex_attention does not reach: use row_dim=0, or "
                f"scaled_dot_product_attention with a mask"
            )
        whole = self.extent(0)
        sizes = row.split(whole)
        # A row without samples computes one stand-in sample.
        batch = Share(sum(sizes[: row.index]), sizes[row.index], whole)
        if not batch.size:
            batch = Share(0, 1, whole)
        if heads is None or heads.whole_query:
            count = mask.shape[1] if heads is None else heads.query
            own_heads = Share(0, count, count)
        else:
            own_heads = Share(heads.first, heads.given, heads.query)
        try:
            return own_blocks(mask, batch, own_heads)
        except ValueError as error:
            raise ValueError(
                f"{where}: {error}: make it for the whole batch and all heads"
            ) from None

    def _part(
        self, x: Tensor, name: str, dims: Sequence[str | None], what: str
    ) -> Shard | Replicate:
        """How an axis splits ``x``: along the dim that is ``what``, if there is one.

        Args:
            what: ``"heads"``, for ``tp_col``, or ``"batch"`` or ``"sequence"``, for ``tp_row``.

        Raises:
            ValueError: for a batch or sequence dim of another size than the tokens have.
        """
        heads = self.runner.heads
        axis = self.grid.col if what == "heads" else self.grid.row
        if what not in dims or axis.size == 1:
            return Replicate()
        dim = dims.index(what)
        if what == "heads":
            whole = heads.query if heads is not None and self._splits_heads else None
            return Shard(dim) if x.shape[dim] == whole != 1 else Replicate()
        self._ask(self.row_dim)
        if x.shape[dim] == 1:
            return Replicate()
        whole = self.extent(self.row_dim)
        if x.shape[dim] == whole:
            return Shard(dim)
        if not isinstance(x, DTensor) and x.shape[dim] == max(1, axis.split(whole)[axis.index]):
            return Replicate()
        raise ValueError(
            f"{describe_module(self.module)} on mesh {describe_mesh(self.grid.mesh)}: {name} has "
            f"shape {tuple(x.shape)}, but its dim {dim} was taken for the {what}, which is {whole} "
            f"long: pass it whole, or say what its dims are: "
            f"Attention2D(whole_inputs={{{name!r}: (...)}})"
        )


def _dims_of(x: Tensor) -> tuple[str | None, ...]:
    if x.ndim == 2 and (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool):
        return "sequence", None
    known: dict[int, tuple[str | None, ...]] = {
        1: ("sequence",),
        2: ("batch", "sequence"),
        3: ("batch", "sequence", None),
        4: ("batch", "heads", "sequence", None),
    }
    return known.get(x.ndim, (None,) * x.ndim)
