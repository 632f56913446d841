"""``cross_entropy`` on a mesh against :func:`torch.nn.functional.cross_entropy` of the whole."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from support import world
from support.device import DEVICE
from support.losses import (
    TOLERANCE,
    Layout,
    class_weights,
    close,
    far,
    loss_beside,
    losses,
    target_of,
    tokens_of,
    whole,
)
from support.marks import deep
from support.models import grid_mesh, noise
from support.one_module import spread
from torch_tp2d import CommCounter, cross_entropy

GRIDS = [(1, 1), (2, 2), deep(1, 3), deep(3, 1), deep(2, 3), deep(2, 4)]


@pytest.mark.parametrize("rows,columns", GRIDS)
def test_loss_and_gradient_equal_one_device(rows: int, columns: int) -> None:
    for found in world.run(rows * columns, losses, rows, columns):
        bad = {key: pair for key, pair in found.items() if not close(pair)}
        assert found and not bad, bad


def _rows_without_tokens() -> None:
    mesh = grid_mesh(4, 1)
    target = target_of(3, 5, 7, -100)
    layouts: list[Layout] = [(Shard(0), Shard(2)), (Shard(0), Replicate())]
    for layout, kind in product(layouts, ("whole", "local")):
        for reduction in ("mean", "sum", "none"):
            pair = loss_beside(mesh, layout, noise(3, 5, 7), target, kind, reduction=reduction)
            assert close(pair)


def test_a_row_without_tokens() -> None:
    world.run(4, _rows_without_tokens)


def _all_ignored() -> dict[str, tuple[float, float]]:
    mesh = grid_mesh(2, 2)
    target = torch.full((4, 6), -100)
    return {
        f"{reduction} {kind} {smoothing}": loss_beside(
            mesh,
            (Shard(0), Shard(2)),
            noise(4, 6, 12),
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
        assert all(close(pair) for pair in found.values()), found


def _large(scale: float) -> dict[str, tuple[float, float]]:
    mesh = grid_mesh(2, 2)
    target = target_of(3, 5, 7, -100)
    found = {}
    for layout, shift in product(((Shard(0), Shard(2)), (Shard(2), Shard(2))), (0.0, 1e4, -1e4)):
        logits = noise(3, 5, 7) * scale + shift
        found[f"{layout} {shift}"] = loss_beside(mesh, layout, logits, target, "whole")
        single = spread(logits.float(), mesh, layout)
        assert math.isfinite(cross_entropy(single, target).item())
    return found


def test_large_logits_stay_finite() -> None:
    """At 1e4 fp64 itself leaves 1e-12 of absolute difference: 1e4 * 2^-53."""
    for found in world.run(4, _large, 1e4):
        assert all(close(pair, 1e-11) for pair in found.values()), found


def _masked() -> dict[str, tuple[float, float]]:
    """Classes that are ruled out, among them all of one rank's."""
    mesh = grid_mesh(2, 2)
    logits = noise(3, 5, 8)
    logits[..., 4:] = -torch.inf
    target = target_of(3, 5, 4, -100)
    return {
        str(layout): loss_beside(mesh, layout, logits, target, "whole")
        for layout in ((Shard(0), Shard(2)), (Shard(2), Shard(2)), (Shard(0), Replicate()))
    }


def test_classes_of_minus_infinity() -> None:
    for found in world.run(4, _masked):
        assert all(close(pair) for pair in found.values()), found


