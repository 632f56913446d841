#!/usr/bin/env python3
"""Train GPT-2, BERT and T5 on a grid beside one device: do the losses stay together?

    torchrun --standalone --nproc-per-node 4 benchmarks/convergence.py --out FILE.json
    python benchmarks/convergence.py --plot FILE.json

The paper's perplexity after 300 iterations differs between TP and TP2D (37.2 and 29.1); exact
arithmetic makes them equal, and ours has to. Each model, in the paper's shapes made small (heads of
64, a layer for every 43 of the hidden dim), is trained by AdamW for 200 steps on Shakespeare in
GPT-2's tokens (``python tutorials/text.py`` fetches them), three times from the same weights and on
the same batches:

one device    rank 0, plain PyTorch
reversed      rank 1, the same with each batch's sequences in reversed order, which changes nothing
              but the order in which fp32 sums are taken
grid          all ranks, under the ready plan (``torch_tp2d.plans``)

GPT-2 predicts the next token, BERT masked ones, T5 the continuation of a text; there is no dropout,
and everything follows from one seed.

With ``--dtype float64`` the curves stay together to FP64, relative: that is the proof. In fp32 the
first losses agree to about 1e-7, and from then on every rounding is amplified: training is chaotic,
and AdamW's first steps take a gradient's sign even where the gradient is nothing but rounding (the
bias of attention's keys). The yardstick there is ``reversed``, which is the same arithmetic beyond
doubt: the grid is expected to stray from one device no more than TIMES as far. The run ends with
status 1 where a curve does not keep to this.

Results are written after every model; the same command again trains what is missing. One model
takes about 3 minutes on two idle cores at the default size (hidden 128, 3 layers, 8 sequences of
64), ``--hidden 256 --layers 6`` about 15.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path += [str(ROOT), str(ROOT / "tutorials")]

KINDS = ("gpt2", "bert", "t5")
FP64 = 1e-8
"""Largest relative difference of two loss curves in fp64."""
TIMES = 10
"""How many times as far as ``reversed`` the grid's curve may stray from one device's, in fp32."""
WEIGHT_DECAY, CLIP, WARM_UP = 0.01, 1.0, 20
"""The paper's weight decay; the norm to which gradients are clipped; steps to the full rate."""
LAST = 20
"""Steps whose mean loss the perplexity is made of."""
VOCAB = 50257
SEED = 20250

RUNS = ("one device", "reversed", "grid")


def trainer(model: Any, rate: float) -> Callable[[dict[str, Any]], float]:
    """A function that takes one AdamW step and returns the loss before it."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM_UP)
    )

    def step(batch: dict[str, Any]) -> float:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        return float(loss.detach())

    return step


def next_token_loss(logits: Any, labels: Any, **_: Any) -> Any:
    """A causal LM's loss on one device, in the logits' own precision."""
    import torch.nn.functional as F

    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def train(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """The three curves of one kind of model; the same on every rank."""
    import torch
    import torch.distributed as dist
    from hf_models import Sizes, build, task, window
    from text import Batches, load
    from torch.distributed.device_mesh import init_device_mesh

    import torch_tp2d
    from torch_tp2d.plans import plan_for

    sizes = Sizes(args.layers, args.hidden, args.batch, args.seq, VOCAB)
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", args.grid, mesh_dim_names=("tp_row", "tp_col"))
    dtype = getattr(torch, args.dtype)
    model = build(kind, sizes).to(dtype)
    alone = None
    if rank < 2:
        beside = build(kind, sizes).to(dtype)
        if kind == "gpt2":
            # transformers' own rounds the logits to fp32.
            beside.loss_function = next_token_loss
        alone = trainer(beside, args.rate)
    torch_tp2d.parallelize_module(model, mesh, plan_for(model, mesh), src_data_rank=None)
    together = trainer(model, args.rate)
    batches = Batches(load("train", args.data), sizes.batch, window(kind, sizes), SEED)
    curves = torch.zeros(len(RUNS), args.steps, dtype=torch.float64)
    began = time.monotonic()
    for step, (ids, _) in zip(range(args.steps), batches, strict=False):
        batch = task(kind, ids, VOCAB, SEED + step)
        if alone is not None:
            own = {name: value.flip(0) if rank else value for name, value in batch.items()}
            curves[rank, step] = alone(own)
        loss = together(batch)
        if rank == 0:
            curves[2, step] = loss
        if (step + 1) % 20 == 0 or step + 1 == args.steps:
            now = curves[:, step].clone()
            dist.all_reduce(now)
            if rank == 0:
                losses = ", ".join(f"{name} {at:.8f}" for name, at in zip(RUNS, now, strict=True))
                took = time.monotonic() - began
                print(f"{kind} step {step + 1}: {losses}, {took:.0f} s", flush=True)
    dist.all_reduce(curves)
    return summary({name: curve.tolist() for name, curve in zip(RUNS, curves, strict=True)}) | {
        "sizes": asdict(sizes),
        "took_seconds": round(time.monotonic() - began, 1),
    }


def summary(curves: dict[str, list[float]]) -> dict[str, Any]:
    """The curves, how far they stray from one device's, and the perplexities they end at."""
    base = curves["one device"]
    apart = {
        name: max(abs(ours / one - 1) for ours, one in zip(curves[name], base, strict=True))
        for name in RUNS[1:]
    }
    last = {name: curve[-LAST:] for name, curve in curves.items()}
    return {
        "curves": curves,
        "largest_relative_difference": apart,
        "first_relative_difference": abs(curves["grid"][0] / base[0] - 1),
        "perplexity": {name: math.exp(sum(tail) / len(tail)) for name, tail in last.items()},
    }


