"""Describes what a plan does to a model: layouts, shards, bytes and memory, by module."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm import NCCL, transport_of
from ..mesh.grid import describe_mesh
from ..parallelize.table import LayoutRow
from .machine import check_transport
from .rates import Rates
from .sandbox import AXES
from .step import Case, PlanLike, Step, run_step
from .table import as_html, as_text, in_bytes
from .trace import ACTIVATIONS, GATHERED

__all__ = ["Description", "Memory", "ModuleCost", "Moved", "describe"]

OPTIMIZERS: Mapping[str, int] = {"adamw": 2, "adam": 2, "momentum": 1, "sgd": 0}
"""How many tensors of a parameter's size each optimizer keeps for it."""


@dataclass(frozen=True)
class Moved:
    """Collectives of one kind along one axis, and the bytes that this rank receives in them."""

    axis: str
    op: str
    calls: int
    bytes: int


@dataclass(frozen=True)
class Memory:
    """Memory of one rank, in bytes.

    ``peak`` is the largest sum within a step of parameters, the gradients that exist by then, the
    optimizer's state, what is kept for backward, gathered weights and temporary tensors. It does
    not include what an allocator or a kernel library takes in addition, nor temporary memory of
    the optimizer's own step.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """Kept for backward, without gathered weights."""
    gathered: int
    """Gathered weights: those kept for backward or those at the peak, the larger of the two."""
    peak: int


@dataclass(frozen=True)
class ModuleCost:
    """What one module costs by itself, without the modules inside it."""

    module: str
    layouts: tuple[LayoutRow, ...]
    """The layouts that a plan gave it, one row for each style and hook."""
    input_shape: tuple[int, ...] | None
    output_shape: tuple[int, ...] | None
    weight_shape: tuple[int, ...] | None
    """The three shapes are those of this rank's shards."""
    parameters: int
    forward: tuple[Moved, ...]
    backward: tuple[Moved, ...]
    kept: int
    """Bytes of activations kept for backward."""
    kept_weights: int
    """Bytes of gathered weights kept for backward."""
    flops: int


@dataclass(frozen=True)
class Description:
    """What :func:`describe` found. It prints as a table, also in a notebook."""

    model: str
    mesh: dict[str, int]
    transport: str
    rank: int
    batch: int
    seq: int
    modules: tuple[ModuleCost, ...]
    memory: Memory

    @property
    def forward(self) -> tuple[Moved, ...]:
        """All collectives of forward."""
        return _sum(move for module in self.modules for move in module.forward)

    @property
    def backward(self) -> tuple[Moved, ...]:
        """All collectives of backward."""
        return _sum(move for module in self.modules for move in module.backward)

    @property
    def flops(self) -> int:
        """Multiplications and additions in this rank's products."""
        return sum(module.flops for module in self.modules)

    @property
    def total_bytes(self) -> int:
        """Bytes that this rank receives in a step."""
        return sum(move.bytes for move in (*self.forward, *self.backward))

    def bytes_along(self, axis: str) -> int:
        """Bytes that this rank receives along one axis of the mesh in a step."""
        return sum(move.bytes for move in (*self.forward, *self.backward) if move.axis == axis)

    def to_dict(self) -> dict[str, Any]:
        """All fields and the totals, for JSON."""
        ways = "forward", "backward"
        totals = {way: [asdict(move) for move in getattr(self, way)] for way in ways}
        return {
            **asdict(self),
            "total": {**totals, "bytes": self.total_bytes, "flops": self.flops},
        }

    def __str__(self) -> str:
        title, notes = self._words()
        return "\n".join([title, as_text(*self._table()), *notes])

    def _repr_html_(self) -> str:
        title, notes = self._words()
        return as_html(title, *self._table(), notes)

    def _words(self) -> tuple[str, list[str]]:
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh.items())
        title = (
            f"{self.model} on mesh ({mesh}), batch {self.batch}, sequence {self.seq}: rank "
            f"{self.rank}, over {self.transport}; layouts (on tp_row, on tp_col)"
        )
        notes = [f"{way}: {_moves(getattr(self, way))}" for way in ("forward", "backward")]
        sizes = [f"{name} {in_bytes(size)}" for name, size in asdict(self.memory).items()]
        return title, [*notes, f"memory: {', '.join(sizes)}"]

    def _table(self) -> tuple[list[str], list[list[str]]]:
        along = [name for name, size in self.mesh.items() if size > 1]
        along += ["other"] * any(move.axis == "other" for move in (*self.forward, *self.backward))
        head = ["module", "style", "input", "output", "weight", "dataflow", "algorithm"]
        head += ["local input", "local output", "local weight"]
        head += [f"{axis} {way}" for axis in along for way in ("fwd", "bwd")]
        head += ["kept", "parameters"]
        rows: dict[tuple[str, ...], list[str]] = {}
        counts: Counter[tuple[str, ...]] = Counter()
        for module in self.modules:
            pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", module.module)
            cells = _layout_cells(module.layouts)
            cells += map(_size, (module.input_shape, module.output_shape, module.weight_shape))
            for axis in along:
                cells += [_along(moves, axis) for moves in (module.forward, module.backward)]
            kept = module.kept + module.kept_weights
            cells += [in_bytes(kept) if kept else "", in_bytes(module.parameters)]
            key = (pattern, *cells)
            counts[key] += 1
            rows[key] = [module.module or "(the model)", *cells]
        for key, row in rows.items():
            if counts[key] > 1:
                row[0] = f"{key[0]} (x{counts[key]})"
        total = ["total", *[""] * 9]
        for axis in along:
            total += [_along(moves, axis) for moves in (self.forward, self.backward)]
        kept = self.memory.activations + sum(module.kept_weights for module in self.modules)
        return head, [*rows.values(), [*total, in_bytes(kept), in_bytes(self.memory.parameters)]]


