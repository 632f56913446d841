"""``loss_parallel``: the lines of a stock plan stay, and mean what they did."""

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
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel as stock_loss_parallel

from support import world
from support.device import DEVICE
from support.losses import (
    BATCHED,
    REPLICATED,
    SIZES,
    TOLERANCE,
    Layout,
    class_weights,
    close,
    far,
    target_of,
    tokens_of,
    whole,
)
from support.marks import deep
from support.models import grid_mesh, noise
from support.one_module import spread
from torch_tp2d import CommCounter, cross_entropy, loss_parallel

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
        logits, target = noise(*size, seed=1), target_of(batch, sequence, vocab, ignore)
        options: dict[str, Any] = {
            "reduction": reduction,
            "label_smoothing": smoothing,
            "ignore_index": ignore,
            "weight": None if weighted is None else class_weights(vocab),
        }
        leaf = logits.clone().requires_grad_()
        wanted = LINES[line](leaf, target, options)
        ours_leaf = spread(logits, mesh, layout).requires_grad_()
        given = target
        divides = batch % (rows * columns) == 0 == sequence % (rows * columns)
        if kind == "dtensor":
            given = spread(target, mesh, tokens_of(layout, 2) if divides else REPLICATED)
        elif kind == "local":
            given = spread(target, mesh, tokens_of(layout, 2)).to_local()
        if weighted == "dtensor":
            options["weight"] = spread(options["weight"], mesh, (Replicate(), Shard(0)))
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
                weights = noise(*wanted.shape, seed=8)
                wanted.backward(weights)
                assert isinstance(ours, DTensor)
                ours.backward(spread(weights, mesh, REPLICATED))
                ours = ours.full_tensor()
            else:
                assert type(ours) is Tensor and ours.ndim == 0
                wanted.backward()
                ours.backward()
        assert ours_leaf.grad is not None and leaf.grad is not None
        key = f"{layout} {line} {size} {when} {kind} {weighted=} {reduction} {smoothing=} {ignore=}"
        found[key] = (
            far(ours.detach(), wanted.detach()),
            far(whole(ours_leaf.grad.redistribute(placements=layout)), leaf.grad),
        )
    return found


@pytest.mark.parametrize(
    "rows,columns",
    [(1, 1), deep(1, 2), deep(2, 1), (2, 2), deep(1, 4), deep(4, 1), deep(2, 3), deep(3, 3)],
)
def test_the_lines_of_a_stock_plan_stay(rows: int, columns: int) -> None:
    for found in world.run(rows * columns, _contexts, rows, columns):
        bad = {key: pair for key, pair in found.items() if not close(pair)}
        assert found and not bad, bad


def _not_finite() -> list[tuple[str, float, list[bool]]]:
    """What each rank sees of logits that are not finite; the test compares the ranks."""
    mesh = grid_mesh(2, 2)
    target, found = target_of(3, 5, 7, -100), []
    layouts: list[Layout] = [(Shard(0), Shard(2)), (Shard(2), Shard(2)), (Shard(1), Replicate())]
    for layout, value, line in product(layouts, (math.nan, math.inf, -math.inf), ("mean", "none")):
        logits = noise(3, 5, 7)
        logits[2, 1, 6] = value
        if value < 0:
            logits[2, 1] = value
        leaf = logits.clone().requires_grad_()
        wanted = F.cross_entropy(leaf.transpose(1, 2), target, reduction=line)
        wanted.sum().backward()
        ours_leaf = spread(logits, mesh, layout).requires_grad_()
        with loss_parallel():
            ours = F.cross_entropy(ours_leaf.transpose(1, 2), target, reduction=line)
        if isinstance(ours, DTensor):
            ours = ours.full_tensor()
        ours.sum().backward()
        assert leaf.grad is not None and ours_leaf.grad is not None
        assert close((far(ours.detach(), wanted.detach()), far(whole(ours_leaf.grad), leaf.grad)))
        found.append((f"{layout} {value}", 0.0, ours.isnan().flatten().tolist()))
    return found


def test_logits_that_are_not_finite_are_seen_by_every_rank() -> None:
    first, *others = world.run(4, _not_finite)
    assert all(other == first for other in others)
    assert all(any(nans) for _, _, nans in first)


