"""Whether the gradient of a module's own parameter is summed along an axis where it is a part.

A parameter that each rank has whole, of a module that runs on local tensors, is applied to what
modules inside hand on. Features of which a rank has a part give a part of its gradient, what is
whole gives all of it. Which it is depends on the code; whether it is summed was told by the
module's own input.
"""

from __future__ import annotations

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..mesh.grid import Grid
from ..mesh.handed import Handed, notes_of, said_of
from ..styles.provenance import names_split, names_whole
from .user_code import Call, place_of

__all__ = ["OwnParameters"]


class OwnParameters:
    """Follows such parameters, and what is made of them, to what they are applied to."""

    def __init__(self, grid: Grid) -> None:
        self._several = frozenset[str]().union(*grid.several)
        self._made = WeakIdKeyDictionary()
        self._declared = WeakIdKeyDictionary()

    def declared(self, x: Tensor) -> None:
        """Leave what is made of ``x`` to the user, whose own code has made it and says what it is.

        The graph would tell of tensors that the user has gathered or summed since.
        """
        self._declared[x] = None

    def misapplied(self, call: Call) -> str:
        """What is wrong where a call takes a parameter together with tokens or features."""
        if self._declared.data and any(x in self._declared for x in call.given):
            for y in call.made:
                self._declared[y] = None
            return ""
        if not any(map(self._is_made_of_one, call.given)):
            return ""
        for y in call.made:
            self._made[y] = None
        # A style sums what a mask needs.
        if call.name in ("scaled_dot_product_attention", "flex_attention"):
            return ""
        several = self._several
        notes = [note for x in call.given for note in notes_of(x, beyond_functions=False)[0]]
        split = frozenset[str]().union(*map(names_split, notes))
        whole = frozenset[str]().union(*map(names_whole, notes)) - split
        for note in notes:
            parts, all_of_it = split & several - note.sums, whole & several & note.sums
            if note.parameter and (parts or all_of_it) and (place := place_of()) is not None:
                return _said(place, call.name, note, parts, all_of_it)
        return ""

    def _is_made_of_one(self, x: Tensor) -> bool:
        if not x.requires_grad:
            return False
        said = said_of(x)
        return bool(said.parameter) or (said.layout is None and x in self._made)


def _said(
    place: str, name: str, note: Handed, parts: frozenset[str], all_of_it: frozenset[str]
) -> str:
    of, along = repr(note.parameter), " and ".join(sorted(parts or all_of_it))
    module = "as a module of its own under torch_tp2d.Replicate()"
    if parts:
        return (
            f"in {place} {name} applies the parameter {of} to a tensor of which each rank has a "
            f"part along {along}, where its gradient is not summed: say "
            f"Local2D(params={{{of}: Partial()}}) if it is applied to nothing that is whole on "
            f"tp_col, or write what applies it {module}"
        )
    return (
        f"in {place} {name} applies the parameter {of} to a tensor that is whole along {along}, "
        f"where its gradient is summed as if of a part: write what applies it {module}"
    )