def describe(
    model: nn.Module,
    mesh: DeviceMesh | Sequence[int] | None = None,
    plan: PlanLike = None,
    *,
    batch: int,
    seq: int,
    inputs: Any = None,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: str = "adamw",
    transport: str | None = None,
    rates: Rates | None = None,
    reshard_after_forward: bool = True,
    micro_batches: int = 1,
    rank: int = 0,
) -> Description:
    """Describe what a plan does to a model on a mesh, module by module, without running it there.

    One training step of a copy runs on tensors without values, in this process alone; the bytes
    that it counts are those that the step on the mesh moves. Neither the model nor any process
    group is touched, so the model may be on the meta device, and the mesh of any size.

    Args:
        model: on any device, not parallelized yet; or, without ``mesh`` and ``plan``, with a plan
            applied to it.
        mesh: a shape ``(R, C)``; ``(dp, R, C)`` with FSDP2 outside, over the outermost lists of
            modules and the root; ``(replicate, shard, R, C)`` with HSDP; or a DeviceMesh of such
            axes, named ``("dp", "tp_row", "tp_col")`` and so on.
        plan: as for :func:`torch_tp2d.parallelize_module`; or a function of a model and a mesh that
            returns one (and may edit the model, which is a copy); by default that of
            :func:`torch_tp2d.plan_for`.
        batch: sequences in a step, those of all ranks together.
        seq: tokens of a sequence.
        inputs: the arguments with which one data-parallel replica calls the model: a dict of
            keyword arguments or a tuple. By default ids of ``[batch, seq]``, and labels if the
            model takes them; images of its config's size; for a model without an embedding, this
            rank's shard of ``[batch, seq, features]`` in the layout that its first module takes.
        loss: a function of the model's output that returns a scalar. By default the model's own
            loss if it has one, the cross entropy of logits that lie on the grid, or a sum.
        optimizer: ``"adamw"``, ``"adam"``, ``"momentum"`` or ``"sgd"``, for its state's size.
        transport: ``"nccl"`` or ``"gloo"``, which differ in how transfers are split and which
            operators they are; by default the mesh's own, or ``"nccl"``.
        rates: the rates by which ``"auto"`` chooses on gloo; by default they are not known.
        reshard_after_forward: FSDP2's own argument, for the axes of data parallelism.
        micro_batches: how many micro-batches a step has; together they are ``batch``. All but the
            last run under :class:`~torch_tp2d.no_sync` and ``set_requires_gradient_sync(False)``.
        rank: the rank of the mesh to describe, for sizes that do not divide.

    Returns:
        A table that prints, with ``to_dict()``. Bytes are those that the rank receives.

    Raises:
        TypeError: for a model or mesh of the wrong kind.
        ValueError: for a mesh, a plan or sizes that cannot work, saying which would; for a model
            that FSDP2 was applied to.

    Example::

        >>> with torch.device("meta"):
        ...     model = GPT2LMHeadModel(GPT2Config())
        >>> print(torch_tp2d.describe(model, (4, 4), batch=16, seq=1024))
        >>> torch_tp2d.describe(model, (4, 4), batch=16, seq=1024).memory.peak / 2**30
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"describe takes a module, not {type(model).__name__}")
    for name, size in (("batch", batch), ("seq", seq), ("micro_batches", micro_batches)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} is a number of {_COUNTED[name]}, at least 1, not {size!r}")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer is one of {sorted(OPTIMIZERS)}, not {optimizer!r}")
    shape, transport = _shape_of(mesh, plan, transport, rank)
    case = Case(
        shape,
        plan,
        batch,
        seq,
        rank=rank,
        transport=transport,
        inputs=inputs,
        loss=loss,
        reshard=reshard_after_forward,
        rates=rates,
        micro_batches=micro_batches,
    )
    return describe_step(run_step(model, case), model, case, optimizer)


_COUNTED: Mapping[str, str] = {
    "batch": "sequences",
    "seq": "tokens of a sequence",
    "micro_batches": "micro-batches of a step",
}


def _shape_of(
    mesh: Any, plan: PlanLike, transport: str | None, rank: int
) -> tuple[tuple[int, ...] | None, str]:
    """The shape of the mesh (None if a plan was applied already), and the transport."""
    check_transport(transport)
    if mesh is None:
        if plan is not None:
            raise ValueError(
                "a plan goes onto a mesh: give its shape, (2, 2) say, beside the plan; a model "
                "with a plan applied to it is described without either"
            )
        if transport is not None or rank:
            raise ValueError(
                "a model with a plan applied to it is on its own mesh: transport= and rank= are "
                "for one that is given"
            )
        return None, ""
    if isinstance(mesh, DeviceMesh):
        if mesh.mesh_dim_names != AXES.get(mesh.ndim):
            # Axes of other names may be of a pipeline, say, over which FSDP2 shards nothing.
            raise ValueError(
                f"describe takes a mesh named {AXES[2]}, {AXES[3]} or {AXES[4]}, but this one is "
                f"{describe_mesh(mesh)}: give its shape instead, (R, C), or with axes of data "
                f"parallelism before it, (dp, R, C) or (replicate, shard, R, C)"
            )
        transport = transport or transport_of(mesh).name
        shape = tuple(mesh.shape)
    else:
        if isinstance(mesh, str) or not isinstance(mesh, Iterable):
            raise TypeError(f"a mesh is a shape, (R, C) say, or a DeviceMesh, not {mesh!r}")
        shape = tuple(mesh)
        if len(shape) not in AXES or any(not isinstance(n, int) or n < 1 for n in shape):
            raise ValueError(
                f"a mesh is of shape (R, C), (dp, R, C) or (replicate, shard, R, C), of at least "
                f"one rank each, not {shape}"
            )
    ranks = 1
    for size in shape:
        ranks *= size
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not on a mesh of shape {shape}: it has 0 to {ranks - 1}")
    return shape, transport or NCCL.name


def describe_step(step: Step, model: nn.Module, case: Case, optimizer: str) -> Description:
    """Sum up a recorded step, by module in the order of ``named_modules()``."""
    recorder = step.recorder
    rows: dict[str, list[LayoutRow]] = {}
    for row in step.layouts or ():
        rows.setdefault("" if row.module == "(the model)" else row.module, []).append(row)
    moved: dict[tuple[str, bool], tuple[Moved, ...]] = {}
    for (module, back, axis, op), calls in sorted(recorder.calls.items()):
        move = Moved(axis, op, calls, recorder.bytes[module, back, axis, op])
        moved[module, back] = (*moved.get((module, back), ()), move)
    modules = []
    for name, _ in model.named_modules():
        kept = step.kept.get(name, Counter())
        forward, backward = (moved.get((name, way), ()) for way in (False, True))
        parameters = step.parameters.get(name, 0)
        if not (rows.get(name) or forward or backward or parameters or kept.total()):
            continue
        shapes = recorder.shapes.get(name, [None, None])
        modules.append(
            ModuleCost(
                name,
                tuple(rows.get(name, ())),
                shapes[0],
                shapes[1],
                step.weights.get(name),
                parameters,
                forward,
                backward,
                kept=kept[ACTIVATIONS],
                kept_weights=kept[GATHERED],
                flops=recorder.flops[name],
            )
        )
    all_kept: Counter[str] = sum(step.kept.values(), Counter())
    state = OPTIMIZERS[optimizer] * step.trainable
    peak = recorder.memory.peak
    memory = Memory(
        parameters=sum(step.parameters.values()),
        gradients=step.trainable,
        optimizer=state,
        activations=all_kept[ACTIVATIONS],
        gathered=max(all_kept[GATHERED], peak[GATHERED]),
        peak=peak.total() + state,
    )
    return Description(
        type(model).__name__,
        step.mesh,
        step.transport,
        case.rank,
        case.batch,
        case.seq,
        tuple(modules),
        memory,
    )


def _sum(moves: Iterable[Moved]) -> tuple[Moved, ...]:
    calls: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for move in moves:
        calls[move.axis, move.op] += move.calls
        sizes[move.axis, move.op] += move.bytes
    return tuple(Moved(*key, calls[key], sizes[key]) for key in sorted(calls))


def _moves(moves: Sequence[Moved]) -> str:
    if not moves:
        return "nothing moves"
    said = [f"{move.axis} {move.op} x{move.calls} {in_bytes(move.bytes)}" for move in moves]
    return f"{in_bytes(sum(move.bytes for move in moves))} ({', '.join(said)})"


def _along(moves: Sequence[Moved], axis: str) -> str:
    found = [move.bytes for move in moves if move.axis == axis]
    return in_bytes(sum(found)) if found else ""


def _size(shape: Sequence[int] | None) -> str:
    return "" if shape is None else "x".join(map(str, shape)) or "scalar"


def _layout_cells(rows: Sequence[LayoutRow]) -> list[str]:
    names = ("style", "input", "output", "weight", "dataflow", "algorithm")
    return [" | ".join(filter(None, (getattr(row, name) for row in rows))) for name in names]
