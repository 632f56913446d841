"""Marks of cases: those that only ``pytest --deep`` runs, and what some torch or device cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .world import DEVICE_OF_RANKS


def deep(*values: Any) -> Any:
    """A case of ``pytest.mark.parametrize`` that is slow and thorough."""
    return pytest.param(*values, marks=pytest.mark.deep)


def from_torch(release: str, why: str) -> pytest.MarkDecorator:
    """Skip with torch before a release, for what torch itself mended there."""
    before = torch.torch_version.TorchVersion(torch.__version__) < release
    return pytest.mark.skipif(before, reason=f"torch before {release}: {why}")


values_are_compared = pytest.mark.skipif(
    DEVICE_OF_RANKS != "cpu", reason="on a GPU a change that torch does not see is not looked for"
)
