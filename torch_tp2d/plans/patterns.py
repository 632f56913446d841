"""A plan that says why each entry is there, with one entry for what is alike in every layer."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from itertools import accumulate

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from .structure import own_parameters

__all__ = ["DerivedPlan", "by_patterns", "names_all"]


class DerivedPlan(dict[str, ParallelStyle]):
    """A plan, and for each entry why it is there.

    Attributes:
        reasons: by the plan's keys. Those of modules that are whole on every rank begin with
            "whole".
    """

    def __init__(self) -> None:
        super().__init__()
        self.reasons: dict[str, str] = {}

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{key:{width}}  {why}" for key, why in self.reasons.items())


def by_patterns(
    modules: Iterable[str], styles: Mapping[str, ParallelStyle], reasons: Mapping[str, str]
) -> DerivedPlan:
    """The plan of ``styles``, by module name, with ``*`` for numbers of layers that are alike.

    Args:
        modules: the names of all modules of the model.
        reasons: for each of the styles.
    """
    alike: dict[str, list[str]] = defaultdict(list)
    for name in modules:
        alike[_pattern(name)].append(name)
    plan = DerivedPlan()
    for name, style in styles.items():
        pattern = _pattern(name)
        shown = {repr(styles.get(other)) for other in alike[pattern]}
        key, why = (pattern, _pattern) if len(shown) == 1 else (name, str)
        if key not in plan:
            plan[key] = style
            plan.reasons[key] = why(reasons[name])
    return plan


def names_all(plan: Iterable[str], model: nn.Module) -> bool:
    """Whether a plan's keys are names in a model, and name each module with parameters of its own.

    Or a module around it, but for the model itself.
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
    """As torch's ``parallelize_module`` reads keys: part by part."""
    parts, tokens = name.split("."), key.split(".")
    return len(parts) == len(tokens) and all(map(fnmatch, parts, tokens))


def _pattern(text: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|\b)", "*", text)
