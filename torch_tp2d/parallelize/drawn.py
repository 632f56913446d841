"""Random numbers that the user's code draws: for other parts ranks of one seed draw the same.

Not those of a style, whose dropout draws one key on all ranks, and other masks from it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .._torch_compat.tensors import disable_current_modes
from .user_code import Call, place_of

__all__ = ["Drawn", "state_before"]

_DRAW = (
    *("rand", "randn", "randint", "randperm", "bernoulli", "uniform", "normal", "exponential"),
    *("geometric", "cauchy", "log_normal", "random", "multinomial", "poisson", "binomial"),
    *("gumbel_softmax", "rrelu", "standard_gamma"),
)


def state_before(call: Call) -> Tensor | None:
    """The state of the generator that a call is about to draw from, two rows of it; else None."""
    draws = call.name.strip("_").removesuffix("_like") in _DRAW and place_of() is not None
    return _state(call) if draws else None


def _state(call: Call) -> Tensor:
    generator = call.kwargs.get("generator")
    with disable_current_modes():
        if generator is not None:
            state: Tensor = generator.get_state()
        else:
            device = call.given[0].device if call.given else call.kwargs.get("device")
            state = _state_of(torch.device(device or torch.get_default_device()))
        return torch.stack([state, state.flip(0)]).double()


def _state_of(device: torch.device) -> Any:
    if device.type in ("cpu", "meta"):
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


class Drawn:
    """From which state tensors were drawn, or what they were made of."""

    def __init__(self) -> None:
        self._known = WeakIdKeyDictionary()

    def follow(self, call: Call, state: Tensor | None) -> Tensor | None:
        """Take what is made for drawn from a state, or as what it is made of.

        Args:
            state: that before the call. It is returned if the call has drawn from it.
        """
        if state is not None and torch.equal(state, _state(call)):
            state = None
        known = (self._known[x] for x in call.given if x in self._known)
        of = next(known, None) if state is None else state
        for y in call.made if of is not None else ():
            self._known[y] = of
        return state

    def state_of(self, x: Tensor) -> Tensor | None:
        """The state that a tensor was drawn from, None if it is not random."""
        state: Tensor | None = self._known.get(x)
        return state