def allowed(result: dict[str, Any]) -> float:
    """How far the grid's curve may stray, relative."""
    if result["settings"]["dtype"] == "float64":
        return FP64
    return TIMES * float(result["largest_relative_difference"]["reversed"])


def report(kind: str, result: dict[str, Any]) -> str:
    """A model's results in words."""
    apart, perplexity = result["largest_relative_difference"], result["perplexity"]
    return (
        f"{kind}: largest difference of the loss curves, relative: grid {apart['grid']:.1e}, "
        f"reversed {apart['reversed']:.1e} (first step: grid "
        f"{result['first_relative_difference']:.1e}); perplexity of the last {LAST} steps: "
        + ", ".join(f"{name} {perplexity[name]:.3f}" for name in RUNS)
    )


def draw(results: dict[str, Any], path: Path) -> None:
    """The curves above each other, and below them how far each is from one device's."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error}: pip install 'torch_tp2d[bench]'") from None

    cases = results["cases"]
    figure, axes = pyplot.subplots(
        2,
        len(cases),
        figsize=(4.5 * len(cases), 6),
        squeeze=False,
        sharex=True,
        layout="constrained",
    )
    for column, (kind, case) in enumerate(cases.items()):
        curves, (above, below) = case["curves"], axes[:, column]
        above.plot(curves["one device"], label="one device", linewidth=2.5, alpha=0.5)
        above.plot(curves["grid"], label="grid", linewidth=0.8)
        for name in RUNS[1:]:
            pairs = zip(curves[name], curves["one device"], strict=True)
            below.plot([abs(ours / one - 1) for ours, one in pairs], label=name, linewidth=0.8)
        below.axhline(allowed(case), color="gray", linestyle=":")
        above.set(title=kind)
        below.set(yscale="log", xlabel="step")
        for axis in (above, below):
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
    axes[0][0].set_ylabel("loss")
    axes[1][0].set_ylabel("relative difference from one device")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train GPT-2, BERT and T5 on a grid beside one device."
    )
    parser.add_argument("--out", type=Path, help="the results, JSON; what is there is kept")
    parser.add_argument("--plot", type=Path, help="only draw these results, beside them")
    parser.add_argument("--kinds", default=",".join(KINDS), help="joined by commas (all)")
    parser.add_argument("--grid", default="2x2", help="RxC, of all ranks (2x2)")
    parser.add_argument("--steps", type=int, default=200, help="(200)")
    parser.add_argument("--layers", type=int, default=3, help="blocks; T5 has half a side (3)")
    parser.add_argument("--hidden", type=int, default=128, help="width, a multiple of 64 (128)")
    parser.add_argument("--batch", type=int, default=8, help="sequences (8)")
    parser.add_argument("--seq", type=int, default=64, help="tokens of a sequence (64)")
    parser.add_argument("--rate", type=float, default=1e-3, help="of AdamW (1e-3)")
    parser.add_argument(
        "--dtype", choices=["float32", "float64"], default="float32", help="of everything (float32)"
    )
    parser.add_argument(
        "--data", type=Path, default=ROOT / "tutorials" / ".data", help="of tutorials/text.py"
    )
    args = parser.parse_args(argv)
    if (args.out is None) == (args.plot is None):
        parser.error("say either --out or --plot")
    args.kinds = args.kinds.split(",")
    unknown = [kind for kind in args.kinds if kind not in KINDS]
    if unknown:
        parser.error(f"no models {unknown}: choose from {list(KINDS)}")
    rows, _, columns = args.grid.partition("x")
    if not (rows.isdigit() and columns.isdigit()):
        parser.error(f"--grid {args.grid}: write rows x columns, as in 2x2")
    args.grid = [int(rows), int(columns)]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Train on this rank; returns the exit status, 1 where curves part."""
    args = parse(argv)
    if args.plot:
        out = args.plot.with_suffix(".png")
        draw(json.loads(args.plot.read_text()), out)
        print(out)
        return 0

    import torch.distributed as dist
    from compare import commit, is_done, load, now, save

    from torch_tp2d.comm.groups import BACKEND

    dist.init_process_group(BACKEND)
    if dist.get_world_size() != math.prod(args.grid) or dist.get_world_size() < 2:
        raise SystemExit(f"--grid {args.grid} is not of {dist.get_world_size()} ranks, 2 or more")
    settings = {
        name: value for name, value in vars(args).items() if name not in ("out", "plot", "kinds")
    } | {"data": None}
    results = load(args.out)
    # Every rank has read the file before rank 0 writes it.
    dist.barrier()
    parted = []
    for kind in args.kinds:
        if not is_done(results["cases"].get(kind), settings):
            result = {"settings": settings, "date": now(), "commit": commit()} | train(kind, args)
            results["cases"][kind] = result
            if dist.get_rank() == 0:
                save(results, args.out)
        if dist.get_rank() == 0:
            print(report(kind, results["cases"][kind]), flush=True)
        result = results["cases"][kind]
        if result["largest_relative_difference"]["grid"] > allowed(result):
            parted.append(kind)
    dist.destroy_process_group()
    return 1 if parted else 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
