"""Checkpoints of a training run: each rank writes its own shards, the files know of no grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint after so many steps lies."""
    return folder / f"step-{step:08d}"


def newest_checkpoint(folder: Path, device: torch.device) -> Path | None:
    """The last checkpoint that was written to its end, as rank 0 sees it.

    DCP writes the metadata last, so that a checkpoint which was killed on the way has none. One
    rank decides: a file system may show the file on one host earlier than on another.
    """
    names = (path.parent.name for path in folder.glob("step-*/.metadata"))
    steps = (int(name.removeprefix("step-")) for name in names)
    newest = torch.tensor(max(steps, default=0), device=device)
    dist.broadcast(newest, 0)
    return step_folder(folder, int(newest)) if newest else None


def save_checkpoint(
    folder: Path, model: nn.Module, optimizer: Optimizer, step: int, position: int
) -> None:
    """Writes what :func:`load_checkpoint` reads: ``position`` is the data's."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    progress = {"step": step, "position": position}
    state = {"model": of_model, "optimizer": of_optimizer, "progress": progress}
    dcp.save(state, checkpoint_id=step_folder(folder, step))


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer) -> tuple[int, int]:
    """Fills both, on whichever grid they lie; returns the step and the data's position."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    progress = {"step": 0, "position": 0}
    state: dict[str, Any] = {"model": of_model, "optimizer": of_optimizer, "progress": progress}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    return state["progress"]["step"], state["progress"]["position"]
