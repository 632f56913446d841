"""What crosses the wire, counted: goldens of collectives and bytes, and the arithmetic.

One process plays rank 0 of a world that only exists as numbers (a fake process group), so these
are quick. Each golden line is ``axis collective calls bytes received by this rank``. If a change
alters one, it moves more or less than before: say why in the commit that accepts it
(``EXPECTTEST_ACCEPT=1 pytest tests/arithmetic/test_bytes.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from expecttest import TestCase
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import torch_tp2d
from support import world
from support.fake import fake_grid
from support.models import (
    grid_mesh,
    parallelize,
    plan_2d,
    plan_mixed,
    plan_without_sequence_parallel,
    transformer,
    tutorial_plan,
)
from torch_tp2d import Block2DParallel, Colwise2D, CommCounter, Norm2D, Rowwise2D

B, S, K, N = 8, 12, 24, 48
WORD = 4
"""Bytes of an fp32 number."""

Layout = tuple[Placement, Placement]
TOKENS: Layout = Shard(0), Shard(1)
ROWS: Layout = Shard(0), Replicate()
FEATURES: Layout = Shard(0), Shard(-1)


def _local(layout: Layout, features: int, mesh: DeviceMesh) -> Tensor:
    shape = [B, S, features]
    for placement, parts in zip(layout, mesh.shape, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] //= parts
    return torch.zeros(shape, requires_grad=True)


def _report(forward: CommCounter, backward: CommCounter) -> str:
    return "\n".join(
        [
            f"forward {forward.total_bytes} B",
            *(" " + line for line in str(forward).splitlines()),
            f"backward {backward.total_bytes} B",
            *(" " + line for line in str(backward).splitlines()),
        ]
    )


def _linear(
    style: Any, layout: Layout, mesh: DeviceMesh, bias: bool = False
) -> tuple[CommCounter, CommCounter]:
    module = nn.Linear(K, N, bias=bias)
    torch_tp2d.parallelize_module(module, mesh, style)
    x = _local(layout, K, mesh)
    # What the embedding would have said of the tokens.
    torch_tp2d.token_sizes(mesh, (B, S))
    with CommCounter(mesh) as forward:
        y = module(x)
    with CommCounter(mesh) as backward:
        y.sum().backward()
    return forward, backward


def _each(
    style: Callable[..., Any],
    layout: Layout,
    rows: int,
    columns: int,
    reshard_after_forward: bool | None = False,
    **kw: Any,
) -> str:
    with fake_grid(rows, columns) as mesh:
        style = style(reshard_after_forward=reshard_after_forward, **kw)
        return _report(*_linear(style, layout, mesh))


def _both(module: nn.Module, x: Tensor, mesh: DeviceMesh) -> str:
    with CommCounter(mesh) as forward:
        y = module(x)
    with CommCounter(mesh) as backward:
        y.sum().backward()
    return _report(forward, backward)


def _norm() -> str:
    with fake_grid(2, 2) as mesh:
        norm = nn.LayerNorm(K)
        torch_tp2d.parallelize_module(norm, mesh, Norm2D())
        return _both(norm, _local(FEATURES, K, mesh), mesh)


def _embedding() -> str:
    with fake_grid(2, 2) as mesh:
        embedding = nn.Embedding(64, K)
        torch_tp2d.parallelize_module(embedding, mesh, Rowwise2D(output_layouts=Shard(1)))
        return _both(embedding, torch.zeros(B, S, dtype=torch.int64), mesh)


def _loss() -> str:
    with fake_grid(2, 2) as mesh:
        logits = distribute_tensor(torch.zeros(B, S, 1000), mesh, FEATURES).requires_grad_()
        with CommCounter(mesh) as forward:
            loss = torch_tp2d.cross_entropy(logits, torch.zeros(B, S, dtype=torch.int64))
        with CommCounter(mesh) as backward:
            loss.backward()
        return _report(forward, backward)


HEADS, HEAD = 4, 6


def _attention(rows: int, columns: int, **kwargs: Any) -> tuple[CommCounter, CommCounter]:
    """Of one sequence that tp_row splits, heads over tp_col."""
    with fake_grid(rows, columns) as mesh:
        zeros = torch.zeros(1, HEADS, S, HEAD)
        layout = Shard(2), Shard(1)
        q, k, v = (distribute_tensor(zeros, mesh, layout).requires_grad_() for _ in range(3))
        with CommCounter(mesh) as forward:
            out = torch_tp2d.attention2d(q, k, v, **kwargs)
        with CommCounter(mesh) as backward:
            out.backward(distribute_tensor(zeros, mesh, layout))
    return forward, backward


def _layer(plan: dict[str, Any]) -> str:
    """One layer of the Transformer, embeddings, head and loss left out by difference."""
    counters = []
    for layers in (1, 2):
        with fake_grid(2, 2) as mesh:
            model = transformer(8, n_layers=layers).float()
            parallelize(model, mesh, plan)
            ids = torch.zeros(4, 8, dtype=torch.int64)
            with CommCounter(mesh) as forward:
                loss = torch_tp2d.cross_entropy(model(ids), ids)
            with CommCounter(mesh) as backward:
                loss.backward()
            counters.append((forward, backward))
    for one, two in zip(*counters, strict=True):
        for key in list(two.calls):
            two.calls[key] -= one.calls[key]
            two.bytes[key] -= one.bytes[key]
            if not two.calls[key]:
                del two.calls[key], two.bytes[key]
    return _report(*counters[1])


class TestGoldens(TestCase):
    def test_colwise_from_tokens(self) -> None:
        report = _each(Colwise2D, TOKENS, 2, 2, input_layouts=Shard(1))
        self.assertExpectedInline(
            report,
            """\
