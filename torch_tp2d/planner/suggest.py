"""Which grid, and which plan on it, trains a model fastest within the memory that there is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..mesh.layouts import TP_COL, TP_ROW
from ..plans import plan_for
from ..plans.sample import copy_without_values
from .candidates import Candidate, Suggestion, Way
from .describe import OPTIMIZERS, Memory, describe_step
from .machine import Machine, machine_of, read_size
from .sandbox import equal_layers, fake_mesh
from .simulate import Timing, simulate
from .step import NO_PLAN, Case, PlanLike, run_step
from .table import in_bytes

__all__ = ["suggest"]

FEW = 3
"""So many layers, or micro-batches, and one less are run; what one adds is added for more."""
TRIED_FURTHER = 3
"""Of how many of the fastest meshes other ways of running them are tried."""


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

    What is taken for an estimate: work takes its operations and bytes divided by a rate, all ranks
    take the same time, a list of equal layers is told from two of them, and peak memory is that of
    tensors alone.

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
    search = _Search(model, case, machine, limit, optimizer)
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


class _Search:
    """Candidates of a model on a machine."""

    def __init__(
        self,
        model: nn.Module,
        case: Case,
        machine: Machine,
        limit: float | None,
        optimizer: str,
    ) -> None:
        self.case, self.machine, self.limit, self.optimizer = case, machine, limit, optimizer
        # Once for all: of a model in memory each copy would be large.
        self.model = copy_without_values(model)
        self.layers = equal_layers(self.model)
        # A plan of the user's has its own.
        self.algorithm = "pipelined" if case.plan is None else "auto"
        self.stock_algorithm = "collective" if case.plan is None else "auto"
        self.refused: dict[str, str] = {}
        self.found: dict[Way, Candidate] = {}

    def run(self, world_size: int) -> list[Candidate]:
        """All that can be run, the fastest that fits first."""
        for way in self._ways(world_size):
            self._try(way)
        if not self.found:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.refused.items())
            raise ValueError(
                f"no mesh of {world_size} devices takes a batch of {self.case.batch} sequences of "
                f"{self.case.seq} tokens{self._in_parts()}: dp has to divide the batch, tp_row to "
                f"have tokens for each rank, and tp_col heads; FSDP2 alone takes one of "
                f"{_divisors(self._least_batch())} devices. {reasons}"
            )
        fastest = sorted(self.found, key=lambda way: self.found[way].seconds)
        best_meshes = _meshes(fastest)
        best_stock = _meshes(way for way in fastest if way.stock)
        for way in fastest:
            if not way.moves_weights:
                continue
            ways = [way]
            if way.shape in best_meshes or way.stock or not self.found[way].fits:
                ways += self._without_kept(way)
            if way.shape in best_meshes or (way.stock and way.shape in best_stock):
                ways += [each for one in ways for each in _hybrids(one)]
            if way.shape in best_meshes and not way.stock and way.algorithm == "pipelined":
                ways.append(replace(way, algorithm="collective"))
            for each in ways:
                self._try(each)
        if not any(each.fits for each in self.found.values()):
            for way in list(self.found):
                if not way.keep or not way.moves_weights:
                    self._try(replace(way, recompute=True))
        return self._ranked()

    def _without_kept(self, way: Way) -> Iterator[Way]:
        """How it runs with gathered weights freed after each use."""
        if self.case.micro_batches == 1:
            yield replace(way, keep=False)
            return
        yield replace(way, keep=False, reduce_each=True)
        if way.stock:
            # Under no_sync a grid keeps what it has gathered.
            yield replace(way, keep=False)

    def _ranked(self) -> list[Candidate]:
        found = sorted(self.found.values(), key=lambda each: (not each.fits, each.seconds))
        if not found[0].fits:
            assert self.limit is not None
            least = min(found, key=lambda each: each.memory.peak)
            kept = least.memory.parameters + least.memory.gradients + least.memory.optimizer
            raise ValueError(
                f"nothing fits in {in_bytes(self.limit)}: the least is "
                f"{in_bytes(least.memory.peak)} a device, for {least.name}"
                f"{', recomputing' * least.recompute}, of which parameters, gradients and the "
                f"optimizer's state are {in_bytes(kept)}: give as much, or use more devices, more "
                f"micro-batches, a smaller batch or shorter sequences"
            )
        return found

    def _ways(self, world_size: int) -> Iterator[Way]:
        """Every mesh once, as it is run best as a rule."""
        yield Way("FSDP2", (world_size, 1, 1))
        for replicas in _divisors(world_size):
            for rows in _divisors(world_size // replicas):
                columns = world_size // replicas // rows
                shape = replicas, rows, columns
                if rows * columns == 1:
                    continue
                if rows == 1:
                    yield Way("TP", shape, self.stock_algorithm)
                if rows == 1 and self.case.plan is None:
                    yield Way("TP+SP", shape)
                few = self._least_batch() // replicas < rows
                row_dim = 1 if few and self.case.plan is None else 0
                yield Way("2-D", shape, self.algorithm, row_dim)

    def _try(self, way: Way) -> None:
        if way in self.found:
            return
        try:
            self.found[way] = self._predict(way)
        except (ValueError, RuntimeError) as error:
            # RuntimeErrors are the model's own, or DTensor's, on shards that do not suit it.
            self.refused[way.name] = str(error).partition("\n")[0]

    def _predict(self, way: Way) -> Candidate:
        replicas = way.shape[0]
        if self.case.batch % replicas:
            raise ValueError(f"a batch of {self.case.batch} does not divide over {replicas}")
        transport = "nccl" if way.stock else self.machine.transport
        case = replace(
            self.case,
            shape=way.mesh_shape,
            plan=NO_PLAN
            if way.kind == "FSDP2"
            else lambda model, mesh: self._plan(way, model, mesh),
            transport=transport,
            reshard=not way.keep,
            recompute=way.recompute,
            reduce_each=way.reduce_each,
        )
        numbers = self._numbers(way, case)
        plan = None
        if way.kind != "FSDP2":
            with fake_mesh(way.mesh_shape, 0, transport) as mesh:
                plan = self._plan(way, self.model, mesh[TP_ROW, TP_COL])
        return Candidate(
            way.name,
            way.mesh_shape,
            plan,
            way.stock,
            way.algorithm,
            way.row_dim,
            way.keep,
            way.reduce_each,
            way.recompute,
            numbers.timing,
            numbers.bytes,
            numbers.memory,
            self.limit is None or numbers.memory.peak <= self.limit,
        )

    def _plan(self, way: Way, model: nn.Module, mesh: DeviceMesh) -> Any:
        given = self.case.plan
        if given is None:
            plan: Any = plan_for(
                model,
                mesh,
                inputs=self.case.inputs,
                sequence_parallel=way.kind != "TP",
                row_dim=way.row_dim,
                algorithm=way.algorithm,
            )
        else:
            plan = given(model, mesh) if callable(given) else given
        plan = {name: copy.copy(style) for name, style in plan.items()}
        for style in plan.values():
            if hasattr(style, "reshard_after_forward") and way.moves_weights:
                style.reshard_after_forward = not way.keep
        return plan

    def _numbers(self, way: Way, case: Case) -> _Numbers:
        """Of all layers and micro-batches, from few of them."""
        micro_batch = case.batch // case.micro_batches

        def of_parts(parts: int) -> _Numbers:
            fewer = replace(case, batch=micro_batch * parts, micro_batches=parts)
            return _told_from(
                lambda layers: self._of(way, replace(fewer, layers=layers)), self.layers
            )

        return _told_from(of_parts, case.micro_batches)

    def _of(self, way: Way, case: Case) -> _Numbers:
        step = run_step(self.model, case)
        found = describe_step(step, self.model, case, self.optimizer)
        reach: dict[str, int] = {}
        ranks = 1
        for name, size in reversed(step.mesh.items()):
            ranks *= size
            reach[name] = ranks
        timing = simulate(step.recorder.events, self.machine, reach, stock=way.stock)
        return _Numbers(timing, found.total_bytes, found.memory)

    def _least_batch(self) -> int:
        return self.case.batch // self.case.micro_batches

    def _in_parts(self) -> str:
        parts = self.case.micro_batches
        return f" in {parts} micro-batches" if parts > 1 else ""


class _Numbers(NamedTuple):
    timing: Timing
    bytes: int
    memory: Memory

    def and_more(self, times: int, less: _Numbers) -> _Numbers:
        """With so many times what these have more than ``less``."""
        memory = {
            name: value + times * (value - getattr(less.memory, name))
            for name, value in asdict(self.memory).items()
        }
        timing = self.timing + (self.timing + less.timing * -1) * times
        moved = self.bytes + times * (self.bytes - less.bytes)
        return _Numbers(timing, moved, Memory(**memory))


def _told_from(of: Callable[[int], _Numbers], count: int) -> _Numbers:
    """Of so many equal things, from what :data:`FEW` of them and one less are."""
    if count <= FEW + 1:
        return of(count)
    return of(FEW).and_more(count - FEW, of(FEW - 1))


def _hybrids(way: Way) -> list[Way]:
    """HSDP in the place of FSDP2, with any number of copies of the weights."""
    return [replace(way, replicate=copies) for copies in _divisors(way.shape[0])[1:-1]]


def _meshes(fastest: Iterable[Way]) -> list[tuple[int, int, int]]:
    """The first ones, of which more is tried."""
    return list(dict.fromkeys(way.shape for way in fastest))[:TRIED_FURTHER]


def _divisors(number: int) -> Sequence[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
