"""Which grid, and which plan on it, trains a model fastest within the memory that there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..plans import plan_for
from .candidates import Suggestion
from .describe import OPTIMIZERS
from .machine import Machine, machine_of, read_size
from .sandbox import fake_mesh
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
    """Which mesh of so many devices trains a model fastest, and by which plan.

    Tries every ``[dp, tp_row, tp_col]``, with FSDP2 over ``dp``, HSDP over that of the fastest, and
    beside our plans torch's own as a careful user would run them: TP, TP with sequence
    parallelism, FSDP2, HSDP, and FSDP2 x TP at every size. Each is run once without values
    (:func:`torch_tp2d.describe`), and the order of its work and transfers played on a machine of
    the given rates. The answer may be "FSDP2" or "TP". AxoNN's and Tesseract's third dimension is
    here ``dp``: FSDP2 around a grid.

    Of more than 64 meshes those that move least by a rough count are tried, the others if none of
    them fits.

    What is taken for an estimate: work takes its operations and bytes divided by a rate, all ranks
    take the same time, a list of equal layers is told from two of them, peak memory is that of
    tensors alone, and on GPUs dropout is left out.

    Args:
        model: on any device, not parallelized; the meta device is enough.
        world_size: number of devices.
        batch: sequences of a step, of all devices together.
        seq: tokens of each.
        memory: of a device, ``"80GB"`` or bytes; by default that of ``device``, else not limited.
        link: bytes received a second, ``"400gbit"``, ``"25GB/s"`` or a number: between nodes where
            ``per_node`` is given, else between any two devices.
        device: a name of :data:`torch_tp2d.planner.machine.DEVICES` (``"h100"``), or a
            :class:`~torch_tp2d.planner.machine.Machine`; by default this machine, measured, its
            link too where there is a process group.
        per_node: devices of a node, which have the device's own link between them.
        transport: ``"nccl"`` or ``"gloo"``; by default the device's.
        plan: one, or a function of a model and a mesh that returns one, in which case its styles
            keep the algorithm that it says; by default :func:`torch_tp2d.plan_for`'s.
        inputs, loss, optimizer: as for :func:`torch_tp2d.describe`; ``inputs`` of a micro-batch.
        micro_batches: of a step, which together are ``batch``: weights are gathered once for all
            of them and gradients reduced once (:class:`~torch_tp2d.no_sync`), or, which takes less
            memory, for each.

    Returns:
        A table that prints, fastest first, with ``best``, ``mesh_shape``, ``plan``, ``apply()`` and
        ``to_dict()``.

    Raises:
        TypeError: for a model of the wrong kind.
        ValueError: for a model that no plan knows, sizes that no mesh of so many devices takes, or
            memory that nothing fits, saying what would.

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
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{name} is a number, at least 1, not {count!r}")
    if batch % micro_batches:
        raise ValueError(
            f"a batch of {batch} does not divide into {micro_batches} micro-batches: batch is of "
            f"the whole step"
        )
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer is one of {sorted(OPTIMIZERS)}, not {optimizer!r}")
    if plan is None:
        # An unknown model is no matter of the mesh.
        with fake_mesh((1, 1), 0, "nccl") as mesh:
            plan_for(model, mesh, inputs=inputs)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
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
