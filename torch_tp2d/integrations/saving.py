"""Saves a model on a grid as a checkpoint that plain transformers loads."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import PreTrainedModel

__all__ = ["save_pretrained"]


def save_pretrained(model: nn.Module, path: str, **kwargs: Any) -> None:
    """``model.save_pretrained(path, **kwargs)`` for a model on a grid, with or without FSDP2.

    Every rank has to call it: the weights are gathered, parameter by parameter, on rank 0, which
    holds the full model on the CPU while it writes. The other ranks wait for it.

    Args:
        model: a model of transformers, with a plan applied.
        path: a folder.
        kwargs: those of transformers: ``max_shard_size``, ``safe_serialization``, ...

    Raises:
        TypeError: for a model that is not of a class of transformers.
        RuntimeError: on every rank, if rank 0 cannot write.

    Example::

        >>> save_pretrained(model, "trained")
        >>> AutoModelForCausalLM.from_pretrained("trained")
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"{type(model).__name__} is no model of transformers: save its state dict, by "
            f"torch.distributed.checkpoint.state_dict.get_model_state_dict"
        )
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    failed: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            _write(model, weights, path, kwargs)
        except Exception as error:  # For example a full disk. Every rank raises, else they wait.
            failed = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(failed)
    if failed[0] is not None:
        raise RuntimeError(f"rank 0 could not write {type(model).__name__} to {path}: {failed[0]}")


def _write(
    model: PreTrainedModel, weights: dict[str, Any], path: str, kwargs: dict[str, Any]
) -> None:
    config = copy.deepcopy(model.config)
    # from_pretrained on a grid leaves it in the config; with it, saving waits for other ranks.
    vars(config).pop("distributed_config", None)
    # The model's own class, below the classes that styles and FSDP2 put in front of it.
    ours = ("torch_tp2d.", "torch.")
    kind: Any = next(k for k in type(model).__mro__ if not k.__module__.startswith(ours))
    with torch.device("meta"):
        plain = kind(config)
    plain.generation_config = model.generation_config
    plain.save_pretrained(path, state_dict=weights, **kwargs)
