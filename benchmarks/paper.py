#!/usr/bin/env python3
"""The paper's tables beside what this library predicts for them, or has measured.

    python benchmarks/paper.py --out benchmarks/results/paper.json     # predicts, in minutes
    python benchmarks/paper.py --show benchmarks/results/paper.json    # prints what was found

The paper (TP2D, doi 10.11992/tis.202411023) trains on up to eight RTX 4090. There is none here, so
each cell is one of three, and says which: *paper*, what is printed there; *predicted*, by
``torch_tp2d.suggest`` from shapes and a data sheet (bf16 throughout, PCIe 4.0, AdamW); *measured*,
on four processes of two cores at 200 Mbit/s (``hf_speed.py``). A prediction is of a step's forward
and backward without dropout, so hours are compared as ratios only.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import torch_tp2d
from torch_tp2d.planner.candidates import Candidate, Suggestion, Way
from torch_tp2d.planner.machine import machine_of
from torch_tp2d.planner.search import Search
from torch_tp2d.planner.step import Case

sys.path.append(str(Path(__file__).resolve().parents[1] / "tutorials"))
import train_swin_unet
from paper_tables import SHOWN, show
from swin_unet import SwinUNet, SwinUNetConfig

RESULTS = Path(__file__).parent / "results"
DEVICE, SEQ, VOCAB = "rtx4090", 512, 50257

Model = tuple[int, int, int]
"""Layers, hidden size, heads."""

SCALING: dict[int, Model] = {1: (32, 1280, 20), 2: (48, 1536, 24), 4: (54, 1920, 30)}
SCALING[8] = (64, 2304, 36)
"""By number of devices, the models of the paper's Table 3."""
LARGE = SCALING[4]
"""The 2.5 B model of Tables 2 and 4."""

ROWS_OF_TABLE_2: tuple[tuple[str, int, int, str, float, float], ...] = (
    ("TP=2, DP=2", 4, 32, "FSDP2 2 x TP 2", 22.3, 168),
    ("TP=4", 4, 32, "TP 4", 21.5, 118),
    ("TP2D=4", 4, 32, "2-D 2x2", 19.8, 64),
    ("TP=8", 8, 64, "TP 8", 22.2, 91),
    ("TP2D=4, DP=2", 8, 64, "FSDP2 2 x 2-D 2x2", 20.0, 43),
)
"""The paper's name, devices, batch, ours, its GB and its hours."""


ROWS_OF_TABLE_5: tuple[tuple[str, tuple[int, int], float], ...] = (
    ("TP=2", (1, 2), 8.0),
    ("TP=4", (1, 4), 4.8),
    ("TP2D=4", (2, 2), 3.5),
)
"""The paper's name, our mesh, the paper's GB; its fourth row offloads to the host."""
SLICES = 24
"""A batch of Table 5."""

PAPERS_WAITING = {"TP=4": 0.093, "TP2D=4": 0.124}
"""Shares of a step in communication, by the paper's name of the plan in Table 2."""

HUGE: Model = 96, 16384, 128
STRONG_BATCH, WEAK_BATCH = 2048, 2
"""Sequences of a step, and of each device, when devices become more."""
TRIED = 3


def gpt2(model: Model) -> nn.Module:
    """As the paper has it, without values."""
    layers, hidden, heads = model
    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=hidden,
        n_head=heads,
        n_positions=SEQ,
        vocab_size=VOCAB,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    return _on_meta(lambda: transformers.GPT2LMHeadModel(config))


def bert(model: Model) -> nn.Module:
    """Of the same size; the paper does not say its own."""
    layers, hidden, heads = model
    config = transformers.BertConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        vocab_size=VOCAB,
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    )
    return _on_meta(lambda: transformers.BertForMaskedLM(config))


