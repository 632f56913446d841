"""Single numbers made of all that a rank has of a dim, a mean or a norm: not those of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..runtime.versions import same_bits

__all__ = ["OwnResults"]


class OwnResults:
    """Where such results were made, by the tensors."""

    def __init__(self) -> None:
        self._known = WeakIdKeyDictionary()

    def __bool__(self) -> bool:
        return bool(self._known.data)

    def note(self, made: Sequence[Tensor], said: str) -> None:
        for y in made:
            self._known[y] = said, y.detach().clone()

    def among(self, given: Sequence[Any]) -> str:
        """Where the first of them was made; empty if none is a rank's own result."""
        for x in given:
            said, values = self._known.get(x, ("", x)) if isinstance(x, Tensor) else ("", x)
            # It is that of all once the ranks have told each other theirs.
            if said and same_bits(x.detach(), values):
                return str(said)
        return ""
