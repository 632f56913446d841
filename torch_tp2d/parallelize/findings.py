"""What a rank finds wrong in the user's code, which the ranks tell each other before they raise."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn

from .._torch_compat.tensors import disable_current_modes
from ..comm.groups import gather_facts
from ..mesh.grid import Grid, describe_mesh
from .alike import FACTS, are_alike, facts_of

__all__ = ["Findings"]

_SLOTS = 64
"""How many meetings are told the other ranks of."""
_WRONG = 2
"""In the place of an axis' number, for what is wrong whatever its values."""


class Findings:
    """What is wrong by itself, and tensors that are if other ranks have the same."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.refused = ""
        """What was first found wrong, whatever its values."""
        self._found: list[Tensor] = []
        self._where: dict[int, str] = {}

    @property
    def is_full(self) -> bool:
        """Whether no more is told."""
        return len(self._found) == _SLOTS

    def refuses(self, said: str) -> None:
        """Note what is wrong by itself, whatever its values."""
        self.refused = self.refused or said
        if not self.is_full:
            key = zlib.crc32(said.encode())
            self._found.append(torch.tensor([key, _WRONG, 0, 0, 0, 0], device="cpu"))
            self._where[key] = said

    def doubts(self, key: str, said: str, x: Tensor, dim: int, axis: int) -> None:
        """Note what is wrong if ranks of an axis have the same values for their parts of a dim.

        Args:
            key: names it, the same on every rank.
        """
        number = zlib.crc32(key.encode())
        with torch.no_grad(), disable_current_modes():
            facts = x.new_tensor([number, axis, x.shape[dim]], dtype=torch.int64)
            self._found.append(torch.cat([facts, facts_of(x.detach(), dim)]))
        self._where[number] = said

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
                            f"part (random numbers from a generator with a seed of its own)"
                        )
