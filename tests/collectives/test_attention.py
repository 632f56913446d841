"""Attention modules on the grid, against one device in fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import torch_tp2d
from support import world
from support.decoder import Attention, model_of, plan_of
from support.fake import fake_grid
from support.marks import deep
from support.models import DOUBLE, batch, grid_mesh, loss_of, relative, train_beside
from torch_tp2d import Attention2D, attention2d, attention_projections, balanced_order
from torch_tp2d._torch_compat.tensors import fake_mode
from torch_tp2d.mesh.layouts import chunk_sizes
from torch_tp2d.ops.attention import Order
from torch_tp2d.ops.attention.block import attend, attend_backward
from torch_tp2d.ops.dropout import draw_key, dropped

TOLERANCE = 1e-11


def _trains(rows: int, columns: int, cases: list[tuple[Any, ...]]) -> list[float]:
    mesh = grid_mesh(rows, columns)
    worst = []
    for heads, kv_heads, size, sequence, options in cases:
        reference = model_of(17, 24, heads, kv_heads, 4)
        reference.masked = "masked" in options
        for block in reference.blocks:
            block.attention.repeats = "repeats" in options
        model = copy.deepcopy(reference)
        torch_tp2d.parallelize_module(model, mesh, plan_of(heads, kv_heads, columns))
        worst.append(train_beside(reference, model, 17, size, sequence, steps=2))
    return worst


CASES = [
    (8, 8, 4, 8, ""),
    (8, 2, 4, 8, ""),
    (8, 2, 3, 7, "repeats masked"),
    (8, 1, 1, 8, "masked"),
    (9, 3, 2, 8, "masked"),
    (9, 3, 2, 5, "repeats"),
]


@pytest.mark.deep
@pytest.mark.parametrize("rows,columns", [(1, 1), (2, 2), (1, 4), (4, 1), (2, 3)])
def test_a_decoder_that_knows_nothing_of_parallelism(rows: int, columns: int) -> None:
    """Heads that divide, key heads that do not, query heads that do not; masks of the model's own
    making; a batch that leaves a row without tokens.
    """
    for worst in world.run(rows * columns, _trains, rows, columns, CASES):
        assert max(worst) < TOLERANCE, worst


ACROSS = [
    (4, 2, 2, 8, "", {}),
    (4, 4, 1, 13, "", {}),
    (4, 2, 1, 8, "masked repeats", {}),
    (3, 1, 1, 5, "masked", {}),
    (4, 2, 1, 13, "", {"balanced": True}),
    (9, 3, 2, 5, "", {"balanced": True}),
    (4, 2, 1, 13, "masked", {"algorithm": "gather"}),
    (4, 1, 1, 8, "", {"algorithm": "gather", "balanced": True}),
    (4, 2, 1, 8, "repeats", {"algorithm": "two_phase"}),
    (3, 1, 1, 5, "masked", {"algorithm": "two_phase"}),
    (9, 3, 1, 13, "", {"algorithm": "two_phase", "balanced": True}),
    (4, 2, 2, 8, "unplaced", {"algorithm": "local"}),
    (9, 3, 1, 5, "unplaced masked", {"algorithm": "local"}),
    (12, 12, 1, 13, "unplaced masked by_matmul", {"algorithm": "local"}),
]
"""Heads, key heads, batch, sequence, what the model does, options of the style."""


def _across_rows(rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    worst: dict[str, float] = {}
    for case in ACROSS:
        heads, kv_heads, size, sequence, kind, options = case
        reference = model_of(17, 24, heads, kv_heads, 4)
        reference.masked, reference.rope = "masked" in kind, "unplaced" not in kind
        for block in reference.blocks:
            block.attention.repeats = "repeats" in kind
            block.attention.by_matmul = "by_matmul" in kind
            if not reference.rope:
                # Without positions it shifts all scores of a query alike: its gradient is noise.
                block.attention.k.register_parameter("bias", None)
        model = copy.deepcopy(reference)
        torch_tp2d.parallelize_module(model, mesh, plan_of(heads, kv_heads, columns, 1, **options))
        ids, target = batch(size, sequence, 17)
        wanted = loss_of(reference(ids), target)
        wanted.backward()
        if options.get("balanced"):
            order = balanced_order(sequence, rows)
            loss = loss_of(model(ids[:, order], order), target[:, order])
        else:
            loss = loss_of(model(ids), target)
        loss.backward()
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        differences = [relative(ours.grad, theirs.grad) for ours, theirs in pairs]
        worst[str(case)] = max(relative(loss.detach(), wanted.detach()), *differences)
    return worst


@pytest.mark.parametrize(
    "rows,columns", [deep(1, 2), deep(2, 2), deep(4, 1), deep(2, 3), deep(2, 4)]
)
def test_a_sequence_split_over_rows(rows: int, columns: int) -> None:
    """The same decoder, its rows holding parts of one sequence: loss and every gradient."""
    for worst in world.run(rows * columns, _across_rows, rows, columns):
        assert max(worst.values()) < TOLERANCE, {k: v for k, v in worst.items() if v > TOLERANCE}


class _WholeDropout(TorchFunctionMode):
    """Attention with dropout on one device, its mask made element by element of the whole."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or not kwargs["dropout_p"]:
            return func(*args, **kwargs)
        q, k, v = args
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if kwargs["is_causal"]:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, -torch.inf)
        if kwargs["attn_mask"] is not None:
            scores = scores.masked_fill(~kwargs["attn_mask"], -torch.inf)
        rate = kwargs["dropout_p"]
        whole = dropped(draw_key(), rate, [torch.arange(n) for n in scores.shape])
        return scores.softmax(-1).masked_fill(whole, 0.0) / (1 - rate) @ v


