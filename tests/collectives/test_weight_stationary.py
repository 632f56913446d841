"""The weight-stationary dataflow, against one device in fp64."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from decode import decode, plan
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from support import world
from support.fake import fake_grid
from support.marks import deep
from support.models import grid_mesh, noise, relative
from support.one_module import (
    GemmaRMSNorm,
    Mlp,
    compare,
    covering,
    feed,
    gradients,
    join,
    layout_of,
    linear,
    no_difference,
    one_device,
    randomized,
)
from support.stationary import LAYOUTS, STATIONARY, decoder, mlp_plan, mlps
from torch_tp2d import (
    Block2DParallel,
    Colwise2D,
    CommCounter,
    Norm2D,
    Rowwise2D,
    parallelize_module,
    token_sizes,
)

TOLERANCE = 1e-10
GRIDS = [(1, 1), (1, 2), (2, 1), deep(2, 2), deep(2, 3), deep(4, 1), deep(1, 4)]

SIZES = [(4, 6, 12, 24), (3, 5, 7, 11), (1, 2, 3, 2), (1, 1, 7, 11), (1, 1, 3, 2)]
"""Batch, sequence, features in and out: even, odd, smaller than the grid, and a single token."""


def _linears(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    cases = covering(
        {
            "style": [Colwise2D, Rowwise2D, Block2DParallel],
            "module": ["bias", "no bias", "conv1d"],
            "kind": ["local", "mesh"],
            "given": LAYOUTS,
            "out": LAYOUTS,
            "local_output": [True, False],
            "row_dim": [0, 1],
            "sizes": SIZES,
        }
    )
    worst = {}
    for case in cases:
        batch, sequence, k, n = case["sizes"]
        given, out = (layout_of(case[part], case["row_dim"]) for part in ("given", "out"))
        style = case["style"](
            input_layouts=given,
            output_layouts=out,
            use_local_output=case["local_output"],
            row_dim=case["row_dim"],
            dataflow=STATIONARY,
        )
        found = compare(
            linear(case["module"], k, n),
            style,
            mesh,
            noise(batch, sequence, k, seed=1),
            noise(batch, sequence, n, seed=2),
            given,
            out,
            kind=case["kind"],
            local_output=case["local_output"],
        )
        case["style"] = case["style"].__name__
        worst |= {f"{what}, {case}": value for what, value in found.items()}
    return worst


@pytest.mark.parametrize("rows,columns", GRIDS)
def test_linears_equal_one_device(rows: int, columns: int) -> None:
    """Every style, module, layout and size, each with every value of every other."""
    no_difference(world.run(rows * columns, _linears, rows, columns), TOLERANCE)


def _default_edges(rows: int, columns: int) -> dict[str, float]:
    """A plan that mixes dataflows: what a style takes and gives by default is as ever."""
    mesh = grid_mesh(rows, columns)
    worst = {}
    defaults = {
        Colwise2D: (Replicate(), Shard(-1)),
        Rowwise2D: (Shard(-1), Replicate()),
        Block2DParallel: (Shard(-1), Shard(-1)),
    }
    for (style, (col_in, col_out)), shape in product(defaults.items(), ((5,), (3, 2, 5), (1, 1))):
        found = compare(
            linear("bias", 7, 11),
            style(dataflow=STATIONARY),
            mesh,
            noise(*shape, 7, seed=1),
            noise(*shape, 11, seed=2),
            (Shard(0), col_in),
            (Shard(0), col_out),
        )
        worst |= {f"{what} {style.__name__} {shape}": value for what, value in found.items()}
    return worst


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(2, 3)])
def test_edges_are_the_usual_ones_by_default(rows: int, columns: int) -> None:
    no_difference(world.run(rows * columns, _default_edges, rows, columns), TOLERANCE)


def _placements() -> None:
    mesh = grid_mesh(2, 2)
    for style, kind in product((Colwise2D, Rowwise2D, Block2DParallel), ("bias", "conv1d")):
        placed = []
        for dataflow in ("auto", STATIONARY):
            module = linear(kind, 7, 11)
            parallelize_module(module, mesh, style(dataflow=dataflow))
            placed.append([(p.placements, p.to_local()) for p in module.parameters()])
        for (usual, value), (ours, other) in zip(*placed, strict=True):
            assert usual == ours and torch.equal(value, other)


def test_parameters_lie_as_in_the_usual_dataflow() -> None:
    """So a checkpoint of one is one of the other, and ties hold."""
    world.run(4, _placements)


# Norms.


def _norms(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    worst = {}
    for case in covering(
        {
            "norm": [nn.LayerNorm(11), nn.RMSNorm(11, eps=1e-6), GemmaRMSNorm(11)],
            "given": ["transposed", "transposed batch", "transposed whole"],
            "out": [None, *LAYOUTS],
            "kind": ["local", "mesh"],
            "local_output": [True, False],
            "size": [(4, 6), (3, 5), (1, 1)],
        }
    ):
        given = layout_of(case["given"], 0)
        out = None if case["out"] is None else layout_of(case["out"], 0)
        found = compare(
            randomized(copy.deepcopy(case["norm"])),
            Norm2D(input_layouts=given, output_layouts=out, use_local_output=case["local_output"]),
            mesh,
            3 + noise(*case["size"], 11, seed=1),
            noise(*case["size"], 11, seed=2),
            given,
            given if out is None else out,
            kind=case["kind"],
            local_output=case["local_output"],
        )
        worst |= {f"{what}, {case}": value for what, value in found.items()}
    return worst


@pytest.mark.parametrize("rows,columns", [deep(2, 2), deep(1, 4), deep(4, 1), deep(2, 3)])
def test_a_norm_of_the_transposed_layout(rows: int, columns: int) -> None:
    no_difference(world.run(rows * columns, _norms, rows, columns), TOLERANCE)


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(1, 4), deep(4, 1), deep(2, 3)])
def test_a_stack_of_mlps(rows: int, columns: int) -> None:
    no_difference(world.run(rows * columns, mlps, rows, columns), TOLERANCE)


def _decoded(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    worst = {}
    for size, tokens in product(((1, 3), (3, 5)), (Replicate(), Shard(0), Shard(1))):
        reference = decoder()
        ids = torch.arange(size[0] * size[1]).view(size) % 13
        model = copy.deepcopy(reference)
        parallelize_module(model, mesh, plan(tokens))
        assert model.head.weight is model.tokens.weight
        assert torch.equal(decode(model, ids, 6), decode(reference, ids, 6))
        with torch.no_grad():
            last = ids[:, -1:]
            logits, wanted = (part(last, part(ids)[1])[0] for part in (model, reference))
        worst[f"logits of a token {size} {tokens}"] = relative(logits, wanted)
        grad = noise(*size, 13)
        for part in (model, reference):
            part(ids)[0].backward(grad)
        found = gradients(reference, model)
        worst |= {f"{what} {size} {tokens}": value for what, value in found.items()}
    return worst


@pytest.mark.parametrize("rows,columns", [deep(2, 2), deep(1, 4), deep(4, 1), deep(2, 3)])
def test_a_decoder(rows: int, columns: int) -> None:
    """A token at a time, with a cache, and trained on a whole sequence."""
    no_difference(world.run(rows * columns, _decoded, rows, columns), TOLERANCE)


def _compiled() -> dict[str, float]:
    mesh = grid_mesh(2, 2)
    worst = {}
    for stream, inner in (
        ((Shard(-1), Shard(1)), (Shard(0), Shard(-1))),
        ((Shard(-1), Replicate()), (Replicate(), Shard(-1))),
    ):
        reference = randomized(nn.Sequential(Mlp(), Mlp()))
        model = copy.deepcopy(reference)
        parallelize_module(model, mesh, mlp_plan(stream, inner))
        x, grad = noise(4, 6, 7, seed=1), noise(4, 6, 7, seed=2)
        wanted, dx = one_device(reference, x, grad)
        leaf = feed(x, mesh, stream, "local")
        with token_sizes(mesh, (4, 6)):
            y = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")(leaf)
        y.backward(feed(grad, mesh, stream, "local").detach())
        assert leaf.grad is not None
        found = {
            "output": relative(join(y, mesh, stream, x.shape), wanted),
            "grad of input": relative(join(leaf.grad, mesh, stream, x.shape), dx),
        } | gradients(reference, model)
        worst |= {f"{what} {stream}": value for what, value in found.items()}
    return worst


@pytest.mark.deep
def test_it_is_one_graph() -> None:
    no_difference(world.run(4, _compiled), TOLERANCE)


def _autocast() -> list[float]:
    mesh = grid_mesh(2, 2)
    found = []
    for style in (Colwise2D, Rowwise2D):
        reference = nn.Linear(24, 48)
        model = copy.deepcopy(reference)
        whole = (Replicate(), Replicate())
        parallelize_module(
            model,
            mesh,
            style(input_layouts=whole, output_layouts=whole, dataflow=STATIONARY),
        )
        x = noise(4, 6, 24).float().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        assert y.dtype == torch.bfloat16
        y.sum().backward()
        assert x.grad is not None and x.grad.dtype == torch.float32
        assert model.weight.grad.dtype == model.bias.grad.dtype == torch.float32
        # Every rank was given the reference of rank 0.
        found.append(
            relative(y.float(), F.linear(x, *(p.full_tensor() for p in (model.weight, model.bias))))
        )
    return found


def test_autocast() -> None:
    for result in world.run(4, _autocast):
        assert all(0 < worst < 2**-6 for worst in result), result


# Errors, before anything is sent.

K, N = 24, 48


@pytest.mark.parametrize("style", [Colwise2D, Rowwise2D, Block2DParallel])
@pytest.mark.parametrize("algorithm", ["summa", "bmr", "cannon"])
def test_an_algorithm_that_moves_the_weight_is_refused(style: Any, algorithm: str) -> None:
    with fake_grid(2, 2) as mesh, CommCounter(mesh) as comm:
        module = nn.Sequential(nn.Linear(K, N))
        chosen = style(dataflow=STATIONARY, algorithm=algorithm)
        with pytest.raises(ValueError) as caught:
            parallelize_module(module, mesh, {"0": chosen})
        for word in ("'0'", "in_features=24", "tp_row=2, tp_col=2", algorithm, 'algorithm="auto"'):
            assert word in str(caught.value), word
        assert not isinstance(module[0].weight, DTensor) and not comm.calls
