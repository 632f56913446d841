"""Checks that are possible only when a model first runs, with every part of the plan applied."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch_compat.distributed import was_localized
from .._torch_compat.modules import forward_hooks, forward_pre_hooks, parameters_of
from .._tracing import eager_only
from ..mesh.grid import describe_mesh
from ..styles.base import refuse_transforms
from ..styles.empty_shards import refuse_empty
from .check import _MEND, _data_parallel
from .dense import refuse_dense


def remove_hooks(module: nn.Module, *own: Any) -> None:
    """Remove hooks from a module alone: a copy of it still has them, and is checked by itself."""
    for hooks in (forward_pre_hooks(module), forward_hooks(module)):
        for key in [key for key, hook in hooks.items() if hook in own]:
            del hooks[key]


class FirstForward:
    """A forward pre-hook that checks a model when it first runs, and then removes itself."""

    def __init__(
        self,
        mesh: DeviceMesh,
        ties: list[list[tuple[str, nn.Module, str]]],
        placed: list[tuple[str, str]],
    ) -> None:
        self.mesh = mesh
        self.ties = ties
        self.placed = placed

    @classmethod
    def watch(
        cls, module: nn.Module, mesh: DeviceMesh, ties: list[list[tuple[str, nn.Module, str]]]
    ) -> None:
        for name, submodule in module.named_modules():
            runner = submodule.__dict__.get("_tp2d")
            if runner is not None:
                runner.name = name
        placed = [
            (prefix, name)
            for prefix, owner in module.named_modules()
            for name, param in parameters_of(owner).items()
            if isinstance(param, DTensor)
        ]
        module.register_forward_pre_hook(cls(mesh, ties, placed), prepend=True)

    def __deepcopy__(self, memo: Any) -> FirstForward:
        return self

    @eager_only
    def __call__(self, module: nn.Module, args: Any) -> None:
        refuse_transforms(module)
        self._check_placed(module)
        self._check_empty(module)
        refuse_dense(module, self.mesh)
        for group in self.ties:
            params = [parameters_of(owner)[attribute] for _, owner, attribute in group]
            if any(param is not params[0] for param in params):
                names = [name for name, _, _ in group]
                raise ValueError(
                    f"{names} were one parameter when the plan was applied and no longer are "
                    f"(to_empty() on a meta model unties them): tie them again, "
                    f"{names[1]} = {names[0]}, before the optimizer is made"
                )
        for submodule in module.modules():
            runner = submodule.__dict__.get("_tp2d")
            if runner is not None:
                runner.installed(submodule)
        remove_hooks(module, self)

    def _check_empty(self, module: nn.Module) -> None:
        """Refuse parameters of which some rank holds no element, if FSDP2 shards the model."""
        names = (kind.__name__ for inner in module.modules() for kind in type(inner).__mro__)
        if "FSDPModule" not in names:
            return
        for name, param in module.named_parameters():
            refuse_empty(name, param, self.mesh)

    def _check_placed(self, module: nn.Module) -> None:
        """Refuse a model whose DTensors DistributedDataParallel or FSDP1 has replaced."""
        wrapper = _data_parallel(module)
        for prefix, name in self.placed:
            try:
                owner = module.get_submodule(prefix)
            except AttributeError:
                continue  # Wrapped or replaced since.
            param = parameters_of(owner).get(name)
            # FSDP1 leaves a view of its own in the parameter's place.
            hidden = param is None and isinstance(owner.__dict__.get(name), Tensor)
            if wrapper is None and not hidden and not was_localized(param):
                continue
            where = f"{prefix}.{name}" if prefix else name
            raise ValueError(
                f"{type(module).__name__} on mesh {describe_mesh(self.mesh)}: {where}, a DTensor "
                f"when the plan was applied, is not the module's own parameter any more, as "
                f"{wrapper or 'DistributedDataParallel(device_mesh=...) and FSDP1'} make it: "
                f"{_MEND}"
            )
