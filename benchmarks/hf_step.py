#!/usr/bin/env python3
"""Time a training step of a Hugging Face model under stock and 2-D plans, in one interleaved run.

What each rank runs; ``hf_speed.py``, whose docstring explains the table, starts it. Forward,
backward and AdamW, all plans from the same weights on the same batch; a plan whose loss or gradient
norm differs from the first one's ends the run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from block import BACKENDS, grid, listed
from hf_models import KINDS, SEED, Batch, Sizes, apply_stock, build, task, window
from measure import Meter, headlines, held, largest_over_ranks, measure, warm_up
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from variants import (
    GRID_PLANS,
    KEPT,
    OURS,
    Grid,
    Share,
    Variant,
    is_ours,
    part,
    shard_blocks,
    stock_meshes,
    titled,
    use_efficient_reduce_scatter,
)

import torch_tp2d
from torch_tp2d.planner.candidates import Candidate
from torch_tp2d.planner.machine import Machine, calibrate
from torch_tp2d.plans import plan_for

STOCK = ("tp", "tp-input")
FSDP = ("fsdp", "fsdp-kept", "fsdp-tp", "fsdp-tp-kept")
RATE = 1e-4
"""AdamW's."""


@dataclass
class ModelVariant(Variant):
    """A model under a plan, and the batch that it is given, whole or this replica's part."""

    batch: Batch = field(default_factory=dict)
    labelled: int = 0
    """Tokens of the whole batch that have a label to predict."""

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)

    @property
    def ours(self) -> bool:
        return is_ours(self.name)

    def step(self, elements: int) -> Tensor:
        with self.around():
            loss = self.grid_step() if self.ours else self.stock_step()
        for parameter in self.model.parameters():
            grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else None
            # A step that leaves a transfer running has not ended.
            if grad is not None and hasattr(grad, "wait"):
                grad.wait()
        self.optimizer.step()
        return loss / self.copies

    def grid_step(self) -> Tensor:
        loss = self.model(**self.batch).loss
        loss.backward()
        return loss.detach()

    def stock_step(self) -> Tensor:
        """The loss outside of the model, where torch's loss_parallel can see its split logits."""
        inputs, labels = dict(self.batch), self.batch["labels"]
        del inputs["labels"]
        kind = self.model.config.model_type
        if kind == "t5":
            inputs["decoder_input_ids"] = self.model.prepare_decoder_input_ids_from_labels(labels)
        labels = targets(kind, labels)
        with loss_parallel() if self.share.columns > 1 else nullcontext():
            logits = self.model(**inputs).logits
            total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            loss = total / self.labelled
            # FSDP2 takes the average over replicas.
            (loss * self.gradient_scale).backward()
        return loss.detach().full_tensor() if isinstance(loss, DTensor) else loss.detach()


def targets(kind: str, labels: Tensor) -> Tensor:
    """What logits are held against: GPT-2's are of the next token."""
    return F.pad(labels, (0, 1), value=-100)[:, 1:] if kind == "gpt2" else labels


def variants(kind: str, sizes: Sizes, grids: Sequence[Grid]) -> list[ModelVariant]:
    """The stock plans on a line of all ranks and on each grid, and the ready plan on each."""
    generator = torch.Generator().manual_seed(SEED + 1)
    ids = torch.randint(0, sizes.vocab, (sizes.batch, window(kind, sizes)), generator=generator)
    batch = task(kind, ids, sizes.vocab, SEED + 2)
    labelled = int((targets(kind, batch["labels"]) >= 0).sum())
    world = dist.get_world_size()

    def made_of(name: str, model: Any, share: Share, copies: int, **more: Any) -> ModelVariant:
        given = {"batch": batch, "labelled": labelled, **more}
        return ModelVariant(name, model, ids, share, copies, **given)

    line = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    made = []
    for name in STOCK:
        model = build(kind, sizes)
        apply_stock(kind, model, line, prepared=name == "tp-input")
        made.append(made_of(name, model, Share(1, world), world))
    fsdp = [(name, shape) for name in FSDP for shape in stock_meshes(name, grids, world)]
    for (name, shape), efficient in product(fsdp, (False, True)):
        both = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        replicas, columns = shape
        model = build(kind, sizes)
        if name in GRID_PLANS:
            apply_stock(kind, model, both["tp"], prepared=True)
        shard_blocks(model, both["dp"], kept=name.endswith(KEPT))
        if efficient:
            use_efficient_reduce_scatter(model)
        mine = {key: part(x, 0, both["dp"]) for key, x in batch.items()}
        given = {"batch": mine, "gradient_scale": replicas, "efficient": efficient}
        made.append(made_of(titled(name, shape), model, Share(*shape), columns, **given))
    for name, shape in product((OURS, OURS + KEPT), grids):
        kept = name.endswith(KEPT)
        if kept and shape[0] == 1:
            # No weight is gathered.
            continue
        model = build(kind, sizes)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("tp_row", "tp_col"))
        plan = plan_for(model, mesh, reshard_after_forward=False if kept else None)
        torch_tp2d.parallelize_module(model, mesh, plan, src_data_rank=None)
        made.append(made_of(titled(name, shape), model, Share(*shape, True), world))
    return made


