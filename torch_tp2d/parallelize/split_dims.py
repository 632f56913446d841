"""Follows the dims that a mesh axis splits through the user's code, in a model's first forward."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from .._tracing import in_graph
from ..comm.axis import Axis
from ..mesh.axes import on_mesh
from ..mesh.grid import Grid
from ..mesh.handed import said_of
from ..mesh.layouts import Layout, normalize
from .cut_heads import are_heads, cut_heads
from .drawn import Drawn, state_before
from .dtensor_losses import wrong_on_dtensors
from .findings import Findings
from .mixed_features import dims_mixed, dims_reduced, dims_sliced, is_routing
from .moved_dims import RESHAPES, VIEWS, Part, moved, picked
from .one_by_one import own_dims
from .own_parameters import OwnParameters
from .own_results import OwnResults
from .partial_sums import WRITES, PartialSums, counts_of, dims_summed
from .refusals import (
    adds_up,
    all_of_it,
    beside_a_slice,
    holds_several,
    in_parts,
    not_of_all,
    some_of_it,
)
from .side_by_side import ELEMENTWISE, JOIN, PRODUCT, aligned, neighbours
from .some_samples import SomeSamples
from .unfollowed import leaves_torch, loses_a_part
from .user_code import Call, is_local, local_tensors, place_of

__all__ = ["SplitDims"]

_LIKE = ("to", "type_as", "expand_as", "view_as", "reshape_as")
"""Functions that take of a second tensor its shape or dtype alone."""


class SplitDims(Findings, TorchFunctionMode):
    """Notes tensors that have as many entries as a rank's part of another, which they meet.

    Which dims of a tensor are split is told by what a style has noted of it, and followed through
    functions that move dims, join them or take elements one by one; others are called again
    (:mod:`.one_by_one`), to see what they take together.
    """

    def __init__(self, grid: Grid) -> None:
        TorchFunctionMode.__init__(self)
        Findings.__init__(self, grid)
        self._split = WeakIdKeyDictionary()
        """By tensor, how a dim is split, by dim."""
        self._met: Counter[str] = Counter()
        self._own, self._sums = OwnResults(), PartialSums()
        self._drawn, self._some = Drawn(), SomeSamples()
        self._parameters = OwnParameters(grid)
        self._records = torch.is_grad_enabled()
        """Else what is looked at in torch.no_grad() cannot be told from what the model makes."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Not every function's name is a string (flex_attention's); an operator's has its overload.
        name, kwargs = str(getattr(func, "__name__", "")).partition(".")[0], kwargs or {}
        call = Call(func, name, args, kwargs, local_tensors(args, kwargs))
        # As they are before the function may write to them.
        terms = self._sums.among(call.given) if self._sums else {}
        drawn = state_before(call)
        own = self._own.among(call.given[name in WRITES :]) if self._own else ""
        out = func(*args, **kwargs)
        # Reading an attribute is what most calls do, and x.T and x.mT are views.
        if (name == "__get__" and not isinstance(out, Tensor)) or in_graph():
            return out
        if wrong := wrong_on_dtensors(call, out):
            self.refuses(wrong)
        made = [x for x in (out if isinstance(out, tuple | list) else [out]) if is_local(x)]
        goes_on = torch.is_grad_enabled() or not self._records
        said = own or next((said for _, said in terms.values()), "")
        if leaves_torch(call, said if goes_on else ""):
            return out
        if made and not loses_a_part(call, self._split_dims, self._axis):
            call = call._replace(made=made)
            if (drawn := self._drawn.follow(call, drawn)) is not None and call.given:
                self._draws(call, drawn)
            self._is_made(call, terms, own)
        return out

    def _is_made(self, call: Call, terms: Mapping[int, tuple[int, str]], own: str) -> None:
        name, x = call.name, next(iter(call.given), None)
        is_split = any(self._split_dims(one) for one in call.given)
        if own and (any(y.requires_grad for y in call.made) or (is_split and not self._records)):
            self.refuses(own)
        elif own and (torch.is_grad_enabled() or not self._records):
            self._own.note(call.made, own)
        if terms and (wrong := self._sums.misused(call, terms, self._axes_of)):
            self.refuses(wrong)
        elif terms and (said := self._sums.averaged(call)):
            self._own.note(call.made, said)
        if wrong := self._parameters.misapplied(call):
            self.refuses(wrong)
        if self._some and len(call.made) == 1:
            self._follow_some(call)
        if x is None or not is_split:
            return
        self._sums_up(call)
        self._slices(call, x)
        reduced = dims_reduced(call, x.ndim)
        if reduced is not None:
            for y in call.made:
                self._reduces(name, x, reduced, y)
        if name in RESHAPES or name in VIEWS and len(call.given) == 1:
            self._follow_view(call, x)
            return
        self._mixes(call, x)
        if len(call.made) == 1:
            self._follow(call)
        if (
            reduced is None
            and not call.is_new
            and name not in (*ELEMENTWISE, *JOIN, *PRODUCT)
            and self._split_dims(x).keys().isdisjoint(dims_mixed(call, x.ndim))
            and not self._adds_up(call)
            and not dims_sliced(call, x.ndim)
        ):
            self._calls_again(call)

    def _calls_again(self, call: Call) -> None:
        """Functions of which nothing else is known."""
        # Which samples and tokens go where is the user's to say, as those of an expert.
        apart = ("samples", "tokens") if is_routing(call) else ()
        for number in (0, 1):
            parts = [
                (x, dim, part)
                for x in call.given
                for dim, part in self._split_dims(x).items()
                if part.axis == number and part.of not in (*apart, "several")
            ]
            if not parts or (place := place_of()) is None:
                continue
            own = own_dims(call, [(x, dim) for x, dim, _ in parts])
            x, dim, part = parts[0]
            for y, at in zip(call.made, own or (), strict=False):
                found = {d: p for d, p in self._split.get(y, {}).items() if p.axis != number}
                self._split[y] = found if at < 0 else {**found, at: part}
            if own != []:
                continue
            y, said = call.made[0], not_of_all(place, call.name, x, dim, part.of, self._axis(part))
            if not y.ndim:
                self._own.note(call.made, said)
            # Of other sizes, they are picked out.
            elif part.of not in ("samples", "tokens") or y.shape[dim : dim + 1] == (x.shape[dim],):
                self.refuses(said)

    def goes_on_with(self, given: Sequence[Any]) -> None:
        """Note what learns from a mean or the like of a rank's own part, now or later."""
        if said := self._own.among(given):
            self.refuses(said)
        self._own.watch_gradients()

    def attends(self, query: Tensor, mask: Tensor) -> None:
        """Note a mask that a style is given for this rank's heads and queries."""
        self._meets(query, mask, aligned(query, mask), by_style=True)

    def declared(self, x: Tensor, layout: Layout) -> None:
        """Take the user's word for what the user's code has made."""
        self._split[x] = self._parts_of(layout, x.ndim)
        self._parameters.declared(x)

    def lies_elsewhere(self, x: Tensor, layout: Layout) -> str:
        """Say which dim ``tp_col`` splits, if that is not the one of ``layout``."""
        wanted = layout[1]
        for dim, (axis, of, _) in self._split.get(x, {}).items():
            elsewhere = isinstance(wanted, Shard) and dim != wanted.dim
            if axis and of in ("features", "tokens") and elsewhere:
                return f"of whose dim {dim} each rank has a part along {self.grid.col.name}"
        return ""

    def holds(self, x: Tensor, layout: Layout, *, certain: bool, takes_fused: bool) -> str:
        """What a tensor that a module takes in ``layout`` holds instead, and what to do."""
        found = None if certain else self._sums.find(x)
        if found is not None and not isinstance(layout[found[0]], Partial):
            return f", a sum of this rank's part: {found[1]}"
        if takes_fused or isinstance(layout[1], Replicate):
            return ""
        for dim, part in self._split_dims(x).items():
            # A part of each of several is no shard, whatever a plan says.
            fused = part.of == "fused" and layout[1] == Shard(dim)
            if part.axis and (fused or (part.of == "joined" and not certain)):
                return holds_several(dim)
        return ""

    def _meets(
        self, x: Tensor, other: Tensor, beside: Mapping[int, int], *, by_style: bool = False
    ) -> None:
        """Note ``other``, if in a dim that is split of ``x`` it is not, but as large as a part."""
        if not (is_local(x) and is_local(other)) or self.is_full:
            return
        whole = self._split_dims(other)
        for dim, (axis, of, _) in self._split_dims(x).items():
            at = beside.get(dim, -1)
            # Samples are taken one by one by what makes anything for all of them, unless it is
            # random. One of them alone may be a number for all.
            alone = of == "samples" and x.shape[dim] < 2
            drawn = None if alone else self._drawn.state_of(other)
            if (
                of == "several"
                or (of == "samples" and drawn is None)
                or at < 0
                or other.shape[at] != x.shape[dim]
                or not x.shape[dim]
                or at in whole
            ):
                continue
            if (place := place_of(by_style)) is None:
                return
            self._met[place] += 1
            if self._met[place] > 2:
                return
            said = in_parts(f"in {place} a tensor of shape {tuple(other.shape)} meets one", x, dim)
            values, along = (other, at) if drawn is None else (drawn, 0)
            self.doubts(f"{place} {self._met[place]}", said, values, along, axis)
            return

    def _draws(self, call: Call, state: Tensor) -> None:
        """Random numbers for each of a rank's entries, which other ranks may draw for theirs."""
        x = call.given[0]
        split = {} if call.is_new else self._split_dims(x)
        for dim, (axis, of, _) in split.items():
            alone = of == "samples" and x.shape[dim] == 1
            if of == "several" or alone or self.is_full or (place := place_of()) is None:
                continue
            what = f"in {place} {call.name} draws for a tensor"
            self.doubts(f"{what} {dim}", in_parts(what, x, dim), state, 0, axis)

    def _axis(self, part: Part) -> Axis:
        return (self.grid.row, self.grid.col)[part.axis]

    def _split_dims(self, x: Tensor) -> dict[int, Part]:
        note = said_of(x)
        if note.layout is not None and note.axes is not None and note.ndim == x.ndim:
            layout = on_mesh(normalize(note.layout, note.ndim), note.axes)
            return self._parts_of(layout, note.ndim, fused=note.fused)
        known: dict[int, Part] = self._split.get(x, {})
        return known

    def _axes_of(self, x: Tensor) -> set[int]:
        return {part.axis for part in self._split_dims(x).values()}

    def _parts_of(self, layout: Layout, ndim: int, *, fused: bool = False) -> dict[int, Part]:
        found: dict[int, Part] = {}
        for number, (axis, p) in enumerate(
            zip((self.grid.row, self.grid.col), layout, strict=True)
        ):
            if axis.size > 1 and isinstance(p, Shard):
                features: Any = "fused" if fused else "features"
                last = 1 < ndim == p.dim + 1
                found[p.dim] = Part(
                    number, "samples" if not p.dim else features if last else "tokens"
                )
        return found

    def _follow(self, call: Call) -> None:
        """Functions that do not move dims: of single elements, and products."""
        name, args, given, (made,) = call.name, call.args, call.given, call.made
        if call.is_new:
            return
        product, joined = name in PRODUCT, name in JOIN
        along = call.kwargs.get("dim", args[1] if len(args) > 1 else 0) if joined else None
        along = along % made.ndim if type(along) is int else None
        is_new = name == "stack"
        elementwise = name in ELEMENTWISE
        found = picked(call, self._split_dims(given[0]))
        alone = product or (name in _LIKE and not self._split_dims(given[0]))
        for x in given[:1] if alone else given:
            split = self._split_dims(x)
            for other, beside in neighbours(call, x) if split else ():
                self._meets(x, other, beside)
            last = x.ndim - 1 if product else x.ndim
            if joined:
                for dim, part in split.items() if made.ndim == x.ndim + is_new else ():
                    if dim != along or is_new:
                        found[dim + (is_new and along is not None and dim >= along)] = part
                    elif part.of in ("features", "fused"):
                        found[dim] = Part(part.axis, "fused")
                    elif part.of == "joined":
                        found[dim] = Part(part.axis, "joined")
            elif made.shape == x.shape or (elementwise or product) and made.ndim >= x.ndim:
                ahead = made.ndim - x.ndim
                found |= {dim + ahead: part for dim, part in split.items() if dim < last}
        if product and (of_columns := self._split_dims(given[-1]).get(given[-1].ndim - 1)):
            found[made.ndim - 1] = of_columns
        if found:
            self._split[made] = found

    def _follow_view(self, call: Call, x: Tensor) -> None:
        """Functions that move dims."""
        split = dict(self._split_dims(x))
        for dim in dims_sliced(call, x.ndim):
            of, was = (split[dim].of, split[dim].was) if dim in split else ("", None)
            if of == "fused" or (of == "joined" and was is not None):
                # One of the projections or tokens, for what follows.
                split[dim] = Part(split[dim].axis, "features")
            elif dim in split and self._are_heads(x, dim, call.made):
                del split[dim]
        for y, found in moved(call, x, split, self._cuts):
            self._split[y] = found

    def _mixes(self, call: Call, x: Tensor) -> None:
        name, split = call.name, self._split_dims(x)
        alone = dims_reduced(call, x.ndim) is None
        kinds = ["features", "fused", "joined", *(["samples"] if alone else [])]
        # Of what has no gradient the graph does not tell that tokens were mixed.
        kinds += ["tokens"] if name in ("argmax", "argmin", "argsort", "batch_norm") else []
        kinds = kinds[:3] if is_routing(call) else kinds
        by_style = name == "scaled_dot_product_attention"  # Which dropout passes on.
        for dim in dims_mixed(call, x.ndim):
            if dim not in split or split[dim].of not in kinds:
                continue
            if (place := place_of(by_style)) is not None:
                self.refuses(not_of_all(place, name, x, dim, split[dim].of, self._axis(split[dim])))
                return

    def _follow_some(self, call: Call) -> None:
        name, (made,) = call.name, call.made
        if not self._some.meet_others(call.given, made, name in ELEMENTWISE, self._has_samples):
            return
        if (place := place_of()) is not None:
            self.refuses(beside_a_slice(place, name, self.grid.row))

    def _has_samples(self, x: Tensor) -> bool:
        return any(part.of == "samples" for part in self._split_dims(x).values())

    def _adds_up(self, call: Call) -> bool:
        pairs = zip(call.given, dims_summed(call), strict=False)
        return any(dim in self._split_dims(x) for x, dims in pairs for dim in dims)

    def _sums_up(self, call: Call) -> None:
        """Functions that add up, of which the ranks' results are the terms of a sum."""
        for x, dims in zip(call.given, dims_summed(call), strict=False):
            split = self._split_dims(x)
            for dim in dims:
                if dim in split and (place := place_of()) is not None:
                    axis = self._axis(split[dim])
                    said = adds_up(place, call.name, x, dim, split[dim].of, axis)
                    counts = counts_of(x, dims, dim)
                    mean = all_of_it(place, f"{call.name}, divided by its size,", x, dim, axis)
                    self._sums.note(call.made[0], split[dim].axis, said, counts, mean)

    def _slices(self, call: Call, x: Tensor) -> None:
        """Functions that take some of the features, which would be some of each rank's."""
        split, made = self._split_dims(x), call.made
        for dim in dims_sliced(call, x.ndim):
            all_of_it = made[0].ndim == x.ndim and made[0].shape[dim] == x.shape[dim]
            if dim not in split or all_of_it:
                continue
            if split[dim].of == "samples" and made[0].ndim == x.ndim:
                self._some.note(x, made)
            if split[dim].of != "features" or self._are_heads(x, dim, made):
                continue
            if (place := place_of()) is not None:
                self.refuses(some_of_it(place, call.name, x, dim, self._axis(split[dim])))

    def _cuts(self, sizes: Sequence[int], axis: int) -> None:
        """Features that are cut into heads, of ``sizes``."""
        ranks = (self.grid.row, self.grid.col)[axis].size
        wrong = cut_heads(inspect.currentframe(), sizes, ranks)
        if wrong and place_of() is not None:
            self.refuses(wrong)

    @staticmethod
    def _are_heads(x: Tensor, dim: int, made: Sequence[Tensor]) -> bool:
        """Whether features were cut into a rank's heads, or a dim of heads is gone through."""
        last = dim == x.ndim - 1
        sizes = (len(made), made[0].shape[-1]) if last else (x.shape[dim], x.shape[-1])
        return len({y.shape for y in made}) == 1 and are_heads(inspect.currentframe(), sizes)

    def _reduces(self, name: str, x: Tensor, reduced: Sequence[int], y: Tensor) -> None:
        """Functions that make one number of many."""
        split = self._split_dims(x)
        parts = [dim for dim in reduced if dim in split]
        if parts and (place := place_of()) is not None:
            said = all_of_it(place, name, x, parts[0], self._axis(split[parts[0]]))
            self._own.note([y], said)
        kept = [dim for dim in range(x.ndim) if y.ndim == x.ndim or dim not in reduced]
        if len(kept) == y.ndim:
            there = split.keys() - {*reduced}
            if left := {at: split[dim] for at, dim in enumerate(kept) if dim in there}:
                self._split[y] = left
