"""What ``finetune_hf.py`` does, by Lightning's Trainer: from one checkpoint to another on a grid.

    pip install lightning
    python tutorials/smollm2.py
    torchrun --standalone --nproc-per-node 4 tutorials/finetune_lightning.py \
        --dp 2 --grid 1x2 --export out

``GridStrategy`` makes the mesh ``[data_parallel, tp_row, tp_col]`` and deals the data out over its
first axis; ``configure_model`` applies the plan and FSDP2 and reads the safetensors into shards.
``--checkpoint`` saves at the end, and goes on from the newest there, on any grid. The losses
are those that ``finetune_hf.py`` prints. Exits with 1 if the exported checkpoint is not the model.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import warm_up_and_fall, whole
from finetune_hf import build, export, make_finetuning_parser
from lightning.pytorch import LightningModule, Trainer
from text import Batches
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import torch_tp2d
from torch_tp2d.integrations.lightning import GridStrategy


class Windows(Dataset[Tensor]):
    """``count`` sequences of a text, from the one of number ``first`` on."""

    def __init__(self, text: Batches, first: int, count: int) -> None:
        self.text, self.first, self.count = text, first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.text.window(self.first + index).astype(np.int64))


class FineTuned(LightningModule):
    """A causal language model of Hugging Face, learning from a text."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        self.tokens = np.load(args.model / "train.npy", allow_pickle=False)
        self.model: Any = None
        self.part = 0.0

    def configure_model(self) -> None:
        if self.model is None:
            grid, replicas = self.device_mesh["tp_row", "tp_col"], self.device_mesh["data_parallel"]
            self.model = build(self.args, grid, replicas, self.device)

    def train_dataloader(self) -> Any:
        """One epoch of all steps. Lightning counts on from those done before, and so does this."""
        in_step = self.args.batch * self.args.accumulate
        text = Batches(self.tokens, self.args.batch, self.args.seq, self.args.seed)
        first = self.trainer.global_step * in_step
        data = Windows(text, first, self.args.steps * in_step)
        replicas = self.device_mesh["data_parallel"]
        # Lightning's own would shuffle, and Batches has.
        sampler = DistributedSampler(
            data, replicas.size(), replicas.get_local_rank(), shuffle=False
        )
        return DataLoader(data, self.args.batch // self.args.dp, sampler=sampler)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        ids, targets = batch[:, :-1], batch[:, 1:].contiguous()
        logits = self.model(input_ids=ids, use_cache=False).logits
        loss = torch_tp2d.cross_entropy(logits, targets)
        replicas, mean = self.device_mesh["data_parallel"], whole(loss.detach()).clone()
        dist.all_reduce(mean, group=replicas.get_group())
        self.part += mean.item() / replicas.size()
        if (index + 1) % self.args.accumulate == 0:
            step = self.trainer.global_step + 1
            self.print(f"step {step}: loss {self.part / self.args.accumulate:.4f}")
            self.part = 0.0
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1.0, weight_decay=0.01)
        rate = warm_up_and_fall(self.args.lr, self.args.steps)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def main(args: argparse.Namespace) -> bool:
    """Trains; returns whether what was exported is the model."""
    rows, columns = args.grid
    gpus = torch.cuda.is_available()
    trainer = Trainer(
        accelerator="gpu" if gpus else "cpu",
        devices=args.dp * rows * columns,
        strategy=GridStrategy(rows, columns, data_parallel_size=args.dp),
        # Around FSDP2 it is FSDP2 that casts.
        use_distributed_sampler=False,
        precision="bf16-mixed" if args.bf16 and args.dp == 1 else None,
        max_steps=args.steps,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=args.clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = FineTuned(args)
    # A checkpoint is whole when its last file is there.
    saved = sorted(args.checkpoint.glob("step-*/meta.pt")) if args.checkpoint else []
    trainer.fit(model, ckpt_path=saved[-1].parent if saved else None, weights_only=True)
    if args.checkpoint:
        trainer.save_checkpoint(args.checkpoint / f"step-{trainer.global_step:08}")
    held = True
    if args.export:
        ids = torch.from_numpy(model.tokens[: args.seq].astype(np.int64)).to(model.device)
        held = export(args, model.model, ids.view(1, -1))
        dist.barrier()
    return held


if __name__ == "__main__":
    sys.exit(0 if main(make_finetuning_parser(__doc__).parse_args()) else 1)
