"""Keeps parameters tied that several modules hold."""

from __future__ import annotations

from collections import defaultdict

from torch import nn
from torch.distributed.tensor import DTensor

from .._torch_compat.modules import parameters_of


def ties_of(root: nn.Module) -> list[list[tuple[str, nn.Module, str]]]:
    """Groups of ``(name, owner, attribute)`` that hold one parameter."""
    owners = defaultdict(list)
    for prefix, module in root.named_modules():
        for name, param in parameters_of(module).items():
            if param is not None:
                owners[id(param)].append((f"{prefix}.{name}" if prefix else name, module, name))
    return [group for group in owners.values() if len(group) > 1]


def tie_again(ties: list[list[tuple[str, nn.Module, str]]]) -> None:
    """Tie a parent's parameter to the placed one, where a module inside it holds the same.

    No plan entry can name the parent's parameter alone, and only the module inside uses it: BERT's
    head holds its decoder's bias only for its name in checkpoints.
    """
    for group in ties:
        for _, owner, attribute in group:
            if isinstance(parameters_of(owner)[attribute], DTensor):
                continue
            inside = {id(module) for module in owner.modules()} - {id(owner)}
            for _, other, name in group:
                placed = parameters_of(other)[name]
                if id(other) in inside and isinstance(placed, DTensor):
                    owner.register_parameter(attribute, placed)