def t5(model: Model) -> nn.Module:
    """Half of the layers in the encoder, half in the decoder."""
    layers, hidden, heads = model
    config = transformers.T5Config(
        num_layers=layers // 2,
        d_model=hidden,
        num_heads=heads,
        d_kv=hidden // heads,
        d_ff=4 * hidden,
        vocab_size=VOCAB,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    return _on_meta(lambda: transformers.T5ForConditionalGeneration(config))


def _on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make().to(torch.bfloat16)


def predict(model: nn.Module, devices: int, batch: int) -> Suggestion:
    """Every plan on so many devices, within the memory that they have."""
    return torch_tp2d.suggest(model, devices, batch=batch, seq=SEQ, device=DEVICE)


def fastest(found: Suggestion, *names: str) -> Candidate:
    """The fastest of these plans that fits; the smallest if none does."""
    own = [each for each in found.candidates if each.name in names]
    fitting = [each for each in own if each.fits]
    if fitting:
        return min(fitting, key=lambda each: each.seconds)
    return min(own, key=lambda each: each.memory.peak)


def row_of(each: Candidate) -> dict[str, Any]:
    """What a table says of a candidate."""
    return {
        "plan": each.name,
        "seconds": each.seconds,
        "peak_bytes": each.memory.peak,
        "fits": each.fits,
        "recomputes": each.recompute,
        "waiting": 1 - each.timing.compute / each.seconds,
    }


def table_1(found: Suggestion) -> dict[str, Any]:
    """Parts of one device's memory that a device has, by plan."""
    whole = torch_tp2d.describe(gpt2(LARGE), (1, 1), batch=found.batch, seq=SEQ).memory
    kinds = "parameters", "gradients", "optimizer", "activations"
    parts = {}
    for name in ("TP 4", "TP+SP 4", "FSDP2 4", "2-D 2x2"):
        plain = [c for c in found.candidates if c.name == name and not c.recompute]
        least = min(plain, key=lambda each: each.memory.activations)
        parts[name] = {kind: getattr(least.memory, kind) / getattr(whole, kind) for kind in kinds}
    return parts


def table_2(found: dict[int, Suggestion]) -> list[dict[str, Any]]:
    """Time and memory of the 2.5 B model."""
    # Data parallelism alone: each device has the model, and a quarter of the batch.
    alone = torch_tp2d.describe(gpt2(LARGE), (1, 1), batch=8, seq=SEQ).memory.peak
    rows: list[dict[str, Any]] = [
        {"paper": "DP=4", "devices": 4, "plan": "DP 4", "peak_bytes": alone, "fits": False}
    ]
    for name, devices, _, plan, memory, hours in ROWS_OF_TABLE_2:
        ours = row_of(fastest(found[devices], plan))
        rows.append({"paper": name, "devices": devices, "GB": memory, "hours": hours, **ours})
    rows += [{"paper": "", "devices": devices, **row_of(found[devices].best)} for devices in found]
    return rows


def table_3(batch: int = 8) -> list[dict[str, Any]]:
    """What grows with the devices: operations a second and device, against one device's."""
    rows: list[dict[str, Any]] = []
    for devices, model in SCALING.items():
        network = gpt2(model)
        found = predict(network, devices, batch * devices)
        work = sum(p.numel() for p in network.parameters())
        plans = {"best": found.best}
        if devices > 1:
            grids = [each.name for each in found.candidates if not each.stock]
            plans = {
                "TP": fastest(found, f"TP {devices}"),
                "TP+SP": fastest(found, f"TP+SP {devices}"),
                "2-D": fastest(found, *grids),
                **plans,
            }
        rate = {kind: work * batch / each.seconds for kind, each in plans.items()}
        names = {kind: each.name for kind, each in plans.items()}
        rows.append({"devices": devices, "parameters": work, "rate": rate, "plan": names})
    return rows


def table_4() -> dict[str, Any]:
    """TP against TP2D for three kinds of model on four devices, whatever memory they take.

    Only these plans are run, each as ``suggest`` first tries it: gathered weights kept, nothing
    computed again.
    """
    papers = {"gpt2": 118 / 64, "bert": 124 / 69, "t5": 166 / 101}
    made = {"gpt2": gpt2, "bert": bert, "t5": t5}
    measured = json.loads((RESULTS / "hf_speed.json").read_text())["cases"]
    machine, _ = machine_of(DEVICE, None, None, None, torch.bfloat16)
    found = {}
    for kind, make in made.items():
        search = Search(make(LARGE), Case(None, None, 32, SEQ), machine, None, "adamw")
        ways = {(way.kind, way.shape): way for way in search.ways(4)}
        grid = search.predict(ways["2-D", (1, 2, 2)]).seconds
        line, sequence = (search.predict(ways[plan, (1, 1, 4)]) for plan in ("TP", "TP+SP"))
        found[kind] = {
            "paper": papers[kind],
            "predicted TP": line.seconds / grid,
            "predicted TP+SP": sequence.seconds / grid,
            "measured TP": beside_grid(measured[kind]["plans"]),
        }
    return found


def beside_grid(plans: Sequence[dict[str, Any]]) -> float:
    """How many times as long as on 2 x 2 TP took, within the same rounds."""
    seconds = {plan["plan"]: plan["rounds"]["seconds"] for plan in plans}
    return statistics.median(
        line / grid for line, grid in zip(seconds["tp-input"], seconds["tp2d 2x2"], strict=True)
    )


def table_5() -> list[dict[str, Any]]:
    """Memory of a Swin-UNet. The paper does not say its sizes: one for images of 224 pixels."""
    sizes = SwinUNetConfig((224, 224), dim=96, depths=(2,) * 4, heads=(4, 8, 16, 32), window=7)
    with torch.device("meta"):
        model = SwinUNet(sizes)
        images = torch.zeros(SLICES, sizes.channels, *sizes.image)
    rows: list[dict[str, Any]] = []
    for name, shape, memory in ROWS_OF_TABLE_5:
        found = torch_tp2d.describe(
            model,
            shape,
            train_swin_unet.plan_2d(),
            batch=SLICES,
            seq=1,
            inputs=(images,),
            loss=lambda scores: scores.sum(),
        ).memory
        rows.append({"paper": name, "GB": memory, "mesh": shape, "peak_bytes": found.peak})
    return rows


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The paper's figures: the share of a step that is waited for, and perplexity.

    Args:
        rows: of Table 2. The paper does not say whose share it shows; here it is that of its rows
            for four devices.
    """
    waiting = {
        row["paper"]: {"paper": PAPERS_WAITING[row["paper"]], "predicted": row["waiting"]}
        for row in rows
        if row["paper"] in PAPERS_WAITING
    }
    measured = json.loads((RESULTS / "convergence.json").read_text())["cases"]
    perplexity = {
        kind: {name: math.exp(losses[-1]) for name, losses in case["curves"].items()}
        for kind, case in measured.items()
    }
    return {"waiting": waiting, "perplexity": perplexity}


def scaling(devices: Sequence[int] = (64, 256, 1024, 4096, 16384)) -> list[dict[str, Any]]:
    """A model of 0.3 T parameters on nodes of eight H100, the batch fixed, or growing with them.

    Layers are computed again and gathered weights freed, whatever memory there is. Of torch's own
    plans and of ours those that move least are run, and the square grid of all devices.
    """
    machine, _ = machine_of("h100", "400gbit", 8, None, torch.bfloat16)
    model = gpt2(HUGE)
    rows: list[dict[str, Any]] = []
    for count in devices:
        for kind, batch in {"strong": STRONG_BATCH, "weak": count * WEAK_BATCH}.items():
            search = Search(model, Case(None, None, batch, SEQ), machine, None, "adamw")
            ways = search.ways(count)
            side = math.isqrt(count)
            chosen = {
                "stock": [way for way in ways if way.stock],
                "2-D": [way for way in ways if not way.stock and way.shape[1] > 1],
                "square": [Way("2-D", (1, side, side), "pipelined")],
            }
            row: dict[str, Any] = {"devices": count, "kind": kind, "batch": batch}
            for name, group in chosen.items():
                tried = (found for way in group if (found := run_leanly(search, way)) is not None)
                best = min(islice(tried, TRIED), key=lambda each: each.seconds, default=None)
                if best is not None:
                    row[name] = {**row_of(best), "sequences": batch / best.seconds / count}
            rows.append(row)
    return rows


def run_leanly(search: Search, way: Way) -> Candidate | None:
    """With all that spares memory; None for what does not suit the model."""
    try:
        return search.predict(replace(way, keep=not way.moves_weights, recompute=True))
    except (ValueError, RuntimeError):
        return None


def collect(tables: Sequence[str], out: Path) -> dict[str, Any]:
    """Predict these tables; each is written when it is there, and those of before are kept."""
    report: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    report["torch"], report["device"] = torch.__version__, DEVICE
    report["torch_tp2d"] = torch_tp2d.__version__
    found: dict[int, Suggestion] = {}
    if {"1", "2"} & {*tables}:
        found[4] = predict(gpt2(LARGE), 4, 32)
    if "2" in tables:
        found[8] = predict(gpt2(LARGE), 8, 64)
    made: dict[str, Callable[[], Any]] = {
        "1": lambda: table_1(found[4]),
        "2": lambda: table_2(found),
        "3": table_3,
        "4": table_4,
        "5": table_5,
        "figures": lambda: figures(report["table 2"]),
        "scaling": scaling,
    }
    for name in tables:
        report[SHOWN[name][0]] = made[name]()
        out.write_text(json.dumps(report, indent=1) + "\n")
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Predict and write, or show what was written."""
    parser = argparse.ArgumentParser(description="The paper's tables, predicted.")
    parser.add_argument("--out", type=Path, help="the JSON to write")
    parser.add_argument("--show", type=Path, help="a JSON to print as tables")
    parser.add_argument("--table", action="append", choices=SHOWN)
    args = parser.parse_args(argv)
    if (args.out is None) == (args.show is None):
        parser.error("--out or --show")
    if args.show is None:
        report = collect(args.table or [*SHOWN], args.out)
    else:
        report = json.loads(args.show.read_text())
    print(show(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
