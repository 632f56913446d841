"""Every style on one module at a time, held against one device in fp64.

Output, input gradient and every parameter gradient; all are compared whole, on every rank, so
that a replica that has gone its own way shows.
"""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import world
from models import grid_mesh, relative
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.parallel import parallelize_module as stock_parallelize_module
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed._tensor.common_dtensor import RMSNormPython

import torch_tp2d
from torch_tp2d import (
    Block2DParallel,
    Colwise2D,
    CommCounter,
    Lifted,
    Norm2D,
    Rowwise2D,
    parallelize_module,
)

TOLERANCE = 1e-12
"""Relative, in fp64, unless a test says otherwise."""

GRIDS = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 3)]
DEEP = [pytest.param(*grid, marks=pytest.mark.deep) for grid in ((2, 4), (3, 3))]
FEW = [(2, 2), (1, 4), (4, 1), (2, 3)]

Layout = tuple[Placement, Placement]
WHOLE: Layout = (Replicate(), Replicate())


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


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


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
    empty = spread(torch.empty(shape), mesh, placements).to_local()
    assert local.shape == empty.shape, (tuple(local.shape), tuple(empty.shape), placements)
    local = local.detach()
    for axis in reversed(range(mesh.ndim)):
        placement = placements[axis]
        if isinstance(placement, Shard) and mesh.size(axis) > 1:
            parts: list[Any] = [None] * mesh.size(axis)
            dist.all_gather_object(parts, local, group=mesh.get_group(axis))
            local = torch.cat(parts, placement.dim)
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


def layout_of(name: str, row_dim: int) -> Layout:
    row = Shard(row_dim)
    return {
        "token": (row, Shard(1)),
        "feature": (row, Shard(-1)),
        "row": (row, Replicate()),
        "whole": WHOLE,
    }[name]


def no_difference(results: list[dict[str, float]], tolerance: float = TOLERANCE) -> None:
    for rank, found in enumerate(results):
        assert found
        bad = {key: value for key, value in found.items() if not value < tolerance}
        assert not bad, f"rank {rank}: {bad}"


# Linear and Conv1D.

SIZES = [(4, 6, 12, 24), (3, 5, 7, 11), (1, 2, 3, 2)]
"""Batch, sequence, features in and out: even, odd, and smaller than the grid."""

INPUTS = [
    *product(("local", "mesh"), ("token", "feature", "row", "whole")),
    *product(("sub-mesh",), ("token", "feature", "row")),
]
SOME_INPUTS = [
    ("local", "token"),
    ("local", "feature"),
    ("mesh", "feature"),
    ("mesh", "whole"),
    ("sub-mesh", "row"),
]
OUTPUTS = ["token", "feature", "row", "whole"]


def _linear(kind: str, k: int, n: int) -> nn.Module:
    module = Conv1D(n, k) if kind == "conv1d" else nn.Linear(k, n, bias=kind == "bias")
    return randomized(module)


