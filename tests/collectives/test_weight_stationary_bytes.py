"""What the weight-stationary dataflow moves, counted: goldens, and the arithmetic.

No weight moves, forward or backward, so what crosses the wire is in proportion to the tokens. The
bytes are counted on a fake process group, as in ``arithmetic/test_bytes.py``.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from decode import Decoder, plan, usual_plan
from expecttest import TestCase
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from support import world
from support.fake import fake_grid
from support.models import grid_mesh
from support.one_module import Layout, Mlp
from support.stationary import STATIONARY, decoder, mlp_plan
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
        module = nn.Sequential(Mlp())
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
        report = _mlp(mlp_plan(ONE, INNER), ONE, (1, 1, K))
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
            model = decoder().float()
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
            model = decoder(hidden=96).float()
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
