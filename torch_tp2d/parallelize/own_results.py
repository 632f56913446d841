"""Single numbers made of all that a rank has of a dim, a mean or a norm: not those of all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

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

    def watch_gradients(self) -> None:
        """Warn if one that is kept for later, ``self.loss = x.mean()``, is given a gradient.

        The ranks may have averaged it until then: nothing tells.
        """
        for y in list(self._known):
            if y.requires_grad:
                y.register_hook(_warning(y, *self._known[y]))


def _warning(y: Tensor, said: str, values: Tensor) -> Callable[[Tensor], None]:
    kept = ref(y)

    def warn(grad: Tensor) -> None:
        now = kept()
        if now is None or same_bits(now.detach(), values):
            warnings.warn(
                f"a loss is made of what each rank has made of its own part, which the model has "
                f"kept, and is right only if the ranks have averaged it. Of that part: {said}",
                stacklevel=2,
            )

    return warn