def _linear_styles(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    square = ["bmr", "cannon"] if rows == columns else []
    cases = covering(
        {
            "style": [Colwise2D, Rowwise2D, Block2DParallel],
            "module": ["bias", "no bias", "conv1d"],
            "algorithm": ["auto", "collective", "summa", *square],
            "given": INPUTS,
            "out": OUTPUTS,
            "local_output": [True, False],
            "row_dim": [0, 1],
            "reshard": [True, False],
            "sizes": SIZES,
        }
    )
    worst = {}
    for case in cases:
        batch, sequence, k, n = case["sizes"]
        kind, name = case["given"]
        given, out = (layout_of(part, case["row_dim"]) for part in (name, case["out"]))
        style = case["style"](
            input_layouts=given,
            output_layouts=out,
            use_local_output=case["local_output"],
            row_dim=case["row_dim"],
            algorithm=case["algorithm"],
            reshard_after_forward=case["reshard"],
        )
        found = compare(
            _linear(case["module"], k, n),
            style,
            mesh,
            noise(batch, sequence, k, seed=1),
            noise(batch, sequence, n, seed=2),
            given,
            out,
            kind=kind,
            local_output=case["local_output"],
        )
        case["style"] = case["style"].__name__
        worst |= {f"{what}, {case}": value for what, value in found.items()}
    return worst


@pytest.mark.parametrize("rows,columns", [*GRIDS, *DEEP])
def test_linear_styles_equal_one_device(rows: int, columns: int) -> None:
    """Every style, module, algorithm, layout and option, each with every value of every other."""
    no_difference(world.run(rows * columns, _linear_styles, rows, columns))


def _both_axes_change(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    worst = {}
    for given in (
        (Replicate(), Shard(0)),
        (Shard(1), Shard(0)),
        (Shard(1), Shard(1)),
        (Shard(-1), Shard(1)),
        (Shard(-1), Shard(-1)),
    ):
        found = compare(
            _linear("bias", 7, 11),
            Colwise2D(input_layouts=given),
            mesh,
            noise(4, 6, 7, seed=1),
            noise(4, 6, 11, seed=2),
            given,
            (Shard(0), Shard(-1)),
        )
        worst |= {f"{what} {given}": value for what, value in found.items()}
    return worst


@pytest.mark.parametrize("rows,columns", [(2, 2), (3, 2)])
def test_an_input_may_change_on_both_axes(rows: int, columns: int) -> None:
    """Where tp_col had to let go of a dim before tp_row took it, the input's gradient was summed
    along tp_col twice: C times too large."""
    no_difference(world.run(rows * columns, _both_axes_change, rows, columns))


def _other_ranks(rows: int, columns: int) -> dict[str, float]:
    """``[N, K]`` and ``[A, B, S, K]`` inputs, the default layouts, a single Placement."""
    mesh = grid_mesh(rows, columns)
    worst = {}
    for shape, placement in product(((5,), (3, 2, 5)), (None, Shard(0), Shard(-1), Replicate())):
        for style, default_in, default_out in (
            (Colwise2D, Replicate(), Shard(-1)),
            (Rowwise2D, Shard(-1), Replicate()),
            (Block2DParallel, Shard(-1), Shard(-1)),
        ):
            found = compare(
                _linear("bias", 7, 11),
                style(input_layouts=placement, output_layouts=placement),
                mesh,
                noise(*shape, 7, seed=1),
                noise(*shape, 11, seed=2),
                (Shard(0), placement or default_in),
                (Shard(0), placement or default_out),
            )
            key = f"{style.__name__} {shape} {placement}"
            worst |= {f"{what} {key}": value for what, value in found.items()}
    # A DTensor that is a sum still to be made.
    model, reference = (_linear("bias", 7, 11) for _ in range(2))
    parallelize_module(model, mesh, Colwise2D())
    x, grad = noise(4, 5, 7, seed=1), noise(4, 5, 11, seed=2)
    wanted, wanted_dx = one_device(reference, x, grad)
    local = spread(x, mesh, (Shard(0), Replicate())).to_local() / columns
    leaf = DTensor.from_local(
        local, mesh, (Shard(0), Partial()), run_check=False, shape=x.shape, stride=x.stride()
    ).requires_grad_()
    y = model(leaf)
    y.backward(spread(grad, mesh, (Shard(0), Shard(2))).to_local())
    ours = join(y, mesh, (Shard(0), Shard(2)), wanted.shape)
    worst["output of a sum"] = relative(ours, wanted)
    assert leaf.grad is not None
    worst["gradient of a sum"] = relative(whole(leaf.grad), wanted_dx)
    return worst | gradients(reference, model)


@pytest.mark.parametrize("rows,columns", [(2, 2), (2, 3)])
def test_linear_styles_take_any_number_of_dims(rows: int, columns: int) -> None:
    no_difference(world.run(rows * columns, _other_ranks, rows, columns))


# Lifted stock styles.


def _axes_layout(layout: Layout, axes: Any) -> Layout:
    """A layout (beside, along) the axes that a lifted style acts on, as (tp_row, tp_col)."""
    row, col = layout
    if axes == "tp_row":
        return col, row
    return (row, col) if axes == "tp_col" else (col, col)


def _lifted_styles(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    cases = covering(
        {
            "style": [ColwiseParallel, RowwiseParallel],
            "bias": ["bias", "no bias"],
            "axes": ["tp_col", "tp_row", ("tp_row", "tp_col")],
            "given": ["token", "feature", "row"],
            "kind": ["local", "mesh"],
            "out": ["token", "feature", "row"],
            "local_output": [True, False],
            "sizes": SIZES,
        }
    )
    worst = {}
    for case in cases:
        batch, sequence, k, n = case["sizes"]
        given, out = (layout_of(case[part], 0) for part in ("given", "out"))
        stock = case["style"](
            input_layouts=given[1],
            output_layouts=out[1],
            use_local_output=case["local_output"],
        )
        found = compare(
            _linear(case["bias"], k, n),
            Lifted(stock, axes=case["axes"]),
            mesh,
            noise(batch, sequence, k, seed=1),
            noise(batch, sequence, n, seed=2),
            _axes_layout(given, case["axes"]),
            _axes_layout(out, case["axes"]),
            kind=case["kind"],
            local_output=case["local_output"],
        )
        case["style"] = case["style"].__name__
        worst |= {f"{what}, {case}": value for what, value in found.items()}
    # Unmodified in the plan, with the sequence over tp_row, on the tp_col sub-mesh.
    for stock in (ColwiseParallel, RowwiseParallel):
        for row_dim, style in ((0, stock()), (1, Lifted(stock(), row_dim=1))):
            given = (Shard(row_dim), stock().input_layouts[0])
            found = compare(
                _linear("bias", 7, 11),
                style,
                mesh,
                noise(3, 5, 7, seed=1),
                noise(3, 5, 11, seed=2),
                given,
                (Shard(row_dim), stock().output_layouts[0]),
                kind="sub-mesh",
            )
            key = f"{stock.__name__} {row_dim=}"
            worst |= {f"{what}, plain {key}": value for what, value in found.items()}
    return worst


@pytest.mark.parametrize("rows,columns", [*FEW, *DEEP])
def test_lifted_linear_styles_equal_one_device(rows: int, columns: int) -> None:
    no_difference(world.run(rows * columns, _lifted_styles, rows, columns))


def _held(rows: int, columns: int) -> None:
    """What each style leaves of a ``[12, 24]`` weight on a rank."""
    mesh = grid_mesh(rows, columns)
    both = rows * columns
    for style, parts in (
        (Colwise2D(), both),
        (Rowwise2D(), both),
        (Block2DParallel(), both),
        (ColwiseParallel(), columns),
        (RowwiseParallel(), columns),
        (Lifted(ColwiseParallel(), axes="tp_row"), rows),
        (Lifted(ColwiseParallel(), axes=("tp_row", "tp_col")), both),
        (torch_tp2d.Replicate(), 1),
    ):
        module = nn.Linear(24, 12)
        parallelize_module(module, mesh, style)
        assert isinstance(module.weight, DTensor) and module.weight.device_mesh == mesh
        assert module.weight.to_local().numel() == 12 * 24 // parts, style


def test_a_rank_holds_its_share_of_a_weight() -> None:
    world.run(6, _held, 2, 3)


def _sequence_parallel(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    worst = {}
    norms: list[Callable[[], nn.Module]] = [
        lambda: nn.LayerNorm(7),
        lambda: nn.LayerNorm(7, bias=False),
        lambda: nn.RMSNorm(7),
        lambda: RMSNormPython(7),
        lambda: nn.Sequential(nn.LayerNorm(7), nn.GELU()),
    ]
    for case in covering(
        {
            "norm": range(len(norms)),
            "axes": ["tp_col", "tp_row", ("tp_row", "tp_col")],
            "size": [(4, 6), (3, 5)],
            "local": [True, False],
            "sequence_dim": [1, 0],
        }
    ):
        if case["sequence_dim"] == 0 and case["axes"] == "tp_row":
            continue  # Both cut one dim, tp_col outermost, which no DTensor can say.
        axes, local = case["axes"], case["local"]
        layout = _axes_layout((Shard(0), Shard(case["sequence_dim"])), axes)
        stock = SequenceParallel(sequence_dim=case["sequence_dim"], use_local_output=local)
        found = compare(
            randomized(norms[case["norm"]]()),
            Lifted(stock, axes=axes),
            mesh,
            noise(*case["size"], 7, seed=1),
            noise(*case["size"], 7, seed=2),
            layout,
            layout,
            kind="local" if local else "mesh",
            local_output=local,
        )
        worst |= {f"{what}, {case}": value for what, value in found.items()}
    return worst


@pytest.mark.parametrize("rows,columns", [(2, 2), (1, 4), (2, 3)])
def test_lifted_sequence_parallel(rows: int, columns: int) -> None:
    no_difference(world.run(rows * columns, _sequence_parallel, rows, columns))


class _Mixer(nn.Module):
    """Mixes the whole sequence, and asks for the shapes that it has to see."""

    def __init__(self, seen: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.seen = seen

    def forward(
        self, x: Tensor, flag: str, scale: Tensor | None = None, *, memory: Tensor, mask: Any = None
    ) -> tuple[Tensor, str, Tensor]:
        assert flag == "as it is" and mask == "this too"
        if self.seen is not None:
            assert tuple(x.shape) == self.seen, x.shape
        if isinstance(x, DTensor):
            total = memory.sum(1, keepdim=True) + x.mean(1, keepdim=True)
        else:
            batch, _, hidden = x.shape
            total = (memory.sum(1) + x.mean(1)).view(batch, 1, hidden)
        y = x * total
        return y, flag, y * y


def _prepare(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    worst = {}
    inputs = {
        "input_layouts": (Shard(1), None),
        "desired_input_layouts": (Replicate(), None),
        "input_kwarg_layouts": {"memory": Shard(1)},
        "desired_input_kwarg_layouts": {"memory": Replicate()},
    }
    outputs = {
        "output_layouts": (Replicate(), None, Replicate()),
        "desired_output_layouts": (Shard(1), None, Shard(-1)),
    }
    both_axes = ("tp_row", "tp_col")
    for axes, local_in, local_out, kind, (batch, sequence) in (
        ("tp_col", None, True, "local", (3, 5)),
        ("tp_col", None, False, "mesh", (4, 6)),
        ("tp_col", None, True, "sub-mesh", (4, 5)),
        ("tp_col", True, True, "mesh", (3, 5)),
        ("tp_row", True, True, "local", (5, 6)),
        (both_axes, True, True, "local", (3, 9)),
        (both_axes, True, True, "mesh", (3, 9)),
    ):
        beside = {"tp_col": rows, "tp_row": columns}.get(str(axes), 1)
        index = mesh.get_local_rank("tp_row" if axes == "tp_col" else "tp_col")
        shares = [len(chunk) for chunk in torch.arange(batch).chunk(beside)]
        if len(shares) < beside:
            continue  # A rank without tokens: test_transformer has those.
        seen = shares[index if beside > 1 else 0], sequence, 7
        given = _axes_layout((Shard(0), Shard(1)), axes)
        outs = [_axes_layout((Shard(0), p), axes) for p in (Shard(1), Shard(-1))]
        x, memory = noise(batch, sequence, 7, seed=1), noise(batch, sequence, 7, seed=2)
        grads = noise(batch, sequence, 7, seed=3), noise(batch, sequence, 7, seed=4)
        leaves = [t.clone().requires_grad_() for t in (x, memory)]
        wanted = _Mixer()(leaves[0], "as it is", memory=leaves[1], mask="this too")
        torch.autograd.backward([wanted[0], wanted[2]], grads)
        for together in (False, True):
            model: nn.Module = _Mixer(seen)
            if together:
                stock = PrepareModuleInputOutput(**inputs, **outputs, use_local_output=local_out)
                plan = {"": Lifted(stock, axes=axes, use_local_output=local_in)}
                parallelize_module(model, mesh, plan)
            else:
                into, out = (
                    PrepareModuleInput(**inputs),
                    PrepareModuleOutput(**outputs, use_local_output=local_out),
                )
                for stock in (into, out):
                    lifted = Lifted(stock, axes=axes, use_local_output=local_in)
                    parallelize_module(model, mesh, lifted)
            ours = [feed(t, mesh, given, kind) for t in (x, memory)]
            y, flag, square = model(ours[0], "as it is", memory=ours[1], mask="this too")
            assert flag == "as it is"
            results = [y, square]
            for result in results:
                assert isinstance(result, DTensor) is not local_out
            spread_grads = [spread(g, mesh, out) for g, out in zip(grads, outs, strict=True)]
            torch.autograd.backward(
                results, [g.to_local() if local_out else g for g in spread_grads]
            )
            key = f"{axes} {kind} {together=}"
            for result, out, right in zip(results, outs, (wanted[0], wanted[2]), strict=True):
                found = collect(
                    result.detach(), mesh, out, "local" if local_out else "mesh", x.shape
                )
                worst[f"output {out} {key}"] = relative(found, right.detach())
            for name, ours_leaf, leaf in zip(("x", "memory"), ours, leaves, strict=True):
                assert ours_leaf.grad is not None and leaf.grad is not None
                found = collect(ours_leaf.grad, mesh, given, kind, x.shape)
                worst[f"grad of {name} {key}"] = relative(found, leaf.grad)
    return worst


@pytest.mark.parametrize("rows,columns", [(2, 2), (1, 4), (3, 1), (2, 3)])
def test_lifted_prepare_styles(rows: int, columns: int) -> None:
    """Positional and keyword arguments, and None entries, which are left alone."""
    no_difference(world.run(rows * columns, _prepare, rows, columns))


class _WantsDTensor(nn.Module):
    def forward(self, x: Tensor, *, memory: Tensor) -> Tensor:
        assert isinstance(x, DTensor) and tuple(x.shape) == (4, 6, 7), x
        assert isinstance(memory, DTensor)
        return x * 2 + memory


def _prepare_dtensor() -> None:
    mesh = grid_mesh(2, 2)
    model = _WantsDTensor()
    stock = PrepareModuleInput(
        input_layouts=Shard(1),
        desired_input_layouts=Replicate(),
        input_kwarg_layouts={"memory": Shard(1)},
        desired_input_kwarg_layouts={"memory": Replicate()},
    )
    parallelize_module(model, mesh, Lifted(stock, use_local_output=False))
    x = noise(4, 6, 7)
    local = spread(x, mesh, (Shard(0), Shard(1))).to_local()
    y = model(local, memory=local)
    assert relative(whole(y), 3 * x) < TOLERANCE


def test_prepare_module_input_gives_a_dtensor_if_asked() -> None:
    world.run(4, _prepare_dtensor)


def _swapped() -> dict[str, float]:
    mesh = grid_mesh(2, 2)
    worst = {}
    both = (Shard(1), Shard(1))
    for given, out in ((both, (Shard(2), Shard(1))), ((Replicate(), Shard(1)), both)):
        stock = ColwiseParallel(
            input_layouts=given[0], output_layouts=out[0], use_local_output=False
        )
        try:
            found = compare(
                _linear("bias", 7, 8),
                Lifted(stock, axes="tp_row", row_dim=1),
                mesh,
                noise(2, 8, 7, seed=1),
                noise(2, 8, 8, seed=2),
                given,
                out,
                kind="mesh",
                local_output=False,
            )
        except ValueError:
            found = {"refused": 0.0}
        worst |= {f"{what} {given} {out}": value for what, value in found.items()}
    return worst


def test_swapped_axes_that_cut_one_dim_are_right_or_refused() -> None:
    """A DTensor cuts by tp_row first and by tp_col inside that; swapped axes the other way round.

    Even sizes, so that every shape fits: tokens were taken in the wrong order, in silence.
    """
    no_difference(world.run(4, _swapped))


def _flattened() -> list[list[int]]:
    mesh = grid_mesh(2, 2)
    parallelize_module(nn.Linear(7, 11), mesh, Lifted(ColwiseParallel(), axes=("tp_row", "tp_col")))
    both = (Shard(0), Shard(0))
    return [spread(torch.arange(n), mesh, both).full_tensor().tolist() for n in (5, 10)]


def test_lifting_onto_both_axes_leaves_dtensor_as_it_was() -> None:
    """torch 2.13 gathers a dim that both axes cut in one transfer, if it finds the mesh flattened.

    It takes the nested shards of 10 elements, 3, 2, 3, 2, for a flat chunk's 3, 3, 3, 1, and loses
    some: the flat mesh that a lifted style needs has to stay out of DTensor's sight.
    """
    for found in world.run(4, _flattened):
        assert found == [list(range(n)) for n in (5, 10)]


# Embeddings.


def _embedding(
    style: ParallelStyle,
    mesh: DeviceMesh,
    ids: Tensor,
    out: Layout,
    *,
    vocab: int = 33,
    hidden: int = 7,
    padding_idx: int | None = None,
    local_output: bool = True,
    given: Layout | None = None,
    dtensor: bool = False,
) -> dict[str, float]:
    reference = randomized(nn.Embedding(vocab, hidden, padding_idx=padding_idx))
    model = copy.deepcopy(reference)
    parallelize_module(model, mesh, style)
    grad = noise(*ids.shape, hidden, seed=3)
    wanted = reference(ids)
    wanted.backward(grad)
    fed: Tensor = ids
    if dtensor or given is not None:
        fed = spread(ids, mesh, given or WHOLE)
        fed = fed if dtensor else fed.to_local()
    y = model(fed)
    assert isinstance(y, DTensor) is not local_output
    share = spread(grad, mesh, out)
    if local_output:
        # A rank without tokens gets one of zeros, for the user's code: nothing comes of it.
        y = y[tuple(slice(extent) for extent in share.to_local().shape)]
    y.backward(share.to_local() if local_output else share)
    found = collect(y.detach(), mesh, out, "local" if local_output else "mesh", wanted.shape)
    return {"output": relative(found, wanted.detach())} | gradients(reference, model)


def _embeddings(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    generator = torch.Generator().manual_seed(5)
    cases = covering(
        {
            "style": [Rowwise2D, Colwise2D, torch_tp2d.Replicate, RowwiseParallel, ColwiseParallel],
            "out": ["default", "token", "feature", "row"],
            "local_output": [True, False],
            "padding_idx": [None, 0, 17, 32],
            "row_dim": [0, 1],
            "size": [(4, 6), (3, 5)],
            "ids": ["plain", "dtensor", "this row's", "dtensor of this row's"],
        }
    )
    worst = {}
    for case in cases:
        stock = case["style"] in (RowwiseParallel, ColwiseParallel)
        row_dim = case["row_dim"]
        out = layout_of(case["out"], row_dim) if case["out"] != "default" else None
        pair = (Shard(row_dim), Replicate()) if "row" in case["ids"] else None
        if stock:
            pair = None
            options = {} if out is None else {"output_layouts": out[1]}
            single = case["style"](
                input_layouts=Replicate(), use_local_output=case["local_output"], **options
            )
            style: ParallelStyle = Lifted(single, row_dim=row_dim)
        else:
            style = case["style"](
                input_layouts=pair,
                output_layouts=out,
                use_local_output=case["local_output"],
                row_dim=row_dim,
            )
        if out is None:
            by_column = case["style"] in (Colwise2D, ColwiseParallel)
            out = layout_of("feature" if by_column else "row", row_dim)
        ids = torch.randint(0, 33, case["size"], generator=generator)
        ids[0, 0], ids[0, 1] = 32, case["padding_idx"] or 0
        found = _embedding(
            style,
            mesh,
            ids,
            out,
            padding_idx=case["padding_idx"],
            local_output=case["local_output"],
            given=pair,
            dtensor="dtensor" in case["ids"],
        )
        case["style"] = case["style"].__name__
        worst |= {f"{what}, {case}": value for what, value in found.items()}

    # Whole on every row, each of which hands back the whole gradient: an override.
    ids = torch.randint(0, 33, (3, 5), generator=generator)
    style = Rowwise2D(output_layouts=WHOLE, grad_layouts=WHOLE)
    found = _embedding(style, mesh, ids, WHOLE)
    worst |= {f"{what}, override": value for what, value in found.items()}
    # The stock ids: every id falls into one rank's part, so that the others find none.
    found = _embedding(Rowwise2D(), mesh, torch.zeros_like(ids), layout_of("row", 0))
    worst |= {f"{what}, one id": value for what, value in found.items()}
    # Fewer rows of vocabulary than ranks.
    for kind in (Rowwise2D, Colwise2D):
        out = layout_of("token", 0)
        found = _embedding(
            kind(output_layouts=out), mesh, ids % 2, out, vocab=2, hidden=3, padding_idx=1
        )
        worst |= {f"{what}, small {kind.__name__}": value for what, value in found.items()}
    return worst


@pytest.mark.parametrize("rows,columns", [*FEW, *DEEP])
def test_embeddings_equal_one_device(rows: int, columns: int) -> None:
    no_difference(world.run(rows * columns, _embeddings, rows, columns))


def _big_vocab() -> dict[str, float]:
    mesh = grid_mesh(2, 2)
    ids = torch.tensor([[0, 50256, 25128, 25129, 1], [12, 50255, 7, 25129, 0], [3, 3, 3, 3, 3]])
    out = layout_of("token", 0)
    found = {}
    for kind in (Rowwise2D, Colwise2D):
        one = _embedding(
            kind(output_layouts=out), mesh, ids, out, vocab=50257, hidden=5, padding_idx=50256
        )
        found |= {f"{what} {kind.__name__}": value for what, value in one.items()}
    return found


def test_a_vocabulary_of_50257() -> None:
    no_difference(world.run(4, _big_vocab))


class _Positions(nn.Module):
    """Positions are added to tokens: the same position to other tokens in each row."""

    def __init__(self, learned: nn.Module) -> None:
        super().__init__()
        self.learned = learned

    def forward(self, h: Tensor, positions: Tensor) -> Tensor:
        return h * self.learned(positions)


def _positions(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    worst = {}
    kinds: list[Any] = [Rowwise2D, Colwise2D, torch_tp2d.Replicate]
    batch, sequence = 3, 5
    for kind, name, local, row_dim in product(
        kinds, ("token", "row", "feature"), (True, False), (0, 1)
    ):
        layout = layout_of(name, row_dim)
        row: Placement = Replicate() if row_dim == 0 else Shard(0)
        on_positions = {"token": Shard(0), "row": Replicate(), "feature": Shard(-1)}[name]
        reference = _Positions(randomized(nn.Embedding(11, 7)))
        model = copy.deepcopy(reference)
        style = kind(
            output_layouts=on_positions if kind is not Colwise2D else (row, on_positions),
            use_local_output=local,
            row_dim=row_dim,
        )
        parallelize_module(model, mesh, {"learned": style})
        h, grad = noise(batch, sequence, 7, seed=1), noise(batch, sequence, 7, seed=2)
        positions = torch.arange(sequence)
        wanted, dh = one_device(lambda x: reference(x, positions), h, grad)  # noqa: B023
        mode = "local" if local else "mesh"
        leaf = feed(h, mesh, layout, mode)
        y = model(leaf, positions)
        share = spread(grad, mesh, layout)
        y.backward(share.to_local() if local else share)
        assert leaf.grad is not None
        key = f"{kind.__name__} {name} {local=} {row_dim=}"
        worst[f"output {key}"] = relative(collect(y.detach(), mesh, layout, mode, h.shape), wanted)
        worst[f"grad of h {key}"] = relative(collect(leaf.grad, mesh, layout, mode, h.shape), dh)
        found = gradients(reference, model)
        worst |= {f"{what} {key}": value for what, value in found.items()}
    return worst


@pytest.mark.parametrize("rows,columns", FEW)
def test_positions_have_a_share_of_the_gradient_in_each_row(rows: int, columns: int) -> None:
    no_difference(world.run(rows * columns, _positions, rows, columns))


class _Cross(nn.Module):
    """An encoder's tokens in a decoder, whose own are fewer, as in T5."""

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(11, 7), nn.Embedding(11, 7)
        self.q, self.k = nn.Linear(7, 6), nn.Linear(7, 6)
        self.scale = scale

    def forward(self, long: Tensor, short: Tensor) -> Tensor:
        h, g = self.encoder(long), self.decoder(short)
        if self.scale is not None:
            h = h * self.scale
        return self.q(g) * self.k(h).mean(1, keepdim=True)


def _two_sequences(rows: int, columns: int, scale: float | None) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    reference = randomized(_Cross(scale))
    model = copy.deepcopy(reference)
    plan = {
        "*coder": Rowwise2D(output_layouts=Shard(1)),
        "[qk]": Colwise2D(input_layouts=Shard(1)),
    }
    parallelize_module(model, mesh, plan)
    long, short = torch.arange(24).view(3, 8) % 11, torch.arange(15).view(3, 5) % 11
    grad, layout = noise(3, 5, 6, seed=2), (Shard(0), Shard(2))
    wanted = reference(long, short)
    wanted.backward(grad)
    y = model(long, short)
    y.backward(spread(grad, mesh, layout).to_local())
    found = {"output": relative(join(y, mesh, layout, wanted.shape), wanted.detach())}
    return found | gradients(reference, model)


@pytest.mark.parametrize("rows,columns", [(2, 2), (1, 3)])
def test_two_sequences_of_other_lengths(rows: int, columns: int) -> None:
    """A local tensor that comes from a style is known; what the user made of it is not.

    The second embedding's sizes are taken for the first one's tokens: an error, not a hang.
    """
    for found in world.run(rows * columns, _two_sequences, rows, columns, None):
        assert max(found.values()) < TOLERANCE, found
    with pytest.raises(world.RankFailed, match="is not this rank's part of the tokens"):
        world.run(rows * columns, _two_sequences, rows, columns, 2.0)


# Norm2D and Replicate.


def _norms() -> list[tuple[str, nn.Module, Callable[[nn.Module, Tensor], Tensor] | None]]:
    """Name, module, and the truth where the module's own forward rounds to fp32."""

    def llama(module: Any, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)

    return [
        ("LayerNorm", nn.LayerNorm(11), None),
        ("LayerNorm, large eps", nn.LayerNorm(11, eps=0.1), None),
        ("LayerNorm, no bias", nn.LayerNorm(11, bias=False), None),
        ("LayerNorm, plain", nn.LayerNorm(11, elementwise_affine=False), None),
        ("RMSNorm", nn.RMSNorm(11), None),
        ("RMSNorm, eps", nn.RMSNorm(11, eps=0.01), None),
        ("RMSNorm, plain", nn.RMSNorm(11, elementwise_affine=False), None),
        ("RMSNormPython", RMSNormPython(11, eps=0.01), None),
        ("Llama", LlamaRMSNorm(11, eps=0.01), llama),
        ("Gemma", GemmaRMSNorm(11, eps=0.01), None),
    ]


class _Truth(nn.Module):
    def __init__(self, module: nn.Module, compute: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.module = module
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self.module, x)


def _norm_styles(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    norms = _norms()
    worst = {}
    for case in covering(
        {
            "norm": range(len(norms)),
            "given": SOME_INPUTS,
            "out": OUTPUTS,
            "local_output": [True, False],
            "row_dim": [0, 1],
            "size": [(4, 6), (3, 5)],
        }
    ):
        name, module, compute = norms[case["norm"]]
        module = randomized(copy.deepcopy(module))
        kind, given_name = case["given"]
        given, out = (layout_of(part, case["row_dim"]) for part in (given_name, case["out"]))
        found = compare(
            module,
            Norm2D(
                input_layouts=given,
                output_layouts=out,
                use_local_output=case["local_output"],
                row_dim=case["row_dim"],
            ),
            mesh,
            3 + noise(*case["size"], 11, seed=1),
            noise(*case["size"], 11, seed=2),
            given,
            out,
            kind=kind,
            local_output=case["local_output"],
            truth=None if compute is None else _Truth(module, compute),
        )
        worst |= {f"{what}, {name} {case}": value for what, value in found.items()}
    return worst


@pytest.mark.parametrize("rows,columns", [*FEW, *DEEP])
def test_norm2d_equals_one_device(rows: int, columns: int) -> None:
    no_difference(world.run(rows * columns, _norm_styles, rows, columns))


def _bf16_norms() -> list[tuple[str, float]]:
    mesh = grid_mesh(2, 2)
    x = (100 + noise(4, 5, 96, seed=1)).to(torch.bfloat16)
    found = []
    for name, module in (
        ("LayerNorm", nn.LayerNorm(96)),
        ("LayerNorm in bf16", nn.LayerNorm(96).to(torch.bfloat16)),
        ("RMSNorm", nn.RMSNorm(96, eps=1e-6)),
        ("RMSNorm in bf16", nn.RMSNorm(96, eps=1e-6).to(torch.bfloat16)),
    ):
        wanted = copy.deepcopy(module).double()(x.double())
        parallelize_module(module, mesh, Norm2D())
        local = spread(x, mesh, (Shard(0), Shard(2))).to_local().requires_grad_()
        y = module(local)
        assert y.dtype == torch.bfloat16
        with CommCounter(mesh) as comm:
            module(local)
        # One or two numbers for each token of this row, in fp32.
        numbers = 2 if "Layer" in name else 1
        assert comm.total_bytes == 2 * 5 * numbers * 4, (name, str(comm))
        y.sum().backward()
        assert local.grad is not None and local.grad.dtype == torch.bfloat16
        assert module.weight.grad.dtype == module.weight.dtype
        worst = (join(y, mesh, (Shard(0), Shard(2)), x.shape).double() - wanted).abs()
        found.append((name, (worst / wanted.abs().clamp(min=1e-2)).max().item()))
    return found


def test_norm2d_keeps_fp32_statistics_of_bf16() -> None:
    """Within bf16's own rounding of the output, 2^-8 (its eps is 2^-7).

    At a mean of 100 bf16 has steps of 0.5, so statistics in bf16 would be off by far more.
    """
    for result in world.run(4, _bf16_norms):
        assert all(worst <= 2**-8 for _, worst in result), result


def _replicated(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    modules: list[Callable[[], nn.Module]] = [
        lambda: nn.LayerNorm(7),
        lambda: nn.RMSNorm(7),
        lambda: LlamaRMSNorm(7, eps=0.01).double(),
        lambda: nn.Linear(7, 7),
        lambda: nn.Sequential(nn.Linear(7, 5), nn.GELU(), nn.Linear(5, 7, bias=False)),
    ]
    worst = {}
    for case in covering(
        {
            "module": range(len(modules)),
            "given": [given for given in SOME_INPUTS if given[1] != "whole"],
            "size": [(4, 6), (3, 5)],
            "row_dim": [0, 1],
            "local_output": [None, True, False],
        }
    ):
        kind, name = case["given"]
        if name == "feature" and case["module"] > 0:
            continue  # A hidden dim that is split is not what whole parameters are for.
        if case["module"] > 2 and (name, case["size"], case["row_dim"]) != ("row", (4, 6), 0):
            continue  # See test_a_replicated_linear_takes_uneven_tokens.
        module = randomized(modules[case["module"]]())
        layout = layout_of(name, case["row_dim"])
        local = kind == "local" if case["local_output"] is None else case["local_output"]
        found = compare(
            module,
            torch_tp2d.Replicate(
                input_layouts=layout,
                output_layouts=layout,
                use_local_output=case["local_output"],
                row_dim=case["row_dim"],
            ),
            mesh,
            noise(*case["size"], 7, seed=1),
            noise(*case["size"], 7, seed=2),
            layout,
            layout,
            kind=kind,
            local_output=local,
        )
        # The Llama norm itself rounds to fp32, 6e-8, and does so here as well: 1e-6 is allowed.
        part = 1e-6 if isinstance(module, LlamaRMSNorm) else 1.0
        worst |= {f"{what}, {case}": value * part for what, value in found.items()}
    return worst


@pytest.mark.parametrize("rows,columns", [(2, 2), (1, 3), (4, 1), (2, 3)])
def test_replicate_equals_one_device(rows: int, columns: int) -> None:
    no_difference(world.run(rows * columns, _replicated, rows, columns))


def _replicated_linear() -> dict[str, float]:
    mesh = grid_mesh(2, 2)
    worst = {}
    for name, row_dim, bias in product(("row", "token"), (0, 1), (True, False)):
        layout = layout_of(name, row_dim)
        found = compare(
            randomized(nn.Linear(7, 11, bias=bias)),
            torch_tp2d.Replicate(input_layouts=layout, row_dim=row_dim),
            mesh,
            noise(3, 5, 7, seed=1),
            noise(3, 5, 11, seed=2),
            layout,
            layout,
        )
        worst |= {f"{what} {name} {row_dim=} {bias=}": value for what, value in found.items()}
    return worst


def test_a_replicated_linear_takes_uneven_tokens() -> None:
    """A router: DTensor's own linear refuses tokens that do not divide over the mesh.

    It flattens them, which it also refuses for some token layouts that do divide.
    """
    no_difference(world.run(4, _replicated_linear))


# Tensors that several modules are given.


class _Attention(nn.Module):
    """q, k and v of one tensor, w1 and w3 of another; ``again`` changes the first in between."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        for name in ("q", "k", "v", "w1", "w3"):
            setattr(self, name, nn.Linear(7, 7))
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        q = self.q(x)
        if self.again:
            x.mul_(3).add_(1)
        y = q * self.k(x) + self.v(x)
        h = x.sin()
        return y + self.w1(h) * self.w3(h)


def _sharing(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    x, grad = noise(3, 5, 7, seed=1), noise(3, 5, 7, seed=2)
    given, out = (Shard(0), Shard(1)), (Shard(0), Shard(2))
    worst = {}
    for again, stock, kind in product((False, True), (False, True), ("local", "mesh")):
        reference = randomized(_Attention(again))
        if again:
            # On one device too, a Linear that learns keeps its input and forbids the change.
            reference.requires_grad_(False)
        model = copy.deepcopy(reference)
        style = Colwise2D(input_layouts=Shard(1))
        other = ColwiseParallel(input_layouts=Shard(1)) if stock else style
        parallelize_module(model, mesh, {"[qv]": style, "k": other, "w?": style})
        wanted, dx = one_device(reference, x, grad)
        leaf = feed(x, mesh, given, kind)
        with CommCounter(mesh) as comm:
            y = model(leaf)
        if columns > 1:
            # Sizes of local tensors are asked for with a gather of one number. In rounds what the
            # others have is sent for; else all of it, the shorter shards padded.
            one = spread(x, mesh, given).to_local()
            row = one.shape[0] * 7 * 8
            others = (5 - one.shape[1]) * row
            longest = -(-5 // columns) * row * (columns - 1)
            gathered = comm.bytes["tp_col", "all_gather_into_tensor"] // longest
            gathered += comm.bytes["tp_col", "all_to_all_single"] // others
            assert gathered == (3 if again else 2), (again, stock, kind, str(comm))
        with CommCounter(mesh) as comm:
            y.backward(spread(grad, mesh, out).to_local())
        if columns > 1:
            backward = comm.calls["tp_col", "all_to_all_single"]
            assert backward == (3 if again else 2), (again, stock, str(comm))
        assert leaf.grad is not None
        key = f"{again=} {stock=} {kind}"
        worst[f"output {key}"] = relative(join(y, mesh, out, x.shape), wanted)
        worst[f"grad of input {key}"] = relative(collect(leaf.grad, mesh, given, kind, x.shape), dx)
        if not again:
            found = gradients(reference, model)
            worst |= {f"{what} {key}": value for what, value in found.items()}
    return worst


@pytest.mark.parametrize("rows,columns", [(1, 2), (2, 2), (2, 3)])
def test_modules_given_one_tensor_gather_it_once(rows: int, columns: int) -> None:
    no_difference(world.run(rows * columns, _sharing, rows, columns))


class _UsesItTwice(nn.Module):
    """User code between PrepareModuleInput and q, k, v that uses the tensor in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(7, 11), nn.Linear(7, 11)
        self.o = nn.Linear(11, 7)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        gate = x.square().mean(1, keepdim=True)
        y = self.o(self.q(x) * self.k(x) + self.q(x.sin()))
        return (y + x * gate).view(batch, sequence, -1)


def _user_code(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    x, grad = noise(3, 5, 7, seed=1), noise(3, 5, 7, seed=2)
    given = (Shard(0), Shard(1))
    worst = {}
    for stock in (False, True):
        colwise = ColwiseParallel if stock else Colwise2D
        reference = randomized(_UsesItTwice())
        model = copy.deepcopy(reference)
        into = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        out = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        plan = {"": into, "q": colwise(), "k": Colwise2D(), "o": Rowwise2D()}
        parallelize_module(model, mesh, plan)
        parallelize_module(model, mesh, out)
        wanted, dx = one_device(reference, x, grad)
        leaf = feed(x, mesh, given, "local")
        y = model(leaf)
        y.backward(spread(grad, mesh, given).to_local())
        assert leaf.grad is not None
        worst[f"output {stock=}"] = relative(join(y, mesh, given, x.shape), wanted)
        worst[f"grad of input {stock=}"] = relative(join(leaf.grad, mesh, given, x.shape), dx)
        found = gradients(reference, model)
        worst |= {f"{what} {stock=}": value for what, value in found.items()}
    return worst


@pytest.mark.parametrize("rows,columns", [(1, 2), (2, 2), (3, 2)])
def test_user_code_may_use_the_prepared_tensor_in_any_way(rows: int, columns: int) -> None:
    no_difference(world.run(rows * columns, _user_code, rows, columns))


def _grad_modes() -> None:
    """A gather made without gradients is not handed to one that needs them, nor kept alive."""
    mesh = grid_mesh(1, 2)
    model = randomized(nn.Linear(7, 4))
    parallelize_module(model, mesh, Colwise2D(input_layouts=Shard(1)))
    leaf = feed(noise(3, 6, 7), mesh, (Shard(0), Shard(1)), "local")
    h = leaf * 2
    with torch.no_grad():
        without = model(h)
    y = model(h)
    assert y.requires_grad and torch.equal(y, without)
    y.sum().backward()
    assert leaf.grad is not None

    alive = weakref.ref(h)
    del y, h, without
    gc.collect()
    assert alive() is None


def test_a_shared_gather_knows_the_grad_mode() -> None:
    world.run(2, _grad_modes)


def _inference_mode() -> None:
    mesh = grid_mesh(2, 2)
    x = noise(4, 6, 7)
    for layout in ((Shard(0), Shard(1)), (Shard(0), Replicate())):
        reference = randomized(nn.Linear(7, 4))
        model = copy.deepcopy(reference)
        parallelize_module(model, mesh, Colwise2D(input_layouts=layout, output_layouts=WHOLE))
        with torch.inference_mode():
            local = spread(x, mesh, layout).to_local().clone()
            assert relative(model(local), reference(x)) < TOLERANCE
            reference = randomized(nn.Sequential(nn.Linear(7, 6), nn.Linear(6, 4)))
            first = Colwise2D(input_layouts=layout, algorithm="pipelined")
            second = Rowwise2D(output_layouts=WHOLE, algorithm="pipelined")
            model = parallelize_module(copy.deepcopy(reference), mesh, {"0": first, "1": second})
            for _ in range(2):
                assert relative(model(local), reference(x)) < TOLERANCE


def test_inference_mode() -> None:
    """Tensors made there have no version counter, which the shared gather asks for.

    Taking up parameters asked for it too, and a model made or placed there raised.
    """
    world.run(4, _inference_mode)


# What a module keeps, and how plans reach it.


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.w1, self.w2 = nn.Linear(7, 11), nn.Linear(11, 7)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w2(F.gelu(self.w1(self.norm(x))))


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": _Mlp(), "1": _Mlp()})
        self.last = nn.LayerNorm(7)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return self.last(x)


def _mlp_plan() -> dict[str, Any]:
    return {
        "norm": SequenceParallel(),
        "w1": Colwise2D(input_layouts=Shard(1)),
        "w2": Rowwise2D(output_layouts=Shard(1), use_local_output=False),
    }


def _run_both(reference: nn.Module, model: nn.Module, mesh: DeviceMesh) -> dict[str, float]:
    """Forward and backward of both on one batch in the token layout."""
    reference.zero_grad()
    model.zero_grad()
    x, grad = noise(3, 5, 7, seed=1), noise(3, 5, 7, seed=2)
    layout = (Shard(0), Shard(1))
    wanted, dx = one_device(reference, x, grad)
    leaf = feed(x, mesh, layout, "mesh")
    y = model(leaf)
    y.backward(spread(grad, mesh, layout))
    assert leaf.grad is not None
    found = {"output": relative(whole(y), wanted), "grad of input": relative(whole(leaf.grad), dx)}
    return found | gradients(reference, model)


def _copies() -> dict[str, float]:
    mesh = grid_mesh(2, 2)
    reference = randomized(_Mlp())
    keys = list(reference.state_dict())
    model = copy.deepcopy(reference)
    parallelize_module(model, mesh, _mlp_plan())
    before = copy.deepcopy(model)
    found = _run_both(reference, model, mesh)
    after = copy.deepcopy(model)
    for name, twin in (("before", before), ("after", after)):
        assert list(twin.state_dict()) == keys == list(model.state_dict())
        for param, mine in zip(twin.parameters(), model.parameters(), strict=True):
            assert param is not mine
        for value in _run_both(reference, twin, mesh).items():
            found[f"copy {name}: {value[0]}"] = value[1]
        # Apart from each other.
        with torch.no_grad():
            twin.w1.weight.zero_()
        assert model.w1.weight.full_tensor().count_nonzero()
    for module in (model, after):
        assert isinstance(module, _Mlp)
        assert isinstance(module.w1, nn.Linear) and isinstance(module.w2, nn.Linear)
        assert isinstance(module.norm, nn.LayerNorm)
        assert "in_features=7" in repr(module.w1)
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    fresh = _Mlp().double()
    fresh.load_state_dict(state)
    for name, value in reference.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)
    return found


def test_a_styled_module_keeps_its_identity_and_can_be_copied() -> None:
    """After a backward pass too.

    A norm's bias had a gradient that was a view into a larger tensor, which DTensor takes for
    storage of its own, so that ``deepcopy`` failed on it.
    """
    no_difference(world.run(4, _copies))


@pytest.mark.parametrize(
    "style",
    [
        Colwise2D(row_dim=1, algorithm="summa"),
        Rowwise2D(output_layouts=Shard(1)),
        Block2DParallel(use_local_output=False),
        Norm2D(),
        torch_tp2d.Replicate(),
        Lifted(ColwiseParallel(), axes="tp_row"),
        Lifted(SequenceParallel()),
    ],
    ids=lambda style: type(style).__name__,
)
def test_repr_tells_the_layouts(style: Any) -> None:
    text = repr(style)
    assert text.startswith(f"{type(style).__name__}(") and text.endswith(")")
    assert "object at" not in text
    for option in ("input_layouts", "output_layouts", "row_dim", "algorithm", "axes"):
        if hasattr(style, option) and not (option == "axes" and not isinstance(style, Lifted)):
            if isinstance(style, Lifted) and option == "row_dim":
                continue
            assert f"{option}={getattr(style, option)!r}" in text


def _plans() -> dict[str, float]:
    mesh = grid_mesh(2, 2)
    reference = randomized(_Stack())
    flat = {f"layers.*.{key}": style for key, style in _mlp_plan().items()}
    globs = {
        "layers.[01].norm": SequenceParallel(),
        "*.?.w1": Colwise2D(input_layouts=Shard(1)),
        "layers.?.*2": Rowwise2D(output_layouts=Shard(1), use_local_output=False),
    }
    last = {"last": SequenceParallel()}
    placement = {"last": Replicate()}
    plans: dict[str, dict[str, Any]] = {
        "flat": {**flat, **last},
        "nested": {"layers": {"*": _mlp_plan()}, **last},
        "nested by half": {"layers.0": _mlp_plan(), "layers.1": _mlp_plan(), **last},
        "under the root": {"": {**flat, **last}},
        "globs": {**globs, **placement},
        "last by default": flat,
    }
    worst = {}
    for name, plan in plans.items():
        model = copy.deepcopy(reference)
        assert parallelize_module(model, mesh, plan) is model
        assert isinstance(model.layers["1"].w1.weight, DTensor)
        assert tuple(model.layers["1"].w1.weight.placements) == (Shard(1), Shard(0))
        for what, value in _run_both(reference, model, mesh).items():
            worst[f"{name}: {what}"] = value
    # One call after another, and the module itself by the empty key.
    model = copy.deepcopy(reference)
    for layer in model.layers.values():
        parallelize_module(layer, mesh, _mlp_plan())
    parallelize_module(model.last, mesh, {"": torch_tp2d.Replicate()})
    for what, value in _run_both(reference, model, mesh).items():
        worst[f"call by call: {what}"] = value
    with mesh:
        model = copy.deepcopy(reference)
        parallelize_module(model, parallelize_plan=plans["flat"])
    for what, value in _run_both(reference, model, mesh).items():
        worst[f"the mesh around it: {what}"] = value
    return worst


def test_plans_reach_their_modules() -> None:
    no_difference(world.run(4, _plans))


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.inner = nn.Linear(7, 7)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(ids)))


def _tied_plan() -> dict[str, Any]:
    return {
        "embed": Rowwise2D(output_layouts=Shard(1)),
        "inner": Colwise2D(input_layouts=Shard(1)),
        "head": Colwise2D(input_layouts=Shard(-1), use_local_output=False),
    }


def _tied(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    ids = torch.arange(15).view(3, 5) % 13
    grad = noise(3, 5, 13, seed=2)
    worst = {}
    by_pieces = [{key: style} for key, style in _tied_plan().items()]
    orders: dict[str, tuple[Any, list[dict[str, Any]]]] = {
        "ours": (parallelize_module, [_tied_plan()]),
        "torch's": (stock_parallelize_module, [_tied_plan()]),
        "ours, piece by piece": (parallelize_module, by_pieces),
        "head first": (parallelize_module, [dict(reversed(_tied_plan().items()))]),
    }
    for name, (apply, plans) in orders.items():
        reference = randomized(_Tied())
        reference.head.weight.requires_grad_(name != "head first")
        model = copy.deepcopy(reference)
        for plan in plans:
            apply(model, mesh, plan)
        assert model.head.weight is model.embed.weight
        assert len(list(model.parameters())) == 3
        wanted = reference(ids)
        wanted.backward(grad)
        y = model(ids)
        y.backward(spread(grad, mesh, y.placements))
        worst[f"output {name}"] = relative(whole(y), wanted.detach())
        if name == "head first":
            assert not model.head.weight.requires_grad and model.head.weight.grad is None
            continue
        found = gradients(reference, model)
        worst |= {f"{what} {name}": value for what, value in found.items()}
    return worst


@pytest.mark.parametrize("rows,columns", [(2, 2), (2, 3)])
def test_tied_weights_stay_one_parameter(rows: int, columns: int) -> None:
    """Through one call or several, in any order; torch's own call unties them elsewhere."""
    no_difference(world.run(rows * columns, _tied, rows, columns))


def _sources() -> None:
    mesh = grid_mesh(2, 2)
    rank = dist.get_rank()
    styles: list[Any] = [
        Colwise2D(),
        Rowwise2D(),
        Block2DParallel(),
        ColwiseParallel(),
        torch_tp2d.Replicate(),
        Lifted(RowwiseParallel(), axes=("tp_row", "tp_col")),
    ]
    for source, style in product((0, None), styles):
        module = nn.Linear(7, 11)
        with torch.no_grad():
            for param in module.parameters():
                param.fill_(float(rank))
        parallelize_module(module, mesh, style, src_data_rank=source)
        for param in module.parameters():
            assert isinstance(param, DTensor)
            expected = float(rank) if source is None else 0.0
            assert (param.to_local() == expected).all(), (source, style, param)
    # A norm that no entry names follows the call as well.
    for source in (0, None):
        model = _Mlp()
        with torch.no_grad():
            model.norm.weight.fill_(float(rank))
        plan = {"w1": Colwise2D(), "w2": Rowwise2D()}
        parallelize_module(model, mesh, plan, src_data_rank=source)
        expected = float(rank) if source is None else 0.0
        assert (model.norm.weight.to_local() == expected).all()


def test_src_data_rank() -> None:
    """0: all take that rank's values, though each was initialised apart. None: each its own."""
    world.run(4, _sources)


def _restyled() -> dict[str, float]:
    mesh = grid_mesh(2, 2)
    worst = {}
    for name, style in (
        ("SequenceParallel", SequenceParallel()),
        ("Replicate", torch_tp2d.Replicate()),
        ("Norm2D", Norm2D(output_layouts=Shard(1), use_local_output=False)),
    ):
        reference = randomized(_Mlp())
        model = copy.deepcopy(reference)
        plan = _mlp_plan()
        del plan["norm"]
        parallelize_module(model, mesh, plan)
        parallelize_module(model, mesh, {"norm": style})
        for what, value in _run_both(reference, model, mesh).items():
            worst[f"{name}: {what}"] = value
    return worst


def test_a_norm_replicated_by_default_may_be_named_later() -> None:
    """The class put in front of the module's found itself in the way: a duplicate base class."""
    no_difference(world.run(4, _restyled))


def _no_communication() -> None:
    mesh = grid_mesh(2, 2)
    model = _Mlp()
    with CommCounter(mesh) as comm:
        parallelize_module(model, mesh, _mlp_plan(), src_data_rank=None)
    assert not comm.calls, str(comm)


def test_without_a_source_rank_nothing_is_sent() -> None:
    world.run(4, _no_communication)


def _meta() -> dict[str, float]:
    mesh = grid_mesh(2, 2)
    reference = randomized(_Mlp())
    with torch.device("meta"):
        model = _Mlp().double()
    parallelize_module(model, mesh, _mlp_plan())
    assert all(param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param, value in zip(model.parameters(), reference.parameters(), strict=True):
            param.copy_(spread(value, mesh, param.placements))
    return _run_both(reference, model, mesh)


def test_a_model_made_on_meta() -> None:
    no_difference(world.run(4, _meta))


def _meta_replicated() -> dict[str, float]:
    mesh = grid_mesh(2, 2)
    reference = RMSNormPython(5).double()
    with torch.device("meta"):
        # Its forward is not torch's, so it runs on DTensors.
        model = RMSNormPython(5).double()
    style = torch_tp2d.Replicate(input_layouts=(Shard(0), Shard(1)))
    parallelize_module(model, mesh, {"": style})
    model.to_empty(device="cpu")
    nn.init.ones_(model.weight)
    x = noise(4, 6, 5, seed=1)
    rows, columns = (axis.get_local_rank() for axis in (mesh["tp_row"], mesh["tp_col"]))
    model(x.chunk(2, 0)[rows].chunk(2, 1)[columns]).square().sum().backward()
    reference(x).square().sum().backward()
    grad = model.weight.grad
    assert isinstance(grad, DTensor) and not any(p.is_partial() for p in grad.placements)
    return {"gradient": relative(grad, reference.weight.grad)}


def test_a_replicated_module_made_on_meta() -> None:
    """Its gradient stayed a partial sum: to_empty() leaves a parameter's hooks behind."""
    no_difference(world.run(4, _meta_replicated))


def _meta_tied() -> dict[str, float]:
    mesh = grid_mesh(2, 2)
    ids = torch.arange(15).view(3, 5) % 13
    reference = randomized(_Tied())
    with torch.device("meta"):
        model = _Tied().double()
    parallelize_module(model, mesh, _tied_plan())
    model.to_empty(device="cpu")
    tied = model.embed.weight
    model.head.weight = nn.Parameter(tied.detach().clone())
    for attempt in range(2):
        # Asked again, it refuses again.
        with pytest.raises(ValueError, match="tie them again"):
            model(ids)
            pytest.fail(f"attempt {attempt} ran")
    model.head.weight = tied
    with torch.no_grad():
        for param, value in zip(model.parameters(), reference.parameters(), strict=True):
            param.copy_(spread(value, mesh, param.placements))
    return {"output": relative(whole(model(ids)), reference(ids).detach())}


def test_a_broken_tie_is_refused() -> None:
    """Every time the model is run, until the tie is mended.

    The check took itself off before it looked, so that a second try ran and trained two weights.
    """
    no_difference(world.run(4, _meta_tied))


def _frozen() -> dict[str, float]:
    mesh = grid_mesh(2, 2)
    x, grad = noise(3, 5, 7, seed=1), noise(3, 5, 7, seed=2)
    worst = {}
    for frozen in (["w1.weight"], ["w2.bias"], ["w1.weight", "w2.weight", "norm.weight"]):
        reference = randomized(_Mlp())
        for name in frozen:
            reference.get_parameter(name).requires_grad_(False)
        model = copy.deepcopy(reference)
        parallelize_module(model, mesh, _mlp_plan())
        wanted, dx = one_device(reference, x, grad)
        leaf = feed(x, mesh, (Shard(0), Shard(1)), "mesh")
        y = model(leaf)
        y.backward(spread(grad, mesh, (Shard(0), Shard(1))))
        assert leaf.grad is not None
        worst[f"output {frozen}"] = relative(whole(y), wanted)
        worst[f"grad of input {frozen}"] = relative(whole(leaf.grad), dx)
        for name, param in reference.named_parameters():
            ours = model.get_parameter(name)
            assert ours.requires_grad is param.requires_grad
            assert (ours.grad is None) is (param.grad is None), name
            if param.grad is not None:
                worst[f"grad of {name} {frozen}"] = relative(whole(ours.grad), param.grad)
    return worst


def test_frozen_parameters_stay_frozen() -> None:
    no_difference(world.run(4, _frozen))


def _split_sequence() -> None:
    mesh = init_device_mesh("cpu", (2,))
    q, k, v = (distribute_tensor(noise(1, 2, 4, 8, seed=n), mesh, [Shard(2)]) for n in range(3))
    with pytest.raises(NotImplementedError, match="only batch and heads"):
        F.scaled_dot_product_attention(q, k, v)


def test_attention_on_a_split_sequence_is_refused() -> None:
    """The rule for a CPU gathered it, and ``context_parallel``, which torch refuses on a CPU,
    ran once torch_tp2d was imported and gave a wrong loss."""
    world.run(2, _split_sequence)