def chosen(kind: str, sizes: Sizes, machine: Machine, measured: Sequence[str]) -> dict[str, Any]:
    """Of the plans that were measured, the one that ``suggest`` puts first."""
    with torch.device("meta"):
        model = build(kind, sizes)
    found = torch_tp2d.suggest(
        model, dist.get_world_size(), batch=sizes.batch, seq=sizes.seq, device=machine
    )
    for each in found.candidates:
        if plan_of(each) in measured:
            return {"plan": plan_of(each), "predicted_seconds": each.seconds}
    return {}


def plan_of(candidate: Candidate) -> str:
    """The benchmark's name of what ``suggest`` has tried; empty for what it does not run."""
    *outside, rows, columns = candidate.mesh_shape
    kept = KEPT * candidate.keep_weights
    if not candidate.stock:
        usual = candidate.algorithm == "pipelined" and candidate.keep_weights and not outside
        return titled(OURS + KEPT * (rows > 1), (rows, columns)) if usual else ""
    if len(outside) > 1 or "SP" in candidate.name:
        return ""
    if columns == 1:
        return "fsdp" + kept
    return titled("fsdp-tp" + kept, (outside[0], columns)) if outside else "tp-input"


def summarize(
    made: Sequence[ModelVariant], seen: dict[str, tuple[float, float, float]]
) -> list[dict[str, Any]]:
    """A record for each plan; the same on every rank."""
    for variant in made:
        variant.seconds = largest_over_ranks(variant.seconds)
        variant.sent = largest_over_ranks(variant.sent)
        variant.step_memory = largest_over_ranks(variant.step_memory)
    counted = Meter().counter is not None
    grids = [variant for variant in made if variant.ours]
    ours = min(grids, key=lambda variant: statistics.median(variant.seconds)).seconds
    records = []
    for variant in made:
        # Within a round, so that a slow minute does not bend it.
        speedups = [other / own for other, own in zip(variant.seconds, ours, strict=True)]
        loss, norm, moved = seen[variant.title]
        records.append(
            {
                "plan": variant.name,
                "efficient_reduce_scatter": variant.efficient,
                "seconds": statistics.median(variant.seconds),
                "times_ours": statistics.median(speedups),
                "times_ours_min": min(speedups),
                "times_ours_max": max(speedups),
                "sent_bytes": statistics.median(variant.sent) if counted else None,
                "nccl_bytes": moved,
                "step_peak_bytes": statistics.median(variant.step_memory),
                "parameter_bytes": largest_over_ranks([held(variant.model)])[0],
                "loss": loss,
                "gradient_norm": norm,
                "rounds": {
                    "seconds": variant.seconds,
                    "sent_bytes": variant.sent if counted else None,
                    "stolen": variant.stolen,
                },
            }
        )
    return records


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Time a training step of a Hugging Face model under stock and 2-D plans."
    )
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--grid", type=listed(grid), required=True, help="RxC[,RxC...]")
    for name in ("layers", "hidden", "batch", "seq", "vocab", "repeats"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--backend", choices=BACKENDS, default="gloo")
    parser.add_argument("--json", type=Path, help="write the records there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark on this rank; returns the exit status."""
    args = parse(argv)
    dist.init_process_group(args.backend)
    sizes = Sizes(args.layers, args.hidden, args.batch, args.seq, args.vocab)
    machine = calibrate()
    made = variants(args.kind, sizes, args.grid)
    tokens = sizes.batch * sizes.seq
    seen, _ = warm_up(made, tokens)
    measure(made, args.repeats, tokens)
    records = summarize(made, seen)
    if dist.get_rank() == 0 and args.json:
        report = {
            "kind": args.kind,
            **asdict(sizes),
            "grids": args.grid,
            "calibrated": machine.to_dict(),
            "plans": records,
            "headlines": {which: line._asdict() for which, line in headlines(records).items()},
            "suggested": chosen(args.kind, sizes, machine, [each["plan"] for each in records]),
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