forward 3456 B
 tp_col all_gather_into_tensor       1         2304 B
 tp_row all_gather_into_tensor       1         1152 B
backward 3456 B
 tp_col reduce_scatter_tensor        1         2304 B
 tp_row reduce_scatter_tensor        1         1152 B""",
        )

    def test_colwise_from_rows(self) -> None:
        """A replicated input needs no gather, and its gradient is summed for user code."""
        report = _each(Colwise2D, ROWS, 2, 2)
        self.assertExpectedInline(
            report,
            """\
forward 1152 B
 tp_row all_gather_into_tensor       1         1152 B
backward 5760 B
 tp_col all_reduce                   1         4608 B
 tp_row reduce_scatter_tensor        1         1152 B""",
        )

    def test_colwise_as_nothing_is_said(self) -> None:
        """On a backend that is not gloo the weight is gathered again, as FSDP2 does."""
        report = _each(Colwise2D, TOKENS, 2, 2, input_layouts=Shard(1), reshard_after_forward=None)
        self.assertExpectedInline(
            report,
            """\
forward 3456 B
 tp_col all_gather_into_tensor       1         2304 B
 tp_row all_gather_into_tensor       1         1152 B
backward 4608 B
 tp_col reduce_scatter_tensor        1         2304 B
 tp_row all_gather_into_tensor       1         1152 B
 tp_row reduce_scatter_tensor        1         1152 B""",
        )

    def test_rowwise_to_tokens(self) -> None:
        report = _each(Rowwise2D, FEATURES, 2, 2, output_layouts=Shard(1))
        self.assertExpectedInline(
            report,
            """\
forward 5760 B
 tp_col reduce_scatter_tensor        1         4608 B
 tp_row all_gather_into_tensor       1         1152 B
backward 5760 B
 tp_col all_gather_into_tensor       1         4608 B
 tp_row reduce_scatter_tensor        1         1152 B""",
        )

    def test_rowwise_to_rows(self) -> None:
        report = _each(Rowwise2D, FEATURES, 2, 2)
        self.assertExpectedInline(
            report,
            """\
forward 10368 B
 tp_col all_reduce                   1         9216 B
 tp_row all_gather_into_tensor       1         1152 B
backward 1152 B
 tp_row reduce_scatter_tensor        1         1152 B""",
        )

    def test_block_collective(self) -> None:
        report = _each(Block2DParallel, FEATURES, 2, 3)
        self.assertExpectedInline(
            report,
            """\
forward 3840 B
 tp_col all_gather_into_tensor       1         3072 B
 tp_row all_gather_into_tensor       1          768 B
backward 3840 B
 tp_col reduce_scatter_tensor        1         3072 B
 tp_row reduce_scatter_tensor        1          768 B""",
        )

    def test_block_summa(self) -> None:
        report = _each(Block2DParallel, FEATURES, 2, 3, algorithm="summa")
        self.assertExpectedInline(
            report,
            """\
