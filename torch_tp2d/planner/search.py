"""Tries the ways to run a model on a number of devices, one by one, without values."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..mesh.layouts import TP_COL, TP_ROW
from ..plans import plan_for
from ..plans.sample import copy_without_values
from .candidates import Candidate, Way
from .describe import Memory, describe_step
from .machine import Machine
from .sandbox import fake_mesh, lists_of_equals
from .simulate import Timing, simulate
from .step import NO_PLAN, Case, run_step
from .table import in_bytes

__all__ = ["Search"]

FEW = 3
"""How many layers, or micro-batches, are run, and in a second run one less. For a model with more,
the difference between the two is added for each further one. Lists of layers of different lengths
may differ in what a layer costs, too, so each length has a second run of its own."""
AT_ONCE = 64
"""How many meshes are tried at once, those that move least first; more only if none fits."""
TRIED_FURTHER = 3
"""On how many of the fastest meshes other ways of running the model are tried."""


class Search:
    """The search for candidates of a model on a machine.

    Args:
        case: the batch, and a plan if it is not to be that of :func:`torch_tp2d.plan_for`.
        limit: bytes of memory of a device, or None.
        optimizer: one of :data:`~torch_tp2d.planner.describe.OPTIMIZERS`.
    """

    def __init__(
        self,
        model: nn.Module,
        case: Case,
        machine: Machine,
        limit: float | None,
        optimizer: str,
    ) -> None:
        self.case, self.machine, self.limit, self.optimizer = case, machine, limit, optimizer
        # Drop the values once, since each further copy of a model with values would be large.
        self.model = copy_without_values(model)
        lengths = {name: len(layers) for name, layers in lists_of_equals(self.model).items()}
        self.long = {name: length for name, length in lengths.items() if length > FEW + 1}
        self.micro_batch = case.batch // case.micro_batches
        weights = [p for p in self.model.parameters() if p.ndim > 1]
        self.weight_bytes = sum(p.numel() * p.itemsize for p in weights)
        # Bytes that move for each token if the narrower side of each weight moves.
        self.token_bytes = sum(p.numel() // max(p.shape) * p.itemsize for p in weights)
        # A plan given by the user has its own algorithm.
        self.algorithm = "pipelined" if case.plan is None else "auto"
        self.stock_algorithm = "collective" if case.plan is None else "auto"
        self.refused: dict[str, str] = {}
        self.tried: set[Way] = set()
        self.found: dict[Way, Candidate] = {}

    def run(self, world_size: int) -> list[Candidate]:
        """All candidates that can be run, those that fit first, and the fastest of these first.

        Raises:
            ValueError: if none can be run, or none fits in memory.
        """
        ways = iter(self.ways(world_size))
        while not any(each.fits for each in self.found.values()):
            if not self._try_next(ways):
                break
            self._try_variants()
        if not self.found:
            named: dict[str, list[str]] = {}
            for name, why in self.refused.items():
                named.setdefault(why, []).append(name)
            reasons = "; ".join(f"{', '.join(names)}: {why}" for why, names in named.items())
            raise ValueError(
                f"no mesh of {world_size} devices takes a batch of {self.case.batch} sequences of "
                f"{self.case.seq} tokens{self._in_parts()}: dp has to divide the batch, tp_row to "
                f"have tokens for each rank, and tp_col heads; FSDP2 alone takes one of "
                f"{_divisors(self.micro_batch)} devices. {reasons}"
            )
        left = len(list(ways))
        if left:
            self.refused[f"{left} others"] = "by arithmetic they move more than those above"
        return self._ranked()

    def _try_next(self, ways: Iterator[Way]) -> list[Way]:
        """Try ways until :data:`AT_ONCE` of them could be run, and return these."""
        return list(islice(filter(self._try, ways), AT_ONCE))

    def _try_variants(self) -> None:
        """Try variants of the ways found: fewer weights kept, other transfers, HSDP, recompute."""
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

    def _without_kept(self, way: Way) -> Iterator[Way]:
        """The way's variants in which gathered weights are freed after each use."""
        if self.case.micro_batches == 1:
            yield replace(way, keep=False)
            return
        yield replace(way, keep=False, reduce_each=True)
        if way.stock:
            # Stock ways only: under no_sync a grid keeps the weights that it has gathered.
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

    def ways(self, world_size: int) -> list[Way]:
        """One way for every mesh, usually its best, sorted by a rough estimate of transfers."""
        return sorted(self._on_each_mesh(world_size), key=self._seconds_roughly)

    def _on_each_mesh(self, world_size: int) -> Iterator[Way]:
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
                few = self.micro_batch // replicas < rows
                row_dim = 1 if few and self.case.plan is None else 0
                yield Way("2-D", shape, self.algorithm, row_dim)

    def _seconds_roughly(self, way: Way) -> float:
        """A rough estimate of a way's transfers, one after the other.

        It sorts very many meshes, so that those which may be best are tried first. Weights are
        gathered and reduced along ``dp`` and ``tp_row``; along ``tp_col`` tokens move on the
        narrower side of each weight, in forward and in backward.
        """
        replicas, rows, columns = way.shape
        tokens = self.case.batch * self.case.seq / (replicas * rows)
        reach, seconds = 1, 0.0
        for ranks, held in (
            (columns, tokens * self.token_bytes),
            (rows, self.weight_bytes / columns),
            (replicas, self.weight_bytes / columns / rows),
        ):
            reach *= ranks
            seconds += 2 * held * (ranks - 1) / ranks / self.machine.rate(reach)[1]
        return seconds

    def _try(self, way: Way) -> bool:
        """Try a way, unless it was tried before, and return whether it can be run."""
        if way not in self.tried:
            self.tried.add(way)
            try:
                self.found[way] = self.predict(way)
            except (ValueError, TypeError, RuntimeError) as error:
                # A style may refuse a module by a TypeError, and a model, or DTensor, raises
                # RuntimeErrors on shards that do not suit it.
                self.refused[way.full_name] = str(error).partition("\n")[0]
        return way in self.found

    def predict(self, way: Way) -> Candidate:
        """Predict what a way would cost.

        Raises:
            ValueError, TypeError, RuntimeError: if it cannot be run.
        """
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
            rates=None if way.stock else self.machine.rates,
            # On a GPU dropout is two kernels, as torch's is, but a trace would show its many
            # operators, so it is left out.
            dropout=self.machine.rates is not None,
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
        """The numbers for all layers and micro-batches, extrapolated from few of them."""

        def of_parts(parts: int) -> _Numbers:
            fewer = replace(case, batch=self.micro_batch * parts, micro_batches=parts)
            return self._of_all_layers(way, fewer)

        count = case.micro_batches
        if count <= FEW + 1:
            return of_parts(count)
        few = of_parts(FEW)
        return few.plus(count - FEW, few, of_parts(FEW - 1))

    def _of_all_layers(self, way: Way, case: Case) -> _Numbers:
        """The numbers for all layers, extrapolated from few layers of each long list."""
        few = dict.fromkeys(self.long, FEW)
        found = of_few = self._of(way, replace(case, layers=few))
        for length in sorted(set(self.long.values())):
            alike = [name for name, other in self.long.items() if other == length]
            less = {**few, **dict.fromkeys(alike, FEW - 1)}
            of_less = self._of(way, replace(case, layers=less))
            found = found.plus(length - FEW, of_few, of_less)
        return found

    def _of(self, way: Way, case: Case) -> _Numbers:
        step = run_step(self.model, case)
        found = describe_step(step, self.model, case, self.optimizer)
        timing = simulate(step.recorder.events, self.machine, step.mesh, stock=way.stock)
        return _Numbers(timing, found.total_bytes, found.memory)

    def _in_parts(self) -> str:
        parts = self.case.micro_batches
        return f" in {parts} micro-batches" if parts > 1 else ""


class _Numbers(NamedTuple):
    """What a way costs: times, received bytes and memory."""

    timing: Timing
    bytes: int
    memory: Memory

    def plus(self, times: int, more: _Numbers, less: _Numbers) -> _Numbers:
        """These numbers plus ``times`` the difference between ``more`` and ``less``."""
        memory = {
            name: value + times * (getattr(more.memory, name) - getattr(less.memory, name))
            for name, value in asdict(self.memory).items()
        }
        timing = self.timing + (more.timing + less.timing * -1) * times
        moved = self.bytes + times * (more.bytes - less.bytes)
        return _Numbers(timing, moved, Memory(**memory))


def _hybrids(way: Way) -> list[Way]:
    """A way's variants with HSDP in the place of FSDP2, for every number of copies of weights."""
    return [replace(way, replicate=copies) for copies in _divisors(way.shape[0])[1:-1]]


def _meshes(fastest: Iterable[Way]) -> list[tuple[int, int, int]]:
    """The meshes of the first ways, on which variants are tried."""
    return list(dict.fromkeys(way.shape for way in fastest))[:TRIED_FURTHER]


def _divisors(number: int) -> Sequence[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