def _low_precision() -> None:
    mesh = grid_mesh(2, 2)
    target = target_of(3, 5, 33, -100)
    for dtype in (torch.bfloat16, torch.float16):
        logits = (3 * noise(3, 5, 33)).to(dtype)
        leaf = logits.double().requires_grad_()
        wanted = F.cross_entropy(leaf.flatten(0, 1), target.flatten())
        wanted.backward()
        ours_leaf = spread(logits, mesh, (Shard(0), Shard(2))).requires_grad_()
        ours = cross_entropy(ours_leaf, target)
        assert ours.dtype == torch.float32
        # As exact as fp32 sums of 33 terms, though a bf16 loss would be off by 2^-8.
        assert abs(ours.item() - wanted.item()) < 2e-6 * abs(wanted.item())
        ours.backward()
        assert ours_leaf.grad is not None and ours_leaf.grad.dtype == dtype
        assert leaf.grad is not None
        error = (whole(ours_leaf.grad).double() - leaf.grad).abs()
        # Rounded once, to the dtype of the logits (fp16 has a smallest number, 6e-8).
        assert (error <= leaf.grad.abs() * torch.finfo(dtype).eps + 6e-8).all()


def test_bf16_logits_give_an_fp32_loss() -> None:
    world.run(4, _low_precision)


def _partial_logits() -> None:
    """A head that left a sum to be made: the loss makes it."""
    mesh = grid_mesh(2, 2)
    logits, target = noise(4, 6, 12), target_of(4, 6, 12, -100)
    half = spread(logits / 2, mesh, (Shard(0), Replicate())).to_local()
    summed = DTensor.from_local(half, mesh, (Shard(0), Partial()), run_check=False)
    wanted = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    assert far(cross_entropy(summed, target), wanted) < TOLERANCE


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
            leaf = spread(noise(4, 6, vocab), mesh, layout).requires_grad_()
            target = target_of(4, 6, vocab, -100)
            if kind == "local":
                target = spread(target, mesh, tokens_of(layout, 2)).to_local()
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


def _unknown_classes() -> list[bool]:
    mesh = grid_mesh(2, 2)
    target = target_of(4, 6, 12, -100)
    target[3, 5] = 12
    logits = spread(noise(4, 6, 12), mesh, (Shard(0), Shard(2)))
    with pytest.raises(IndexError, match="12 is no class of the logits, which have 12"):
        cross_entropy(logits, target)
    own = spread(target, mesh, (Shard(0), Replicate())).to_local()
    weights = class_weights(12)
    leaf = logits.detach().requires_grad_()
    seen = [cross_entropy(leaf, own), cross_entropy(logits, own, weight=weights)]
    seen[0].backward()
    assert leaf.grad is not None
    wrong = leaf.grad.full_tensor().isnan().any(-1)
    return [*(bool(loss.isnan()) for loss in seen), bool(wrong[3, 5])]


def test_a_target_that_is_no_class() -> None:
    """It counted with a loss of log(sum(exp)), without a word; torch raises.

    Only the row that holds it can tell where targets are local, and it would leave the other row
    waiting in the sum: all ranks see nan then, in the loss and in that token's gradient, which was
    a finite one of no class at all.
    """
    assert world.run(4, _unknown_classes) == [[True, True, True]] * 4


def _weighted_nothing() -> None:
    mesh = grid_mesh(2, 2)
    logits, ignored = noise(4, 6, 12), torch.full((4, 6), -100)
    for kind, reduction in product(("whole", "local"), ("mean", "sum")):
        for target in (ignored, target_of(4, 6, 12, -100)):
            options = {"reduction": reduction, "weight": class_weights(12), "label_smoothing": 0.1}
            pair = loss_beside(mesh, (Shard(0), Shard(2)), logits, target, kind, **options)
            assert close(pair), (kind, reduction, pair)
    leaf = spread(logits, mesh, (Shard(0), Shard(2)))
    for weight, words in (
        (torch.ones(6), "12 classes"),
        (torch.ones(12, requires_grad=True), "detach"),
        (spread(torch.ones(12), init_device_mesh(DEVICE, (4,)), (Shard(0),)), "weight is a"),
    ):
        with pytest.raises(ValueError, match=words):
            cross_entropy(leaf, ignored, weight=weight)


def test_class_weights() -> None:
    world.run(4, _weighted_nothing)