DROPPING = [
    (8, 8, 4, 8, 0, "", {}),
    (8, 2, 3, 7, 0, "masked", {}),
    (9, 3, 2, 5, 0, "", {}),
    (4, 2, 2, 13, 1, "", {}),
    (9, 3, 1, 13, 1, "", {"balanced": True}),
    (4, 2, 1, 13, 1, "masked", {"algorithm": "two_phase"}),
]


def _drops(rows: int, columns: int, cases: slice) -> list[float]:
    mesh, worst = grid_mesh(rows, columns), []
    for heads, kv_heads, size, sequence, row_dim, kind, options in DROPPING[cases]:
        reference = model_of(17, 24, heads, kv_heads, 4)
        reference.masked = "masked" in kind
        for block in reference.blocks:
            block.attention.dropout = 0.3
        model = copy.deepcopy(reference)
        plan = plan_of(heads, kv_heads, columns, row_dim, **options)
        torch_tp2d.parallelize_module(model, mesh, plan)
        ids, target = batch(size, sequence, 17)
        order = torch.arange(sequence)
        if options.get("balanced"):
            order = balanced_order(sequence, rows)
        torch.manual_seed(5)
        with _WholeDropout():
            wanted = loss_of(reference(ids), target)
        wanted.backward()
        torch.manual_seed(5)
        loss = loss_of(model(ids[:, order], order), target[:, order])
        loss.backward()
        pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
        differences = [relative(ours.grad, theirs.grad) for (_, ours), theirs in pairs]
        worst.append(max(relative(loss.detach(), wanted.detach()), *differences))
    return worst


@pytest.mark.parametrize(
    "rows,columns,cases",
    [
        (2, 1, slice(1, None, 4)),
        *(deep(*grid, slice(None)) for grid in ((1, 1), (2, 1), (2, 2), (4, 1))),
    ],
)
def test_dropout_of_attention_weights(rows: int, columns: int, cases: slice) -> None:
    """The mask is that of one device, whoever computes which heads of which tokens."""
    for worst in world.run(rows * columns, _drops, rows, columns, cases):
        assert max(worst) < TOLERANCE, worst


