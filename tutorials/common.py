"""What the training scripts share: starting up, a step of training, and one device beside it."""

from __future__ import annotations

import argparse
import copy
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torch_tp2d import CommCounter
from torch_tp2d.comm.groups import BACKEND
from torch_tp2d.integrations.inductor import overlap_options

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Tolerance:
    """How far a run on many devices may stray from one device.

    Attributes:
        loss: the largest difference of any step's loss.
        travel: the largest root-mean-square difference of any parameter, over the sum of the
            learning rates: about the length of the path that Adam takes every element along,
            whatever the size of its gradient. A wrong gradient strays by about 1.
    """

    loss: float
    travel: float


# Adding in another order moves a gradient by a few last places, and Adam divides by the
# gradient's own size: where that is round-off alone (a key's bias: softmax does not see it) no
# digit is shared. So parameters agree less well than losses, and fp64 is the sharp test. In bf16
# the weights themselves are rounded to 8 bits after each step, which is coarser than a step.
TOLERANCES = {
    "fp64": Tolerance(loss=1e-10, travel=1e-8),
    "fp32": Tolerance(loss=1e-3, travel=1e-2),
    "bf16": Tolerance(loss=2e-2, travel=1.0),
}

Loss = Callable[[Tensor, Tensor], Tensor]


def parse_grid(text: str) -> tuple[int, int]:
    """``"2x3"`` to ``(2, 3)``."""
    rows, cross, columns = text.partition("x")
    if not (cross and rows.isdigit() and columns.isdigit() and int(rows) and int(columns)):
        raise argparse.ArgumentTypeError(f"{text!r} is no grid: write rows x columns, as in 2x2")
    return int(rows), int(columns)


def positive(text: str) -> int:
    """A whole number from 1 upwards."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 upwards")
    return int(text)


def make_parser(description: str | None, **defaults: object) -> argparse.ArgumentParser:
    """A parser of the arguments that every script takes; ``defaults`` replaces theirs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    devices = "devices; all axes together must be the number of processes"
    add("--grid", type=parse_grid, default=(2, 2), metavar="RxC", help=devices)
    add("--steps", type=positive, default=10)
    add("--lr", type=float, default=1e-3, help="the highest learning rate")
    add("--clip", type=float, default=1.0, help="the largest norm of the gradient")
    add("--dtype", choices=DTYPES, default="fp32", help="of weights, gradients and activations")
    add("--seed", type=int, default=0, help="of the initial weights and the data")
    parser.set_defaults(**defaults)
    return parser


def make_text_parser(
    description: str | None, data: Path, **defaults: object
) -> argparse.ArgumentParser:
    """A parser with what a script for a language model takes besides.

    Args:
        data: the folder of the tokens, if no other is asked for.
    """
    parser = make_parser(description)
    add = parser.add_argument
    add("--dp", type=positive, default=1, help="data-parallel replicas, sharded by FSDP")
    add("--seq", type=positive, default=64, help="tokens in a sequence")
    add("--batch", type=positive, default=8, help="sequences in a step, over all replicas")
    add("--recompute", action="store_true", help="recompute each layer in the backward pass")
    add("--compile", action="store_true", help="compile each layer")
    add("--data", type=Path, default=data, metavar="DIR", help="where text.py put its tokens")
    add("--verify", action="store_true", help="compare with one device; exit 1 if they differ")
    parser.set_defaults(**defaults)
    return parser


def check_world(args: argparse.Namespace) -> None:
    """Raises a ValueError for arguments that do not fit the processes or each other.

    ``--grid`` and ``--dp`` have to take as many processes as there are, and ``--dp`` to divide
    ``--batch``.
    """
    rows, columns = args.grid
    replicas = getattr(args, "dp", 1)
    if replicas * rows * columns != dist.get_world_size():
        axes = (f"--dp {replicas} " if "dp" in args else "") + f"--grid {rows}x{columns}"
        raise ValueError(
            f"{axes} takes {replicas * rows * columns} processes and there are "
            f"{dist.get_world_size()}: set torchrun's --nproc-per-node and --nnodes to match"
        )
    batch = getattr(args, "batch", replicas)
    if batch % replicas:
        raise ValueError(f"--batch {batch} does not divide over --dp {replicas} replicas")


