"""Runs a program on one rank of its grid, beside the same on one device."""

from __future__ import annotations

import copy
import dataclasses
import gc
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor, parallel

import torch_tp2d
from support.models import noise
from support.symmetric import on_cpu
from torch_tp2d import planner
from torch_tp2d.runtime.context import context_of

from .data import TRAIN, Attention, Model, Op, Program
from .models import LONGEST, Net, Plan, Stop, build, drop_as_one_device, pair, settled

__all__ = ["play"]

TOLERANCE = 1e-10
"""Of the largest element, and absolute for what is zero but for rounding."""

_IN_FSDP = {"inference": "no_grad", "raise": "train", "chain": "train"}
"""What FSDP2's hooks do not take, and what is done instead."""

_NOT_BETWEEN = frozenset(
    ("step", "zero", "freeze", "thaw", "swap", "change", "load", "deepcopy", "hook")
)
"""What is not to be done between the micro-batches of a step."""

_RATES = planner.Rates(row=1e6, col=1e6, flops=1e10)

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
            _meshes[key] = init_device_mesh("cpu", (dp, *grid), mesh_dim_names=names)
        else:
            _meshes[key] = init_device_mesh("cpu", grid, mesh_dim_names=names[1:])
    return _meshes[key]


def play(program: Program) -> list[str]:
    """What differs from one device, in words; raises what the program raises."""
    # A CPU has no operators of its own for "fused".
    on_cpu()
    planner.assume(_RATES if program.rates else None)
    try:
        player = _Player(program)
        if player.sides:
            for index, op in enumerate(program.use):
                player.now = f"use[{index}] {op}"
                if index == len(program.use) - len(TRAIN):
                    player.release()
                if not (player.kept and op.what in _NOT_BETWEEN):
                    getattr(player, op.what)(op)
        player.release("discard")
        # The mesh is the next program's too.
        torch_tp2d.no_sync(player.mesh).discard()
        return player.wrong
    finally:
        planner.assume(None)


class _Side:
    """One model of a program, on one device and on the grid."""

    def __init__(
        self, model: Model, grid: tuple[int, int], mesh: DeviceMesh, seed: int, fsdp: str
    ) -> None:
        self.model, self.plan, self.fsdp = model, Plan(model, grid), bool(fsdp)
        self.alone, self.net = (build(model, seed, not fsdp) for _ in range(2))
        drop_as_one_device(self.alone)
        self._parallelize(mesh["tp_row", "tp_col"])
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


class _Pending:
    """A forward whose backward may still come."""

    def __init__(
        self, sides: list[_Side], alone: Tensor, ours: Tensor, inputs: Any, once: bool
    ) -> None:
        self.sides, self.alone, self.ours, self.inputs = sides, alone, ours, inputs
        self.once = once
        """Whether its graph serves one backward only, as selective checkpointing says itself."""