forward 3840 B
 tp_col broadcast                    4         3072 B
 tp_row broadcast                    4          768 B
backward 7680 B
 tp_col all_to_all_single            4         3072 B
 tp_col broadcast                    4         3072 B
 tp_row all_to_all_single            4          768 B
 tp_row broadcast                    4          768 B""",
        )

    def test_block_bmr(self) -> None:
        """The paper's Algorithm 1: broadcasts along tp_col, rolls (all-to-alls) along tp_row."""
        report = _each(Block2DParallel, FEATURES, 3, 3, algorithm="bmr")
        self.assertExpectedInline(
            report,
            """\
forward 2560 B
 tp_col broadcast                    3         1536 B
 tp_row all_to_all_single            2         1024 B
backward 5632 B
 tp_col all_to_all_single            3         1536 B
 tp_col broadcast                    3         1536 B
 tp_row all_to_all_single            5         2560 B""",
        )

    def test_block_cannon(self) -> None:
        report = _each(Block2DParallel, FEATURES, 3, 3, algorithm="cannon")
        self.assertExpectedInline(
            report,
            """\
forward 2560 B
 tp_col all_to_all_single            2         1536 B
 tp_row all_to_all_single            2         1024 B
backward 6400 B
 tp_col all_to_all_single            5         3840 B
 tp_row all_to_all_single            5         2560 B""",
        )

    def test_norm2d(self) -> None:
        """Statistics only: a number or two a token each way, and the weights' sums."""
        report = _norm()
        self.assertExpectedInline(
            report,
            """\
forward 384 B
 tp_col all_reduce                   2          384 B
backward 480 B
 tp_col all_reduce                   1          384 B
 tp_row all_reduce                   1           96 B""",
        )

    def test_embedding(self) -> None:
        report = _embedding()
        self.assertExpectedInline(
            report,
            """\
forward 3456 B
 tp_col reduce_scatter_tensor        1         2304 B
 tp_row all_to_all_single            1         1152 B
backward 3456 B
 tp_col all_gather_into_tensor       1         2304 B
 tp_row all_to_all_single            1         1152 B""",
        )

    def test_cross_entropy(self) -> None:
        """Three numbers a token and one sum, whatever the vocabulary; nothing backward."""
        report = _loss()
        self.assertExpectedInline(
            report,
            """\
forward 580 B
 tp_col all_reduce                   2          576 B
 tp_row all_reduce                   1            4 B
backward 0 B""",
        )

    def test_a_transformer_layer(self) -> None:
        """q, k and v share one gather of their input and one reduce-scatter of its gradient."""
        report = _layer(plan_2d())
        self.assertExpectedInline(
            report,
            """\
forward 5120 B
 tp_col all_gather_into_tensor       2         1024 B
 tp_col reduce_scatter_tensor        2         1024 B
 tp_row all_gather_into_tensor       6         3072 B
backward 8864 B
 tp_col all_gather_into_tensor       2         1024 B
 tp_col all_reduce                   2          256 B
 tp_col reduce_scatter_tensor        2         1024 B
 tp_row all_gather_into_tensor       6         3072 B
 tp_row all_reduce                   4          416 B
 tp_row reduce_scatter_tensor        6         3072 B""",
        )

    def test_a_transformer_layer_without_sequence_parallel(self) -> None:
        """q, k and v read one whole tensor: its gradient is all-reduced once, not three times."""
        report = _layer(plan_without_sequence_parallel())
        self.assertExpectedInline(
            report,
            """\
forward 5120 B
 tp_col all_reduce                   2         2048 B
 tp_row all_gather_into_tensor       6         3072 B
backward 8608 B
 tp_col all_reduce                   2         2048 B
 tp_row all_gather_into_tensor       6         3072 B
 tp_row all_reduce                   4          416 B
 tp_row reduce_scatter_tensor        6         3072 B""",
        )

    def test_a_transformer_layer_of_the_mixed_plan(self) -> None:
        """Stock attention: its weights do not move, their gradients are all-reduced."""
        report = _layer(plan_mixed())
        self.assertExpectedInline(
            report,
            """\
forward 4096 B
 tp_col all_gather_into_tensor       2         1024 B
 tp_col reduce_scatter_tensor        2         1024 B
 tp_row all_gather_into_tensor       2         2048 B
backward 8864 B
 tp_col all_gather_into_tensor       2         1024 B
 tp_col all_reduce                   2          256 B
 tp_col reduce_scatter_tensor        2         1024 B
 tp_row all_gather_into_tensor       2         2048 B
 tp_row all_reduce                   8         2464 B
 tp_row reduce_scatter_tensor        2         2048 B""",
        )

    def test_ring_attention(self) -> None:
        """Backward hands on keys, values and their gradients; a causal mask changes nothing."""
        report = _report(*_attention(4, 2, algorithm="ring", is_causal=True))
        self.assertExpectedInline(
            report,
            """\
forward 864 B
 tp_row all_to_all_single            3          864 B
backward 1728 B
 tp_row all_to_all_single            6         1728 B""",
        )

    def test_gathered_attention(self) -> None:
        report = _report(*_attention(4, 2, algorithm="gather"))
        self.assertExpectedInline(
            report,
            """\
forward 864 B
 tp_row all_gather_into_tensor       2          864 B
backward 864 B
 tp_row reduce_scatter_tensor        2          864 B""",
        )

    def test_two_phase_attention(self) -> None:
        report = _report(*_attention(2, 2))
        self.assertExpectedInline(
            report,
            """\
forward 1920 B
 tp_col all_gather_into_tensor       1          288 B
 tp_col all_reduce                   2          192 B
 tp_col all_to_all_single            2          576 B
 tp_col reduce_scatter_tensor        1          288 B
 tp_row all_gather_into_tensor       2          576 B
backward 1824 B
 tp_col all_gather_into_tensor       1          288 B
 tp_col all_reduce                   1           96 B
 tp_col all_to_all_single            2          576 B
 tp_col reduce_scatter_tensor        1          288 B
 tp_row reduce_scatter_tensor        2          576 B""",
        )


