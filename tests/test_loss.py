"""``cross_entropy`` on a mesh against :func:`torch.nn.functional.cross_entropy` of the whole."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import world
from marks import deep
from models import grid_mesh
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel as stock_loss_parallel
from torch.distributed.tensor.placement_types import Placement

from torch_tp2d import CommCounter, cross_entropy, loss_parallel

TOLERANCE = 1e-12
GRIDS = [(1, 1), (2, 2), (1, 3), (3, 1), (2, 3)]

Layout = tuple[Placement, Placement]
BATCHED: list[Layout] = [
    (Shard(0), Shard(2)),
    (Shard(0), Replicate()),
    (Replicate(), Shard(2)),
    (Shard(2), Replicate()),
    (Shard(2), Shard(2)),
    (Shard(1), Shard(2)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(1)),
    (Replicate(), Replicate()),
]
FLAT: list[Layout] = [
    (Shard(0), Shard(1)),
    (Shard(0), Replicate()),
    (Replicate(), Shard(1)),
    (Shard(1), Shard(1)),
    (Shard(0), Shard(0)),
]
REPLICATED: Layout = (Replicate(), Replicate())
SIZES = [(4, 6, 12), (3, 5, 7), (3, 5, 2)]
"""Batch, sequence, vocabulary: even, odd, and a vocabulary smaller than the grid."""


def _noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _spread(x: Tensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    return distribute_tensor(x, mesh, layout, src_data_rank=None)


def _join(x: Tensor) -> Tensor:
    """A DTensor whole, without ``full_tensor``: each rank keeps its own replica."""
    assert isinstance(x, DTensor)
    local = x.detach().to_local()
    for axis in (1, 0):
        placement = x.placements[axis]
        assert isinstance(placement, Shard | Replicate)
        if isinstance(placement, Shard) and x.device_mesh.size(axis) > 1:
            parts: list[Any] = [None] * x.device_mesh.size(axis)
            dist.all_gather_object(parts, local, group=x.device_mesh.get_group(axis))
            local = torch.cat(parts, placement.dim)
    assert local.shape == x.shape
    return local


def _tokens(layout: Layout, last: int) -> Layout:
    """The layout of what holds one number for each token."""
    row, col = (Replicate() if p == Shard(last) else p for p in layout)
    return row, col


def _far(ours: Tensor, wanted: Tensor) -> float:
    """Relative difference; nan where one is nan and the other is not."""
    assert ours.shape == wanted.shape
    if torch.equal(ours.isnan(), wanted.isnan()):
        ours, wanted = ours.nan_to_num(), wanted.nan_to_num()
    scale = wanted.norm().item()
    return (ours - wanted).norm().item() / (scale if scale else 1.0)


def _one(
    mesh: DeviceMesh,
    layout: Layout,
    logits: Tensor,
    target: Tensor,
    kind: str,
    **options: Any,
) -> tuple[float, float]:
    """Relative differences of the loss and of the logits' gradient."""
    leaf = logits.clone().requires_grad_()
    wanted = F.cross_entropy(leaf.flatten(0, -2), target.flatten(), **options)
    ours_leaf = _spread(logits, mesh, layout).requires_grad_()
    given: Tensor = target
    tokens = _tokens(layout, logits.ndim - 1)
    if kind == "local":
        given = _spread(target, mesh, tokens).to_local()
    elif kind == "dtensor":
        given = _spread(target, mesh, tokens)
    elif kind == "whole dtensor":
        given = _spread(target, mesh, (Replicate(), Replicate()))
    ours = cross_entropy(ours_leaf, given, **options)
    if options.get("reduction") == "none":
        weights = _noise(*target.shape, seed=8)
        wanted.backward(weights.flatten())
        wanted = wanted.view_as(target)
        assert isinstance(ours, DTensor) and ours.shape == target.shape
        assert tuple(ours.placements) == tokens
        ours.backward(_spread(weights, mesh, tokens))
        ours = _join(ours)
    else:
        assert not isinstance(ours, DTensor) and ours.ndim == 0
        wanted.backward()
        ours.backward()
    assert ours_leaf.grad is not None and leaf.grad is not None
    assert ours_leaf.grad.placements == ours_leaf.placements
    return _far(ours.detach(), wanted.detach()), _far(_join(ours_leaf.grad), leaf.grad)


