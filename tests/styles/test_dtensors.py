"""Our nodes between DTensors and local shards, beside ``from_local`` and ``to_local``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from support import world
from support.models import grid_mesh, noise
from torch_tp2d.mesh.grid import Grid
from torch_tp2d.styles.dtensors import shard_of, to_dtensor

SHAPE = torch.Size((5, 3, 7))  # Divides by nothing.
LAYOUTS: tuple[Any, ...] = (
    (Shard(0), Shard(1)),
    (Shard(0), Shard(0)),
    (Shard(1), Replicate()),
    (Replicate(), Shard(2)),
    (Replicate(), Replicate()),
    (Partial(), Shard(2)),
    (Shard(0), Partial()),
)


def _turned(x: DTensor) -> Tensor:
    """Has a gradient whose local shard is not contiguous."""
    return x.transpose(0, 2) * 2


def _placed(x: DTensor) -> Tensor:
    """Has a gradient in another layout."""
    return x.redistribute(placements=(Replicate(), Shard(0))).sin()


def _between() -> list[tuple[Any, bool]]:
    mesh = grid_mesh(2, 2)
    grid = Grid(mesh)
    told: list[tuple[Any, bool]] = []
    whole = noise(*SHAPE)
    uses: tuple[Callable[[DTensor], Tensor], ...] = (torch.sin, _turned, _placed)
    for layout in LAYOUTS:
        placed = [Replicate() if p.is_partial() else p for p in layout]
        mine = torch.distributed.tensor.distribute_tensor(whole, mesh, placed).to_local()
        stride = whole.stride()

        def torchs(x: Tensor, layout: Any = layout, stride: Any = stride) -> DTensor:
            return DTensor.from_local(x, mesh, layout, run_check=False, shape=SHAPE, stride=stride)

        def ours(x: Tensor, layout: Any = layout) -> DTensor:
            return to_dtensor(x, layout, grid, SHAPE)

        for use in uses:
            a, b = (mine.clone().requires_grad_() for _ in range(2))
            x, y = torchs(a), ours(b)
            same = x._spec == y._spec and x.requires_grad == y.requires_grad
            use(x).to_local().square().sum().backward()
            use(y).to_local().square().sum().backward()
            told.append((("from", layout, use.__name__), same and _equal(a.grad, b.grad)))
        grads = [Partial() if p == Replicate() else p for p in placed]
        for given in (None, grads):
            for use_local in (Tensor.sin, lambda x: x.transpose(0, 2).contiguous().exp()):
                a, b = (mine.clone().requires_grad_() for _ in range(2))
                x, y = torchs(a), torchs(b)
                grads_seen: list[Any] = []
                for one in (x, y):
                    one.register_hook(grads_seen.append)
                use_local(x.to_local(grad_placements=given)).sum().backward()
                use_local(shard_of(y, grid, grad_placements=given)).sum().backward()
                theirs, own = grads_seen
                same = theirs.placements == own.placements and theirs.shape == own.shape
                same &= own.to_local().is_contiguous() and own.stride() == stride
                same &= _equal(theirs.to_local(), own.to_local())
                told.append((("to", layout, given is None), same and _equal(a.grad, b.grad)))
        frozen = ours(mine)
        same = not frozen.requires_grad and torch.equal(shard_of(frozen, grid), mine)
        told.append((("frozen", layout), same))
    return told


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and torch.equal(a, b)


def test_they_give_what_torchs_give() -> None:
    for told in world.run(4, _between):
        assert [what for what, same in told if not same] == []