Case = tuple[int, int, int, int, str]
"""Heads, key heads, queries, keys, mask."""

GRIDS = [(1, 1), (1, 2), (2, 1), deep(2, 2), deep(1, 4), deep(4, 1), deep(2, 3), deep(2, 4)]
ALGORITHMS = ["ring", "gather", "two_phase"]
LAYOUTS = [
    (Shard(2), Shard(1)),
    (Shard(2), Shard(3)),
    (Shard(2), Replicate()),
    (Shard(0), Shard(2)),
]
SHAPES: list[Case] = [
    (4, 4, 13, 13, "causal"),
    (4, 2, 13, 13, ""),
    (9, 3, 8, 8, "causal"),
    (3, 1, 5, 5, "bool"),
    (2, 2, 13, 6, "added"),
    (2, 2, 7, 9, "added huge"),
    (2, 2, 7, 9, "added huge fixed"),
    (4, 1, 6, 13, "bool"),
    (2, 2, 5, 5, "causal balanced"),
    (4, 2, 13, 13, "causal balanced"),
    (2, 1, 16, 16, "causal balanced"),
]


def _inputs(case: Case, size: int) -> tuple[list[Tensor], Tensor | None]:
    heads, kv_heads, queries, keys, kind = case
    generator = torch.Generator().manual_seed(heads + queries)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=DOUBLE)

    leaves = [
        random(size, heads, queries, 6),
        random(size, kv_heads, keys, 6),
        random(size, kv_heads, keys, 6),
        random(size, heads, queries, 6),
    ]
    mask: Tensor | None = None
    if "bool" in kind:
        mask = random(size, 1, queries, keys) > -0.5
        # A query that sees nothing, and one that sees one key.
        mask[0, :, 0] = False
        mask[0, :, 1] = torch.arange(keys) == keys - 1
    if "added" in kind:
        mask = random(1, heads, queries, keys)
        mask[0, 0, :, 0] = -torch.inf
    if "huge" in kind:
        assert mask is not None
        mask[:, :, 2] = torch.finfo(DOUBLE).min
        mask[:, 0, 4], mask[:, 1, 4, 1:] = -1e9, -1e30
    return leaves, mask


def _learns(case: Case) -> bool:
    return "added" in case[4] and "fixed" not in case[4]


def _right_on_one_device(case: Case) -> AbstractContextManager[None]:
    """Without torch's fused kernel for the CPU where a row of the mask is one huge number.

    Its backward takes each weight of such a row for 1, on one device too.
    """
    return sdpa_kernel(SDPBackend.MATH) if "huge" in case[4] else nullcontext()


def _one_device(case: Case, size: int) -> list[Tensor]:
    (*leaves, grad), mask = _inputs(case, size)
    leaves = [x.requires_grad_() for x in leaves]
    if mask is not None and _learns(case):
        mask.requires_grad_()
    with _right_on_one_device(case):
        out = F.scaled_dot_product_attention(
            *leaves, mask, is_causal="causal" in case[4], enable_gqa=True
        )
        out.backward(grad)
    extra = [mask.grad] if mask is not None and mask.requires_grad else []
    return [out.detach(), *(x.grad for x in leaves), *extra]


def _function(rows: int, columns: int, size: int, deep: bool) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    worst = {}
    for n, (case, algorithm) in enumerate(product(SHAPES, ALGORITHMS)):
        for layout in LAYOUTS if deep else [LAYOUTS[n % len(LAYOUTS)]]:
            wanted = _one_device(case, size)
            (*leaves, grad), mask = _inputs(case, size)
            balanced = "balanced" in case[4]
            if balanced:
                order = balanced_order(case[2], rows)
                *leaves, grad = (x[:, :, order] for x in (*leaves, grad))
                wanted = [x[:, :, order] for x in wanted]
            if mask is not None and _learns(case):
                mask.requires_grad_()
            placed = [distribute_tensor(x, mesh, layout).requires_grad_() for x in leaves]
            with _right_on_one_device(case):
                out = attention2d(
                    *placed,
                    mask,
                    is_causal="causal" in case[4],
                    algorithm=algorithm,
                    balanced=balanced,
                )
                assert out.placements == layout
                out.backward(distribute_tensor(grad, mesh, layout))
            extra = []
            if mask is not None and mask.requires_grad:
                extra = [mask.grad]
            found = [out.detach(), *(x.grad for x in placed), *extra]
            key = f"{algorithm} {case} {layout}"
            worst[key] = max(relative(a, b) for a, b in zip(found, wanted, strict=True))
    return worst