class _Player:
    def __init__(self, program: Program) -> None:
        self.wrong: list[str] = []
        self.now = "plan"
        self.fsdp = bool(program.fsdp)
        models = [settled(model, self.fsdp) for model in program.models]
        embeds = any(model.embed is not None for model in models)
        whole = mesh_of(program.grid, program.dp if program.fsdp else 0, embeds)
        self.mesh = whole["tp_row", "tp_col"]
        self.sides = [
            _Side(model, program.grid, whole, seed=10 + index, fsdp=program.fsdp)
            for index, model in enumerate(models)
            if model.blocks or model.head or model.embed
        ]
        self.pending: list[_Pending] = []
        self.draws = 0
        self.held: torch_tp2d.no_sync | None = None
        self.kept = False
        """Whether gradients may be kept that are not in ``.grad`` yet."""

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

    def _compare_grads(self, pending: _Pending) -> None:
        # Not settled by a backward through none of the plan's Linears: an optimizer would not step.
        kept = context_of(self.mesh).accumulation
        self.kept = self.held is not None or bool(kept)
        for number, side in enumerate(() if self.kept else self.sides):
            for name, alone, ours in side.params():
                self._compare_dtensor(
                    f"gradient of {name} of model {number}", ours.grad, alone.grad, ours.placements
                )
        alone, ours = pending.inputs
        if alone.is_floating_point() and (alone.requires_grad or ours.requires_grad):
            self._compare_input("gradient of the input", pending.sides[0], ours.grad, alone.grad)

    def _compare_input(self, what: str, side: _Side, ours: Any, alone: Any) -> None:
        if isinstance(ours, DTensor) or ours is None or alone is None:
            self._compare_dtensor(what, ours, alone)
        else:
            layout = pair(side.model.stream, side.model, alone.ndim - 1)
            self._compare_local(what, ours, alone, layout)

    # Inputs.

    def _values(self, side: _Side, size: tuple[int, int]) -> Tensor:
        self.draws += 1
        model, (batch, sequence) = side.model, size
        if model.embed is not None:
            generator = torch.Generator().manual_seed(self.draws)
            return torch.randint(0, model.embed.vocab, (batch, sequence), generator=generator)
        shape = (batch, sequence, model.hidden) if sequence else (batch, model.hidden)
        return noise(*shape, seed=self.draws)

    def _input(self, side: _Side, op: Op) -> tuple[Tensor, Tensor]:
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
        if _on_dtensors(model):
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

    def _placed(self, side: _Side, values: Tensor) -> Tensor:
        if side.model.embed is not None:
            return values.clone()
        layout = pair(side.model.stream, side.model, values.ndim - 1)
        if side.model.local:
            return self._part(values, layout).clone()
        return distribute_tensor(values, self.mesh, layout, src_data_rank=None).clone()

    # What a program does.

    def forward(self, op: Op) -> None:
        sides = [self.sides[op.model % len(self.sides)]]
        if op.mode == "chain" and len(self.sides) == 2 and self._fit():
            sides = self.sides
        elif op.mode == "chain":
            op = _with(op, mode="train")
        if any(side.hooked for side in sides):
            # Each run of a hooked block changes its weight, under graphs that were made before.
            self._forget(*sides)
            op = _with(op, twice=(), mode=op.mode if op.mode in ("no_grad", "raise") else "train")
        alone, ours = self._input(sides[0], op)
        inputs = alone, ours
        if self.fsdp:
            # What FSDP2 says it does not take, or takes otherwise.
            op = _with(op, twice=(), skip=(), mode=_IN_FSDP.get(op.mode, op.mode))
        if op.mode == "inference" and any(_on_dtensors(side.model) for side in sides):
            # torch works out its own rule for attention there, for longer than a hang may take.
            op = _with(op, mode="no_grad")
        if op.mode in ("no_grad", "inference") and any(_two_streams(side.model) for side in sides):
            # Documented: without a graph the user's sums of the other stream tell no sizes.
            op = _with(op, mode="train")
        grads = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(
            op.mode, torch.enable_grad
        )
        with grads():
            for side in sides:
                # Dropout of both draws from torch's generator.
                self.draws += 1
                torch.manual_seed(self.draws)
                alone, raised = _call(side.alone, op, alone)
                torch.manual_seed(self.draws)
                ours, raised_too = _call(side.net, op, ours)
                if raised != raised_too:
                    self.wrong.append(f"{self.now}: raised {raised}, on the grid {raised_too}")
                if raised or raised_too:
                    return
            if self.fsdp and op.mode == "no_grad":
                # Told to keep what it gathered, it would until the next backward, stale or not.
                for module in sides[0].net.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()
            side = sides[-1]
            losses = self._losses(side, op, alone, ours)
        if losses is not None and op.mode not in ("no_grad", "inference"):
            if losses[0].requires_grad != losses[1].requires_grad:
                self.wrong.append(f"{self.now}: requires_grad is {losses[1].requires_grad}")
            elif losses[0].requires_grad:
                self.pending.append(_Pending(sides, *losses, inputs, op.mode == "selective"))
                if self.fsdp:
                    # It takes one forward to end with its backward before the next begins.
                    self.backward(Op("backward", last=True))

    def _fit(self) -> bool:
        """Whether the second model takes what the first one hands on."""
        first, second = self.sides
        width = first.model.head.features if first.model.head else first.model.hidden
        return second.model.embed is None and (
            first.plan.out,
            first.plan.local,
            first.model.row_dim,
            width,
        ) == (second.model.stream, second.model.local, second.model.row_dim, second.model.hidden)

    def _losses(
        self, side: _Side, op: Op, alone: Tensor, ours: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        weights = noise(*alone.shape, seed=99)
        if side.plan.local == isinstance(ours, DTensor):
            self.wrong.append(f"{self.now}: the output is a {type(ours).__name__}")
            return None
        if isinstance(ours, DTensor):
            if ours.shape != alone.shape:
                self.wrong.append(f"{self.now}: the output has shape {tuple(ours.shape)}")
                return None
            layout: Any = ours.placements
            if op.loss == "entropy" and alone.ndim == 3:
                target = weights[..., 0].abs().mul(1e6).long() % alone.shape[-1]
                losses = (
                    F.cross_entropy(alone.flatten(0, -2), target.flatten()),
                    torch_tp2d.cross_entropy(ours, target),
                )
                full = losses[1]
                full = full.full_tensor() if isinstance(full, DTensor) else full
                self._compare("loss", full, losses[0].detach())
                return losses
            if op.loss == "full":
                whole = ours.full_tensor()
                self._compare("output", whole, alone.detach())
                return (alone * weights).sum(), (whole * weights).sum()
            ours = ours.to_local()
        else:
            layout = pair(side.plan.out, side.model, alone.ndim - 1)
        mine = self._part(weights, layout)
        if not self._compare_local("output", ours, alone, layout):
            mine = torch.zeros_like(ours)
        return (alone * weights).sum(), (ours * mine).sum()

    def _pick(self, op: Op) -> _Pending | None:
        return self.pending[-1 if op.last else 0] if self.pending else None

    def backward(self, op: Op) -> None:
        pending = self._pick(op)
        if pending is None:
            return
        if op.how == "sum":
            sum(p.alone for p in self.pending).backward()
            sum(p.ours for p in self.pending).backward()
            self.pending = []
            self._compare_grads(pending)
            return
        if self.fsdp or pending.once:
            op = _with(op, retain=False)
        for loss in (pending.alone, pending.ours):
            loss.backward(retain_graph=op.retain)
        if not op.retain:
            self.pending.remove(pending)
        self._compare_grads(pending)

    def grad(self, op: Op) -> None:
        pending = self._pick(op)
        if pending is None or self.fsdp:
            return
        if pending.once:
            op = _with(op, retain=False)
        params = [
            (name, alone, ours)
            for side in pending.sides
            for number, (name, alone, ours) in enumerate(side.params())
            if alone.requires_grad and (number + op.index) % 3
        ]
        alone, ours = pending.inputs
        with_input = alone.requires_grad and op.index % 2 == 0
        if with_input:
            params.append(("input", alone, ours))
        if not params:
            return
        wanted = torch.autograd.grad(
            pending.alone, [p[1] for p in params], retain_graph=op.retain, allow_unused=True
        )
        given = torch.autograd.grad(
            pending.ours, [p[2] for p in params], retain_graph=op.retain, allow_unused=True
        )
        if not op.retain:
            self.pending.remove(pending)
        for (name, *_), one, other in zip(params, wanted, given, strict=True):
            if name == "input":
                self._compare_input("autograd.grad of the input", pending.sides[0], other, one)
            else:
                self._compare_dtensor(f"autograd.grad of {name}", other, one)

    def _forget(self, *sides: _Side) -> None:
        """Drop the graphs that an in-place change of a model's parameters spoils."""
        self.pending = [
            p for p in self.pending if not any(side is one for side in sides for one in p.sides)
        ]

    def drop(self, op: Op) -> None:
        cycle: list[Any] = list(self.pending)
        cycle.append(cycle)
        self.pending = []

    def _side(self, op: Op) -> _Side:
        return self.sides[op.model % len(self.sides)]

    def step(self, op: Op) -> None:
        side = self._side(op)
        self._forget(side)
        for module in (side.alone, side.net):
            params = [p for p in module.parameters() if p.requires_grad and p.grad is not None]
            if not params:
                continue
            if op.how in ("", "sgd"):
                torch.optim.SGD(params, lr=0.1).step()
            else:
                # A large eps: of a gradient that is zero but for rounding AdamW makes a full step.
                kind = {op.how: True} if op.how in ("foreach", "fused") else {}
                torch.optim.AdamW(params, lr=0.1, eps=0.1, **kind).step()

    def zero(self, op: Op) -> None:
        side = self._side(op)
        for module in (side.alone, side.net):
            module.zero_grad(set_to_none=op.how != "zeros")

    def freeze(self, op: Op) -> None:
        if self.fsdp and op.index >= 0:
            return
        for _, *params in self._side(op).chosen(op.index):
            for param in params:
                param.requires_grad_(op.what == "thaw")

    thaw = freeze

    def swap(self, op: Op) -> None:
        side = self._side(op)
        if self.fsdp:
            return
        for _, alone, ours in side.chosen(op.index):
            for module, param in ((side.alone, alone), (side.net, ours)):
                owners = [
                    (owner, attribute)
                    for owner in module.modules()
                    for attribute, own in owner._parameters.items()
                    if own is param
                ]
                new = nn.Parameter((param.detach() * 1.1), requires_grad=param.requires_grad)
                for owner, attribute in owners:
                    setattr(owner, attribute, new)

    def change(self, op: Op) -> None:
        side = self._side(op)
        self._forget(side)
        for _, *params in side.chosen(op.index):
            for param in params:
                _change(param, op.how)

    def exchange(self, op: Op) -> None:
        side = self._side(op)
        for module in (side.alone, side.net):
            if len(module.blocks) > 1:
                first, last = module.blocks[0], module.blocks[-1]
                module.blocks[0], module.blocks[-1] = last, first
        shapes = [{k: v.shape for k, v in b.state_dict().items()} for b in side.alone.blocks]
        if shapes and shapes[0] != shapes[-1]:
            side.saved = None  # It fits no more.

    def log(self, op: Op) -> None:
        side = self._side(op)
        for module in (side.alone, side.net):
            for block in (*module.blocks, module)[op.index % 3 :]:
                block.register_forward_pre_hook(lambda *args: None)
                block.register_forward_hook(lambda *args: None)
                block.register_full_backward_hook(lambda *args: None)

    def hook(self, op: Op) -> None:
        side = self._side(op)
        if not side.model.blocks or self.fsdp:
            return
        side.hooked = True
        # What is computed again for backward would meet the hook for the first time.
        self._forget(side)
        for module in (side.alone, side.net):
            block = module.blocks[op.index % len(module.blocks)]
            how = op.how

            def change(module: Any, args: Any, how: str = how) -> None:
                _change(next(module.body.parameters()), how)

            block.register_forward_pre_hook(change)

    def deepcopy(self, op: Op) -> None:
        side = self._side(op)
        if self.fsdp:
            return
        side.alone, side.net = copy.deepcopy(side.alone), copy.deepcopy(side.net)
        for module in (side.alone, side.net):
            # A copy of a DTensor takes the gradient along, that of a plain parameter does not.
            module.zero_grad()

    def save(self, op: Op) -> None:
        side = self._side(op)
        side.saved = [
            {name: value.detach().clone() for name, value in module.state_dict().items()}
            for module in (side.alone, side.net)
        ]

    def load(self, op: Op) -> None:
        side = self._side(op)
        if side.saved is None:
            return
        self._forget(side)
        side.alone.load_state_dict(side.saved[0])
        side.net.load_state_dict(side.saved[1])

    def hold(self, op: Op) -> None:
        if self.held is not None:
            self.release(op.how)
        elif not self.fsdp and not any(side.hooked for side in self.sides):
            self.held, self.kept = torch_tp2d.no_sync(self.mesh), True
            self.held.__enter__()

    def release(self, how: str = "") -> None:
        """End the micro-batches but the last; all of them, if the step is given up."""
        if self.held is None:
            return
        self.held.__exit__(Stop if how == "exception" else None)
        if how == "discard":
            self.held.discard()
        self.held = None
        if how:
            self.kept = False
            for side in self.sides:
                for module in (side.alone, side.net):
                    module.zero_grad()

    def collect(self, op: Op) -> None:
        if dist.get_rank() == op.index % dist.get_world_size():
            gc.collect()


def _on_dtensors(model: Model) -> bool:
    return any(isinstance(b, Attention) and b.plan == "dtensor" for b in model.blocks)


def _two_streams(model: Model) -> bool:
    return model.local and any(isinstance(b, Attention) and b.cross for b in model.blocks)


def _with(op: Op, **changes: Any) -> Op:
    return dataclasses.replace(op, **changes)


def _call(net: Net, op: Op, x: Tensor) -> tuple[Any, bool]:
    net.control = op
    try:
        return net(x), False
    except Stop:
        return None, True


def _change(param: Any, how: str) -> None:
    if how == "data":
        param.data.mul_(1.1)
    else:
        with torch.no_grad():
            if how == "foreach":
                torch._foreach_mul_([param], 1.1)
            elif how == "local" and isinstance(param, DTensor):
                param.to_local().mul_(1.1)
            else:
                param.mul_(1.1)
