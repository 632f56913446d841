"""Token sizes that are said where no embedding tells them."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import torch_tp2d
from support import world
from support.fake import pretend
from support.models import grid_mesh, relative
from torch_tp2d import Colwise2D, CommCounter, Rowwise2D, token_sizes

PLAN = {"0": Colwise2D(input_layouts=Shard(1)), "2": Rowwise2D(output_layouts=Shard(1))}


class _Again(nn.Sequential):
    """Activation checkpointing of the whole."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def _mine(whole: Tensor, row: int, col: int) -> Tensor:
    return whole.chunk(2)[row].chunk(2, 1)[col].clone()


def _said() -> tuple[float, list[int]]:
    mesh = grid_mesh(2, 2)
    row, col = mesh.get_coordinate()
    torch.manual_seed(0)
    worst, asked = 0.0, []
    for kind in (nn.Sequential, _Again):
        reference = kind(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).double()
        block = torch_tp2d.parallelize_module(copy.deepcopy(reference), mesh, PLAN)
        # Others each time: after the second, nothing is left of what was said of it.
        for sizes, said in (((4, 6), True), ((3, 5), True), ((6, 8), False)):
            whole = torch.randn(*sizes, 6, dtype=torch.float64, requires_grad=True)
            x = _mine(whole.detach(), row, col).requires_grad_()
            with CommCounter(mesh) as counter:
                with token_sizes(mesh, sizes) if said else nullcontext():
                    y = block(x)
            asked.append(sum(counter.calls.values()))
            wanted = reference(whole)
            wanted.sin().sum().backward()
            y.sin().sum().backward()
            worst = max(worst, relative(y.detach(), _mine(wanted.detach(), row, col)))
            assert whole.grad is not None and x.grad is not None
            worst = max(worst, relative(x.grad, _mine(whole.grad, row, col)))
            for param, ours in zip(reference.parameters(), block.parameters(), strict=True):
                worst = max(worst, relative(ours.grad, param.grad))
                param.grad = ours.grad = None
    return worst, asked


def test_where_they_are_said_nobody_is_asked() -> None:
    """Uneven batches too, and checkpointed blocks, which run again when the ``with`` is over.

    Backward put the sizes back for what runs again, and left them: the next forward without an
    embedding, of another batch, was refused as no part of the batch before.
    """
    for worst, (even, uneven, asking, *again) in world.run(4, _said):
        assert worst < 1e-11
        assert even == uneven < asking and again == [even, uneven, asking]


def test_they_hold_until_others_are_said_or_for_a_while() -> None:
    with pretend(0, 4):
        mesh = grid_mesh(2, 2)
        style = Colwise2D(input_layouts=Shard(1))
        linear = torch_tp2d.parallelize_module(nn.Linear(4, 4), mesh, style)

        def takes(sequence: int) -> bool:
            try:
                linear(torch.zeros(2, sequence // 2, 4))
            except ValueError as error:
                assert "torch_tp2d.token_sizes(mesh, (batch, sequence))" in str(error)
                return False
            return True

        token_sizes(mesh, (4, 8))
        assert takes(8) and not takes(6)
        with token_sizes(mesh, torch.zeros(4, 6).shape):
            assert takes(6) and not takes(8)
        assert takes(8)
        token_sizes(mesh, (4, 6))
        assert takes(6)


def test_what_is_wrong_with_them_is_said() -> None:
    with pretend(0, 4):
        mesh = grid_mesh(2, 2)
        for sizes in ((), (2, 3, 4), (0, 3)):
            with pytest.raises(ValueError, match="batch, sequence"):
                token_sizes(mesh, sizes)
        with pytest.raises(TypeError, match="integers"):
            token_sizes(mesh, (2, 3.0))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="2-D mesh"):
            token_sizes(mesh["tp_row"], (2, 3))
        with pytest.raises(TypeError, match="DeviceMesh"):
            token_sizes(None, (2, 3))  # type: ignore[arg-type]


def test_a_context_shows_what_is_under_way() -> None:
    from torch_tp2d.runtime.context import context_of

    seen: list[str] = []

    class Seeing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(repr(context_of(mesh)))
            x.register_hook(lambda _: seen.append(repr(context_of(mesh))))
            return super().forward(x)

    with pretend(0, 4):
        mesh = grid_mesh(2, 2)
        plan = {"0": Colwise2D(algorithm="pipelined")}
        model = nn.Sequential(nn.Linear(4, 4), Seeing(2, 4).requires_grad_(False))
        torch_tp2d.parallelize_module(model, mesh, plan)
        with token_sizes(mesh, (4, 6)):
            model(torch.zeros(2, 6, 4)).sum().backward()
        seen.append(repr(context_of(mesh)))
    grid = "mesh=(tp_row=2, tp_col=2)"
    assert seen == [
        f"Context({grid}, tokens=(4, 6), Pass(1 modules of 0, 0 ahead))",
        f"Context({grid}, tokens=(4, 6), Backward(0 sums pending, 2 calls at its end))",
        f"Context({grid}, tokens=None, nothing under way)",
    ]
