"""Slices of some of a rank's samples, which are to meet no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["SomeSamples"]


class SomeSamples:
    """By the slices, their first sample."""

    def __init__(self) -> None:
        self._first = WeakIdKeyDictionary()

    def __bool__(self) -> bool:
        return bool(self._first.data)

    def note(self, x: Tensor, taken: Sequence[Tensor]) -> None:
        """Take tensors for samples of ``x``, of its memory."""
        for y in taken if x.stride(0) else ():
            self._first[y] = (y.storage_offset() - x.storage_offset()) // x.stride(0)

    def meet_others(
        self,
        given: Sequence[Tensor],
        made: Tensor,
        elementwise: bool,
        has_samples: Callable[[Tensor], bool],
    ) -> bool:
        """Whether samples of a slice are taken together with others; else follow them."""
        firsts = {self._first[x] for x in given if x in self._first}
        alone = len(given) == 1 and made.shape[:1] == given[0].shape[:1]
        of_all = any(has_samples(x) for x in given if x not in self._first)
        if len(firsts) == 1 and (alone if not elementwise else not of_all):
            (self._first[made],) = firsts
            return False
        return bool(firsts) and elementwise
