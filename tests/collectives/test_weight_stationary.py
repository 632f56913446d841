"""The weight-stationary dataflow: against one device in fp64, and what it moves, counted.

No weight moves, forward or backward, so what crosses the wire is in proportion to the tokens. The
bytes are counted on a fake process group, as in ``test_bytes.py``.
"""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import world
from decode import Decoder, decode, plan, usual_plan
from expecttest import TestCase
from marks import deep
from models import grid_mesh, relative
from test_bytes import fake_grid
from test_styles import (
    Conv1D,
    GemmaRMSNorm,
    Layout,
    compare,
    covering,
    feed,
    gradients,
    join,
    no_difference,
    noise,
    one_device,
    randomized,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from torch_tp2d import (
    Block2DParallel,
    Colwise2D,
    CommCounter,
    Norm2D,
    Rowwise2D,
    parallelize_module,
    token_sizes,
)
from torch_tp2d.mesh import layouts as rules
from torch_tp2d.planner.cost import linear_traffic

TOLERANCE = 1e-10
STATIONARY = "weight_stationary"
GRIDS = [(1, 1), (1, 2), (2, 1), deep(2, 2), (2, 3), deep(4, 1), deep(1, 4)]

SIZES = [(4, 6, 12, 24), (3, 5, 7, 11), (1, 2, 3, 2), (1, 1, 7, 11), (1, 1, 3, 2)]
"""Batch, sequence, features in and out: even, odd, smaller than the grid, and a single token."""


LAYOUTS = [
    "token",
    "feature",
    "row",
    "whole",
    "transposed",
    "transposed batch",
    "transposed whole",
    "columns",
]


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


def _linear(kind: str, k: int, n: int) -> nn.Module:
    module = Conv1D(n, k) if kind == "conv1d" else nn.Linear(k, n, bias=kind == "bias")
    return randomized(module)


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
            _linear(case["module"], k, n),
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
            _linear("bias", 7, 11),
            style(dataflow=STATIONARY),
            mesh,
            noise(*shape, 7, seed=1),
            noise(*shape, 11, seed=2),
            (Shard(0), col_in),
            (Shard(0), col_out),
        )
        worst |= {f"{what} {style.__name__} {shape}": value for what, value in found.items()}
    return worst


@pytest.mark.parametrize("rows,columns", [(2, 2), (2, 3)])
def test_edges_are_the_usual_ones_by_default(rows: int, columns: int) -> None:
    no_difference(world.run(rows * columns, _default_edges, rows, columns), TOLERANCE)


def _placements() -> None:
    mesh = grid_mesh(2, 2)
    for style, kind in product((Colwise2D, Rowwise2D, Block2DParallel), ("bias", "conv1d")):
        placed = []
        for dataflow in ("auto", STATIONARY):
            module = _linear(kind, 7, 11)
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


@pytest.mark.parametrize("rows,columns", [(2, 2), (1, 4), (4, 1), (2, 3)])
def test_a_norm_of_the_transposed_layout(rows: int, columns: int) -> None:
    no_difference(world.run(rows * columns, _norms, rows, columns), TOLERANCE)


# Whole models in the transposed layout.


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.w1, self.w2 = nn.Linear(7, 11), nn.Linear(11, 7)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w2(F.gelu(self.w1(self.norm(x))))


def _mlp_plan(stream: Layout, inner: Layout) -> dict[str, Any]:
    return {
        "*.norm": Norm2D(input_layouts=stream),
        "*.w1": Colwise2D(input_layouts=stream, output_layouts=inner, dataflow=STATIONARY),
        "*.w2": Rowwise2D(input_layouts=inner, output_layouts=stream, dataflow=STATIONARY),
    }


