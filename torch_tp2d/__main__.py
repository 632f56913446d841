"""``python -m torch_tp2d describe|suggest|check|calibrate``: the planner on the command line.

    python -m torch_tp2d describe gpt2 --mesh 2x2 --batch 8 --seq 512
    python -m torch_tp2d suggest gpt2 --devices 8 --batch 16 --seq 1024 --device h100 --link 400gbit
    python -m torch_tp2d suggest my.package:make_model --plan my.package:make_plan --devices 4 ...
    python -m torch_tp2d check my.package:make_small_model --mesh 2x2
    torchrun --nproc-per-node 4 -m torch_tp2d calibrate

A model is a name or path that transformers knows, a config file (``config.json``), or
``package.module:function``, which is called without arguments. Weights are not loaded: the model is
made on the meta device, without values. Only ``check`` initializes a model as its class does, so
name a small one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import __version__, check_plan, describe, suggest
from .planner.describe import OPTIMIZERS
from .planner.machine import DEVICES, calibrate, read_link

__all__ = ["main"]


def function_of(name: str) -> Callable[..., Any]:
    """The function that ``package.module:function`` names.

    Raises:
        ValueError: if the module or the function does not exist, or it cannot be called.
    """
    module, _, attribute = name.partition(":")
    # As with python -m, modules in the current directory can be imported.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{name}: {error}") from error
    function = getattr(found, attribute, None)
    if not callable(function):
        raise ValueError(f"{name}: {module} has no function {attribute!r}")
    return function


def model_of(name: str, *, values: bool = False) -> nn.Module:
    """The model that the command line names.

    Args:
        name: as the module's docstring says.
        values: initialize the model as its class does; else it is made on the meta device.

    Raises:
        ValueError: if ``name`` does not lead to a model.
    """
    with nullcontext() if values else torch.device("meta"):
        if ":" in name:
            model = function_of(name)()
            if not isinstance(model, nn.Module):
                raise ValueError(f"{name} makes a {type(model).__name__}, not a model")
            return model
        return _of_transformers(name)


def _of_transformers(name: str) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            f"{name} is a model of transformers, which is not installed: pip install transformers, "
            f"or name a function that makes a model, package.module:function"
        ) from error
    try:
        # It takes the path of a file, too, whatever the file is called.
        config = transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{name} is neither a model that transformers finds, nor a config file, nor "
            f"package.module:function: {str(error).splitlines()[0]}"
        ) from error
    for name_ in getattr(config, "architectures", None) or ():
        kind = getattr(transformers, name_, None)
        if kind is not None:
            return kind(config)
    return transformers.AutoModelForCausalLM.from_config(config)


def shape_of(text: str) -> tuple[int, ...]:
    """``2x4`` or ``2x2x4`` as numbers."""
    parts = text.lower().split("x")
    if not all(part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh: write 2x4, or 2x2x4 with dp first")
    return tuple(map(int, parts))


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    whole = argparse.ArgumentParser(
        prog="python -m torch_tp2d",
        description="What a mesh and a plan do to a model, and which to choose.",
    )
    whole.add_argument(
        "--version",
        action="version",
        version=f"torch_tp2d {__version__}, torch {torch.__version__}",
    )
    commands = whole.add_subparsers(dest="command", required=True)
    described = commands.add_parser("describe", help="bytes, shapes and memory, module by module")
    described.add_argument("--mesh", type=shape_of, required=True, help="RxC, or dpxRxC")
    suggested = commands.add_parser("suggest", help="which mesh and plan, by predicted time")
    suggested.add_argument("--devices", type=int, required=True, help="how many there are")
    suggested.add_argument("--memory", help="of each: 80GB, 24GiB")
    suggested.add_argument("--link", help="400gbit, 25GB/s: between nodes, if --per-node is given")
    suggested.add_argument("--device", help=f"{', '.join(sorted(DEVICES))} (this one, measured)")
    suggested.add_argument("--per-node", type=int, help="devices of a node")
    checked = commands.add_parser("check", help="a plan beside one device, on processes of its own")
    checked.add_argument("--mesh", type=shape_of, required=True, help="RxC")
    checked.add_argument("--layers", type=int, default=2, help="at most so many of equal ones (2)")
    for command in (described, suggested, checked):
        command.add_argument("model", help="of transformers, a config file, or module:function")
        needed = command is not checked
        command.add_argument("--batch", type=int, required=needed, help="sequences, of all devices")
        command.add_argument("--seq", type=int, required=needed, help="tokens of each")
        command.add_argument("--plan", help="module:function of a model and a mesh (the ready one)")
    for command in (described, suggested):
        command.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="adamw")
        command.add_argument("--transport", choices=("nccl", "gloo"))
        command.add_argument("--micro-batches", type=int, default=1, help="of a step's batch (1)")
        command.add_argument("--dtype", help="of the parameters: bfloat16, float32 (the model's)")
    measured = commands.add_parser("calibrate", help="measure this machine, and by torchrun a link")
    measured.add_argument("--link", help="200mbit, 25GB/s, instead of measuring it")
    for command in (described, suggested, checked, measured):
        command.add_argument("--json", action="store_true", help="print JSON")
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status, 2 if its arguments cannot work."""
    args = parser().parse_args(argv)
    try:
        found = {"calibrate": _calibrated, "check": _checked}.get(args.command, _planned)(args)
    except (ValueError, TypeError) as error:
        print(f"torch_tp2d {args.command}: {error}", file=sys.stderr)
        return 2
    if found is not None:
        print(found)
    return 0


def _planned(args: argparse.Namespace) -> str:
    model = model_of(args.model)
    if args.dtype is not None:
        dtype = getattr(torch, args.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"--dtype is bfloat16, float16 or float32, not {args.dtype!r}")
        model = model.to(dtype)
    plan = None if args.plan is None else function_of(args.plan)
    options: dict[str, Any] = {
        name: getattr(args, name)
        for name in ("batch", "seq", "optimizer", "transport", "micro_batches")
    }
    found: Any
    if args.command == "describe":
        found = describe(model, args.mesh, plan, **options)
    else:
        options |= {name: getattr(args, name) for name in ("memory", "link", "device", "per_node")}
        found = suggest(model, args.devices, plan=plan, **options)
    return json.dumps(found.to_dict(), indent=1) if args.json else str(found)


def _checked(args: argparse.Namespace) -> str:
    torch.manual_seed(0)
    model = model_of(args.model, values=True)
    plan = None if args.plan is None else function_of(args.plan)
    options = {name: getattr(args, name) for name in ("batch", "seq", "layers")}
    found = check_plan(model, args.mesh, plan, **options)
    return json.dumps(asdict(found), indent=1) if args.json else str(found)


def _calibrated(args: argparse.Namespace) -> str | None:
    link = None if args.link is None else read_link(args.link)
    several = link is None and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        dist.init_process_group()
    try:
        machine = calibrate(link)
        if several and dist.get_rank() > 0:
            return None
    finally:
        if several:
            dist.destroy_process_group()
    if args.json:
        return json.dumps(machine.to_dict())
    return (
        f"{machine.flops / 1e9:.1f} GFLOP/s, memory {machine.memory_rate / 1e9:.1f} GB/s, link "
        f"{machine.link / 1e6:.1f} MB/s, {machine.op_seconds * 1e6:.1f} us an operator, over "
        f"{machine.transport}"
    )


if __name__ == "__main__":
    sys.exit(main())