class TestArithmetic(TestCase):
    """The README's formulas, in elements received per device, for every grid that divides."""

    GRIDS = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 3), (2, 4), (4, 2)]
    M = B * S

    def _moved(self, style: Any, layout: Layout, mesh: DeviceMesh) -> tuple[float, float]:
        forward, backward = _linear(style, layout, mesh)
        return forward.total_bytes / WORD, backward.total_bytes / WORD

    def test_move_the_input_and_the_weight(self) -> None:
        """Forward (C-1)/C M/R K + (R-1)/R K N/C. Backward: the weight again, if it is not kept,
        and its gradient along tp_row, the input's gradient along tp_col."""
        for (rows, columns), again in product(self.GRIDS, (False, True)):
            with fake_grid(rows, columns) as mesh:
                for style, layout in (
                    (Colwise2D(input_layouts=Shard(1), reshard_after_forward=again), TOKENS),
                    (Block2DParallel(reshard_after_forward=again), FEATURES),
                ):
                    forward, backward = self._moved(style, layout, mesh)
                    weight = (rows - 1) / rows * K * N / columns
                    tokens = (columns - 1) / columns * self.M / rows * K
                    self.assertEqual(forward, tokens + weight)
                    self.assertEqual(backward, tokens + (1 + again) * weight)

    def test_move_the_weight_and_the_output(self) -> None:
        """Forward (R-1)/R K N/C + (C-1)/C M/R N; backward the same and the weight's gradient."""
        for (rows, columns), again in product(self.GRIDS, (False, True)):
            with fake_grid(rows, columns) as mesh:
                style = Rowwise2D(output_layouts=Shard(1), reshard_after_forward=again)
                forward, backward = self._moved(style, FEATURES, mesh)
                weight = (rows - 1) / rows * K * N / columns
                tokens = (columns - 1) / columns * self.M / rows * N
                self.assertEqual(forward, weight + tokens)
                self.assertEqual(backward, (1 + again) * weight + tokens)

    def test_a_weight_larger_than_its_input_is_gathered_again(self) -> None:
        """By default; the other goldens have more tokens than that."""
        with fake_grid(2, 2) as mesh:
            module = nn.Linear(K, 8 * B * S, bias=False)
            torch_tp2d.parallelize_module(module, mesh, Colwise2D(input_layouts=Shard(1)))
            torch_tp2d.token_sizes(mesh, (B, S))
            with CommCounter(mesh) as comm:
                module(_local(TOKENS, K, mesh)).sum().backward()
            self.assertEqual(comm.calls["tp_row", "all_gather_into_tensor"], 2)

    def test_block_algorithms_move_what_the_collective_does(self) -> None:
        """Broadcasts and rolls move the same blocks; rank 0, root of some, receives no more."""
        for rows, columns, name in ((2, 2, "bmr"), (3, 3, "bmr"), (2, 3, "summa"), (2, 2, "summa")):
            with fake_grid(rows, columns) as mesh:
                forward, _ = self._moved(Block2DParallel(algorithm=name), FEATURES, mesh)
                collective, _ = self._moved(Block2DParallel(), FEATURES, mesh)
                self.assertEqual(forward, collective, name)

    def test_attention_moves_what_its_docstring_says(self) -> None:
        """In units of a rank's part of the queries; the paper's softmax is two reductions forward
        and one backward of a number for each query and head."""
        for rows, columns in ((2, 2), (4, 2), (2, 4), (3, 1), (1, 4)):
            unit = HEADS * S * HEAD // (rows * columns) * WORD
            forward, backward = _attention(rows, columns, algorithm="ring")
            self.assertEqual(forward.total_bytes, 2 * (rows - 1) * unit)
            self.assertEqual(backward.total_bytes, 4 * (rows - 1) * unit)
            tokens = (columns - 1) * 2 + 2 * (rows - 1) + 2 * rows * (columns - 1) / columns
            statistic = 2 * (columns - 1) / columns * HEADS * S / rows * WORD
            forward, backward = _attention(rows, columns)
            self.assertEqual(forward.total_bytes, tokens * unit + 2 * statistic)
            self.assertEqual(backward.total_bytes, tokens * unit + statistic)

    def test_a_block_moves_what_the_readme_says(self) -> None:
        """8m/R (C-1)/C + 24/C (R-1)/R in units of hidden^2, m = tokens / hidden: attention and
        an MLP of four times the hidden dim, without biases, forward and backward; 36 for 24
        where weights are gathered again."""
        hidden = 24
        for (rows, columns), again in product(
            ((2, 2), (1, 4), (4, 1), (2, 4), (4, 2)), (False, True)
        ):
            with fake_grid(rows, columns) as mesh:
                model = transformer(8, n_layers=1, dim=hidden).float()
                layer = model.layers[0]
                layer.feed_forward.w1.bias = layer.feed_forward.w2.bias = None
                plan = {
                    key.removeprefix("layers.*."): style
                    for key, style in tutorial_plan(
                        partial(Colwise2D, reshard_after_forward=again),
                        partial(Rowwise2D, reshard_after_forward=again),
                    ).items()
                    if key.startswith("layers")
                }
                torch_tp2d.parallelize_module(layer, mesh, plan)
                layer.attention.n_heads //= columns
                torch_tp2d.token_sizes(mesh, (B, S))
                x = _local(TOKENS, hidden, mesh)
                norms = 4 * hidden  # two LayerNorms' weights and biases, summed on both axes
                norm_bytes = sum(2 * (n - 1) / n * norms for n in (rows, columns))
                with CommCounter(mesh) as comm:
                    layer(x).sum().backward()
            m = self.M / hidden
            units = 8 * m / rows * (columns - 1) / columns
            units += (36 if again else 24) / columns * (rows - 1) / rows
            found = comm.total_bytes / WORD - norm_bytes
            self.assertAlmostEqual(found / hidden**2, units, places=6)


def _on_gloo() -> int:
    mesh = grid_mesh(2, 2)
    style = Colwise2D(input_layouts=Shard(1), reshard_after_forward=False)
    forward, backward = _linear(style, TOKENS, mesh, bias=True)
    return forward.total_bytes + backward.total_bytes


@pytest.mark.deep
def test_gloo_moves_no_more_than_the_arithmetic() -> None:
    """On gloo reduce-scatters are all-to-alls: other collectives, the same bytes."""
    style = Colwise2D(input_layouts=Shard(1), reshard_after_forward=False)
    with fake_grid(2, 2) as mesh:
        forward, backward = _linear(style, TOKENS, mesh, bias=True)
    assert set(world.run(4, _on_gloo)) == {forward.total_bytes + backward.total_bytes}
