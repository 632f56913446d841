"""torch's own styles, lifted onto the grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.testing._internal.distributed._tensor.common_dtensor import RMSNormPython

import torch_tp2d
from support import world
from support.marks import deep
from support.models import grid_mesh, noise, relative
from support.one_module import (
    FEW,
    LARGE,
    SIZES,
    TOLERANCE,
    Layout,
    collect,
    compare,
    covering,
    feed,
    layout_of,
    linear,
    no_difference,
    randomized,
    spread,
    whole,
)
from torch_tp2d import Block2DParallel, Colwise2D, Lifted, Rowwise2D, parallelize_module


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
            linear(case["bias"], k, n),
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
                linear("bias", 7, 11),
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


@pytest.mark.parametrize("rows,columns", [*FEW, *LARGE])
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


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(1, 4), deep(2, 3)])
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


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(1, 4), deep(3, 1), deep(2, 3)])
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
                linear("bias", 7, 8),
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