@pytest.mark.parametrize("rows,columns", GRIDS)
def test_every_algorithm_against_one_device(rows: int, columns: int) -> None:
    """Output and gradients of queries, keys, values and masks, of batch 1 and odd shapes.

    Rows of an added mask that are one huge number, which hide all keys from a query, give equal
    weights. The ring summed such outputs of blocks where it had to average them, in silence: the
    number rounds away the logarithm of the count of keys by which blocks are merged.
    """
    for worst in world.run(rows * columns, _function, rows, columns, 1, False):
        assert max(worst.values()) < 1e-12, {k: v for k, v in worst.items() if v > 1e-12}


@pytest.mark.parametrize("learns", [False, True])
def test_a_mask_without_values(learns: bool) -> None:
    """``describe`` runs on fake tensors, of whose masks no value can be looked at: it raised."""
    with fake_grid(2, 2) as mesh, fake_mode():
        shards = (torch.randn(2, 2, 4, 6, requires_grad=True) for _ in range(3))
        placed = (DTensor.from_local(x, mesh, (Shard(2), Shard(1))) for x in shards)
        out = attention2d(*placed, torch.randn(2, 4, 8, 8, requires_grad=learns), algorithm="ring")
        out.sum().backward()
    assert out.shape == (2, 4, 8, 6)


def _cross(rows: int, columns: int) -> dict[str, float]:
    """Attention to states of another length, with a bias of this column's heads that is learned."""
    mesh = grid_mesh(rows, columns)
    worst = {}
    cases = product(((4, 2), (4, 4), (3, 1)), ((0, "auto"), (1, "ring"), (1, "gather")))
    for (heads, kv_heads), (row_dim, algorithm) in cases:
        torch.manual_seed(heads)
        reference = Attention(24, heads, kv_heads, 4).to(DOUBLE)
        # The gradient of a bias that shifts all scores of a query alike is noise.
        reference.k.register_parameter("bias", None)
        module = copy.deepcopy(reference)
        q, kv, o = attention_projections(heads, kv_heads, columns, row_dim=row_dim)
        style = Attention2D(row_dim=row_dim, algorithm=algorithm)
        plan = {"": style, "q": q, "[kv]": kv, "o": o}
        torch_tp2d.parallelize_module(module, mesh, plan)
        x, states = torch.randn(3, 7, 24, dtype=DOUBLE), torch.randn(3, 11, 24, dtype=DOUBLE)
        bias = torch.randn(1, heads, 7, 11, dtype=DOUBLE)
        leaves = [t.clone().requires_grad_() for t in (x, states, bias)]
        wanted = reference(leaves[0], mask=leaves[2], states=leaves[1])
        wanted.square().sum().backward()
        layout = Shard(row_dim), Shard(1)
        placed = [distribute_tensor(t, mesh, layout).requires_grad_() for t in (x, states)]
        ours = bias.clone().requires_grad_()
        out = module(placed[0], None, ours, states=placed[1])
        out.square().sum().backward()
        pairs = [
            (out.detach(), wanted.detach()),
            (ours.grad, leaves[2].grad),
            *((a.grad, b.grad) for a, b in zip(placed, leaves, strict=False)),
            *(
                (a.grad, b.grad)
                for a, b in zip(module.parameters(), reference.parameters(), strict=True)
            ),
        ]
        worst[f"{heads} {kv_heads} {row_dim} {algorithm}"] = max(relative(*p) for p in pairs)
    return worst


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(4, 1), deep(1, 4)])
def test_attention_to_other_states(rows: int, columns: int) -> None:
    for worst in world.run(rows * columns, _cross, rows, columns):
        assert max(worst.values()) < TOLERANCE, worst


