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


def _not_finite() -> list[tuple[str, float, list[bool]]]:
    """What each rank sees of logits that are not finite; the test compares the ranks."""
    mesh = grid_mesh(2, 2)
    target, found = _target(3, 5, 7, -100), []
    layouts: list[Layout] = [(Shard(0), Shard(2)), (Shard(2), Shard(2)), (Shard(1), Replicate())]
    for layout, value, line in product(layouts, (math.nan, math.inf, -math.inf), ("mean", "none")):
        logits = _noise(3, 5, 7)
        logits[2, 1, 6] = value
        if value < 0:
            logits[2, 1] = value
        leaf = logits.clone().requires_grad_()
        wanted = F.cross_entropy(leaf.transpose(1, 2), target, reduction=line)
        wanted.sum().backward()
        ours_leaf = _spread(logits, mesh, layout).requires_grad_()
        with loss_parallel():
            ours = F.cross_entropy(ours_leaf.transpose(1, 2), target, reduction=line)
        if isinstance(ours, DTensor):
            ours = ours.full_tensor()
        ours.sum().backward()
        assert leaf.grad is not None and ours_leaf.grad is not None
        assert _close(
            (_far(ours.detach(), wanted.detach()), _far(_join(ours_leaf.grad), leaf.grad))
        )
        found.append((f"{layout} {value}", 0.0, ours.isnan().flatten().tolist()))
    return found


def test_logits_that_are_not_finite_are_seen_by_every_rank() -> None:
    first, *others = world.run(4, _not_finite)
    assert all(other == first for other in others)
    assert all(any(nans) for _, _, nans in first)


def _unknown_classes() -> list[bool]:
    mesh = grid_mesh(2, 2)
    target = _target(4, 6, 12, -100)
    target[3, 5] = 12
    logits = _spread(_noise(4, 6, 12), mesh, (Shard(0), Shard(2)))
    with pytest.raises(IndexError, match="12 is no class of the logits, which have 12"):
        cross_entropy(logits, target)
    own = _spread(target, mesh, (Shard(0), Replicate())).to_local()
    weights = _weights(12)
    seen = [cross_entropy(logits, own), cross_entropy(logits, own, weight=weights)]
    return [bool(loss.isnan()) for loss in seen]


def test_a_target_that_is_no_class() -> None:
    """It counted with a loss of log(sum(exp)), without a word; torch raises.

    Only the row that holds it can tell where targets are local, and it would leave the other row
    waiting in the sum: all ranks see nan then.
    """
    assert world.run(4, _unknown_classes) == [[True, True]] * 4


def _weighted_nothing() -> None:
    mesh = grid_mesh(2, 2)
    logits, ignored = _noise(4, 6, 12), torch.full((4, 6), -100)
    for kind, reduction in product(("whole", "local"), ("mean", "sum")):
        for target in (ignored, _target(4, 6, 12, -100)):
            options = {"reduction": reduction, "weight": _weights(12), "label_smoothing": 0.1}
            pair = _one(mesh, (Shard(0), Shard(2)), logits, target, kind, **options)
            assert _close(pair), (kind, reduction, pair)
    leaf = _spread(logits, mesh, (Shard(0), Shard(2)))
    for weight, words in (
        (torch.ones(6), "12 classes"),
        (torch.ones(12, requires_grad=True), "detach"),
        (_spread(torch.ones(12), init_device_mesh("cpu", (4,)), (Shard(0),)), "weight is a"),
    ):
        with pytest.raises(ValueError, match=words):
            cross_entropy(leaf, ignored, weight=weight)


def test_class_weights() -> None:
    world.run(4, _weighted_nothing)


def _what_a_context_leaves_alone() -> None:
    mesh = grid_mesh(2, 2)
    logits, target = _noise(3, 5, 8), _target(3, 5, 8, -100)
    wanted = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    spread = _spread(logits, mesh, (Shard(0), Shard(2)))
    handlers = dict(DTensor._op_dispatcher._custom_op_handlers)

    def refused_elsewhere() -> None:
        with pytest.raises(RuntimeError, match="flatten unevenly"):
            spread.flatten(0, 1)
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
            F.cross_entropy(spread.transpose(1, 2), target)
        passed.append(True)

    passed: list[bool] = []
    with loss_parallel():
        with loss_parallel(), stock_loss_parallel():
            inner = F.cross_entropy(spread.flatten(0, 1), target.flatten(0, 1))
        outer = F.cross_entropy(spread.flatten(0, 1), target.flatten(0, 1))
        assert _far(inner, wanted) < TOLERANCE and torch.equal(inner, outer)
        assert dict(DTensor._op_dispatcher._custom_op_handlers) == handlers
        thread = threading.Thread(target=refused_elsewhere)
        thread.start()
        thread.join()
        # A plain tensor's loss is torch's.
        assert torch.equal(F.cross_entropy(logits.flatten(0, 1), target.flatten()), wanted)
    with pytest.raises(KeyError), loss_parallel():
        raise KeyError
    refused_elsewhere()
    assert len(passed) == 2


def test_nothing_outside_the_context_changes() -> None:
    world.run(4, _what_a_context_leaves_alone)


