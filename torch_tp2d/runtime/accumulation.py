"""Gradient accumulation: weights gathered, and gradients reduced, once for all micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._torch_compat.modules import parameters_of
from .._torch_compat.tensors import local_tensor
from ..comm import Pending
from .unseen import UnseenChanges
from .versions import copy_to_compare, same_bits, versions

__all__ = ["Accumulation"]

_Key = tuple[nn.Module, int]


@dataclass
class _Weight:
    """A gathered weight, and the parameter that it was gathered from."""

    param: Tensor
    versions: tuple[int | None, ...]
    values: Tensor | None
    """The shard's values at that time; None where they are not compared."""
    gathered: Tensor

    def is_current(self, dtype: torch.dtype) -> bool:
        """Whether it is up to date, judged by what is the same on every rank."""
        return versions(self.param) == self.versions and self.gathered.dtype == dtype

    def compare(self, module: nn.Module, unseen: UnseenChanges) -> None:
        """Note whether this rank's values changed in a way that torch does not see."""
        if self.values is not None:
            now = local_tensor(self.param).detach()
            unseen.note(module, changed=not same_bits(now, self.values))


class _Gradient(NamedTuple):
    """This rank's partial gradient of a weight, summed over the micro-batches so far."""

    module: nn.Module
    param: Tensor
    part: Tensor
    finish: Callable[[Tensor], None]
    """Reduces the partial gradient and adds it to the parameter's ``.grad``."""


class Accumulation:
    """What the micro-batches of a step keep on a mesh for the last of them.

    While it :attr:`holds`, a Linear keeps its gathered weight for the next micro-batch, and this
    rank's partial gradient of the weight is kept here. The first backward afterwards adds it to its
    own, reduces the sum, and releases the weights.
    """

    def __init__(self, unseen: UnseenChanges) -> None:
        self.holds = False
        self._unseen = unseen
        # Of a module and a weight, by identity, as a module may be given other weights between two
        # micro-batches. What is kept holds the weight, so that its id is not reused.
        self._weights: dict[_Key, _Weight] = {}
        self._gradients: dict[_Key, _Gradient] = {}
        self._steps: Any = None
        """The handle of the hook on optimizers, while gradients are kept."""

    def __repr__(self) -> str:
        return (
            f"Accumulation({len(self._weights)} gathered weights, "
            f"{len(self._gradients)} gradients not reduced)"
        )

    def __bool__(self) -> bool:
        return self.holds or bool(self._weights) or bool(self._gradients)

    def gathered(self, module: Any, param: Tensor, dtype: torch.dtype) -> Pending | None:
        """The module's weight ``param``, if an earlier micro-batch has gathered it as it is.

        If it was changed in a way that torch does not see, then it is still taken, and all ranks
        raise later: one whose shard happens to be unchanged would not take part in gathering anew.
        """
        held = self._weights.get((module, id(param)))
        if held is None:
            return None
        if not held.is_current(dtype):
            del self._weights[module, id(param)]
            return None
        held.compare(module, self._unseen)
        return Pending(held.gathered)

    def keep_weight(self, module: nn.Module, param: Tensor, gathered: Tensor) -> None:
        """Keep a module's gathered weight for the next micro-batch, if there is to be one.

        Not one that is computed anew at each use, as a parametrized one is.
        """
        key = module, id(param)
        if not self.holds or key in self._weights:
            return
        if parameters_of(module).get("weight") is not param:
            return
        values = copy_to_compare(local_tensor(param).detach())
        self._weights[key] = _Weight(param, versions(param), values, gathered)

    def keep_gradient(
        self, module: nn.Module, param: Tensor, part: Tensor, finish: Callable[[Tensor], None]
    ) -> None:
        """Add this rank's partial gradient of a weight to what is kept."""
        if self._steps is None:
            self._steps = register_optimizer_step_pre_hook(self._check_step)
        before = self._gradients.get((module, id(param)))
        total = part if before is None else before.part.add_(part)
        self._gradients[module, id(param)] = _Gradient(module, param, total, finish)

    def with_kept(self, module: nn.Module, param: Tensor, part: Tensor) -> Tensor:
        """Add what was kept to this rank's partial gradient, which is about to be reduced."""
        kept = self._gradients.pop((module, id(param)), None)
        return part if kept is None else kept.part.add_(part)

    def discard(self) -> None:
        """Give the step up: forget what its micro-batches have kept."""
        self._weights.clear()
        self._gradients.clear()
        self._let_step()

    def settle(self) -> None:
        """After the last backward: reduce the kept gradients of weights that were not in it."""
        try:
            while self._gradients:
                # In the order in which they were kept, which is that of every rank.
                kept = self._gradients.pop(next(iter(self._gradients)))
                kept.finish(kept.part)
        finally:
            # Of a step that failed nothing is left for the next.
            self.discard()

    def _let_step(self) -> None:
        if self._steps is not None:
            self._steps.remove()
            self._steps = None

    def _check_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for kept in self._gradients.values():
            if id(kept.param) in stepped:
                raise ValueError(
                    f"an optimizer steps while the gradient of {kept.module} is still kept for the "
                    f"last micro-batch: the last backward before the step is to be outside of "
                    f"no_sync, and through one of the plan's Linears; no_sync(mesh).discard() "
                    f"gives the step up"
                )
