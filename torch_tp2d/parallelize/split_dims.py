"""Follows the dims that a mesh axis splits through the user's code, in a model's first forward."""

from __future__ import annotations

import inspect
import os
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from .._torch_compat import disable_current_modes
from .._tracing import in_graph
from ..comm.groups import gather_facts
from ..mesh.axes import on_mesh
from ..mesh.grid import Grid, describe_mesh
from ..mesh.handed import said_of
from ..mesh.layouts import Layout, normalize
from .alike import FACTS, are_alike, facts_of
from .cut_heads import cut_heads
from .mixed_features import dims_mixed, dims_reduced, is_wrong_on_dtensors

__all__ = ["SplitDims"]

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_SLOTS = 64
"""How many meetings are told the other ranks of."""
_WRONG = 2
"""In the place of an axis' number, for what is wrong whatever its values."""

_ELEMENTWISE = (
    *("add", "sub", "rsub", "mul", "div", "true_divide", "pow", "maximum", "minimum", "where"),
    *("add_", "sub_", "mul_", "div_", "masked_fill", "masked_fill_", "lerp", "addcmul"),
    *("__radd__", "__rsub__", "__rmul__", "__rtruediv__", "__and__", "__or__", "logical_and"),
)
_RESHAPES = ("view", "reshape", "flatten", "unflatten")
_VIEWS = (
    *("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "unsqueeze"),
    *("squeeze", "expand", "chunk", "split", "tensor_split", "unbind", "narrow", "select"),
    *("__getitem__", "__get__", "t", "adjoint", "view_as_complex", "view_as_real"),
)


class _Part(NamedTuple):
    """How a dim is split."""

    axis: int
    """The index of the mesh axis."""
    of: Literal["features", "tokens", "samples", "several"]
    """Features or heads; tokens of each sample; samples; several dims in one."""


class SplitDims(TorchFunctionMode):
    """Notes tensors that have as many entries as a rank's part of another, which they meet.

    Which dims of a tensor are split is told by what a style has noted of it, and followed through
    functions that move dims or take elements one by one; beyond others it is not known.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.grid = grid
        self._split = WeakIdKeyDictionary()
        """By tensor, how a dim is split, by dim."""
        self._met: Counter[str] = Counter()
        self._found: list[Tensor] = []
        self._where: dict[int, str] = {}
        self._of_a_part = WeakIdKeyDictionary()
        """By what was made of all that a rank has of a dim, where that was."""
        self.refused = ""
        """What was first found wrong, whatever its values."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        # Reading an attribute is what most calls do, and x.T and x.mT are views.
        if (name == "__get__" and not isinstance(out, Tensor)) or in_graph():
            return out
        if is_wrong_on_dtensors(name, args, kwargs or {}) and (place := _place(False)) is not None:
            self.refuses(
                f"in {place} {name} takes a DTensor that is split over the mesh, whose gradient "
                f"torch divides by the number of elements of a shard, not of all: write the mean "
                f"out, as in (x - y).square().mean(), or give it x.full_tensor()"
            )
        given = _local_tensors(args, kwargs)
        made = [x for x in (out if isinstance(out, tuple | list) else [out]) if _is_local(x)]
        if self._of_a_part and any(x.requires_grad for x in made):
            self.goes_on_with(given)
        if not any(self._split_dims(x) for x in given):
            return out
        if made and (reduced := dims_reduced(name, args, kwargs or {}, given[0].ndim)) is not None:
            self._reduces(name, given[0], reduced, made[0])
        if name in _RESHAPES or name in _VIEWS:
            if len(given) == 1 and made:
                self._follow_view(func, name, given[0], args, kwargs or {}, made)
        elif len(made) == 1:
            self._mixes(name, given[0], args, kwargs or {})
            self._follow(name, given, made[0])
        return out

    def goes_on_with(self, given: Sequence[Any]) -> None:
        """Note what learns from a mean or the like of a rank's own part."""
        for x in given:
            if isinstance(x, Tensor) and x in self._of_a_part:
                self.refuses(self._of_a_part[x])

    def attends(self, query: Tensor, mask: Tensor) -> None:
        """Note a mask that a style is given for this rank's heads and queries."""
        self._meets(query, mask, by_style=True)

    def declared(self, x: Tensor, layout: Layout) -> None:
        """Take the user's word for what the user's code has made."""
        self._split[x] = self._parts_of(layout, x.ndim)

    def lies_elsewhere(self, x: Tensor, layout: Layout) -> str:
        """Say which dim ``tp_col`` splits, if that is not the one of ``layout``."""
        wanted = layout[1]
        for dim, (axis, of) in self._split.get(x, {}).items():
            elsewhere = isinstance(wanted, Shard) and dim != wanted.dim
            if axis and of in ("features", "tokens") and elsewhere:
                return f"of whose dim {dim} each rank has a part along {self.grid.col.name}"
        return ""

    def refuses(self, said: str) -> None:
        """Note what is wrong by itself, whatever its values."""
        self.refused = self.refused or said
        if len(self._found) < _SLOTS:
            key = zlib.crc32(said.encode())
            self._found.append(torch.tensor([key, _WRONG, 0, 0, 0, 0], device="cpu"))
            self._where[key] = said

    def _meets(self, x: Tensor, other: Tensor, *, by_style: bool = False) -> None:
        """Note ``other``, if in a dim that is split of ``x`` it is not, but as large as a part."""
        if not (_is_local(x) and _is_local(other)) or len(self._found) == _SLOTS:
            return
        whole = self._split_dims(other)
        for dim, (axis, of) in self._split_dims(x).items():
            at = dim - x.ndim + other.ndim
            # Samples are taken one by one by what makes anything for all of them.
            if (
                of in ("samples", "several")
                or at < 0
                or other.shape[at] != x.shape[dim]
                or not x.shape[dim]
                or at in whole
            ):
                continue
            if (place := _place(by_style)) is None:
                return
            self._met[place] += 1
            if self._met[place] > 2:
                return
            key = zlib.crc32(f"{place} {self._met[place]}".encode())
            with torch.no_grad(), disable_current_modes():
                said = other.new_tensor([key, axis, other.shape[at]], dtype=torch.int64)
                self._found.append(torch.cat([said, facts_of(other.detach(), at)]))
            self._where[key] = (
                f"in {place} a tensor of shape {tuple(other.shape)} meets one of shape "
                f"{tuple(x.shape)} of whose dim {dim} each rank has a part"
            )
            return

    def compare(self, module: nn.Module) -> None:
        """Compare what was found over the ranks.

        Raises:
            ValueError: on every rank, if ranks with other parts have the same values for them.
        """
        grid = self.grid
        with torch.no_grad(), disable_current_modes():
            facts = torch.zeros(
                _SLOTS, 3 + FACTS, dtype=torch.int64, device=self.grid.mesh.device_type
            )
            for slot, found in enumerate(self._found[:_SLOTS]):
                facts[slot] = found
            for axis in (grid.col, grid.row):
                if axis.size > 1:
                    facts = gather_facts(facts.flatten(), axis.process_group)
            of_all = facts.view(grid.row.size, grid.col.size, _SLOTS, 3 + FACTS).tolist()
        said = [one for line in of_all for rank in line for one in rank]
        if wrong := [key for key, number, *_ in said if key and number == _WRONG]:
            elsewhere = "its code is refused on another rank, which says why"
            told = next((self._where[key] for key in wrong if key in self._where), elsewhere)
            raise ValueError(f"{type(module).__name__}: {told}")
        for number, (axis, lines) in enumerate(
            ((grid.row, list(zip(*of_all, strict=True))), (grid.col, of_all))
        ):
            for line in lines:
                for key in {one[0] for rank in line for one in rank if one[0]}:
                    met = [one for rank in line for one in rank if one[:2] == [key, number]]
                    if are_alike(met):
                        where = self._where.get(key, "what is made by the sizes of a rank's part")
                        raise ValueError(
                            f"{type(module).__name__} on mesh {describe_mesh(grid.mesh)}: {where} "
                            f"along {axis.name}, and it has the same values on these ranks. What "
                            f"is made by the sizes that a rank sees, torch.arange(x.shape[1]) or "
                            f"table[: x.shape[1]] or a slope for each of self.num_heads, is that "
                            f"of the first part; random numbers are the same for each. Compute it "
                            f"in a module under torch_tp2d.Replicate(), which sees the sizes of "
                            f"the whole, give the module the tokens, positions or heads of all "
                            f"(output_layouts=Replicate(), row_dim=0), or make it for this rank's "
                            f"part"
                        )

    def _split_dims(self, x: Tensor) -> dict[int, _Part]:
        note = said_of(x)
        if note.layout is not None and note.axes is not None and note.ndim == x.ndim:
            return self._parts_of(on_mesh(normalize(note.layout, note.ndim), note.axes), note.ndim)
        known: dict[int, _Part] = self._split.get(x, {})
        return known

    def _parts_of(self, layout: Layout, ndim: int) -> dict[int, _Part]:
        found: dict[int, _Part] = {}
        for number, (axis, p) in enumerate(
            zip((self.grid.row, self.grid.col), layout, strict=True)
        ):
            if axis.size > 1 and type(p) is Shard:
                last = 1 < ndim == p.dim + 1
                found[p.dim] = _Part(
                    number, "samples" if not p.dim else "features" if last else "tokens"
                )
        return found

    def _follow(self, name: str, given: list[Tensor], made: Tensor) -> None:
        """Functions that do not move dims: of single elements, and products."""
        if name.endswith("_like"):
            return
        product, joined = name in ("matmul", "__matmul__", "bmm"), name in ("cat", "stack")
        elementwise = name in _ELEMENTWISE
        found: dict[int, _Part] = {}
        for x in given[:1] if product else given:
            split = self._split_dims(x)
            if elementwise and split:
                for other in given:
                    if other is not x:
                        self._meets(x, other)
            elif name == "scaled_dot_product_attention" and x is given[0] and len(given) > 3:
                self._meets(x, given[3])
            last = x.ndim - 1 if product else x.ndim
            if joined:
                same = enumerate(zip(made.shape, x.shape, strict=False))
                kept = {dim for dim, (size, of) in same if size == of and made.ndim == x.ndim}
                found |= {dim: part for dim, part in split.items() if dim in kept}
            elif made.shape == x.shape or (elementwise or product) and made.ndim >= x.ndim:
                ahead = made.ndim - x.ndim
                found |= {dim + ahead: part for dim, part in split.items() if dim < last}
        if product and (of_columns := self._split_dims(given[-1]).get(given[-1].ndim - 1)):
            found[made.ndim - 1] = of_columns
        if found:
            self._split[made] = found

    def _mixes(self, name: str, x: Tensor, args: Any, kwargs: dict[str, Any]) -> None:
        split = self._split_dims(x)
        alone = dims_reduced(name, args, kwargs, x.ndim) is None
        kinds = ("features", "samples") if alone else ("features",)
        for dim in dims_mixed(name, args, kwargs, x.ndim):
            if dim in split and split[dim].of in kinds and (place := _place(False)) is not None:
                axis = (self.grid.row, self.grid.col)[split[dim].axis]
                of = "features or heads" if split[dim].of == "features" else "samples"
                self.refuses(
                    f"in {place} {name} takes dim {dim} of a tensor of shape {tuple(x.shape)} for "
                    f"all {of}, but each rank has a part of them along {axis.name}. Write it as a "
                    f"module under torch_tp2d.Replicate() with input_layouts="
                    f"(Shard(0), Shard(-1)), which sees all of them, let the module before it hand "
                    f"on DTensors (use_local_output=False), or go on from a sum over the ranks"
                )
                return

    def _reduces(self, name: str, x: Tensor, reduced: Sequence[int], y: Tensor) -> None:
        """Functions that make one number of many."""
        split = self._split_dims(x)
        parts = [dim for dim in reduced if dim in split]
        if parts and y.requires_grad and (place := _place(False)) is not None:
            axis = (self.grid.row, self.grid.col)[split[parts[0]].axis]
            self._of_a_part[y] = (
                f"in {place} {name} takes all of dim {parts[0]} of a tensor of shape "
                f"{tuple(x.shape)}, but each rank has a part of it along {axis.name}, and goes on "
                f"with what it has made of that. Let the module before it hand on a DTensor "
                f"(use_local_output=False), of which it is that of all, and go on with its "
                f"full_tensor(); or write this as a module under torch_tp2d.Replicate(), which "
                f"computes on DTensors. What is only looked at is to be made in torch.no_grad()"
            )
        kept = [dim for dim in range(x.ndim) if y.ndim == x.ndim or dim not in reduced]
        if len(kept) == y.ndim:
            there = split.keys() - {*reduced}
            if left := {at: split[dim] for at, dim in enumerate(kept) if dim in there}:
                self._split[y] = left

    def _follow_view(
        self, func: Any, name: str, x: Tensor, args: Any, kwargs: Any, made: list[Tensor]
    ) -> None:
        """Functions that move dims: strides tell where those of a contiguous twin have gone."""
        split = self._split_dims(x)
        with torch.no_grad(), disable_current_modes():
            # A dim of one, or of none, has no stride of its own.
            shape = [2 if at in split and size < 2 else size for at, size in enumerate(x.shape)]
            if name in _RESHAPES:
                twin = torch.empty(x.shape, dtype=x.dtype, device="meta")
                moved: Any = [twin.view(made[0].shape)]
            else:
                twin = torch.empty(shape, dtype=x.dtype, device="meta")
                try:
                    moved = func(*(twin if one is x else one for one in args), **kwargs)
                except (IndexError, RuntimeError):
                    return
                moved = moved if isinstance(moved, tuple | list) else [moved]
        for y, like in zip(made, moved, strict=False):
            if not isinstance(like, Tensor) or y.ndim != like.ndim:
                continue
            found: dict[int, _Part] = {}
            for dim, part in split.items():
                if name in _RESHAPES and y.shape[: dim + 1] == x.shape[: dim + 1]:
                    found[dim] = part
                    continue
                if name in _RESHAPES and part.of in ("samples", "several"):
                    # Taken apart again, a dim of one among them would be lost.
                    if dim == 0 and y.shape[0] > x.shape[0]:
                        found[0] = _Part(part.axis, "several")
                    continue
                if name in _RESHAPES and 0 < dim == x.ndim - 1 and y.ndim > x.ndim:
                    ranks = (self.grid.row, self.grid.col)[part.axis].size
                    wrong = cut_heads(inspect.currentframe(), y.shape[dim:], ranks)
                    if wrong and _place(False) is not None:
                        self.refuses(wrong)
                    # Features become heads and features of each: the heads are split.
                    if y.ndim == x.ndim + 1 and y.shape[:dim] == x.shape[:dim]:
                        found[dim] = part
                    continue
                least, end = twin.stride(dim), twin.stride(dim) * twin.shape[dim]
                there = [
                    (like.stride(at), at)
                    for at in range(like.ndim)
                    if like.shape[at] > 1
                    and least <= like.stride(at)
                    and like.stride(at) * like.shape[at] <= end
                ]
                if there:
                    found[max(there)[1]] = part
                    continue
                for at in range(like.ndim):
                    if like.stride(at) <= least and end <= like.stride(at) * like.shape[at]:
                        found[at] = _Part(part.axis, "several")
            if found:
                self._split[y] = found


def _is_local(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, DTensor)


def _local_tensors(args: Any, kwargs: dict[str, Any] | None) -> list[Tensor]:
    """Those among the arguments of one of torch's functions, and in their lists and tuples."""
    found: list[Tensor] = []
    for given in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(given, tuple | list):
            found += filter(_is_local, given)
        elif _is_local(given):
            found.append(given)
    return found


def _place(by_style: bool) -> str | None:
    """The file and line of the user's code that calls a function; None if a style does."""
    frame: Any = inspect.currentframe()
    while frame is not None:
        path = frame.f_code.co_filename
        # A mode around it stands between a function and who calls it.
        passes_on = path == __file__ or frame.f_code.co_name == "__torch_function__"
        if path.startswith(_PACKAGE) and not (passes_on or by_style):
            return None
        if not path.startswith((_PACKAGE, _TORCH)):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return None