def _mlps(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    worst = {}
    for tokens, inner, size in product(
        (Replicate(), Shard(0), Shard(1)),
        ((Replicate(), Shard(-1)), (Shard(0), Shard(-1))),
        ((3, 5), (1, 1)),
    ):
        stream = (Shard(-1), tokens)
        reference = randomized(nn.Sequential(_Mlp(), _Mlp()))
        model = copy.deepcopy(reference)
        parallelize_module(model, mesh, _mlp_plan(stream, inner))
        x, grad = noise(*size, 7, seed=1), noise(*size, 7, seed=2)
        wanted, dx = one_device(reference, x, grad)
        leaf = feed(x, mesh, stream, "local")
        y = model(leaf)
        y.backward(feed(grad, mesh, stream, "local").detach())
        assert leaf.grad is not None
        found = {
            "output": relative(join(y, mesh, stream, x.shape), wanted),
            "grad of input": relative(join(leaf.grad, mesh, stream, x.shape), dx),
        } | gradients(reference, model)
        worst |= {f"{what} {stream} {inner} {size}": value for what, value in found.items()}
    return worst


@pytest.mark.parametrize("rows,columns", [(2, 2), (1, 4), (4, 1), (2, 3)])
def test_a_stack_of_mlps(rows: int, columns: int) -> None:
    no_difference(world.run(rows * columns, _mlps, rows, columns), TOLERANCE)


def _decoder(hidden: int = 24) -> Decoder:
    torch.manual_seed(0)
    return Decoder(vocab=13, context=16, hidden=hidden, heads=12, layers=2).double()


def _decoded(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    worst = {}
    for size, tokens in product(((1, 3), (3, 5)), (Replicate(), Shard(0), Shard(1))):
        reference = _decoder()
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


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(1, 4), deep(4, 1), deep(2, 3)])
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
        reference = randomized(nn.Sequential(_Mlp(), _Mlp()))
        model = copy.deepcopy(reference)
        parallelize_module(model, mesh, _mlp_plan(stream, inner))
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


# What moves, counted.

B, S, K, N = 8, 12, 24, 48
WORD = 4
"""Bytes of an fp32 number."""

TRANSPOSED: Layout = Shard(-1), Shard(1)
FEATURES: Layout = Shard(0), Shard(-1)
TOKENS: Layout = Shard(0), Shard(1)
ONE: Layout = Shard(-1), Replicate()
INNER: Layout = Replicate(), Shard(-1)


def _counted(
    module: nn.Module, shape: tuple[int, int, int], layout: Layout, mesh: DeviceMesh
) -> tuple[CommCounter, CommCounter]:
    """Collectives of forward and of backward, on zeros."""
    local = list(shape)
    for placement, parts in zip(layout, mesh.shape, strict=True):
        if isinstance(placement, Shard):
            local[placement.dim] = rules.chunk_sizes(local[placement.dim], parts)[0]
    x = torch.zeros(local, requires_grad=True)
    # What the embedding would have said of the tokens.
    token_sizes(mesh, shape[:2])
    with CommCounter(mesh) as forward:
        y = module(x)
    with CommCounter(mesh) as backward:
        y.sum().backward()
    return forward, backward


def _report(counters: tuple[CommCounter, CommCounter]) -> str:
    lines = []
    for name, counter in zip(("forward", "backward"), counters, strict=True):
        lines.append(f"{name} {counter.total_bytes} B")
        lines += [" " + line for line in str(counter).splitlines()]
    return "\n".join(lines)


def _one(style: Any, layout: Layout, bias: bool = False, rows: int = 2, columns: int = 2) -> str:
    with fake_grid(rows, columns) as mesh:
        module = nn.Linear(K, N, bias=bias)
        parallelize_module(module, mesh, style)
        return _report(_counted(module, (B, S, K), layout, mesh))


def _mlp(plan: dict[str, Any], layout: Layout, shape: tuple[int, int, int]) -> str:
    with fake_grid(2, 2) as mesh:
        module = nn.Sequential(_Mlp())
        module[0].norm = nn.LayerNorm(K)
        module[0].w1, module[0].w2 = nn.Linear(K, N), nn.Linear(N, K)
        parallelize_module(module, mesh, plan)
        return _report(_counted(module, shape, layout, mesh))


