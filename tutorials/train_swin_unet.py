"""Trains a Swin-UNet to tell grey from white matter, on a line or a grid of devices.

    torchrun --nproc-per-node 4 tutorials/train_swin_unet.py --grid 2x2

A grid of one row is 1-D tensor parallelism. ``--offload`` keeps parameters, gradients and optimizer
state in the host's memory, by FSDP2's CPUOffloadPolicy; it saves memory of a GPU, and on a CPU,
which is the host, none. ``--verify`` trains the same on one device beside it and compares. At the
end comes what each rank held, and Dice for each class.

The images are axial slices of the MNI152 template that nilearn's package brings, its labels that
template's own tissue maps. It is one brain, the average of 152: nearby slices look alike, and there
is no other patient to test on. This shows that training works and what it takes, not how good such
a model would be.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from common import (
    DTYPES,
    Learner,
    OneDevice,
    check_world,
    launch,
    local,
    make_parser,
    positive,
    say,
    warm_up_and_fall,
    whole,
)
from swin_unet import SwinUNet, SwinUNetConfig
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

import torch_tp2d
from torch_tp2d import Colwise2D, Local2D, Rowwise2D

CLASSES = ("background", "grey matter", "white matter")
SIZES = {
    "tiny": SwinUNetConfig(dim=16, depths=(2, 2), heads=(4, 8)),
    "mini": SwinUNetConfig(dim=32, heads=(4, 8, 16)),
    "small": SwinUNetConfig(dim=96, heads=(4, 8, 16)),
}


def plan_2d() -> dict[str, ParallelStyle]:
    """The Swin-UNet over a grid.

    Windows of all images lie in one dim, and patches are merged and expanded, so between modules
    tensors are local: this row's images, whole along ``tp_col``. Heads and the features inside an
    MLP lie over ``tp_col``. Whole inputs are cut (``Rowwise2D``) where a Linear has more features
    in than out, and whole outputs gathered (``Colwise2D``) where it has fewer: what is cut costs
    less to move.
    """
    plan: dict[str, ParallelStyle] = {
        "patches": Colwise2D(output_layouts=Replicate()),
        "norm": Local2D(),
        "encoder.*.merge.norm": Local2D(),
        "encoder.*.merge.reduce": Rowwise2D(input_layouts=Replicate()),
        "decoder.*.expand.expand": Colwise2D(output_layouts=Replicate()),
        "decoder.*.expand.norm": Local2D(),
        "decoder.*.join": Rowwise2D(input_layouts=Replicate()),
        "to_pixels.expand": Colwise2D(output_layouts=Replicate()),
        # From here on DTensors of the whole batch, for the loss.
        "to_pixels.norm": Local2D(use_local_output=False),
        "head": Rowwise2D(input_layouts=Replicate(), use_local_output=False),
    }
    for blocks in ("encoder.*.blocks.*", "bottom.*", "decoder.*.blocks.*"):
        plan |= {
            f"{blocks}.norm[12]": Local2D(),
            f"{blocks}.attention.[qkv]_proj": Colwise2D(),
            f"{blocks}.attention.bias": Local2D(params={"table": Shard(1)}),
            f"{blocks}.attention.o_proj": Rowwise2D(),
            f"{blocks}.mlp.fc1": Colwise2D(),
            f"{blocks}.mlp.fc2": Rowwise2D(),
        }
    return plan


def distribute(model: SwinUNet, mesh: DeviceMesh, offload: bool) -> None:
    """Lays ``model`` over the grid, in place; FSDP offloads it, over ``mesh["dp"]``."""
    torch_tp2d.parallelize_module(model, mesh["tp_row", "tp_col"], plan_2d())
    if offload:
        policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        for part in (*model.encoder, *model.bottom, *model.decoder, model):
            fully_shard(part, mesh=mesh["dp"], offload_policy=policy)


def load_slices(image: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Every axial slice of the template with enough brain in it, 1 mm apart, in pixels of 2 mm.

    Args:
        image: height and width of the pictures, in pixels; the brain is in their middle.

    Returns:
        Images ``[n, 1, height, width]`` of mean 0 and variance 1, and for each pixel the number of
        its class in :data:`CLASSES`, ``[n, height, width]``.
    """
    import nibabel

    found = importlib.util.find_spec("nilearn")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("the images come with nilearn: pip install nilearn")
    folder = Path(found.origin).parent / "datasets" / "data"
    volumes = []
    for kind in ("t1", "gm", "wm"):
        file = nibabel.load(folder / f"mni_icbm152_{kind}_tal_nlin_sym_09a_converted.nii.gz")
        volume = torch.from_numpy(file.get_fdata(dtype="float32")) / 255
        volumes.append(F.avg_pool3d(volume[None, None], (2, 2, 1))[0, 0])
    t1, grey, white = (volume.permute(2, 0, 1) for volume in volumes)
    labels = torch.stack([1 - grey - white, grey, white]).argmax(0)
    for dim, side in zip((1, 2), image, strict=True):
        brain = (labels > 0).any(0).any(2 - dim).nonzero()
        start = max(0, (int(brain.min()) + int(brain.max()) + 1 - side) // 2)
        missing = max(0, start + side - labels.shape[dim])
        padding = (0, missing) if dim == 2 else (0, 0, 0, missing)
        t1 = F.pad(t1, padding).narrow(dim, start, side)
        labels = F.pad(labels, padding).narrow(dim, start, side)
    used = (labels > 0).float().mean((1, 2)) > 0.02
    t1, labels = t1[used], labels[used]
    return ((t1 - t1.mean()) / t1.std()).unsqueeze(1), labels


def split(count: int) -> tuple[Tensor, Tensor]:
    """Numbers of the slices to learn from and to test on: of each ten in a row, the last two."""
    numbers = torch.arange(count)
    return numbers[numbers % 10 < 8], numbers[numbers % 10 >= 8]


def loss_of_pixels(scores: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of one device's scores ``[B, H, W, classes]``."""
    return F.cross_entropy(scores.flatten(0, -2), labels.flatten())


class Meter:
    """What a rank holds of a model, and the most that a step adds to it, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.added = 0
        self._before = 0

    @staticmethod
    def _resident(key: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
        raise KeyError(key)

    def start(self) -> None:
        """Begins a step. On a CPU from a heap that keeps nothing of the step before (Linux)."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            ctypes.CDLL(None).malloc_trim(0)
            # Makes the peak, VmHWM, start again from what is resident now.
            Path("/proc/self/clear_refs").write_text("5")
            self._before = self._resident("VmRSS")

    def stop(self) -> None:
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
        else:
            peak = self._resident("VmHWM")
        self.added = max(self.added, peak - self._before)

    @staticmethod
    def held(learner: Learner) -> tuple[int, int, int]:
        """Bytes of parameters, gradients and optimizer state, as if every gradient were there."""
        parameters = [local(parameter) for parameter in learner.model.parameters()]
        states = [
            local(value)
            for state in learner.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        sizes = [sum(t.numel() * t.element_size() for t in kind) for kind in (parameters, states)]
        return sizes[0], sizes[0], sizes[1]


@torch.no_grad()
def dice(model: nn.Module, images: Tensor, labels: Tensor, batch: int) -> list[float]:
    """Dice's coefficient of each class, over all pixels: 1 where prediction and label agree."""
    model.eval()
    both, either = torch.zeros(len(CLASSES)), torch.zeros(len(CLASSES))
    for part, truth in zip(images.split(batch), labels.split(batch), strict=True):
        chosen = whole(model(part)).argmax(-1)
        for number in range(len(CLASSES)):
            both[number] += ((chosen == number) & (truth == number)).sum().item()
            either[number] += ((chosen == number).sum() + (truth == number).sum()).item()
    model.train()
    return (2 * both / either).tolist()


def by_class(scores: list[float]) -> str:
    return ", ".join(f"{name} {score:.3f}" for name, score in zip(CLASSES, scores, strict=True))


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, steps=60, lr=2e-3)
    add = parser.add_argument
    add("--size", choices=SIZES, default="mini", help="of the model")
    add("--batch", type=positive, default=8, help="images in a step")
    add("--offload", action="store_true", help="parameters and optimizer in the host's memory")
    add("--verify", action="store_true", help="compare with one device; exit 1 if they differ")
    return parser.parse_args()


def train(args: argparse.Namespace, device: torch.device) -> bool:
    """Trains and reports; returns whether ``--verify``, if asked for, held."""
    check_world(args)
    mesh = init_device_mesh(device.type, (1, *args.grid), mesh_dim_names=("dp", "tp_row", "tp_col"))
    config, dtype = SIZES[args.size], DTYPES[args.dtype]
    with device:
        model = SwinUNet(config, args.seed).to(dtype)
    count = sum(parameter.numel() for parameter in model.parameters())
    learning_rate = warm_up_and_fall(args.lr, args.steps)
    alone = None
    if args.verify:
        alone = OneDevice(model, loss_of_pixels, learning_rate, args.clip, args.dtype)
    distribute(model, mesh, args.offload)
    learner = Learner(model, torch_tp2d.cross_entropy, learning_rate, args.clip)

    images, labels = (part.to(device) for part in load_slices(config.image))
    images = images.to(dtype)
    known, unseen = split(len(images))
    grid = "x".join(map(str, args.grid))
    say(
        f"{count / 1e6:.2f} M parameters, grid {grid}{' offloaded' if args.offload else ''}, "
        f"{args.dtype} on {dist.get_world_size()} x {device.type}; {len(known)} slices to learn "
        f"from, {len(unseen)} to test on"
    )
    meter = Meter(device)
    order = torch.Generator().manual_seed(args.seed)
    for step in range(args.steps):
        chosen = known[torch.randint(len(known), (args.batch,), generator=order)].to(device)
        # The two sides of a brain are alike: each step sees one of the two ways round.
        flip = (1,) if torch.rand((), generator=order) < 0.5 else ()
        pixels, truth = images[chosen].flip([dim + 1 for dim in flip]), labels[chosen].flip(flip)
        # The first step makes the optimizer's state, the next two are measured.
        measured = step in (1, 2)
        if measured:
            meter.start()
        loss = learner.step(step, pixels, truth).item()
        if measured:
            meter.stop()
        beside = (
            "" if alone is None else f", one device {alone.step(step, pixels, truth, loss):.6f}"
        )
        if step % 10 == 0 or step + 1 == args.steps:
            say(f"step {step + 1:3}: loss {loss:.6f}{beside}")

    scores = dice(learner.model, images[unseen], labels[unseen], args.batch)
    say(f"Dice: {by_class(scores)}")
    if alone is not None and alone.learner is not None:
        scores = dice(alone.learner.model, images[unseen], labels[unseen], args.batch)
        say(f"Dice of one device: {by_class(scores)}")

    mine = (*meter.held(learner), meter.added)
    ranks = [mine] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    where = "host" if args.offload else "device"
    say(
        f"MB of a rank: parameters, gradients, optimizer (on the {where}), a step's peak above them"
    )
    for rank, held in enumerate(ranks):
        say(f"rank {rank}: " + ", ".join(f"{size / 1e6:.2f}" for size in held))
    return alone is None or alone.agrees_with(learner.model)


if __name__ == "__main__":
    launch(train, parse_args())
