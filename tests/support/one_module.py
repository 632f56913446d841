"""One module under a style, held against one device in fp64.

Output, input gradient and every parameter gradient; all are compared whole, on every rank, so
that a replica that has gone its own way shows.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from support.marks import deep
from support.models import noise, relative
from torch_tp2d import Colwise2D, Rowwise2D, parallelize_module

TOLERANCE = 1e-12
"""Relative, in fp64, unless a test says otherwise."""

LARGE = [deep(2, 4), deep(3, 3)]
LINES = [deep(1, 2), deep(2, 1), deep(1, 4), deep(4, 1)]
GRIDS = [(1, 1), (2, 3), deep(2, 2), *LINES, *LARGE]
FEW = [(2, 2), deep(2, 3), *LINES]

SIZES = [(4, 6, 12, 24), (3, 5, 7, 11), (1, 2, 3, 2)]
"""Batch, sequence, features in and out: even, odd, and smaller than the grid."""
SOME_INPUTS = [
    ("local", "token"),
    ("local", "feature"),
    ("mesh", "feature"),
    ("mesh", "whole"),
    ("sub-mesh", "row"),
]
OUTPUTS = ["token", "feature", "row", "whole"]

Layout = tuple[Placement, Placement]
WHOLE: Layout = (Replicate(), Replicate())


class Between(nn.Module):
    """A module in the middle of an embedding and a head."""

    def __init__(self, vocab: int, width: int, middle: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)
        self.middle = middle()

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.middle(self.embed(ids)))
        return y


def up_and_down() -> dict[str, ParallelStyle]:
    """A plan for :class:`Between`, whose middle has features split between an up and a down."""
    return {
        "embed": Rowwise2D(output_layouts=Replicate()),
        "middle.up": Colwise2D(),
        "middle.down": Rowwise2D(output_layouts=Replicate()),
        "head": Colwise2D(use_local_output=False),
    }


class Conv1D(nn.Module):
    """As Hugging Face has it: a Linear that stores its weight ``[in, out]``."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)