class TestGoldens(TestCase):
    """What rank 0 receives. If a change alters a golden, say why in the commit that accepts it."""

    def test_colwise_from_the_transposed_layout(self) -> None:
        """The tokens gathered along tp_col; the output scattered along tp_row. Backward mirrors."""
        style = Colwise2D(input_layouts=TRANSPOSED, dataflow=STATIONARY)
        self.assertExpectedInline(
            _one(style, TRANSPOSED),
            """\
forward 6912 B
 tp_col all_gather_into_tensor       1         2304 B
 tp_row reduce_scatter_tensor        1         4608 B
backward 6912 B
 tp_col reduce_scatter_tensor        1         2304 B
 tp_row all_gather_into_tensor       1         4608 B""",
        )

    def test_colwise_of_whole_tokens(self) -> None:
        """Tokens that are whole already: no gather, and one sum each way."""
        style = Colwise2D(input_layouts=ONE, output_layouts=INNER, dataflow=STATIONARY)
        self.assertExpectedInline(
            _one(style, ONE),
            """\
forward 9216 B
 tp_row all_reduce                   1         9216 B
backward 4608 B
 tp_col all_reduce                   1         4608 B""",
        )

    def test_colwise_from_the_token_layout(self) -> None:
        """A drop-in: one all-to-all along tp_row more, before the gather."""
        style = Colwise2D(input_layouts=Shard(1), dataflow=STATIONARY)
        self.assertExpectedInline(
            _one(style, TOKENS, bias=True),
            """\
forward 8064 B
 tp_col all_gather_into_tensor       1         2304 B
 tp_row all_to_all_single            1         1152 B
 tp_row reduce_scatter_tensor        1         4608 B
backward 8064 B
 tp_col reduce_scatter_tensor        1         2304 B
 tp_row all_gather_into_tensor       1         4608 B
 tp_row all_to_all_single            1         1152 B""",
        )

    def test_rowwise_to_the_transposed_layout(self) -> None:
        """The bias's gradient, not the weight's, is summed along tp_row."""
        style = Rowwise2D(output_layouts=TRANSPOSED, dataflow=STATIONARY)
        self.assertExpectedInline(
            _one(style, FEATURES, bias=True),
            """\
forward 6912 B
 tp_col reduce_scatter_tensor        1         4608 B
 tp_row all_gather_into_tensor       1         2304 B
backward 7008 B
 tp_col all_gather_into_tensor       1         4608 B
 tp_row all_reduce                   1           96 B
 tp_row reduce_scatter_tensor        1         2304 B""",
        )

    def test_rowwise_to_whole_tokens(self) -> None:
        style = Rowwise2D(input_layouts=INNER, output_layouts=ONE, dataflow=STATIONARY)
        self.assertExpectedInline(
            _one(style, INNER),
            """\
forward 9216 B
 tp_col all_reduce                   1         9216 B
backward 4608 B
 tp_row all_reduce                   1         4608 B""",
        )

    def test_rowwise_to_the_token_layout(self) -> None:
        style = Rowwise2D(output_layouts=Shard(1), dataflow=STATIONARY)
        self.assertExpectedInline(
            _one(style, FEATURES),
            """\
forward 9216 B
 tp_col reduce_scatter_tensor        1         4608 B
 tp_row all_gather_into_tensor       1         2304 B
 tp_row all_to_all_single            1         2304 B
backward 9216 B
 tp_col all_gather_into_tensor       1         4608 B
 tp_row all_to_all_single            1         2304 B
 tp_row reduce_scatter_tensor        1         2304 B""",
        )

    def test_block(self) -> None:
        style = Block2DParallel(dataflow=STATIONARY)
        self.assertExpectedInline(
            _one(style, FEATURES, rows=2, columns=3),
            """\
forward 8448 B
 tp_col all_gather_into_tensor       1         3072 B
 tp_row all_to_all_single            1         2304 B
 tp_row reduce_scatter_tensor        1         3072 B
backward 8448 B
 tp_col reduce_scatter_tensor        1         3072 B
 tp_row all_gather_into_tensor       1         3072 B
 tp_row all_to_all_single            1         2304 B""",
        )

    def test_norm(self) -> None:
        """Statistics along tp_row, the weights' gradients along tp_col."""
        with fake_grid(2, 2) as mesh:
            norm = nn.LayerNorm(K)
            parallelize_module(norm, mesh, Norm2D(input_layouts=TRANSPOSED))
            report = _report(_counted(norm, (B, S, K), TRANSPOSED, mesh))
        self.assertExpectedInline(
            report,
            """\
forward 384 B
 tp_row all_reduce                   2          384 B
backward 480 B
 tp_col all_reduce                   1           96 B
 tp_row all_reduce                   1          384 B""",
        )

    def test_norm_of_whole_tokens(self) -> None:
        """Every column has all the tokens: the weights' gradients are whole."""
        with fake_grid(2, 2) as mesh:
            norm = nn.LayerNorm(K)
            parallelize_module(norm, mesh, Norm2D(input_layouts=ONE))
            report = _report(_counted(norm, (B, S, K), ONE, mesh))
        self.assertExpectedInline(
            report,
            """\
forward 768 B
 tp_row all_reduce                   2          768 B
backward 768 B
 tp_row all_reduce                   1          768 B""",
        )

    def test_an_mlp_on_one_token(self) -> None:
        report = _mlp(_mlp_plan(ONE, INNER), ONE, (1, 1, K))
        self.assertExpectedInline(
            report,
            """\
forward 152 B
 tp_col all_reduce                   1           48 B
 tp_row all_reduce                   3          104 B
backward 200 B
 tp_col all_reduce                   1           48 B
 tp_row all_reduce                   3          152 B""",
        )

    def test_an_mlp_on_one_token_whose_weights_move(self) -> None:
        """The same block by the usual dataflows: sixteen times as much forward."""
        usual = {"*.norm": Replicate(), "*.w1": Colwise2D(), "*.w2": Rowwise2D()}
        report = _mlp(usual, (Shard(0), Replicate()), (1, 1, K))
        self.assertExpectedInline(
            report,
            """\
forward 2400 B
 tp_col all_reduce                   1           96 B
 tp_row all_gather_into_tensor       2         2304 B
backward 5040 B
 tp_col all_reduce                   1           96 B
 tp_row all_gather_into_tensor       2         2304 B
 tp_row all_reduce                   3          336 B
 tp_row reduce_scatter_tensor        2         2304 B""",
        )

    def test_a_decoder_on_one_token(self) -> None:
        with fake_grid(2, 2) as mesh:
            model = _decoder().float()
            parallelize_module(model, mesh, plan())
            ids = torch.zeros(1, 1, dtype=torch.int64)
            with torch.no_grad():
                _, cache = model(ids)
                with CommCounter(mesh) as comm:
                    model(ids, cache)
        self.assertExpectedInline(
            str(comm),
            """\
tp_col all_gather_into_tensor       1           28 B
tp_col all_reduce                   6          288 B
tp_row all_reduce                  19          740 B""",
        )


