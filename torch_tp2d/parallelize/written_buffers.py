"""Refuses buffers that a forward has changed to other values on each rank.

A running mean, the use of a codebook's entries or the bias that balances a router's experts is a
part of the model: it is saved once, and has to be the same on every rank. A module that is given
this rank's samples or tokens changes it by these alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch_compat.tensors import disable_current_modes, version
from .._tracing import eager_only
from ..comm.groups import gather_facts, sends
from ..mesh.grid import Grid, describe_mesh
from ..runtime.context import in_backward
from ..styles.module_kinds import describe_module
from .first_forward import remove_hooks

__all__ = ["WrittenBuffers"]


class WrittenBuffers:
    """Hooks around the first forward of a model in training, which then remove themselves."""

    def __init__(self, mesh: DeviceMesh, names: list[str]) -> None:
        self.mesh = mesh
        self.names = names
        self._before: dict[str, tuple[Tensor, int | None]] = {}

    def __deepcopy__(self, memo: Any) -> WrittenBuffers:
        return WrittenBuffers(self.mesh, self.names)

    @classmethod
    def watch(cls, module: nn.Module, mesh: DeviceMesh) -> None:
        """Look at the buffers that are saved with ``module``.

        What each rank has for itself, such as a cache, is registered with ``persistent=False``.
        """
        names = [name for name, _ in module.named_buffers()]
        saved = nn.Module.state_dict(module) if names else {}
        names = [name for name in names if name in saved]
        if names:
            hooks = cls(mesh, names)
            module.register_forward_pre_hook(hooks.begins)
            module.register_forward_hook(hooks.ends)

    @eager_only
    def begins(self, module: nn.Module, args: Any) -> None:
        learns = module.training and torch.is_grad_enabled() and not in_backward()
        if learns and sends(self.mesh):
            self._before = {name: (x, version(x)) for name, x in self._buffers(module).items()}

    @eager_only
    def ends(self, module: nn.Module, args: Any, output: Any) -> None:
        """Compare what was changed over the ranks.

        Raises:
            ValueError: on every rank, if one differs by more than rounding.
        """
        if not self._before or in_backward():
            return
        before, self._before = self._before, {}
        remove_hooks(module, self.begins, self.ends)
        found = self._buffers(module)
        grid = Grid(self.mesh)
        with torch.no_grad(), disable_current_modes():
            said = [_facts(found.get(name), *before[name]) for name in before]
            facts = torch.stack([one.to(self.mesh.device_type) for one in said])
            for axis in (grid.col, grid.row):
                if axis.size > 1:
                    facts = gather_facts(facts.flatten(), axis.process_group)
        of_all = facts.view(grid.row.size, grid.col.size, len(before), -1)
        for at, name in enumerate(before):
            axes = ((grid.row, of_all[:, :, at]), (grid.col, of_all[:, :, at].transpose(0, 1)))
            along = [axis.name for axis, one in axes if axis.size > 1 and _differ(one)]
            if along:
                owner = module.get_submodule(name.rpartition(".")[0])
                raise ValueError(
                    f"{describe_module(owner)} on mesh {describe_mesh(self.mesh)}: its forward has "
                    f"changed the buffer {name!r}, which is saved with the model, to other values "
                    f"on the ranks of {' and '.join(along)}: each has seen its own samples or "
                    f"tokens. torch_tp2d.Replicate() computes a module on the tokens of all; or "
                    f"have its forward sum the buffer over those ranks; register what each rank is "
                    f"to have for itself with persistent=False"
                )

    def _buffers(self, module: nn.Module) -> dict[str, Tensor]:
        buffers = dict(module.named_buffers())
        found = {name: buffers.get(name) for name in self.names}
        return {n: x for n, x in found.items() if x is not None and not isinstance(x, DTensor)}


def _facts(x: Tensor | None, before: Tensor, version_before: int | None) -> Tensor:
    """Whether a buffer was changed, its shape as a number, rounding, and two sums of its values."""
    if x is None:
        return before.new_zeros(5, dtype=torch.float64)
    changed = x is not before or version(x) != version_before
    rounds = x.is_floating_point() or x.is_complex()
    values = torch.view_as_real(x) if x.is_complex() else x
    values = torch.nan_to_num(values.detach().flatten().double())
    # Weights of different sizes: a permutation changes the sum.
    weights = torch.arange(len(values), device=x.device, dtype=torch.float64)
    weights = 0.5 + (weights * 0.6180339887498949).frac_()
    eps = torch.finfo(x.dtype).eps ** 0.5 if rounds else 0.0
    said = [float(changed), float(hash(tuple(x.shape)) % (1 << 50)), eps]
    return torch.cat([values.new_tensor(said), torch.stack([values @ weights, values.norm()])])


def _differ(facts: Tensor) -> bool:
    """Whether along dim 0 a buffer differs that was changed, and has the same shape everywhere."""
    changed, shape, eps, total, norm = facts.unbind(-1)
    if not bool(changed.any()) or not torch.equal(shape, shape[:1].expand_as(shape)):
        return False
    return bool(((total - total[:1]).abs() > eps * norm.max()).any())