class LlamaRMSNorm(nn.Module):
    """As Hugging Face has it, its fp32 statistics included."""

    def __init__(self, hidden: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(dtype)


class GemmaRMSNorm(nn.Module):
    """Stores its weight less one."""

    def __init__(self, hidden: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * (1.0 + self.weight)


def randomized(module: nn.Module, seed: int = 7) -> nn.Module:
    """In fp64, with parameters that no rank could guess (no ones, no zeros)."""
    module = module.double()
    with torch.no_grad():
        for index, param in enumerate(module.parameters()):
            param.copy_(noise(*param.shape, seed=seed + index))
    return module


def spread(x: Tensor, mesh: DeviceMesh, layout: Sequence[Placement]) -> DTensor:
    """A whole tensor, which every rank has, as a DTensor: no communication."""
    placements = [Shard(p.dim % x.ndim) if isinstance(p, Shard) else p for p in layout]
    return distribute_tensor(x, mesh, placements, src_data_rank=None)


def join(local: Tensor, mesh: DeviceMesh, layout: Sequence[Placement], shape: Any) -> Tensor:
    """The whole tensor that the ranks' shards make up, each rank's own copy where replicated.

    Not by ``full_tensor``, which loses elements where one dim is cut unevenly by both axes and
    the mesh has been flattened (torch 2.13).
    """
    assert not any(p.is_partial() for p in layout)
    placements = [Shard(p.dim % local.ndim) if isinstance(p, Shard) else p for p in layout]
    lengths, cuts = list(shape), []
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            # As torch.chunk cuts them; the last ones may be empty.
            length, ranks = lengths[placement.dim], mesh.size(axis)
            longest = -(-length // ranks)
            parts = [min(longest, max(0, length - rank * longest)) for rank in range(ranks)]
            lengths[placement.dim] = parts[mesh.get_local_rank(axis)]
            cuts.append((axis, placement.dim, longest, parts))
    assert list(local.shape) == lengths, (tuple(local.shape), lengths, placements)
    local = local.detach()
    for axis, dim, longest, parts in reversed(cuts):
        if len(parts) > 1:
            padded = local.new_zeros([*local.shape[:dim], longest, *local.shape[dim + 1 :]])
            padded.narrow(dim, 0, local.shape[dim]).copy_(local)
            gathered = [torch.empty_like(padded) for _ in parts]
            if padded.numel():
                dist.all_gather(gathered, padded, group=mesh.get_group(axis))
            pairs = zip(gathered, parts, strict=True)
            local = torch.cat([part.narrow(dim, 0, length) for part, length in pairs], dim)
    return local


def whole(x: Tensor) -> Tensor:
    """A DTensor's value, by :func:`join`."""
    assert isinstance(x, DTensor)
    x = x.detach()
    if any(p.is_partial() for p in x.placements):
        # A gradient that DTensor keeps account of: a sum still to be made.
        x = x.redistribute(placements=[Replicate() if p.is_partial() else p for p in x.placements])
    return join(x.to_local(), x.device_mesh, x.placements, x.shape)


def one_device(
    module: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(grad)
    assert x.grad is not None
    return y.detach(), x.grad


def gradients(reference: nn.Module, model: nn.Module) -> dict[str, float]:
    """Relative differences of all parameter gradients, which are placed as their parameters."""
    found = {}
    for (name, param), ours in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert isinstance(ours, DTensor) and param.grad is not None
        assert isinstance(ours.grad, DTensor), name
        assert ours.grad.placements == ours.placements, name
        found[f"grad of {name}"] = relative(whole(ours.grad), param.grad)
    return found


def feed(x: Tensor, mesh: DeviceMesh, layout: Layout, kind: str) -> Tensor:
    """A leaf: the local shard, a DTensor on the mesh, or one on the ``tp_col`` sub-mesh."""
    given = spread(x, mesh, layout)
    if kind == "local":
        return given.to_local().clone().requires_grad_()
    if kind == "mesh":
        return given.detach().requires_grad_()
    row = spread(x, mesh, (layout[0], Replicate())).to_local()
    return spread(row, mesh["tp_col"], layout[1:]).detach().requires_grad_()


def collect(x: Tensor, mesh: DeviceMesh, layout: Layout, kind: str, shape: Any) -> Tensor:
    """What :func:`feed` took apart (or its gradient), whole."""
    if kind == "mesh":
        assert isinstance(x, DTensor) and x.shape == shape
        return whole(x)
    if kind == "sub-mesh":
        assert isinstance(x, DTensor) and x.device_mesh == mesh["tp_col"]
        x = x.to_local()
    assert not isinstance(x, DTensor)
    return join(x, mesh, layout, shape)


def compare(
    reference: nn.Module,
    style: ParallelStyle,
    mesh: DeviceMesh,
    x: Tensor,
    grad: Tensor,
    given: Layout,
    out: Layout,
    *,
    kind: str = "local",
    local_output: bool = True,
    truth: nn.Module | None = None,
) -> dict[str, float]:
    """Relative differences of a parallelized copy of ``reference`` from one device.

    A local tensor that is replicated along an axis has a gradient that is replicated there:
    the whole gradient is handed to every rank, and is expected back from every rank.
    """
    truth = reference if truth is None else truth
    truth.zero_grad()
    model = copy.deepcopy(reference)
    wanted, wanted_dx = one_device(truth, x, grad)
    parallelize_module(model, mesh, style)
    leaf = feed(x, mesh, given, kind)
    y = model(leaf)
    assert isinstance(y, DTensor) is not local_output
    if isinstance(y, DTensor):
        assert y.device_mesh == mesh and y.shape == wanted.shape
        assert tuple(y.placements) == tuple(spread(wanted, mesh, out).placements)
    spread_grad = spread(grad, mesh, out)
    y.backward(spread_grad.to_local() if local_output else spread_grad)
    assert leaf.grad is not None
    ours = collect(y.detach(), mesh, out, "local" if local_output else "mesh", wanted.shape)
    dx = collect(leaf.grad, mesh, given, kind, x.shape)
    found = {"output": relative(ours, wanted), "grad of input": relative(dx, wanted_dx)}
    return found | gradients(truth, model)


def covering(factors: dict[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Few cases in which any two values of any two factors meet at least once."""
    draw = random.Random(0)
    names = list(factors)

    def pairs(case: dict[str, int]) -> set[tuple[Any, ...]]:
        return {(a, case[a], b, case[b]) for a, b in combinations(names, 2)}

    missing = {
        (a, i, b, j)
        for a, b in combinations(names, 2)
        for i, j in product(range(len(factors[a])), range(len(factors[b])))
    }
    cases = []
    while missing:
        a, i, b, j = min(missing)
        candidates = []
        for _ in range(20):
            case = {name: draw.randrange(len(factors[name])) for name in names}
            candidates.append(case | {a: i, b: j})
        best = max(candidates, key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        cases.append({name: factors[name][index] for name, index in best.items()})
    return cases


def no_difference(results: list[dict[str, float]], tolerance: float = TOLERANCE) -> None:
    for rank, found in enumerate(results):
        assert found
        bad = {key: value for key, value in found.items() if not value < tolerance}
        assert not bad, f"rank {rank}: {bad}"


def linear(kind: str, k: int, n: int) -> nn.Module:
    module = Conv1D(n, k) if kind == "conv1d" else nn.Linear(k, n, bias=kind == "bias")
    return randomized(module)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.w1, self.w2 = nn.Linear(7, 11), nn.Linear(11, 7)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w2(F.gelu(self.w1(self.norm(x))))


def layout_of(name: str, row_dim: int) -> Layout:
    row = Shard(row_dim)
    return {
        "token": (row, Shard(1)),
        "feature": (row, Shard(-1)),
        "row": (row, Replicate()),
        "whole": (Replicate(), Replicate()),
        "transposed": (Shard(-1), Shard(1)),
        "transposed batch": (Shard(-1), Shard(0)),
        "transposed whole": (Shard(-1), Replicate()),
        "columns": (Replicate(), Shard(-1)),
    }[name]