class TestArithmetic(TestCase):
    GRIDS = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 3), (2, 4), (4, 2)]

    def test_traffic_is_what_is_counted(self) -> None:
        """Every rule, dataflow, residual stream and grid, the weight kept or not."""
        streams: dict[Any, Layout] = {"token": TOKENS, "transposed": TRANSPOSED}
        for (rows, columns), stream, keep, sizes in product(
            self.GRIDS, ("token", "transposed"), (False, True), ((B, S), (4, S))
        ):
            for style, rule in (
                (Colwise2D, rules.COLWISE),
                (Rowwise2D, rules.ROWWISE),
                (Block2DParallel, rules.BLOCK),
            ):
                takes, gives = {
                    Colwise2D: (streams[stream], FEATURES),
                    Rowwise2D: (FEATURES, streams[stream]),
                    Block2DParallel: (FEATURES, FEATURES),
                }[style]
                for dataflow in (rule.dataflow, STATIONARY):
                    with fake_grid(rows, columns) as mesh:
                        module = nn.Linear(K, N, bias=False)
                        chosen = style(
                            input_layouts=takes,
                            output_layouts=gives,
                            dataflow=dataflow,
                            reshard_after_forward=not keep,
                        )
                        parallelize_module(module, mesh, chosen)
                        counted = _counted(module, (*sizes, K), takes, mesh)
                    traffic = linear_traffic(
                        rule,
                        dataflow,
                        tokens=sizes[0] * sizes[1],
                        in_features=K,
                        out_features=N,
                        rows=rows,
                        columns=columns,
                        keep_weight=keep,
                        takes=takes,
                        gives=gives,
                    )
                    case = rule.style, dataflow, rows, columns
                    for counter, moved in zip(counted, traffic, strict=True):
                        found = dict.fromkeys(("tp_row", "tp_col"), 0.0)
                        for (axis, _), count in counter.bytes.items():
                            found[axis] += count / WORD
                        self.assertEqual(tuple(found.values()), tuple(moved), case)

    def test_no_weight_moves(self) -> None:
        """Traffic doubles with the tokens and has no part that stays: none is the weight's."""
        for style, rows, columns in product((Colwise2D, Rowwise2D), (1, 2, 4), (1, 2, 4)):
            takes, gives = (ONE, INNER) if style is Colwise2D else (INNER, ONE)
            totals = []
            for batch in (1, 2):
                with fake_grid(rows, columns) as mesh:
                    module = nn.Linear(K, N, bias=False)
                    chosen = style(input_layouts=takes, output_layouts=gives, dataflow=STATIONARY)
                    parallelize_module(module, mesh, chosen)
                    counted = _counted(module, (batch, 1, K), takes, mesh)
                    totals.append([counter.total_bytes for counter in counted])
            self.assertEqual([2 * part for part in totals[0]], totals[1])

    def test_a_block_moves_what_the_readme_says(self) -> None:
        """18 m (n-1)/n^2, beside the statistics of its two norms."""
        hidden = 48
        for n in (2, 4):
            totals = []
            for layers in (1, 2):
                with fake_grid(n, n) as mesh:
                    model = Decoder(16, 8, hidden, heads=8, layers=layers)
                    parallelize_module(model, mesh, plan())
                    with torch.no_grad(), CommCounter(mesh) as comm:
                        model(torch.zeros(n, 1, dtype=torch.int64))
                    totals.append(comm.total_bytes / WORD)
            norms = 2 * 2 * 2 * (n - 1) / n * n
            self.assertEqual(totals[1] - totals[0] - norms, 18 * n * hidden * (n - 1) / n**2)

    def test_with_few_tokens_it_moves_far_less(self) -> None:
        sizes = {"in_features": 4096, "out_features": 4096, "rows": 2, "columns": 2}
        for rule in (rules.COLWISE, rules.ROWWISE):

            def total(dataflow: str, stream: Layout, tokens: int, rule: Any = rule) -> float:
                ends = (stream, FEATURES) if rule is rules.COLWISE else (FEATURES, stream)
                ways = dict(zip(("takes", "gives"), ends, strict=True))
                return linear_traffic(rule, dataflow, tokens=tokens, **ways, **sizes).total

            few, many = 16, 65536
            usual, ours = total(rule.dataflow, TOKENS, few), total(STATIONARY, TRANSPOSED, few)
            self.assertLess(100 * ours, usual)
            usual, ours = total(rule.dataflow, TOKENS, many), total(STATIONARY, TRANSPOSED, many)
            self.assertLess(usual, ours)

    def test_a_dataflow_of_another_style_is_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "Rowwise2D.*input_stationary.*output_stationary"):
            linear_traffic(
                rules.ROWWISE,
                "output_stationary",
                takes=FEATURES,
                gives=TOKENS,
                tokens=1,
                in_features=1,
                out_features=1,
                rows=1,
                columns=1,
            )


