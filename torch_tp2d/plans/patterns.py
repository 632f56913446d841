"""A plan that says why each entry is there, with one entry for equal modules of all layers."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from itertools import accumulate

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from .structure import own_parameters

__all__ = ["DerivedPlan", "by_patterns", "names_all"]


class DerivedPlan(dict[str, ParallelStyle]):
    """A plan that also holds the reason for each entry, and prints as these reasons.

    Attributes:
        reasons: by the plan's keys. Those of modules that are replicated on every rank begin with
            "whole".
    """

    def __init__(self) -> None:
        super().__init__()
        self.reasons: dict[str, str] = {}

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{key:{width}}  {why}" for key, why in self.reasons.items())


def by_patterns(
    modules: Collection[str], styles: Mapping[str, ParallelStyle], reasons: Mapping[str, str]
) -> DerivedPlan:
    """Merge styles into a plan that has ``*`` for the numbers of layers with equal styles.

    Args:
        modules: the names of all modules of the model.
        styles: by module name.
        reasons: the reason for each style, by module name.
    """
    alike: dict[str, set[str]] = {}
    for pattern in {_pattern(name) for name in styles}:
        # Its * stands for names that are no numbers, too.
        named = (name for name in modules if _matches(name, pattern))
        alike[pattern] = {repr(styles.get(name)) for name in named}
    plan = DerivedPlan()
    for name, style in styles.items():
        pattern = _pattern(name)
        key, why = (pattern, _pattern) if len(alike[pattern]) == 1 else (name, str)
        if key not in plan:
            plan[key] = style
            plan.reasons[key] = why(reasons[name])
    return plan


def names_all(plan: Collection[str], model: nn.Module) -> bool:
    """Whether all keys of a plan name modules, and all modules with own parameters are covered.

    A module is covered by a key that names it or a module around it; the key ``""``, which names
    the model itself, does not count.
    """
    names = {name for name, _ in model.named_modules()}
    keys = [key for key in plan if key]
    named = {name for key in keys for name in names if _matches(name, key)}
    if not all(any(_matches(name, key) for name in names) for key in keys):
        return False
    return all(
        any(prefix in named for prefix in accumulate(name.split("."), "{}.{}".format))
        for name, module in model.named_modules()
        if name and own_parameters(module)
    )


def _matches(name: str, key: str) -> bool:
    """Match a key part by part, as torch's ``parallelize_module`` does."""
    parts, tokens = name.split("."), key.split(".")
    return len(parts) == len(tokens) and all(map(fnmatch, parts, tokens))


def _pattern(text: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|\b)", "*", text)
