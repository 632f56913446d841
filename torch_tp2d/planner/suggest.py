"""Suggests which grid, and which plan on it, trains a model fastest within the given memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..plans import plan_for
from .candidates import Suggestion
from .describe import OPTIMIZERS
from .machine import Machine, check_transport, machine_of, read_size
from .sandbox import dtype_of, fake_mesh
from .search import Search
from .step import Case, PlanLike

__all__ = ["suggest"]


def suggest(
    model: nn.Module,
    world_size: int,
    *,
    batch: int,
    seq: int,
    memory: str | float | None = None,
    link: str | float | None = None,
    device: str | Machine | None = None,
    per_node: int | None = None,
    transport: str | None = None,
    plan: PlanLike = None,
    inputs: Any = None,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: str = "adamw",
    micro_batches: int = 1,
) -> Suggestion:
    """Suggest which mesh of ``world_size`` devices trains a model fastest, and by which plan.

    It tries every ``[dp, tp_row, tp_col]`` with FSDP2 over ``dp``, and on the fastest of them HSDP
    too; and, beside our plans, torch's own as a careful user would run them: TP, TP with sequence
    parallelism, FSDP2, HSDP, and FSDP2 x TP at every size. Each is run once without values
    (:func:`torch_tp2d.describe`), and its work and transfers are then played in their order on a
    machine of the given rates. The answer may be "FSDP2" or "TP". The third dimension of AxoNN and
    Tesseract is ``dp`` here: FSDP2 around a grid.

    Of more than 64 meshes only those that move least by a rough count are tried, and the others if
    none of them fits.

    The prediction assumes that work takes its operations and bytes divided by a rate, that all
    ranks take the same time, and that further equal layers cost as much as one of the first. Peak
    memory is that of tensors alone, and dropout is left out on GPUs.

    Args:
        model: on any device, not parallelized; the meta device is enough.
        world_size: number of devices.
        batch: sequences in a step, those of all devices together.
        seq: tokens of a sequence.
        memory: memory of a device, ``"80GB"`` or bytes; by default that of ``device``, else not
            limited.
        link: bytes received per second, ``"400gbit"``, ``"25GB/s"`` or a number: between nodes if
            ``per_node`` is given, else between any two devices.
        device: a name of :data:`torch_tp2d.planner.machine.DEVICES` (``"h100"``), or a
            :class:`~torch_tp2d.planner.machine.Machine`; by default this machine is measured, and
            its link too if there is a process group.
        per_node: number of devices in a node, between which the device's own link is used; of a
            ``Machine`` that is its ``near``. On this machine no such link is measured.
        transport: ``"nccl"`` or ``"gloo"``; by default the device's.
        plan: a plan, or a function of a model and a mesh that returns one; its styles keep their
            algorithm. By default that of :func:`torch_tp2d.plan_for`.
        inputs, loss, optimizer: as for :func:`torch_tp2d.describe`; ``inputs`` of a micro-batch.
        micro_batches: how many micro-batches a step has; together they are ``batch``. Weights are
            gathered and gradients reduced once for all of them (:class:`~torch_tp2d.no_sync`), or
            for each, which takes less memory.

    Returns:
        A table that prints, fastest first, with ``best``, ``mesh_shape``, ``plan``, ``apply()`` and
        ``to_dict()``.

    Raises:
        TypeError: for a model of the wrong kind.
        ValueError: for a model that has no plan or nothing to train, for sizes that no mesh of so
            many devices takes, and if nothing fits into ``memory``, saying what would.

    Example::

        >>> with torch.device("meta"):
        ...     model = GPT2LMHeadModel(GPT2Config())
        >>> found = torch_tp2d.suggest(model, 8, batch=16, seq=1024, device="h100", link="400gbit")
        >>> print(found)
        >>> mesh = found.apply(model)          # on the 8 ranks
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"suggest takes a module, not {type(model).__name__}")
    counts = {"world_size": world_size, "batch": batch, "seq": seq, "micro_batches": micro_batches}
    counts |= {} if per_node is None else {"per_node": per_node}
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{name} is a number, at least 1, not {count!r}")
    if batch % micro_batches:
        raise ValueError(
            f"a batch of {batch} does not divide into {micro_batches} micro-batches: batch is of "
            f"the whole step"
        )
    check_transport(transport)
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer is one of {sorted(OPTIMIZERS)}, not {optimizer!r}")
    dtype = dtype_of(model)
    if plan is None:
        # Whether a model has a plan does not depend on the mesh: refuse it before the search.
        with fake_mesh((1, 1), 0, "nccl") as mesh:
            plan_for(model, mesh, inputs=inputs)
    machine, of_device = machine_of(device, link, per_node, transport, dtype)
    limit = of_device if memory is None else read_size(memory)
    case = Case(None, plan, batch, seq, inputs=inputs, loss=loss, micro_batches=micro_batches)
    search = Search(model, case, machine, limit, optimizer)
    found = search.run(world_size)
    return Suggestion(
        type(model).__name__,
        world_size,
        batch,
        seq,
        micro_batches,
        machine,
        limit,
        tuple(found),
        search.refused,
    )