@pytest.mark.parametrize("extent,ranks", [(13, 4), (8, 2), (5, 4), (1, 3), (16, 3)])
def test_what_a_causal_mask_leaves(extent: int, ranks: int) -> None:
    """The parts of the blocks that are computed, against a mask made of positions."""
    sizes = chunk_sizes(extent, ranks)
    for order in (Order.contiguous(sizes), Order.balanced(sizes)):
        assert order.sizes == sizes
        assert sorted(order.positions().tolist()) == list(range(extent))
        for i, j in product(range(ranks), range(ranks)):
            seen = torch.zeros(sizes[i], sizes[j], dtype=torch.int64)
            for part in order.parts(i, j, True):
                block = torch.ones(part.queries, part.keys, dtype=torch.int64)
                rows = slice(part.q, part.q + part.queries)
                columns = slice(part.k, part.k + part.keys)
                seen[rows, columns] += block.tril() if part.causal else block
            wanted = order.positions(i)[:, None] >= order.positions(j)
            assert seen.equal(wanted.to(torch.int64)), (order, i, j)


def test_the_balanced_order_shares_out_what_is_computed() -> None:
    order = Order.balanced(chunk_sizes(64, 4))
    done = [
        sum(p.queries * p.keys for j in range(4) for p in order.parts(i, j, True) if not p.causal)
        for i in range(4)
    ]
    assert len(set(done)) == 1
    assert balanced_order(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


@pytest.mark.parametrize("dtype,tolerance", [(DOUBLE, 1e-13), (torch.bfloat16, 2e-2)])
def test_the_kernels_of_a_block_agree(dtype: torch.dtype, tolerance: float) -> None:
    """The CPU's fused kernel, forward and backward, against scores that are written out."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 3, 6, 8, dtype=dtype) for _ in range(4))
    mask = torch.rand(2, 1, 6, 6) > 0.5
    mask[0, :, 2] = False
    for seen, causal in ((None, False), (None, True), (mask, False)):
        results = []
        for exact in (False, True):
            out, log = attend(q, k, v, seen, causal, 0.3, exact)
            grads = attend_backward(
                grad, q, k, v, seen, out, log, causal, 0.3, exact, mask_grad=False
            )
            results.append([out, log.exp(), *grads[:3]])
        for fused, written in zip(*results, strict=True):
            assert relative(fused.double(), written.double()) < tolerance


def _module(mesh: DeviceMesh, heads: int = 4, kv_heads: int = 2, **options: Any) -> Attention:
    module = Attention(24, heads, kv_heads, 4)
    row_dim = options.get("row_dim", 0)
    q, kv, o = attention_projections(heads, kv_heads, mesh["tp_col"].size(), row_dim=row_dim)
    plan = {"": Attention2D(**options), "q": q, "[kv]": kv, "o": o}
    torch_tp2d.parallelize_module(module, mesh, plan)
    return module


def _hidden(mesh: DeviceMesh, row_dim: int = 0, size: int = 4, sequence: int = 8) -> DTensor:
    return distribute_tensor(torch.randn(size, sequence, 24), mesh, (Shard(row_dim), Shard(1)))


@pytest.mark.parametrize(
    "make,words",
    [
        (lambda: Attention2D(row_dim=2), ("row_dim", "0 or 1")),
        (lambda: Attention2D(row_dim=1, algorithm="star"), ("star", "ring")),
        (lambda: Attention2D(algorithm="ring"), ("row_dim=1", "leave it out")),
        (lambda: Attention2D(balanced=True), ("row_dim=1", "leave it out")),
        (lambda: Attention2D(num_heads=9, num_kv_heads=2), ("9", "2")),
        (lambda: Attention2D(whole_inputs={"x": ("time",)}), ("'x'", "batch")),
        (lambda: attention_projections(9, 2, 2), ("9", "2")),
        (lambda: attention_projections(4, 4, 2, whole_keys=True), ("row_dim=1",)),
    ],
)
def test_options_that_cannot_be(make: Callable[[], Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert all(word in str(error.value) for word in words), error.value


def test_modules_that_cannot_be() -> None:
    with fake_grid(2, 2) as mesh:
        with pytest.raises(ValueError, match="head_dim.*3.*cannot be divided.*tp_col=2"):
            module = Attention(24, 4, 4, 3)
            torch_tp2d.parallelize_module(module, mesh, Attention2D(local_attributes=["head_dim"]))
        with pytest.raises(ValueError, match="7 query heads are no multiple of 2"):
            module.num_heads, module.num_kv_heads = 7, 2
            torch_tp2d.parallelize_module(module, mesh, Attention2D())
        with pytest.raises(ValueError, match="num_heads"):
            module.num_heads = None
            style = Attention2D(row_dim=1, algorithm="two_phase")
            torch_tp2d.parallelize_module(module, mesh, style)
        with pytest.raises(ValueError, match="computes a bias from the lengths.*row_dim=0"):
            module.num_heads, module.compute_bias = 4, lambda queries, keys: None
            torch_tp2d.parallelize_module(module, mesh, Attention2D(row_dim=1))


def test_calls_that_cannot_be() -> None:
    """What the style cannot make right it refuses, before anything is computed wrongly."""
    with fake_grid(2, 2) as mesh:
        x = _hidden(mesh)
        with pytest.raises(TypeError, match="needs hidden states"):
            _module(mesh)(torch.zeros(3))
        with pytest.raises(
            ValueError, match=r"'?rope'? has shape \(3, 8, 4\).*batch.*whole_inputs"
        ):
            _module(mesh)(x, rope=(torch.zeros(3, 8, 4), torch.zeros(3, 8, 4)))
        x = _hidden(mesh, 1)
        with pytest.raises(ValueError, match="mask of shape .* expected 4 rows.*and 8 columns"):
            _module(mesh, row_dim=1)(x, mask=torch.ones(4, 1, 8, 5, dtype=torch.bool))
        with pytest.raises(ValueError, match=r"dim 2 was taken for the sequence, which is 8"):
            _module(mesh, row_dim=1)(x, mask=torch.ones(4, 1, 5, 8, dtype=torch.bool))
        with pytest.raises(ValueError, match="expected 1 or 2 heads"):
            _module(mesh, row_dim=1)(x, mask=torch.ones(4, 3, 8, 8, dtype=torch.bool))
        with pytest.raises(ValueError, match="balanced order.*balanced=False"):
            module = _module(mesh, row_dim=1, balanced=True)
            module(x, mask=torch.ones(8, 8, dtype=torch.bool).tril())
        with pytest.raises(ValueError, match="sequence of 8 attending to one of 6.*pass a mask"):
            _module(mesh, row_dim=1)(x, states=_hidden(mesh, 1, sequence=6))
        with pytest.raises(ValueError, match="leaves some of tp_row=2 without keys"):
            _module(mesh, row_dim=1)(x, states=_hidden(mesh, 1, sequence=1), is_causal=False)


@pytest.mark.parametrize("options", [{"row_dim": 1}, {"heads": 3, "kv_heads": 3}])
def test_a_module_that_computes_where_the_style_cannot_reach(options: dict[str, Any]) -> None:
    """Attention written out as products saw a part of the keys, or had gradients summed twice."""
    with fake_grid(2, 2) as mesh:
        module = _module(mesh, **options)
        module.by_matmul = True
        mask = torch.ones(1, dtype=torch.bool)
        with pytest.raises(ValueError, match="did not call scaled_dot_product_attention, but"):
            module(_hidden(mesh, options.get("row_dim", 0)), mask=mask)


def test_keys_that_are_not_gathered_after_all() -> None:
    with fake_grid(2, 2) as mesh:
        module = _module(mesh, row_dim=1, algorithm="local")
        with pytest.raises(ValueError, match="whole_keys=True"):
            module(_hidden(mesh, 1))


def test_attention2d_says_what_it_does_not_take() -> None:
    with fake_grid(2, 2) as mesh:
        q, k = (
            distribute_tensor(torch.randn(2, heads, 8, 4), mesh, (Shard(2), Shard(3)))
            for heads in (4, 3)
        )
        plain = torch.randn(2, 4, 8, 4)
        with pytest.raises(TypeError, match="takes DTensors"):
            attention2d(plain, plain, plain)
        with pytest.raises(ValueError, match="4 query heads are no multiple of 3"):
            attention2d(q, k, k)
        with pytest.raises(ValueError, match="fit each other"):
            attention2d(q, q, k)
        with pytest.raises(ValueError, match="algorithm is one of"):
            attention2d(q, q, q, algorithm="local")
        with pytest.raises(ValueError, match=r"does not broadcast to \(2, 4, 8, 8\)"):
            attention2d(q, q, q, torch.zeros(8, 7))
        with pytest.raises(ValueError, match="without a mask"):
            attention2d(q, q, q, torch.zeros(8, 8), is_causal=True)
        sums = DTensor.from_local(plain, mesh, (Shard(2), Partial()))
        with pytest.raises(ValueError, match="partial sums"):
            attention2d(sums, sums, sums)


def test_what_the_dims_of_a_whole_input_are() -> None:
    """A table ``[2, sequence, features]`` was cut as if its 2 were the batch."""
    with fake_grid(2, 2) as mesh:
        seen: dict[str, Any] = {}

        class Table(Attention):
            def forward(self, x: Tensor, table: Tensor, other: Tensor) -> Tensor:
                seen.update(table=table.shape, other=other.shape, heads=self.num_heads)
                return super().forward(x)

        for row_dim, shape in ((0, (2, 8, 3)), (1, (2, 4, 3))):
            module = Table(24, 4, 4, 4)
            q, kv, o = attention_projections(4, 4, 2, row_dim=row_dim)
            whole_inputs = {"table": (None, "sequence", None)}
            style = Attention2D(row_dim=row_dim, whole_inputs=whole_inputs)
            torch_tp2d.parallelize_module(module, mesh, {"": style, "q": q, "[kv]": kv, "o": o})
            frequencies = torch.zeros(8, 2, dtype=torch.complex64)
            module(_hidden(mesh, row_dim, size=2), torch.zeros(2, 8, 3), other=frequencies)
            assert seen["table"] == shape
            assert seen["other"] == (8 if row_dim == 0 else 4, 2)
            assert seen["heads"] == 2


def _compiled(rows: int, columns: int, heads: int, kv_heads: int, row_dim: int) -> float:
    reference = model_of(17, 24, heads, kv_heads, 4)
    model = copy.deepcopy(reference)
    plan = plan_of(heads, kv_heads, columns, row_dim)
    torch_tp2d.parallelize_module(model, grid_mesh(rows, columns), plan)
    model.blocks[1].attention.compile(fullgraph=True, backend="aot_eager_decomp_partition")
    # The first is in eager.
    return train_beside(reference, model, 17, 2, 8, steps=2)


@pytest.mark.deep
def test_an_attention_module_is_one_graph() -> None:
    """With heads that are shared out unevenly."""
    assert max(world.run(2, _compiled, 1, 2, 9, 3, 0)) < TOLERANCE


@pytest.mark.deep
def test_an_attention_module_across_rows_is_one_graph() -> None:
    """The ring hung: the first rank's graph, which has no use for later keys, did not move them."""
    assert max(world.run(2, _compiled, 2, 1, 4, 2, 1)) < TOLERANCE
