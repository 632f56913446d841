"""A model of which parts are compiled is looked at, too: its first forward runs in eager."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.tensor import Replicate
from torch.utils.checkpoint import checkpoint

from support import world
from support.models import grid_mesh
from support.one_module import Between, gradients, up_and_down
from torch_tp2d import Colwise2D, Rowwise2D, parallelize_module

WIDTH, WIDE, VOCAB = 12, 32, 11


class Middle(nn.Module):
    """Right with an act of single features."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)
        self.act = act
        self.memory_is_full = False

    def forward(self, x: Tensor) -> Tensor:
        if self.memory_is_full:
            raise torch.OutOfMemoryError("no memory")
        y: Tensor = self.down(self.act(self.up(x)))
        return y


def _parallelized(act: Any, in_place: bool, counter: CompileCounter) -> Between:
    model = Between(VOCAB, WIDTH, lambda: Middle(act)).double()
    parallelize_module(model, grid_mesh(1, 2), up_and_down())
    if in_place:
        model.middle.compile(fullgraph=True, backend=counter)
    else:
        model.middle = torch.compile(model.middle, fullgraph=True, backend=counter)
    return model


def _run(in_place: bool) -> tuple[str, list[int], float, list[str]]:
    ids = torch.randint(0, VOCAB, (4, 5), generator=torch.Generator().manual_seed(1))
    wrong = _parallelized(lambda x: x.softmax(-1), in_place, CompileCounter())
    with pytest.raises(ValueError) as error:
        wrong(ids)
    counter, graphs = CompileCounter(), []
    model = _parallelized(F.gelu, in_place, counter)
    reference = Between(VOCAB, WIDTH, lambda: Middle(F.gelu)).double()
    for learns in (False, True, True, False):
        with torch.set_grad_enabled(learns):
            out = model(ids).full_tensor()
        graphs.append(counter.frame_count)
    for y in (out, reference(ids)):
        assert y.shape == (4, 5, VOCAB)
    for y in (model(ids).full_tensor(), reference(ids)):
        F.cross_entropy(y.flatten(0, 1), ids.flatten()).backward()
    worst = max(gradients(reference, model).values())
    full = _parallelized(F.gelu, in_place, counter)
    inner = full.middle if in_place else full.middle._orig_mod
    inner.memory_is_full = True
    with pytest.raises(torch.OutOfMemoryError) as raised:
        full(ids)
    inner.memory_is_full = False
    assert torch.compile(lambda x: x + 1, backend=counter)(ids).shape == ids.shape
    graphs.append(counter.frame_count)
    return str(error.value), graphs, worst, raised.value.__notes__


@pytest.mark.parametrize("in_place", [True, False])
def test_a_first_forward_looks_at_compiled_parts(in_place: bool) -> None:
    """A softmax of a rank's own features in a compiled block was wrong in silence.

    torch compiles the block for the forward after it, and what else the user compiles goes on
    after an error.
    """
    for said, graphs, worst, notes in world.run(2, _run, in_place):
        assert "test_parts_compiled.py:" in said and " softmax takes dim 2 " in said
        assert graphs == [0, 0, 1, 2, 3]
        assert worst < 1e-12
        assert "smaller batch" in notes[0]


def _whole(_: int) -> list[tuple[list[str], int]]:
    """Warnings and graphs of a model that is compiled whole, at first, after a forward, inside."""
    seen = []
    ids = torch.randint(0, VOCAB, (4, 5), generator=torch.Generator().manual_seed(1))
    for kind in ("at first", "after a forward", "inside a model"):
        counter = CompileCounter()
        model = Between(VOCAB, WIDTH, lambda: Middle(F.gelu)).double()
        mesh = grid_mesh(1, 2)
        around = {
            "embed": Rowwise2D(output_layouts=Replicate()),
            "head": Colwise2D(use_local_output=False),
        }
        inside = {"up": Colwise2D(), "down": Rowwise2D(output_layouts=Replicate())}
        if kind == "inside a model":
            # Block by block, as torchtitan parallelizes.
            parallelize_module(model.middle, mesh, inside)
            parallelize_module(model, mesh, around)
            model.middle.compile(fullgraph=True, backend=counter)
        else:
            plan = around | {f"middle.{key}": style for key, style in inside.items()}
            parallelize_module(model, mesh, plan)
            if kind == "after a forward":
                model(ids)
            model = torch.compile(model, backend=counter)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                model(ids).full_tensor().sum().backward()
        told = [str(one.message) for one in caught if "torch_tp2d" in str(one.message)]
        seen.append((told, counter.frame_count))
    return seen


def test_a_model_that_is_compiled_as_a_whole() -> None:
    """Nothing told that a graph's code is not looked at. No part is refused or warned of where the
    model around it was looked at.
    """
    for at_first, after, inside in world.run(2, _whole, 0):
        assert at_first[1] and len(at_first[0]) == 1, at_first
        assert "compile its blocks alone" in at_first[0][0]
        assert after == ([], after[1]) and after[1]
        assert inside == ([], 1)


class Checkpointed(Between):
    def forward(self, ids: Tensor) -> Tensor:
        y = checkpoint(self.middle, self.embed(ids), use_reentrant=False)
        out: Tensor = self.head(y)
        return out


def _recomputed() -> list[Any]:
    """Graphs after each step of a block that is recomputed; the first backward raises."""
    counter, seen = CompileCounter(), []
    ids = torch.randint(0, VOCAB, (4, 5), generator=torch.Generator().manual_seed(1))
    model = _parallelized(F.gelu, True, counter)
    model.__class__ = Checkpointed
    reference = Between(VOCAB, WIDTH, lambda: Middle(F.gelu)).double()
    stop = model.embed.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids).full_tensor().sum().backward()
    stop.remove()
    seen.append(counter.frame_count)
    for _ in range(2):
        model.zero_grad()
        F.cross_entropy(model(ids).full_tensor().flatten(0, 1), ids.flatten()).backward()
        seen.append(counter.frame_count)
    F.cross_entropy(reference(ids).flatten(0, 1), ids.flatten()).backward()
    return [seen, max(gradients(reference, model).values())]


def test_what_checkpointing_runs_again() -> None:
    """A block that was looked at in eager and compiled for its recomputation in backward did not
    keep what the forward had: torch's CheckpointError. What a backward that raises leaves behind
    the next forward puts right.
    """
    for graphs, worst in world.run(2, _recomputed):
        assert graphs == [0, 1, 1]
        assert worst < 1e-12
