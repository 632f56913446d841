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
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import torch_tp2d
from support.models import noise
from support.symmetric import on_cpu
from torch_tp2d import planner
from torch_tp2d.runtime.context import context_of

from .beside import Beside, Pending, Side, on_dtensors
from .data import TRAIN, Attention, Model, Op, Program
from .models import Net, Stop
from .plans import pair

__all__ = ["play"]

_IN_FSDP = {"inference": "no_grad", "raise": "train", "chain": "train"}
"""What FSDP2's hooks do not take, and what is done instead."""

_NOT_BETWEEN = frozenset(
    ("step", "zero", "freeze", "thaw", "swap", "change", "load", "deepcopy", "hook")
)
"""What is not to be done between the micro-batches of a step."""

_RATES = planner.Rates(row=1e6, col=1e6, flops=1e10)


def play(program: Program) -> list[str]:
    """What differs from one device, in words; raises what the program raises."""
    # A CPU has no operators of its own for "fused".
    on_cpu()
    planner.assume(_RATES if program.rates else None)
    if program.compiled:
        # The code is the same for all programs, and torch compiles it so often only.
        torch._dynamo.reset()
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


class _Player(Beside):
    """What a program does with its models, by the names of its ops."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.held: torch_tp2d.no_sync | None = None
        self.kept = False
        """Whether gradients may be kept that are not in ``.grad`` yet."""

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
        if self.compiled and op.mode in ("full", "selective"):
            # torch refuses it where a block runs in parts, which differ when it runs again.
            op = _with(op, mode="train")
        if self.compiled and alone.is_floating_point():
            # A graph cannot ask the other ranks.
            sizes = tuple(alone.shape[:2]) if alone.ndim == 3 else None
            torch_tp2d.token_sizes(self.mesh, sizes)
        if self.fsdp:
            # What FSDP2 says it does not take, or takes otherwise.
            op = _with(op, twice=(), skip=(), mode=_IN_FSDP.get(op.mode, op.mode))
        if op.mode == "inference" and any(on_dtensors(side.model) for side in sides):
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
                self.pending.append(Pending(sides, *losses, inputs, op.mode))
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
        self, side: Side, op: Op, alone: Tensor, ours: Tensor
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

    def _pick(self, op: Op) -> Pending | None:
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

    def _compare_grads(self, pending: Pending) -> None:
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

    def _forget(self, *sides: Side) -> None:
        """Drop the graphs that an in-place change of a model's parameters spoils."""
        self.pending = [
            p for p in self.pending if not any(side is one for side in sides for one in p.sides)
        ]

    def drop(self, op: Op) -> None:
        cycle: list[Any] = list(self.pending)
        cycle.append(cycle)
        self.pending = []

    def _side(self, op: Op) -> Side:
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
        side = self._side(op)
        for _, *params in side.chosen(op.index):
            for param in params:
                param.requires_grad_(op.what == "thaw")
        # On one device, too, a block that is run again then keeps other tensors than before.
        self.pending = [p for p in self.pending if not (p.runs_again and side in p.sides)]

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
