"""The styles of Linear and Conv1D, each on one module, held against one device in fp64."""

from __future__ import annotations

from itertools import product

import pytest
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from support import world
from support.marks import deep
from support.models import grid_mesh, noise, relative
from support.one_module import (
    GRIDS,
    OUTPUTS,
    SIZES,
    compare,
    covering,
    gradients,
    join,
    layout_of,
    linear,
    no_difference,
    one_device,
    spread,
    whole,
)
from torch_tp2d import Block2DParallel, Colwise2D, Rowwise2D, parallelize_module

INPUTS = [
    *product(("local", "mesh"), ("token", "feature", "row", "whole")),
    *product(("sub-mesh",), ("token", "feature", "row")),
]


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
            linear(case["module"], k, n),
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


@pytest.mark.parametrize("rows,columns", GRIDS)
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
            linear("bias", 7, 11),
            Colwise2D(input_layouts=given),
            mesh,
            noise(4, 6, 7, seed=1),
            noise(4, 6, 11, seed=2),
            given,
            (Shard(0), Shard(-1)),
        )
        worst |= {f"{what} {given}": value for what, value in found.items()}
    return worst


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(3, 2)])
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
                linear("bias", 7, 11),
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
    model, reference = (linear("bias", 7, 11) for _ in range(2))
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


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(2, 3)])
def test_linear_styles_take_any_number_of_dims(rows: int, columns: int) -> None:
    no_difference(world.run(rows * columns, _other_ranks, rows, columns))