def make_mesh(args: argparse.Namespace, device: torch.device, line: bool) -> DeviceMesh:
    """A line for the stock plans, ``[dp, tp]``, or a grid, ``[dp, tp_row, tp_col]``."""
    shape = (args.dp, math.prod(args.grid)) if line else (args.dp, *args.grid)
    names = ("dp", "tp") if line else ("dp", "tp_row", "tp_col")
    return init_device_mesh(device.type, shape, mesh_dim_names=names)


def set_up() -> torch.device:
    """Joins the process group; returns this process's device.

    Raises:
        ValueError: if torchrun did not launch this process, or would start it again in vain.
    """
    if "LOCAL_RANK" not in os.environ:
        raise ValueError(f"launch it with torchrun: torchrun --nproc-per-node 4 {sys.argv[0]} ...")
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # pytorch#135712, with any backend.
        raise ValueError(
            "processes that torchrun starts again find the addresses of those that are gone in "
            "the store that it keeps: let it make a new one, "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --max-restarts ..."
        )
    local_rank = int(os.environ["LOCAL_RANK"])
    # Its advice (flatten the mesh for one reduction of a scalar) does not matter here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        # gloo for what FSDP offloads to the host: clipping takes a norm of gradients there.
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        device = torch.device("cpu")
        # gloo with one worker thread: with two, FSDP's collectives now and then end in a crash.
        dist.init_process_group(BACKEND)
    return device


def launch(
    train: Callable[[argparse.Namespace, torch.device], bool], args: argparse.Namespace
) -> None:
    """Runs ``train`` on this process's device; exits with 1 if it returns False."""
    device = set_up()
    try:
        held = train(args, device)
    finally:
        dist.destroy_process_group()
    sys.exit(0 if held else 1)


def say(*lines: str) -> None:
    """Prints, on rank 0 alone."""
    if dist.get_rank() == 0:
        print(*lines, sep="\n", flush=True)


def whole(value: Tensor) -> Tensor:
    """A DTensor's full value; a plain tensor as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def local(value: Tensor) -> Tensor:
    """This rank's shard of a DTensor; a plain tensor as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def share_of(batch: Tensor, mesh: DeviceMesh) -> Tensor:
    """This replica's part of the whole batch, the same on each rank of its line or grid."""
    return batch.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")]


def mean_over(values: Tensor, mesh: DeviceMesh) -> float:
    """The mean of a scalar over the data-parallel replicas."""
    total = values.double().clone()
    dist.all_reduce(total, group=mesh.get_group("dp"))
    return total.item() / mesh["dp"].size()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of one device's or stock logits, ``[B, S, V]`` against ``[B, S]``."""
    # bf16 tells losses near 10 apart by 1/16 only.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def warm_up_and_fall(highest: float, steps: int) -> Callable[[int], float]:
    """Learning rates that rise over a tenth of the run (20 steps at most), then fall to a tenth."""
    warm_up = min(20, max(1, steps // 10))

    def learning_rate(step: int) -> float:
        if step < warm_up:
            return highest * (step + 1) / warm_up
        done = (step - warm_up) / max(1, steps - warm_up)
        return highest * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))

    return learning_rate


def wrap_layers(
    model: nn.Module, layers: nn.ModuleList, mesh: DeviceMesh, args: argparse.Namespace
) -> None:
    """Compiles, recomputes and shards over ``dp`` the layers of a model that has its plan.

    The order matters: each wraps the one before. Compiled around what is recomputed a layer traces,
    but torch 2.13's AOTAutograd then takes a DeviceMesh for a tensor, under stock plans too.
    """
    if args.compile:
        for layer in layers:
            layer.compile(options=overlap_options())
    if args.recompute:
        for index, layer in enumerate(layers):
            layers[index] = checkpoint_wrapper(layer)
    if args.dp > 1:
        for layer in layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])


