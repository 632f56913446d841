"""Refuses parameters that learn and that no style has placed on the mesh, whenever a model runs.

Not in the first forward alone: a module may be replaced, or a frozen one unfrozen, after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch_compat.modules import parameters_of, submodules_of
from .._tracing import eager_only
from ..mesh.grid import describe_mesh

__all__ = ["DenseParameters", "refuse_dense"]


def refuse_dense(module: nn.Module, mesh: DeviceMesh) -> None:
    """Raise a ValueError if a parameter of ``module`` learns and is not a DTensor.

    Each rank would compute its gradient of the tokens that it has alone.
    """
    if not _has_dense(module):
        return
    plain = [
        f"{name} {tuple(param.shape)}"
        for name, param in module.named_parameters()
        if param.requires_grad and not isinstance(param, DTensor)
    ]
    raise ValueError(
        f"{type(module).__name__} on mesh {describe_mesh(mesh)}: no plan entry names "
        f"the modules of {plain[:5]}{'...' if len(plain) > 5 else ''}, so they would be "
        f"dense on every rank and their gradients wrong: name each with a style, "
        f"torch_tp2d.Replicate() if it is to be whole on every rank, or torch_tp2d.Local2D() if "
        f"modules inside it have entries of their own, or freeze it; "
        f"parallelize_module takes a module that was put in later, too"
    )


def _has_dense(module: nn.Module) -> bool:
    # Without names or generators, which take longer than all else: this is asked in each forward.
    waiting, seen = [module], {module}
    while waiting:
        owner = waiting.pop()
        for param in parameters_of(owner).values():
            if not (param is None or isinstance(param, DTensor)) and param.requires_grad:
                return True
        for child in submodules_of(owner).values():
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    return False


class DenseParameters:
    """A forward pre-hook that calls :func:`refuse_dense` where gradients are recorded."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    @classmethod
    def watch(cls, module: nn.Module, mesh: DeviceMesh) -> None:
        """Check each forward of ``module``."""
        module.register_forward_pre_hook(cls(mesh))

    def __deepcopy__(self, memo: Any) -> DenseParameters:
        return self

    @eager_only
    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            refuse_dense(module, self.mesh)
