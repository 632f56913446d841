"""The answer of :func:`torch_tp2d.suggest`: ways to run a model, and what each would cost."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..mesh.layouts import TP_COL, TP_ROW
from ..parallelize import parallelize_module
from .describe import Memory
from .machine import Machine
from .sandbox import AXES, shard_over_data
from .simulate import Timing
from .table import as_html, as_text, in_bytes

__all__ = ["Candidate", "Suggestion", "Way"]


@dataclass(frozen=True)
class Way:
    """How a mesh of ``(dp, R, C)`` is used.

    Args:
        kind: ``"2-D"``, ``"TP"``, ``"TP+SP"`` or ``"FSDP2"``.
        shape: ``(dp, R, C)``.
        algorithm, row_dim: those of the plan's styles.
        keep: gathered weights are kept for backward, and for all micro-batches of a step.
        recompute: layers are recomputed for backward.
        replicate: number of copies of the weights over ``dp`` (HSDP); each copy is sharded over
            ``dp / replicate`` replicas.
        reduce_each: gradients are reduced in each micro-batch, not once.
    """

    kind: str
    shape: tuple[int, int, int]
    algorithm: str = "collective"
    row_dim: int = 0
    keep: bool = True
    recompute: bool = False
    replicate: int = 1
    reduce_each: bool = False

    @property
    def stock(self) -> bool:
        """Whether it needs only torch's own parallelism."""
        return self.kind != "2-D"

    @property
    def name(self) -> str:
        """Its name, for example ``FSDP2 2 x 2-D 2x2``."""
        replicas, rows, columns = self.shape
        outside = f"FSDP2 {replicas}"
        if self.replicate > 1:
            outside = f"HSDP {self.replicate}x{replicas // self.replicate}"
        if self.kind == "FSDP2":
            return outside
        grid = f"{self.kind} {columns}" if self.stock else f"2-D {rows}x{columns}"
        return grid if replicas == 1 else f"{outside} x {grid}"

    @property
    def full_name(self) -> str:
        """Its name, and all that sets it apart from other ways of the same name."""
        also = [] if self.kind == "FSDP2" else [self.algorithm]
        if self.moves_weights:
            also += ["weights kept" if self.keep else "weights gathered again"]
        also += ["reduced each time"] * self.reduce_each + ["recomputing"] * self.recompute
        return f"{self.name} ({', '.join(also)})" if also else self.name

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """``(R, C)``, ``(dp, R, C)``, or ``(replicate, shard, R, C)`` for HSDP."""
        replicas, *grid = self.shape
        if self.replicate > 1:
            return self.replicate, replicas // self.replicate, *grid
        return self.shape if replicas > 1 else tuple(grid)

    @property
    def moves_weights(self) -> bool:
        """Whether weights are gathered, so that keeping them is a choice."""
        return self.shape[0] * self.shape[1] > 1


@dataclass(frozen=True)
class Candidate:
    """One way of running the model, and what it is predicted to cost.

    Args:
        name: ``2-D 2x2``, ``FSDP2 2 x TP+SP 4``, ``HSDP 2x4 x 2-D 2x2``, ...
        mesh_shape: ``(R, C)``, or ``(dp, R, C)`` with FSDP2 over ``dp``, or
            ``(replicate, shard, R, C)`` with HSDP.
        plan: a dict of module names and styles; None for FSDP2 alone.
        stock: whether it needs only torch's own parallelism.
        algorithm, row_dim: those of the plan's styles.
        keep_weights: gathered weights are kept for backward, and for all micro-batches of a step;
            else they are gathered for each use.
        reduce_each: each micro-batch reduces its gradients; else the last one does, for all.
        recompute: layers are recomputed for backward (``torch.utils.checkpoint``).
        timing: seconds of a step, forward and backward, and of its work and its transfers.
        bytes: bytes that a rank receives in a step.
        memory: memory of a rank.
        fits: whether ``memory.peak`` is within the memory of a device.
    """

    name: str
    mesh_shape: tuple[int, ...]
    plan: dict[str, Any] | None
    stock: bool
    algorithm: str
    row_dim: int
    keep_weights: bool
    reduce_each: bool
    recompute: bool
    timing: Timing
    bytes: int
    memory: Memory
    fits: bool

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.timing.seconds

    def make_mesh(self, device_type: str = "cuda") -> DeviceMesh:
        """Make the mesh; all ranks have to call it together."""
        names = AXES[len(self.mesh_shape)]
        return init_device_mesh(device_type, self.mesh_shape, mesh_dim_names=names)

    def apply(self, model: nn.Module, mesh: DeviceMesh | None = None) -> DeviceMesh:
        """Apply the plan to a model, and FSDP2 around it if the candidate has it.

        All ranks have to call it together. It does not apply ``recompute``: wrap the layers by
        ``torch.utils.checkpoint`` before. Nor does it split micro-batches, which is up to the
        training loop: for all but the last, use :class:`~torch_tp2d.no_sync`, FSDP2's
        ``set_requires_gradient_sync(False)`` and, if ``keep_weights``,
        ``set_reshard_after_backward(False)``.

        Args:
            mesh: as :meth:`make_mesh` makes it, which is the default.

        Returns:
            The mesh. The plan is on ``mesh["tp_row", "tp_col"]``; FSDP2 is on ``mesh["dp"]``, and
            HSDP on ``mesh["replicate", "shard"]``.
        """
        mesh = self.make_mesh() if mesh is None else mesh
        if self.plan is not None:
            parallelize_module(model, mesh[TP_ROW, TP_COL], copy.deepcopy(self.plan))
        shard_over_data(model, mesh, not self.keep_weights)
        return mesh


