"""Blocks whose transfers overlap, beside one device, and the order of what a rank does."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import PrepareModuleInput
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from support.models import grid_mesh, relative
from torch_tp2d import Colwise2D, CommCounter, Rowwise2D, comm, parallelize_module
from torch_tp2d.runtime.deferred import Deferred, Transfer


class Block(nn.Module):
    """Three projections of one input and an MLP, residuals between."""

    def __init__(self, hidden: int, inner: int, touches: bool = False) -> None:
        super().__init__()
        self.mix = Mix(hidden, touches)
        self.w1 = nn.Linear(hidden, inner)
        self.w2 = nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(torch.tanh(x))
        return x + self.w2(F.gelu(self.w1(torch.sin(x))))


class Mix(nn.Module):
    """What attention is to the styles: the projections of one input, combined."""

    def __init__(self, hidden: int, touches: bool) -> None:
        super().__init__()
        self.touches = touches
        self.wq = nn.Linear(hidden, hidden)
        self.wk = nn.Linear(hidden, hidden, bias=False)
        self.wv = nn.Linear(hidden, hidden)
        self.wo = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        if self.touches:
            # Code of the user's that needs the gathered input itself.
            flat = x.view(-1, x.shape[-1])
            x = x * (1 + flat.square().mean(-1).view(*x.shape[:-1], 1))
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        return self.wo(torch.sigmoid(q) * torch.tanh(k) + v)


def plan(regather_input: bool = False, **options: Any) -> dict[str, Any]:
    again = {"regather_input": regather_input}
    return {
        "*.mix": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "*.mix.w[qkv]": Colwise2D(**again, **options),
        "*.mix.wo": Rowwise2D(output_layouts=Shard(1), **options),
        "*.w1": Colwise2D(input_layouts=Shard(1), **again, **options),
        "*.w2": Rowwise2D(output_layouts=Shard(1), **options),
    }


def model(hidden: int, inner: int, **args: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(hidden, inner, **args), Block(hidden, inner, **args)).double()


def tokens(batch: int, sequence: int, hidden: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, sequence, hidden, generator=generator, dtype=torch.float64)


def differences(one: nn.Module, several: nn.Module) -> list[float]:
    return [
        relative(b.grad.full_tensor(), a.grad)
        for a, b in zip(one.parameters(), several.parameters(), strict=True)
    ]


def beside_one_device(
    rows: int, columns: int, sizes: tuple[int, int, int, int], options: dict[str, Any]
) -> float:
    """Two passes whose gradients add up; the largest difference in outputs and gradients."""
    comm.axis.PIECE_BYTES = 256
    batch, sequence, hidden, inner = sizes
    steps = options.pop("steps", ("plain", "plain"))
    one = model(hidden, inner, touches=options.pop("touches", False))
    mesh = grid_mesh(rows, columns)
    several = parallelize_module(copy.deepcopy(one), mesh, plan(**options))
    worst = 0.0
    for step, kind in enumerate(steps):
        whole = tokens(batch, sequence, hidden, step).requires_grad_()
        placements = (Shard(0), Shard(1))
        mine = distribute_tensor(whole.detach(), mesh, placements)
        local = mine.to_local().clone().requires_grad_()
        if kind == "recomputed":
            y = local
            for block in several:
                y = checkpoint(block, y, use_reentrant=False)
        elif kind == "inference":
            with torch.no_grad():
                several(local)
            continue
        else:
            y = several(local)
        expected = one(whole)
        expected.square().mean().backward()
        (y.square().sum() / expected.numel()).backward()
        assert not isinstance(y, Deferred) and not isinstance(local.grad, Deferred)

        shape, stride = whole.shape, whole.stride()

        assert local.grad is not None and whole.grad is not None
        for shard, truth in ((y.detach(), expected.detach()), (local.grad, whole.grad)):
            found = DTensor.from_local(
                shard, mesh, placements, shape=shape, stride=stride, run_check=False
            )
            worst = max(worst, relative(found.full_tensor(), truth))
        if kind == "stepped":
            for module in (one, several):
                torch.optim.SGD(module.parameters(), lr=0.1).step()
    return max(worst, *differences(one, several))


def regathered() -> tuple[int, int]:
    """Gathered inputs alive after forward, and how many bytes more they cost in backward."""
    comm.axis.PIECE_BYTES = 256
    mesh = grid_mesh(2, 2)
    alive: list[weakref.ref[Transfer]] = []
    made = Transfer.__init__

    def remember(self: Transfer, *args: Any) -> None:
        made(self, *args)
        alive.append(weakref.ref(self))

    Transfer.__init__ = remember  # type: ignore[method-assign]
    moved, living = [], 0
    for again in (False, True):
        several = parallelize_module(model(24, 48), mesh, plan(regather_input=again))
        mine = tokens(2, 4, 24, mesh.get_rank()).requires_grad_()
        with CommCounter(mesh) as counted:
            alive.clear()
            y = several(mine)
            living = sum(transfer() is not None for transfer in alive)
            assert living == (0 if again else 4)
            y.square().sum().backward()
        moved.append(counted.total_bytes)
    return living, moved[1] - moved[0]


LETTERS = {
    "all_gather_into_tensor": "g",
    "all_to_all_single": "s",
    "all_reduce": "r",
    "wait_tensor": ".",
    "mm": "x",
    "addmm": "x",
    "addmm_": "x",
    "bmm": "x",
    "baddbmm": "x",
    "native_layer_norm": "n",
}
"""Transfers started (gather, send to each other, reduce), awaited, products, and norms."""


def letter(func: Any, args: Any, row: comm.Axis) -> str:
    """An operation's letter, a capital if it is a transfer along tp_row."""
    known = LETTERS.get(getattr(func, "_opname", ""), "")
    along_row = args and args[-1] in (row.group, row.asking.group)
    return known.upper() if along_row else known


class Events(TorchDispatchMode):
    """What a rank does, one letter each."""

    def __init__(self, row: comm.Axis) -> None:
        super().__init__()
        self.row = row
        self.seen = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen += letter(func, args, self.row)
        return func(*args, **(kwargs or {}))


def order_of_events(rows: int = 2, columns: int = 2, **options: Any) -> tuple[str, ...]:
    mesh = grid_mesh(rows, columns)
    comm.axis.PIECE_BYTES = 4 * 8 * 24  # a gather of the input in two rounds
    torch.manual_seed(0)
    several = parallelize_module(
        nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 24)).double(),
        mesh,
        {
            "0": Colwise2D(input_layouts=Shard(1), **options),
            "2": Rowwise2D(output_layouts=Shard(1), **options),
        },
    )
    mine = tokens(2, 4, 24).requires_grad_()
    seen = []
    for _ in range(2):
        forward, backward = (Events(several[0]._tp2d.grid.row) for _ in range(2))
        with forward:
            loss = several(mine * 1).square().sum()
        with backward:
            loss.backward()
        seen += [forward.seen, backward.seen]
    return tuple(seen)
