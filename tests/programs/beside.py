"""A program's models on one device and on the grid: their inputs, and what differs of the two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor, parallel

import torch_tp2d
from support.device import DEVICE
from support.models import noise

from .data import Attention, Model, Op, Program
from .models import LONGEST, build, drop_as_one_device
from .plans import Plan, pair, settled

__all__ = ["Beside", "Pending", "Side", "on_dtensors"]

TOLERANCE = 1e-10
"""Of the largest element, and absolute for what is zero but for rounding."""
PARTITIONED = "aot_eager_decomp_partition"
"""A backend that decomposes and parts graphs as Inductor does, and runs them without kernels."""

_meshes: dict[tuple[int, int, int, bool], DeviceMesh] = {}


def mesh_of(grid: tuple[int, int], dp: int, embeds: bool) -> DeviceMesh:
    """One mesh for each grid as long as the process lives, as DTensor caches meshes by value.

    Models without an embedding have one of their own: the sizes of the tokens under way are a
    mesh's, and an earlier model's are not theirs.
    """
    key = (dp, *grid, embeds)
    if key not in _meshes:
        names = ("dp", "tp_row", "tp_col")
        if dp:
            _meshes[key] = init_device_mesh(DEVICE, (dp, *grid), mesh_dim_names=names)
        else:
            _meshes[key] = init_device_mesh(DEVICE, grid, mesh_dim_names=names[1:])
    return _meshes[key]


class Side:
    """One model of a program, on one device and on the grid."""

    def __init__(self, model: Model, program: Program, mesh: DeviceMesh, seed: int) -> None:
        fsdp = program.fsdp
        self.model, self.plan, self.fsdp = model, Plan(model, program.grid), bool(fsdp)
        self.alone, self.net = (build(model, seed, not fsdp) for _ in range(2))
        drop_as_one_device(self.alone)
        self._parallelize(mesh["tp_row", "tp_col"])
        for block in self.net.blocks if program.compiled else ():
            block.compile(backend=PARTITIONED)
        if fsdp:
            for module in (*self.net.blocks, self.net):
                fully_shard(module, mesh=mesh["dp"], reshard_after_forward=fsdp == "reshard")
        self.saved: Any = None
        self.hooked = False
        self.inputs: tuple[Tensor, Tensor, tuple[int, int]] | None = None

    def _parallelize(self, mesh: DeviceMesh) -> None:
        entries, how = self.plan.entries, self.model.apply
        if how == "torch":
            parallel.parallelize_module(self.net, mesh, entries)
            return
        if how == "blocks":
            for index, block in enumerate(self.net.blocks):
                prefix = f"blocks.{index}."
                own = {
                    n.removeprefix(prefix): s for n, s in entries.items() if n.startswith(prefix)
                }
                torch_tp2d.parallelize_module(block, mesh, own)
            entries = {n: s for n, s in entries.items() if not n.startswith("blocks.")}
        torch_tp2d.parallelize_module(self.net, mesh, entries)

    def params(self) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
        return [
            (name, alone, ours)
            for (name, alone), ours in zip(
                self.alone.named_parameters(), self.net.parameters(), strict=True
            )
        ]

    def chosen(self, index: int) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
        params = self.params()
        return params if index < 0 else [params[index % len(params)]]


class Pending:
    """A forward whose backward may still come."""

    def __init__(
        self, sides: list[Side], alone: Tensor, ours: Tensor, inputs: Any, mode: str
    ) -> None:
        self.sides, self.alone, self.ours, self.inputs = sides, alone, ours, inputs
        self.once = mode == "selective"
        """Whether its graph serves one backward only, as selective checkpointing says itself."""
        self.runs_again = mode in ("full", "selective")
        """Whether its backward runs blocks again, which then have to keep the same tensors."""


class Beside:
    """The models of a program, one mesh for all of them, and what was found to differ."""

    def __init__(self, program: Program) -> None:
        self.wrong: list[str] = []
        self.now = "plan"
        self.fsdp, self.compiled = bool(program.fsdp), program.compiled
        models = [settled(model, self.fsdp) for model in program.models]
        embeds = any(model.embed is not None for model in models)
        whole = mesh_of(program.grid, program.dp if program.fsdp else 0, embeds)
        self.mesh = whole["tp_row", "tp_col"]
        self.sides = [
            Side(model, program, whole, seed=10 + index)
            for index, model in enumerate(models)
            if model.blocks or model.head or model.embed
        ]
        self.pending: list[Pending] = []
        self.draws = 0

    # Comparing: by each rank for itself, so that no collective of ours helps or hides anything.

    def _part(self, whole: Tensor, placements: Any) -> Tensor:
        return distribute_tensor(
            whole.detach(), self.mesh, placements, src_data_rank=None
        ).to_local()

    def _compare(self, what: str, ours: Tensor, wanted: Tensor) -> None:
        ours = ours.detach()
        if ours.shape != wanted.shape:
            self.wrong.append(
                f"{self.now}: {what} has shape {tuple(ours.shape)}, not {tuple(wanted.shape)}"
            )
        elif wanted.numel():
            scale = 1.0 + wanted.abs().max().item()
            error = (ours - wanted).abs().max().item()
            if not error <= TOLERANCE * scale:
                self.wrong.append(f"{self.now}: {what} is off by {error / scale:.2g}")

    def _compare_dtensor(
        self, what: str, ours: Tensor | None, wanted: Tensor | None, placements: Any = None
    ) -> None:
        """Compare what is a DTensor, or None, on the grid."""
        if (ours is None) != (wanted is None):
            self.wrong.append(f"{self.now}: {what} is {ours if ours is None else 'a tensor'}")
        elif ours is not None and wanted is not None:
            if not isinstance(ours, DTensor):
                self.wrong.append(f"{self.now}: {what} is a {type(ours).__name__}")
                return
            if ours.device_mesh.ndim == 3:
                self._compare(what, ours.full_tensor(), wanted)
                return
            if placements is not None and tuple(ours.placements) != tuple(placements):
                self.wrong.append(f"{self.now}: {what} is placed {ours.placements}")
            if any(p.is_partial() for p in ours.placements):
                self._compare(what, ours.full_tensor(), wanted)
            else:
                self._compare(what, ours.to_local(), self._part(wanted, ours.placements))

    def _compare_local(self, what: str, ours: Tensor, wanted: Tensor, placements: Any) -> bool:
        """Compare a local tensor; False where it only stands in for tokens that are not there."""
        part = self._part(wanted, placements)
        if not part.numel() and ours.shape != part.shape:
            return False
        self._compare(what, ours, part)
        return ours.shape == part.shape

    def _compare_input(self, what: str, side: Side, ours: Any, alone: Any) -> None:
        if isinstance(ours, DTensor) or ours is None or alone is None:
            self._compare_dtensor(what, ours, alone)
        else:
            layout = pair(side.model.stream, side.model, alone.ndim - 1)
            self._compare_local(what, ours, alone, layout)

    # Inputs.

    def _values(self, side: Side, size: tuple[int, int]) -> Tensor:
        self.draws += 1
        model, (batch, sequence) = side.model, size
        if model.embed is not None:
            generator = torch.Generator().manual_seed(self.draws)
            return torch.randint(0, model.embed.vocab, (batch, sequence), generator=generator)
        shape = (batch, sequence, model.hidden) if sequence else (batch, model.hidden)
        return noise(*shape, seed=self.draws)

    def _input(self, side: Side, op: Op) -> tuple[Tensor, Tensor]:
        model = side.model
        batch, sequence = op.size
        needs = model.embed is not None or model.row_dim or model.stream in ("tokens", "hidden")
        attends = any(isinstance(block, Attention) for block in model.blocks)
        norms = [block.norm for block in model.blocks] + [model.norm]
        needs = needs or any(norm is not None and norm.out == "tokens" for norm in norms)
        needs = needs or any(
            "tokens" in (getattr(block, "between", ""), getattr(block, "after", ""))
            for block in model.blocks
        )
        needs = needs or (model.head is not None and model.head.out == "tokens")
        size = batch, min(max(sequence, int(needs or attends)), LONGEST)
        if on_dtensors(model):
            # Documented: DTensor's own operations do not keep rows without samples apart.
            size = max(self.mesh.size(0), size[0]), size[1]
        if model.axes == "tp_row":
            # A column without samples is given one that stands in, which a declared norm, whose
            # style knows no other axes, would take for its own.
            size = max(self.mesh.size(1), size[0]), size[1]
        if model.embed is not None and model.embed.positions and not model.local:
            # DTensor cannot drop a split dim of size 1 again, in the gradient of what was added.
            size = max(2, size[0]), max(2, size[1])
        if op.again and side.inputs is not None:
            alone, ours, size = side.inputs
            if op.again == "same":
                return alone, ours
            self.pending = [p for p in self.pending if p.inputs[1] is not ours]
            values = self._values(side, size)
            for x, new in ((alone, values), (ours, self._placed(side, values))):
                if op.again == "data":
                    x.data.copy_(new)
                elif op.again == "local" and isinstance(x, DTensor):
                    with torch.no_grad():
                        x.to_local().copy_(new.to_local())
                else:
                    with torch.no_grad():
                        x.copy_(new)
            return alone, ours
        alone = self._values(side, size)
        ours = self._placed(side, alone)
        if op.learns and alone.is_floating_point():
            alone.requires_grad_()
            ours.requires_grad_()
        side.inputs = alone, ours, size
        return alone, ours

    def _placed(self, side: Side, values: Tensor) -> Tensor:
        if side.model.embed is not None:
            return values.clone()
        layout = pair(side.model.stream, side.model, values.ndim - 1)
        if side.model.local:
            return self._part(values, layout).clone()
        return distribute_tensor(values, self.mesh, layout, src_data_rank=None).clone()


def on_dtensors(model: Model) -> bool:
    return any(isinstance(b, Attention) and b.plan == "dtensor" for b in model.blocks)