def test_the_usual_plan_moves_far_more_for_a_token() -> None:
    totals = []
    for chosen in (plan(), usual_plan()):
        with fake_grid(2, 2) as mesh:
            model = _decoder(hidden=96).float()
            parallelize_module(model, mesh, chosen)
            ids = torch.zeros(1, 1, dtype=torch.int64)
            with torch.no_grad(), CommCounter(mesh) as comm:
                model(ids)
            totals.append(comm.total_bytes)
    assert 20 * totals[0] < totals[1], totals


def test_gloo_moves_no_more_than_the_arithmetic() -> None:
    """On gloo reduce-scatters are all-to-alls: other collectives, the same bytes."""
    style = Colwise2D(input_layouts=TRANSPOSED, dataflow=STATIONARY)
    traffic = linear_traffic(
        rules.COLWISE,
        STATIONARY,
        tokens=B * S,
        in_features=K,
        out_features=N,
        rows=2,
        columns=2,
        takes=TRANSPOSED,
        gives=FEATURES,
    )
    assert set(world.run(4, _on_gloo, style)) == {traffic.total * WORD}


def _on_gloo(style: Any) -> int:
    mesh = grid_mesh(2, 2)
    module = nn.Linear(K, N, bias=False)
    parallelize_module(module, mesh, style)
    return sum(part.total_bytes for part in _counted(module, (B, S, K), TRANSPOSED, mesh))


def test_an_embedding_takes_it_and_is_as_ever() -> None:
    """No dataflow moves an embedding's weight."""
    reports = []
    for dataflow in ("auto", STATIONARY):
        with fake_grid(2, 2) as mesh:
            module = nn.Embedding(N, K)
            parallelize_module(module, mesh, Rowwise2D(output_layouts=ONE, dataflow=dataflow))
            with CommCounter(mesh) as comm:
                module(torch.zeros(1, 1, dtype=torch.int64)).sum().backward()
            reports.append(str(comm))
    assert reports[0] == reports[1] and "tp_col" in reports[0] and "tp_row" not in reports[0]


# Errors, before anything is sent.


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
