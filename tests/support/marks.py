"""Cases that only ``pytest --deep`` runs."""

from __future__ import annotations

from typing import Any

import pytest


def deep(*values: Any) -> Any:
    """A case of ``pytest.mark.parametrize`` that is slow and thorough."""
    return pytest.param(*values, marks=pytest.mark.deep)