@dataclass(frozen=True)
class Suggestion:
    """What :func:`suggest` found: a table of candidates, the best first."""

    model: str
    world_size: int
    batch: int
    seq: int
    micro_batches: int
    machine: Machine
    memory: float | None
    candidates: tuple[Candidate, ...]
    refused: dict[str, str]
    """By name of a way, algorithm and use of weights included, why it could not be run."""

    @property
    def best(self) -> Candidate:
        """The fastest that fits."""
        return self.candidates[0]

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The mesh shape of the best candidate."""
        return self.best.mesh_shape

    @property
    def plan(self) -> dict[str, Any] | None:
        """The plan of the best candidate."""
        return self.best.plan

    def apply(self, model: nn.Module, mesh: DeviceMesh | None = None) -> DeviceMesh:
        """Apply the best candidate, see :meth:`Candidate.apply`."""
        return self.best.apply(model, mesh)

    def to_dict(self) -> dict[str, Any]:
        """All fields, for JSON; the styles of plans are given as text."""
        found = asdict(replace(self, candidates=()))
        found["candidates"] = [
            {
                **asdict(replace(each, plan=None)),
                "plan": None if each.plan is None else {k: repr(v) for k, v in each.plan.items()},
            }
            for each in self.candidates
        ]
        found["machine"] = self.machine.to_dict()
        return found

    def __str__(self) -> str:
        title, notes = self._words()
        return "\n".join([title, as_text(*self._table()), *notes])

    def _repr_html_(self) -> str:
        title, notes = self._words()
        return as_html(title, *self._table(), notes)

    def _words(self) -> tuple[str, list[str]]:
        within = "" if self.memory is None else f", within {in_bytes(self.memory)} each"
        parts = f" in {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        title = (
            f"{self.model} on {self.world_size} devices{within}, batch {self.batch}{parts}, "
            f"sequence {self.seq}: predicted for a step, forward and backward"
        )
        return title, [f"not run: {name}: {reason}" for name, reason in self.refused.items()]

    def _table(self) -> tuple[list[str], list[list[str]]]:
        head = ["", "plan", "mesh", "algorithm", "gathered weights", "seconds", "against the best"]
        head += ["work", "transfers", "received", "peak memory"]
        rows = []
        for place, each in enumerate(self.candidates, 1):
            weights = "kept" if each.keep_weights else "gathered again"
            if self.micro_batches > 1:
                weights += ", reduced each time" if each.reduce_each else ", reduced once"
            moves = any(size > 1 for size in each.mesh_shape[:-1])
            rows.append(
                [
                    str(place) if each.fits else "too large",
                    each.name + ", recomputing" * each.recompute,
                    str(each.mesh_shape),
                    each.algorithm if each.plan is not None else "",
                    weights if moves else "",
                    f"{each.seconds:.3g}",
                    f"{each.seconds / self.best.seconds:.2f}",
                    f"{each.timing.compute:.3g}",
                    f"{each.timing.transfers:.3g}",
                    in_bytes(each.bytes),
                    in_bytes(each.memory.peak),
                ]
            )
        return head, rows