def _other_lines() -> None:
    mesh = grid_mesh(2, 2)
    logits, target = _noise(3, 5, 8), _target(3, 5, 8, -100)
    spread = _spread(logits, mesh, (Shard(0), Shard(2))).requires_grad_()
    leaf = logits.clone().requires_grad_()
    scale = _noise(3, 5, 8, seed=4)
    with loss_parallel():
        # A log_softmax beside the loss, as of a distillation: wrong under torch's own context.
        (F.log_softmax(leaf, -1) * scale).sum().backward()
        soft = F.log_softmax(spread, -1)
        (soft * _spread(scale, mesh, REPLICATED)).sum().backward()
        assert leaf.grad is not None and spread.grad is not None
        assert _far(spread.grad.full_tensor(), leaf.grad) < TOLERANCE
        for log_probs in (soft.transpose(1, 2), spread.flatten(0, 1)):
            with pytest.raises(TypeError, match="F.cross_entropy on the logits"):
                F.nll_loss(log_probs, target)
        with pytest.raises(TypeError, match="class ids"):
            F.cross_entropy(spread, logits)
        with pytest.raises(ValueError, match="classes from dim 1"):
            F.cross_entropy(spread, target)
        flat = spread.flatten(0, 1)
        assert flat.shape == (15, 8) and flat.float().dtype == torch.float32 and repr(flat)
        for use in (lambda: flat + 1, lambda: flat.sum(), lambda: flat.view(3, 5, 8)):
            with pytest.raises(RuntimeError, match="flatten unevenly"):
                use()
        with pytest.raises(RuntimeError, match="flatten unevenly"):
            F.cross_entropy(flat, target.flatten(), reduction="none")
        alone = _spread(logits, mesh["tp_col"], (Shard(2),))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"\(tp_col=2\) alone"):
            F.cross_entropy(alone.flatten(0, 1), target.flatten())
        loss = F.cross_entropy(flat, target.flatten())
    # No second derivative, rather than the part of it that autograd could tell.
    (grad,) = torch.autograd.grad(loss, spread, create_graph=True)
    with pytest.raises(RuntimeError, match="grad"):
        grad.full_tensor().sum().backward()


def test_what_a_context_refuses() -> None:
    world.run(4, _other_lines)


def _on_a_line() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    target = _target(4, 6, 12, 1).flatten()
    for options in ({}, {"reduction": "sum"}, {"ignore_index": 1}, {"weight": _weights(12)}):
        graded = []
        for context in (loss_parallel, stock_loss_parallel):
            leaf = distribute_tensor(_noise(24, 12), mesh, [Shard(1)], src_data_rank=None)
            leaf.requires_grad_()
            with context():
                loss = F.cross_entropy(leaf, target, **options)
                assert isinstance(loss, DTensor) and loss.placements == (Replicate(),)
                loss.backward()
            graded.append((loss.detach().full_tensor(), leaf.grad.full_tensor()))
        (ours, our_grad), (torchs, torchs_grad) = graded
        assert _far(ours, torchs) < TOLERANCE and _far(our_grad, torchs_grad) < TOLERANCE


def test_on_a_line_it_is_torchs_own() -> None:
    world.run(4, _on_a_line)


def _bytes_of_a_line() -> None:
    mesh = grid_mesh(2, 2)
    for batch, layout in product((4, 3), ((Shard(0), Shard(2)), (Shard(1), Shard(2)))):
        received = []
        for line in ("flatten", "direct"):
            leaf = _spread(_noise(batch, 6, 800), mesh, layout).requires_grad_()
            target = _target(batch, 6, 800, -100)
            with CommCounter(mesh) as counter:
                if line == "direct":
                    cross_entropy(leaf, target).backward()
                else:
                    with loss_parallel():
                        LINES["cast"](leaf, target, {}).backward()
            received.append(counter.total_bytes)
        assert received[0] == received[1] <= batch * 6 * 3 * 8 + 64, (batch, layout, received)


def test_flattening_moves_nothing() -> None:
    """Neither of a batch that does not divide, which no placement of DTensor's could express."""
    world.run(4, _bytes_of_a_line)


def _compiled_line() -> None:
    mesh = grid_mesh(2, 2)
    logits, target = _noise(4, 6, 12).float(), _target(4, 6, 12, -100)
    leaf = logits.clone().requires_grad_()
    wanted = LINES["flatten"](leaf, target, {})
    wanted.backward()
    line = torch.compile(lambda pred: LINES["flatten"](pred, target, {}), backend="aot_eager")
    ours_leaf = _spread(logits, mesh, (Shard(0), Shard(2))).requires_grad_()
    with loss_parallel():
        loss = line(ours_leaf)
        loss.backward()
    assert leaf.grad is not None and ours_leaf.grad is not None
    assert _far(loss.detach(), wanted.detach()) < 1e-6
    assert _far(_join(ours_leaf.grad), leaf.grad) < 1e-6


def test_a_compiled_loss() -> None:
    """torchtitan compiles it: what the graph cannot hold is run between two of them."""
    world.run(4, _compiled_line)
