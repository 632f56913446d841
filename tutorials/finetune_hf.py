"""From a checkpoint of Hugging Face to another: fine-tuning on ``[dp, tp_row, tp_col]``.

    python tutorials/smollm2.py
    torchrun --standalone --nproc-per-node 4 tutorials/finetune_hf.py --dp 2 --grid 1x2 --export out

Every rank reads its own shards of the safetensors (by torch.distributed.checkpoint), so none ever
holds the whole model. On the grid a ready plan, FSDP2 over ``dp`` around it; in bf16 with gradients
summed in fp32 if asked for, with recomputation, with several micro-batches to a step. The batch
is dealt out over ``dp`` alone. ``--checkpoint`` saves and resumes, on any grid; ``--export`` writes
what plain transformers loads, holds its logits against the trained model's, and continues a prompt
with it on the grid, from a cache of keys and values. Runs on GPUs over NCCL where every process has
one, else on the CPU over gloo. Exits with 1 if the exported checkpoint is not the model.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import load_checkpoint, newest_checkpoint, save_checkpoint
from common import (
    DTYPES,
    check_world,
    launch,
    make_mesh,
    make_parser,
    mean_over,
    positive,
    say,
    share_of,
    warm_up_and_fall,
    whole,
)
from smollm2 import FOLDER
from text import Batches
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import profile
from train_gpt2 import peak_memory
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import torch_tp2d
from torch_tp2d.integrations.transformers import from_pretrained, save_pretrained


def make_finetuning_parser(description: str | None) -> argparse.ArgumentParser:
    parser = make_parser(description, steps=6, lr=2e-5, grid=(1, 2))
    add = parser.add_argument
    add("--model", type=Path, default=FOLDER, metavar="DIR", help="config, safetensors, train.npy")
    add("--dp", type=positive, default=1, help="data-parallel replicas, sharded by FSDP2")
    add("--seq", type=positive, default=64, help="tokens in a sequence")
    add("--batch", type=positive, default=4, help="sequences in a micro-batch, over all replicas")
    add("--accumulate", type=positive, default=2, help="micro-batches in a step")
    add("--bf16", action="store_true", help="compute in bf16, with fp32 weights and sums")
    add("--recompute", action="store_true", help="recompute each layer in the backward pass")
    add("--checkpoint", type=Path, metavar="DIR", help="save here; resume from the newest there")
    add("--export", type=Path, metavar="DIR", help="write a checkpoint of transformers")
    return parser


def parse_args() -> argparse.Namespace:
    parser = make_finetuning_parser(__doc__)
    add = parser.add_argument
    add("--peak", type=float, metavar="FLOPS", help="of a device, for the share that is used (MFU)")
    add("--trace", type=Path, metavar="FILE", help="a trace of the second step, for Perfetto")
    add("--prompt", default="To be, or not", help="to be continued, given a tokenizer")
    return parser.parse_args()


def build(
    args: argparse.Namespace, grid: DeviceMesh, replicas: DeviceMesh, device: torch.device
) -> Any:
    """The model in shards, with the weights of the checkpoint."""
    config = AutoConfig.from_pretrained(args.model)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[args.dtype])
    plan = torch_tp2d.plan_for(model, grid, reduce_dtype=torch.float32 if args.bf16 else None)
    torch_tp2d.parallelize_module(model, grid, plan)
    layers = model.model.layers
    if args.recompute:
        for index, layer in enumerate(layers):
            layers[index] = checkpoint_wrapper(layer)
    if args.dp > 1:
        low: dict[str, Any] = {}
        if args.bf16:
            low = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        for layer in layers:
            fully_shard(layer, mesh=replicas, mp_policy=MixedPrecisionPolicy(**low))
        fully_shard(model, mesh=replicas, mp_policy=MixedPrecisionPolicy(**low))
    model.to_empty(device=device)
    # What no checkpoint has: the ties, and tables that are made of the configuration.
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    weights = dict(model.named_parameters())
    weights = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in weights.items()}
    dcp.load(weights, storage_reader=HuggingFaceStorageReader(str(args.model)))
    return model


class Training:
    """Learning from several micro-batches: weights gathered once, gradients reduced once."""

    def __init__(self, args: argparse.Namespace, model: Any, mesh: DeviceMesh) -> None:
        self.args, self.model, self.mesh = args, model, mesh
        self.grid = mesh["tp_row", "tp_col"]
        self.learning_rate = warm_up_and_fall(args.lr, args.steps)
        self.optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)

    def step(self, step: int, micro_batches: list[tuple[Tensor, Tensor]]) -> float:
        """The mean loss before the update, over all replicas."""
        last, loss = len(micro_batches) - 1, 0.0
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        for index, (ids, targets) in enumerate(micro_batches):
            if self.args.dp > 1:
                self.model.set_requires_gradient_sync(index == last)
            held = torch_tp2d.no_sync(self.grid) if index < last else contextlib.nullcontext()
            with held, self._precision():
                logits = self.model(input_ids=ids, use_cache=False).logits
                part = torch_tp2d.cross_entropy(logits, targets) / len(micro_batches)
                part.backward()
            loss += mean_over(whole(part.detach()), self.mesh)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def _precision(self) -> Any:
        """Autocast where there is no FSDP2 to cast."""
        if not self.args.bf16 or self.args.dp > 1:
            return contextlib.nullcontext()
        return torch.autocast(self.mesh.device_type, torch.bfloat16)


def export(args: argparse.Namespace, model: nn.Module, ids: Tensor) -> bool:
    """Writes a checkpoint that plain transformers loads; returns whether it is the model."""
    save_pretrained(model, str(args.export))
    model.eval()
    with torch.no_grad():
        logits = whole(model(input_ids=ids, use_cache=False).logits)
    if dist.get_rank():
        return True
    plain = AutoModelForCausalLM.from_pretrained(args.export).to(ids.device).eval()
    with torch.no_grad():
        wanted = plain(input_ids=ids, use_cache=False).logits
    difference = ((logits - wanted).norm() / wanted.norm()).item()
    # fp32 in two orders of summation; in bf16 the trained model computes otherwise than this one.
    held = args.bf16 or difference < 3e-6
    print(f"{args.export}: logits in plain transformers differ by {difference:.1e}", flush=True)
    return held


def write(args: argparse.Namespace, device: torch.device) -> None:
    """Continues a prompt by the exported model, read into shards of a grid of all ranks."""
    if not (args.model / "tokenizer_config.json").exists():
        return say("no tokenizer beside the model, so no words")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows, columns = args.grid
    shape = (args.dp * rows, columns)
    grid = init_device_mesh(device.type, shape, mesh_dim_names=("tp_row", "tp_col"))
    model = from_pretrained(AutoModelForCausalLM, str(args.export), grid).eval()
    asked = tokenizer([args.prompt] * shape[0], return_tensors="pt").to(device)
    words = model.generate(**asked, max_new_tokens=12, do_sample=False)
    say(tokenizer.decode(words[0], skip_special_tokens=True))


def train(args: argparse.Namespace, device: torch.device) -> bool:
    """Trains and reports; returns whether what was exported is the model."""
    check_world(args)
    mesh = make_mesh(args, device, line=False)
    model = build(args, mesh["tp_row", "tp_col"], mesh["dp"], device)
    training = Training(args, model, mesh)
    tokens = np.load(args.model / "train.npy", allow_pickle=False)
    batches = Batches(tokens, args.batch, args.seq, args.seed)
    first = 0
    if args.checkpoint and (found := newest_checkpoint(args.checkpoint, device)):
        first, batches.position = load_checkpoint(found, model, training.optimizer)
        say(f"resumed at step {first}")
    count = sum(param.numel() for param in model.parameters())
    for step in range(first, args.steps):
        micro_batches = [
            (share_of(ids, mesh).to(device), share_of(targets, mesh).to(device))
            for ids, targets in (next(batches) for _ in range(args.accumulate))
        ]
        traced = args.trace is not None and step == first + 1 and dist.get_rank() == 0
        began = time.perf_counter()
        with profile() if traced else contextlib.nullcontext() as trace:
            loss = training.step(step, micro_batches)
        seconds = time.perf_counter() - began
        if trace is not None:
            args.trace.parent.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(args.trace))
        rate = args.accumulate * args.batch * args.seq / seconds
        used = ""
        if args.peak:
            # Six operations for each parameter and token, forward and backward.
            used = f", MFU {6 * count * rate / dist.get_world_size() / args.peak:.1%}"
        say(
            f"step {step + 1}: loss {loss:.4f}, {rate:.0f} tokens/s{used}, "
            f"{peak_memory(device) / 2**20:.0f} MiB"
        )
    if args.checkpoint and first < args.steps:
        save_checkpoint(args.checkpoint, model, training.optimizer, args.steps, batches.position)
    if args.export is None:
        return True
    ids = torch.from_numpy(tokens[: args.seq].astype(np.int64)).to(device).view(1, -1)
    held = export(args, model, ids)
    dist.barrier()
    write(args, device)
    return held


if __name__ == "__main__":
    launch(train, parse_args())