class Learner:
    """A model, its optimizer, and one step of training: the same code for one device or many.

    Args:
        model: the model, parallel or not.
        loss: ``(outputs, targets) -> scalar``.
        learning_rate: of a step, by its number from 0.
        clip: the largest norm of the gradient.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, learning_rate: Callable[[int], float], clip: float
    ) -> None:
        self.model, self.loss = model, loss
        self.learning_rate, self.clip = learning_rate, clip
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=learning_rate(0), weight_decay=0.01
        )

    def step(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        """Learns from a batch; returns its loss before the update."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        loss = self.loss(self.model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return whole(loss.detach())


class OneDevice:
    """The same training on one device, to hold the others' against. Rank 0 alone does it.

    Args:
        model: the model before it is parallelized; it is copied.
        loss, learning_rate, clip: as for :class:`Learner`.
        dtype: a key of :data:`TOLERANCES`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        learning_rate: Callable[[int], float],
        clip: float,
        dtype: str,
    ) -> None:
        self.learner = None
        if dist.get_rank() == 0:
            self.learner = Learner(copy.deepcopy(model), loss, learning_rate, clip)
        self.learning_rate = learning_rate
        self.dtype = dtype
        self.gaps: list[float] = []
        self.travel = 0.0

    def step(self, step: int, inputs: Tensor, targets: Tensor, loss: float) -> float:
        """Learns from the whole batch; returns its loss (rank 0), which should be ``loss``."""
        self.travel += self.learning_rate(step)
        if self.learner is None:
            return loss
        alone = self.learner.step(step, inputs, targets).item()
        self.gaps.append(abs(loss - alone))
        return alone

    def agrees_with(self, model: nn.Module) -> bool:
        """Says how far ``model``'s training strayed; returns whether it is within the tolerance.

        Every rank calls it; the answer of rank 0 counts, the others' is True.
        """
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        theirs: dict[str, Any] = get_model_state_dict(model, options=options)
        if self.learner is None:
            return True
        ours = self.learner.model.state_dict()
        differences = [theirs[name].double() - ours[name].cpu().double() for name in ours]
        # torch's maximum hands a NaN on; Python's would lose it.
        largest = torch.stack([part.abs().max() for part in differences]).max().item()
        spread = torch.stack([part.square().mean().sqrt() for part in differences]).max().item()
        strayed = spread / self.travel
        allowed = TOLERANCES[self.dtype]
        # "Within", not "beyond": a NaN must fail.
        held = all(gap <= allowed.loss for gap in self.gaps) and strayed <= allowed.travel
        say(
            f"one device against {dist.get_world_size()} over {len(self.gaps)} steps of "
            f"{self.dtype}: loss differs by {max(self.gaps):.1e} at most "
            f"(allowed {allowed.loss:.0e}), a parameter by {largest:.1e}; root mean square over "
            f"Adam's path {strayed:.1e} (allowed {allowed.travel:.0e}): "
            + ("the same" if held else "DIFFERENT")
        )
        return held


def train_beside(
    learner: Learner,
    alone: OneDevice | None,
    batches: Callable[[int], tuple[Tensor, Tensor]],
    steps: int,
    share: Callable[[Tensor], Tensor] = lambda whole_batch: whole_batch,
    mean: Callable[[Tensor], float] = Tensor.item,
) -> bool:
    """Trains on many devices and on one, side by side, and says both losses of each step.

    Args:
        learner: on many devices.
        alone: on one; None: not asked for.
        batches: a step's whole inputs and targets, the same on every rank.
        share: what this rank's learner is given of the inputs, and of the targets.
        mean: a learner's loss, as a number over all replicas.

    Returns:
        Whether they agree, where there is one to agree with.
    """
    for step in range(steps):
        inputs, targets = batches(step)
        loss = mean(learner.step(step, share(inputs), share(targets)))
        line = f"step {step + 1:3}: loss {loss:.6f}"
        if alone is not None:
            line += f", one device {alone.step(step, inputs, targets, loss):.6f}"
        say(line)
    return alone is None or alone.agrees_with(learner.model)


def survey(
    learner: Learner, mesh: DeviceMesh, inputs: Tensor, targets: Tensor, modules: Sequence[str]
) -> None:
    """Says what every rank holds and moves: shapes of parameters and outputs, and collectives.

    Runs one forward and backward pass, which changes nothing.

    Args:
        learner: its model lies on ``mesh``.
        mesh: the whole mesh.
        inputs, targets: this rank's batch.
        modules: those whose outputs are shown, by name.
    """
    parameters = {
        # Recomputed layers are wrapped.
        name.replace("_checkpoint_wrapped_module.", ""): _describe(parameter)
        for name, parameter in learner.model.named_parameters()
    }
    whole_count = sum(parameter.numel() for parameter in learner.model.parameters())
    count = sum(local(parameter).numel() for parameter in learner.model.parameters())
    outputs: dict[str, tuple[str, str, str]] = {}

    def show(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        def hook(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            outputs[name] = _describe(output)

        return hook

    handles = [
        learner.model.get_submodule(name).register_forward_hook(show(name)) for name in modules
    ]
    # What runs inside a compiled layer is not seen from outside.
    with CommCounter(mesh) as comm, torch.compiler.set_stance("force_eager"):
        learner.loss(learner.model(inputs), targets).backward()
    learner.optimizer.zero_grad()
    for handle in handles:
        handle.remove()

    ranks = [
        f"rank {rank} ({','.join(map(str, coordinate))})"
        for rank, coordinate in enumerate(_gather(mesh.get_coordinate()))
    ]
    _say_table(
        ["parameter", "whole", "placed", *ranks],
        # Of layers that are all alike the first is shown.
        *_shape_rows({name: shape for name, shape in parameters.items() if _is_first(name)}),
        ["all, elements", f"{whole_count:,}", "", *(f"{count:,}" for count in _gather(count))],
    )
    _say_table(["output", "whole", "placed", *ranks], *_shape_rows(outputs))
    everyones = _gather(dict(comm.bytes))
    _say_table(
        ["bytes received in a step", "along", "calls", *ranks],
        *(
            [kind, axis, str(calls), *(f"{moved.get((axis, kind), 0):,}" for moved in everyones)]
            for (axis, kind), calls in sorted(comm.calls.items())
        ),
        [
            *("together", "", str(sum(comm.calls.values()))),
            *(f"{sum(moved.values()):,}" for moved in everyones),
        ],
    )


def _gather(value: Any) -> list[Any]:
    everywhere = [value] * dist.get_world_size()
    dist.all_gather_object(everywhere, value)
    return everywhere


def _is_first(name: str) -> bool:
    """Whether a parameter is of no layer, or of layer 0."""
    return set(filter(str.isdigit, name.split("."))) <= {"0"}


def _describe(value: Tensor) -> tuple[str, str, str]:
    """The whole shape, the placements and this rank's shape; of a plain tensor only the last."""
    here = "x".join(map(str, local(value).shape))
    if not isinstance(value, DTensor):
        return "", "local", here
    axes = value.device_mesh.mesh_dim_names or ()
    # FSDP cuts once more what the plan has cut; that cut of torch's is a _StridedShard.
    placed = ", ".join(
        f"{axis} S({placement.dim})" if hasattr(placement, "dim") else f"{axis} {placement}"
        for axis, placement in zip(axes, value.placements, strict=True)
    )
    return "x".join(map(str, value.shape)), placed, here


def _shape_rows(shapes: dict[str, tuple[str, str, str]]) -> list[list[str]]:
    """A line a name: its whole shape and placements, and the shape on each rank."""
    everyones = _gather(shapes)
    return [
        [name, whole, placed, *(theirs[name][2] for theirs in everyones)]
        for name, (whole, placed, _) in shapes.items()
    ]


def _say_table(heading: list[str], *rows: list[str]) -> None:
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (heading, *rows)
    ]
    say(lines[0], "-" * max(map(len, lines)), *lines[1:], "")