def _close(pair: tuple[float, float], tolerance: float = TOLERANCE) -> bool:
    """Not by ``max``, which skips a nan in the second place."""
    return all(value < tolerance for value in pair)


def _target(batch: int, sequence: int, vocab: int, ignore_index: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(0, vocab, (batch, sequence), generator=generator)
    # More of them in one row than in another, so that a mean of means would show.
    target[0, : sequence - 1] = ignore_index
    target[-1, 0] = vocab - 1
    return target


def _losses(rows: int, columns: int) -> dict[str, tuple[float, float]]:
    mesh = grid_mesh(rows, columns)
    layouts = [*product((True,), BATCHED), *product((False,), FLAT)]
    cases = list(
        product(
            layouts,
            ("whole", "local", "dtensor", "whole dtensor"),
            SIZES,
            (-100, 1),
            ("mean", "sum", "none"),
            (0.0, 0.1, 1.0),
        )
    )
    found = {}
    # Coprime to the number of values of each, so that all of them meet.
    for (batched, layout), kind, size, ignore, reduction, smoothing in cases[::29]:
        batch, sequence, vocab = size
        logits = _noise(*size, seed=1)
        target = _target(batch, sequence, vocab, ignore)
        if not batched:
            logits, target = logits.flatten(0, 1), target.flatten()
        key = f"{layout} {kind} {size} {ignore=} {reduction} {smoothing=} {batched=}"
        found[key] = _one(
            mesh,
            layout,
            logits,
            target,
            kind,
            ignore_index=ignore,
            reduction=reduction,
            label_smoothing=smoothing,
        )
    return found


@pytest.mark.parametrize("rows,columns", [*GRIDS, pytest.param(2, 4, marks=pytest.mark.deep)])
def test_loss_and_gradient_equal_one_device(rows: int, columns: int) -> None:
    for found in world.run(rows * columns, _losses, rows, columns):
        bad = {key: pair for key, pair in found.items() if not _close(pair)}
        assert found and not bad, bad


def _rows_without_tokens() -> None:
    mesh = grid_mesh(4, 1)
    target = _target(3, 5, 7, -100)
    layouts: list[Layout] = [(Shard(0), Shard(2)), (Shard(0), Replicate())]
    for layout, kind in product(layouts, ("whole", "local")):
        for reduction in ("mean", "sum", "none"):
            pair = _one(mesh, layout, _noise(3, 5, 7), target, kind, reduction=reduction)
            assert _close(pair)


def test_a_row_without_tokens() -> None:
    world.run(4, _rows_without_tokens)


def _all_ignored() -> dict[str, tuple[float, float]]:
    mesh = grid_mesh(2, 2)
    target = torch.full((4, 6), -100)
    return {
        f"{reduction} {kind} {smoothing}": _one(
            mesh,
            (Shard(0), Shard(2)),
            _noise(4, 6, 12),
            target,
            kind,
            reduction=reduction,
            label_smoothing=smoothing,
        )
        for reduction, kind, smoothing in product(
            ("mean", "sum", "none"), ("whole", "local"), (0.0, 0.1)
        )
    }


def test_all_tokens_ignored() -> None:
    """The mean is nan, as in torch; its gradient is 0, as in torch.

    The gradient was nan as well: 1 / count is infinite there, and 0 times that is nan. One batch
    of padding, with its loss left out of the sum by ``nan_to_num``, spoilt the weights for good.
    """
    for found in world.run(4, _all_ignored):
        assert all(_close(pair) for pair in found.values()), found


def _large(scale: float) -> dict[str, tuple[float, float]]:
    mesh = grid_mesh(2, 2)
    target = _target(3, 5, 7, -100)
    found = {}
    for layout, shift in product(((Shard(0), Shard(2)), (Shard(2), Shard(2))), (0.0, 1e4, -1e4)):
        logits = _noise(3, 5, 7) * scale + shift
        found[f"{layout} {shift}"] = _one(mesh, layout, logits, target, "whole")
        single = _spread(logits.float(), mesh, layout)
        assert math.isfinite(cross_entropy(single, target).item())
    return found


def test_large_logits_stay_finite() -> None:
    """At 1e4 fp64 itself leaves 1e-12 of absolute difference: 1e4 * 2^-53."""
    for found in world.run(4, _large, 1e4):
        assert all(_close(pair, 1e-11) for pair in found.values()), found


def _masked() -> dict[str, tuple[float, float]]:
    """Classes that are ruled out, among them all of one rank's."""
    mesh = grid_mesh(2, 2)
    logits = _noise(3, 5, 8)
    logits[..., 4:] = -torch.inf
    target = _target(3, 5, 4, -100)
    return {
        str(layout): _one(mesh, layout, logits, target, "whole")
        for layout in ((Shard(0), Shard(2)), (Shard(2), Shard(2)), (Shard(0), Replicate()))
    }


def test_classes_of_minus_infinity() -> None:
    for found in world.run(4, _masked):
        assert all(_close(pair) for pair in found.values()), found


def _low_precision() -> None:
    mesh = grid_mesh(2, 2)
    target = _target(3, 5, 33, -100)
    for dtype in (torch.bfloat16, torch.float16):
        logits = (3 * _noise(3, 5, 33)).to(dtype)
        leaf = logits.double().requires_grad_()
        wanted = F.cross_entropy(leaf.flatten(0, 1), target.flatten())
        wanted.backward()
        ours_leaf = _spread(logits, mesh, (Shard(0), Shard(2))).requires_grad_()
        ours = cross_entropy(ours_leaf, target)
        assert ours.dtype == torch.float32
        # As exact as fp32 sums of 33 terms, though a bf16 loss would be off by 2^-8.
        assert abs(ours.item() - wanted.item()) < 2e-6 * abs(wanted.item())
        ours.backward()
        assert ours_leaf.grad is not None and ours_leaf.grad.dtype == dtype
        assert leaf.grad is not None
        error = (_join(ours_leaf.grad).double() - leaf.grad).abs()
        # Rounded once, to the dtype of the logits (fp16 has a smallest number, 6e-8).
        assert (error <= leaf.grad.abs() * torch.finfo(dtype).eps + 6e-8).all()


def test_bf16_logits_give_an_fp32_loss() -> None:
    world.run(4, _low_precision)


def _partial_logits() -> None:
    """A head that left a sum to be made: the loss makes it."""
    mesh = grid_mesh(2, 2)
    logits, target = _noise(4, 6, 12), _target(4, 6, 12, -100)
    half = _spread(logits / 2, mesh, (Shard(0), Replicate())).to_local()
    summed = DTensor.from_local(half, mesh, (Shard(0), Partial()), run_check=False)
    wanted = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    assert _far(cross_entropy(summed, target), wanted) < TOLERANCE


def test_partial_logits_are_summed() -> None:
    world.run(4, _partial_logits)


def _bytes() -> None:
    mesh = grid_mesh(2, 2)
    layouts: list[Layout] = [
        (Shard(0), Shard(2)),
        (Replicate(), Shard(2)),
        (Shard(2), Shard(2)),
        (Shard(0), Replicate()),
    ]
    for layout, kind, smoothing in product(layouts, ("whole", "local"), (0.0, 0.1)):
        tokens = 4 * 6 // (2 if Shard(0) in layout else 1)
        axes = sum(p == Shard(2) for p in layout)
        received = []
        for vocab in (8, 800):
            leaf = _spread(_noise(4, 6, vocab), mesh, layout).requires_grad_()
            target = _target(4, 6, vocab, -100)
            if kind == "local":
                target = _spread(target, mesh, _tokens(layout, 2)).to_local()
            with CommCounter(mesh) as forward:
                loss = cross_entropy(leaf, target, label_smoothing=smoothing)
            with CommCounter(mesh) as backward:
                loss.backward()
            assert backward.total_bytes == 0, str(backward)
            received.append(forward.total_bytes)
        # All-reduces over two ranks receive as much as they reduce; a few scalars beside.
        numbers = tokens * axes * (4 if smoothing else 3)
        assert received[0] == received[1], (layout, kind, received)
        assert numbers * 8 <= received[0] <= numbers * 8 + 64, (layout, kind, received)


def test_a_few_numbers_for_each_token_cross_the_wire() -> None:
    """A maximum and two sums (three with smoothing) for each token and axis that cuts V."""
    world.run(4, _bytes)


def _weights(vocab: int) -> Tensor:
    """Class weights, one of them 0."""
    weight = _noise(vocab, seed=5).abs()
    weight[vocab // 2] = 0.0
    return weight


Lines = dict[str, Callable[[Tensor, Tensor, dict[str, Any]], Tensor]]
LINES: Lines = {
    # The tutorial's.
    "flatten": lambda pred, target, options: F.cross_entropy(
        pred.flatten(0, 1), target.flatten(0, 1), **options
    ),
    # torchtitan's.
    "cast": lambda pred, target, options: F.cross_entropy(
        pred.flatten(0, 1).double(), target.flatten(0, 1), **options
    ),
    "view": lambda pred, target, options: F.cross_entropy(
        input=pred.view(-1, pred.size(-1)), target=target.reshape(-1), **options
    ),
    "module": lambda pred, target, options: nn.CrossEntropyLoss(**options)(
        pred.reshape(-1, pred.shape[-1]), target.view(-1)
    ),
    "classes in dim 1": lambda pred, target, options: F.cross_entropy(
        pred.transpose(1, 2), target, **options
    ),
}


def _contexts(rows: int, columns: int) -> dict[str, tuple[float, float]]:
    mesh = grid_mesh(rows, columns)
    cases = list(
        product(
            BATCHED,
            LINES,
            SIZES,
            ("inside", "after", "flat before"),
            ("plain", "dtensor", "local"),
            (None, "plain", "dtensor"),
            ("mean", "sum", "none"),
            (0.0, 0.1),
            (-100, 1),
        )
    )
    found = {}
    # Coprime to the number of values of each, so that all of them meet; others on each grid.
    for case in cases[7 * rows + columns :: 487]:
        layout, line, size, when, kind, weighted, reduction, smoothing, ignore = case
        batch, sequence, vocab = size
        logits, target = _noise(*size, seed=1), _target(batch, sequence, vocab, ignore)
        options: dict[str, Any] = {
            "reduction": reduction,
            "label_smoothing": smoothing,
            "ignore_index": ignore,
            "weight": None if weighted is None else _weights(vocab),
        }
        leaf = logits.clone().requires_grad_()
        wanted = LINES[line](leaf, target, options)
        ours_leaf = _spread(logits, mesh, layout).requires_grad_()
        given = target
        divides = batch % (rows * columns) == 0 == sequence % (rows * columns)
        if kind == "dtensor":
            given = _spread(target, mesh, _tokens(layout, 2) if divides else REPLICATED)
        elif kind == "local":
            given = _spread(target, mesh, _tokens(layout, 2)).to_local()
        if weighted == "dtensor":
            options["weight"] = _spread(options["weight"], mesh, (Replicate(), Shard(0)))
        # DTensor itself refuses others, some of them in backward only.
        flat = divides or not {Shard(0), Shard(1)} & set(layout)
        before = flat and layout != (Shard(1), Shard(1))
        pred: Tensor = ours_leaf
        if when == "flat before" and before and line != "classes in dim 1":
            pred, given = pred.flatten(0, 1), given.flatten(0, 1)
            line_of = partial(F.cross_entropy, **options)
        else:
            line_of = partial(LINES[line], options=options)
        if reduction == "none" and not flat and line != "classes in dim 1":
            continue
        with ExitStack() as stack:
            stack.enter_context(loss_parallel())
            ours = line_of(pred, given)
            if when != "inside":
                stack.close()
            if reduction == "none":
                weights = _noise(*wanted.shape, seed=8)
                wanted.backward(weights)
                assert isinstance(ours, DTensor)
                ours.backward(_spread(weights, mesh, REPLICATED))
                ours = ours.full_tensor()
            else:
                assert type(ours) is Tensor and ours.ndim == 0
                wanted.backward()
                ours.backward()
        assert ours_leaf.grad is not None and leaf.grad is not None
        key = f"{layout} {line} {size} {when} {kind} {weighted=} {reduction} {smoothing=} {ignore=}"
        found[key] = (
            _far(ours.detach(), wanted.detach()),
            _far(_join(ours_leaf.grad.redistribute(placements=layout)), leaf.grad),
        )
    return found


@pytest.mark.parametrize(
    "rows,columns", [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), deep(2, 3), deep(3, 3)]
)
def test_the_lines_of_a_stock_plan_stay(rows: int, columns: int) -> None:
    for found in world.run(rows * columns, _contexts, rows, columns):
        bad = {key: pair for key, pair in found.items() if not _close(pair)}
        assert found and not bad, bad
