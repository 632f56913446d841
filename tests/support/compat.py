"""Checks of the names of ``torch_tp2d/_torch_compat/``, by name; and what they look by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_tp2d._torch_compat import tensors

Check = Callable[..., None]


class Checks(dict[str, Check]):
    """The checks of a test module, by the names that they are of."""

    def of(self, *names: str) -> Callable[[Check], Check]:
        """The check of these names."""

        def note(check: Check) -> Check:
            self.update(dict.fromkeys(names, check))
            return check

        return note


class Ops(tensors.TorchDispatchMode):
    """Notes the operators that it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))
