"""Hugging Face models on a grid, beside themselves on one device.

A test names a *builder* (a tiny model in fp64 from a config, the same on every rank), a *batch* (a
function of the step to keyword arguments of the model, labels among them) and the plan's options;
:func:`train_beside` trains both copies and measures everything.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import torch_tp2d
from support import world
from support.models import grid_mesh, relative
from torch_tp2d.plans import Plan, plan_for

pytest.importorskip("transformers")
world.preload("support.preload_hf")

TOLERANCE = 1e-10
"""Of everything, relative."""

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass
class Differences:
    """The largest relative ones that were seen."""

    loss: float = 0.0
    gradient: float = 0.0
    norm: float = 0.0
    parameter: float = 0.0

    def see(self, kind: str, actual: Tensor, wanted: Tensor) -> None:
        setattr(self, kind, max(getattr(self, kind), relative(actual.detach(), wanted.detach())))

    @property
    def worst(self) -> float:
        return max(getattr(self, field.name) for field in fields(self))


def in_fp64(model: nn.Module) -> nn.Module:
    """The model in fp64, with RMSNorms (T5's among them) that compute in it too.

    Those of transformers compute in fp32 whatever their input, where a sum in another order (as
    the strides of a shard may have it) differs by 1e-7.
    """
    for module in model.modules():
        kind = type(module)
        if kind.__name__.endswith(("RMSNorm", "T5LayerNorm")) and kind.__module__.startswith(
            "transformers."
        ):
            kind.forward = _rms_norm
    return model.double()


def _rms_norm(self: Any, x: Tensor) -> Tensor:
    return self.weight * (
        x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
    )


def causal_lm_truth(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of a causal LM on one device, in the logits' own precision.

    transformers' own rounds the logits to fp32 first.
    """
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs).logits
    labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """What the model itself says of labels."""
    return model(**batch).loss


def causal_lm_batch(size: int, sequence: int, vocab: int, padded: bool = False) -> Any:
    """Batches of ids, which are their own labels; a part of them padding, if ``padded``."""

    def batch(step: int) -> Batch:
        generator = torch.Generator().manual_seed(100 + step)
        ids = torch.randint(0, vocab, (size, sequence), generator=generator)
        if not padded:
            return {"input_ids": ids, "labels": ids}
        lengths = torch.randint(sequence // 2, sequence + 1, (size, 1), generator=generator)
        mask = (torch.arange(sequence) < lengths).long()
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": ids.masked_fill(mask == 0, -100),
        }

    return batch


def train_beside(
    reference: nn.Module,
    model: nn.Module,
    batch: Callable[[int], Batch],
    *,
    truth: Loss = causal_lm_truth,
    loss: Loss = own_loss,
    steps: int = 3,
    replica: tuple[int, int] | None = None,
) -> Differences:
    """Train both by AdamW with clipped gradients, the reference on one device.

    Args:
        replica: ``(index, count)`` of this rank's replica of the model, which is given its part of
            the batch. The loss is then not that of the batch, and not compared.
    """
    seen = Differences()
    optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (reference, model)]
    for step in range(steps):
        inputs = batch(step)
        wanted = truth(reference, inputs)
        if replica is None:
            actual = loss(model, inputs)
            seen.see("loss", actual, wanted)
        else:
            index, count = replica
            actual = loss(model, {key: value.chunk(count)[index] for key, value in inputs.items()})
        wanted.backward()
        actual.backward()
        ours = dict(model.named_parameters())
        names = [name for name, _ in reference.named_parameters()]
        assert names == list(ours), "ties, or names, are not what they were"
        scale = max(p.grad.norm() for p in reference.parameters() if p.grad is not None)
        for name, param in reference.named_parameters():
            if param.grad is None:
                assert ours[name].grad is None, name
                continue
            assert ours[name].grad is not None, name
            if param.grad.norm() > 1e-12 * scale:
                seen.see("gradient", ours[name].grad, param.grad)
            else:
                # Zero but for rounding: keys' biases, which softmax takes away.
                seen.see("gradient", ours[name].grad + scale, param.grad + scale)
        norms = [
            torch.nn.utils.clip_grad_norm_(part.parameters(), 0.5) for part in (reference, model)
        ]
        seen.see("norm", norms[1], norms[0])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, param in reference.named_parameters():
            seen.see("parameter", ours[name], param)
    return seen


def on_grid(
    build: Callable[[], nn.Module],
    rows: int,
    columns: int,
    *,
    edit: Callable[[Plan, DeviceMesh], None] | None = None,
    plans: Callable[..., Plan] = plan_for,
    **options: Any,
) -> tuple[nn.Module, nn.Module, DeviceMesh]:
    """The model on one device, its copy on a grid by its ready plan or another, and the mesh."""
    mesh = grid_mesh(rows, columns)
    reference = build()
    model = copy.deepcopy(reference)
    plan = plans(model, mesh, **options)
    if edit is not None:
        edit(plan, mesh)
    torch_tp2d.parallelize_module(model, mesh, plan)
    return reference, model, mesh
