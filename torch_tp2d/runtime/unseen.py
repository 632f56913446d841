"""Changes of parameters that torch does not see, after their values were sent.

Each rank compares the values of its own shards, and a change may be in one rank's shard alone. So
a rank that finds one goes on with what was gathered, and the error is raised on all ranks at a
point that all pass, after they have told each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ..comm.groups import gathering_facts, sends

__all__ = ["UnseenChanges"]


class UnseenChanges:
    """What this rank has compared in a forward, or in a backward, and what the others found.

    Nobody waits for the answer in training: the question is asked at the end of a forward, along
    one axis of the mesh, handed on along the other when backward begins, and looked at when that is
    over (:meth:`tell`).
    """

    def __init__(self, of: str) -> None:
        self.of = of
        """The mesh, for messages."""
        self._compared: list[ref[nn.Module]] = []
        """The modules whose parameters were compared: the same, in this order, on all ranks."""
        self._first = 0
        """1 + the index in it of the first that had changed on this rank, or on one that told."""
        self._groups: list[Any] = []
        """The process groups along which the ranks have yet to tell each other."""
        self._asked = False
        self._answer: Callable[[], Tensor] | None = None

    def note(self, module: Any, *, changed: bool) -> None:
        """Note that this rank has compared a module's parameters. All ranks do so alike."""
        if self._asked:
            # About an earlier forward, which no backward has followed so far.
            self.tell()
        if not self._compared:
            # Not the grid itself: it refers to the mesh, as long as which this lives.
            grid = module._tp2d.grid
            axes = [axis for axis in (grid.row, grid.col) if axis.size > 1]
            self._groups = [axis.process_group for axis in axes] if sends(grid.mesh) else []
            self._device = grid.mesh.device_type
        self._compared.append(ref(module))
        if changed and not self._first:
            self._first = len(self._compared)

    def ask(self) -> None:
        """Start telling the other ranks, along the first axis, if anything was compared."""
        if self._compared and not self._asked:
            self._asked = True
            self.hand_on()

    def hand_on(self) -> None:
        """Start telling the other ranks along the next axis, once they have along the last."""
        if self._answer is not None:
            found = [first for first in self._answer().tolist() if first]
            # The first of all, so that every rank names the same module.
            self._first, self._answer = min(found, default=0), None
        if self._asked and self._groups:
            mine = torch.tensor([self._first], device=self._device)
            self._answer = gathering_facts(mine, self._groups.pop(0))

    def tell(self) -> None:
        """Wait for what the other ranks say.

        Raises:
            ValueError: on every rank, if a parameter had changed on one.
        """
        if not self._compared:
            return
        self.ask()
        while self._answer is not None:
            self.hand_on()
        compared, first = self._compared, self._first
        self._compared, self._first, self._asked = [], 0, False
        if first:
            raise ValueError(
                f"a parameter of {compared[first - 1]()} on mesh {self.of} was changed, in a way "
                f"that torch does not see (.data, to_local(), torch._foreach_*), after it was "
                f"gathered: during the forward of the model that it is a part of, or between "
                f"micro-batches under no_sync. Change it before that forward, or in a forward "
                f"pre-hook of the module, and after the last backward of a step"
            )
