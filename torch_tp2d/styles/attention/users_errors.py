"""Errors of an attention module's own code, told together with what it sees on a grid."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import torch

__all__ = ["place_in_users_code"]

_PACKAGE = f"{Path(__file__).parents[2]}{os.sep}"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


def place_in_users_code(error: BaseException) -> str | None:
    """The file and line in which the user's code has raised, or called a function of torch's.

    None if a style has: its errors say what to do already.
    """
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        path = frame.f_code.co_filename
        # A mode around the user's code calls torch's functions for it.
        if path.startswith(_TORCH) or frame.f_code.co_name == "__torch_function__":
            continue
        return None if path.startswith(_PACKAGE) else f"{path}:{line}"
    return None