def _what_a_context_leaves_alone() -> None:
    mesh = grid_mesh(2, 2)
    logits, target = noise(3, 5, 8), target_of(3, 5, 8, -100)
    wanted = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    placed = spread(logits, mesh, (Shard(0), Shard(2)))
    handlers = dict(DTensor._op_dispatcher._custom_op_handlers)

    def refused_elsewhere() -> None:
        with pytest.raises(RuntimeError, match="flatten unevenly"):
            placed.flatten(0, 1)
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
            F.cross_entropy(placed.transpose(1, 2), target)
        passed.append(True)

    passed: list[bool] = []
    with loss_parallel():
        with loss_parallel(), stock_loss_parallel():
            inner = F.cross_entropy(placed.flatten(0, 1), target.flatten(0, 1))
        outer = F.cross_entropy(placed.flatten(0, 1), target.flatten(0, 1))
        assert far(inner, wanted) < TOLERANCE and torch.equal(inner, outer)
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
    logits, target = noise(3, 5, 8), target_of(3, 5, 8, -100)
    placed = spread(logits, mesh, (Shard(0), Shard(2))).requires_grad_()
    leaf = logits.clone().requires_grad_()
    scale = noise(3, 5, 8, seed=4)
    with loss_parallel():
        # A log_softmax beside the loss, as of a distillation: wrong under torch's own context.
        (F.log_softmax(leaf, -1) * scale).sum().backward()
        soft = F.log_softmax(placed, -1)
        (soft * spread(scale, mesh, REPLICATED)).sum().backward()
        assert leaf.grad is not None and placed.grad is not None
        assert far(placed.grad.full_tensor(), leaf.grad) < TOLERANCE
        for log_probs in (soft.transpose(1, 2), placed.flatten(0, 1)):
            with pytest.raises(TypeError, match="F.cross_entropy on the logits"):
                F.nll_loss(log_probs, target)
        with pytest.raises(TypeError, match="class ids"):
            F.cross_entropy(placed, logits)
        with pytest.raises(ValueError, match="classes from dim 1"):
            F.cross_entropy(placed, target)
        flat = placed.flatten(0, 1)
        assert flat.shape == (15, 8) and flat.float().dtype == torch.float32 and repr(flat)
        for use in (lambda: flat + 1, lambda: flat.sum(), lambda: flat.view(3, 5, 8)):
            with pytest.raises(RuntimeError, match="flatten unevenly"):
                use()
        with pytest.raises(RuntimeError, match="flatten unevenly"):
            F.cross_entropy(flat, target.flatten(), reduction="none")
        alone = spread(logits, mesh["tp_col"], (Shard(2),))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"\(tp_col=2\) alone"):
            F.cross_entropy(alone.flatten(0, 1), target.flatten())
        loss = F.cross_entropy(flat, target.flatten())
    # No second derivative, rather than the part of it that autograd could tell.
    (grad,) = torch.autograd.grad(loss, placed, create_graph=True)
    with pytest.raises(RuntimeError, match="grad"):
        grad.full_tensor().sum().backward()


def test_what_a_context_refuses() -> None:
    world.run(4, _other_lines)


def _on_a_line() -> None:
    mesh = init_device_mesh(DEVICE, (4,), mesh_dim_names=("tp",))
    target = target_of(4, 6, 12, 1).flatten()
    for options in ({}, {"reduction": "sum"}, {"ignore_index": 1}, {"weight": class_weights(12)}):
        graded = []
        for context in (loss_parallel, stock_loss_parallel):
            leaf = distribute_tensor(noise(24, 12), mesh, [Shard(1)], src_data_rank=None)
            leaf.requires_grad_()
            with context():
                loss = F.cross_entropy(leaf, target, **options)
                assert isinstance(loss, DTensor) and loss.placements == (Replicate(),)
                loss.backward()
            graded.append((loss.detach().full_tensor(), leaf.grad.full_tensor()))
        (ours, our_grad), (torchs, torchs_grad) = graded
        assert far(ours, torchs) < TOLERANCE and far(our_grad, torchs_grad) < TOLERANCE


def test_on_a_line_it_is_torchs_own() -> None:
    world.run(4, _on_a_line)


def _bytes_of_a_line() -> None:
    mesh = grid_mesh(2, 2)
    for batch, layout in product((4, 3), ((Shard(0), Shard(2)), (Shard(1), Shard(2)))):
        received = []
        for line in ("flatten", "direct"):
            leaf = spread(noise(batch, 6, 800), mesh, layout).requires_grad_()
            target = target_of(batch, 6, 800, -100)
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
    logits, target = noise(4, 6, 12).float(), target_of(4, 6, 12, -100)
    leaf = logits.clone().requires_grad_()
    wanted = LINES["flatten"](leaf, target, {})
    wanted.backward()
    line = torch.compile(lambda pred: LINES["flatten"](pred, target, {}), backend="aot_eager")
    ours_leaf = spread(logits, mesh, (Shard(0), Shard(2))).requires_grad_()
    with loss_parallel():
        loss = line(ours_leaf)
        loss.backward()
    assert leaf.grad is not None and ours_leaf.grad is not None
    assert far(loss.detach(), wanted.detach()) < 1e-6
    assert far(whole(ours_leaf.grad), leaf.grad) < 1e-6


@pytest.mark.deep
def test_a_compiled_loss() -> None:
    """torchtitan compiles it: what the graph cannot hold is run between two of them."""
    world.run(4, _compiled_line)


def _narrow_ids_rank() -> list[float]:
    mesh = grid_mesh(4, 1)
    logits, target = noise(3, 5, 12), target_of(3, 5, 12, 0)
    placed = spread(logits, mesh, (Shard(0), Replicate()))
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    return [
        abs((cross_entropy(placed, target.to(dtype)) - expected).item())
        for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64)
    ]


def test_class_ids_of_narrow_dtypes() -> None:
    """uint8, which torch takes, raised on ranks with tokens, and the rank without any waited for
    them: the gather of no elements does not look at the dtype of its index."""
    for differences in world.run(4, _narrow_ids_rank):
        assert max(differences) < TOLERANCE, differences
