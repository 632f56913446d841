"""Steps out of the ordinary: weights that are computed, swapped, or changed where torch does not
see it; a backward that raises; checkpointing within a module; gradients asked for late."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, SequenceParallel
from torch.func import functional_call
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

import torch_tp2d
from support import world
from support.marks import deep, values_are_compared
from support.models import batch, grid_mesh, loss_of, noise, relative
from torch_tp2d import Colwise2D, Rowwise2D, parallelize_module
from torch_tp2d.runtime.context import context_of

TOLERANCE = 1e-10
VOCAB, HIDDEN, INNER = 17, 8, 12
GRIDS = {4: [(2, 2)], 2: [(1, 2), (2, 1)]}


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(HIDDEN, INNER), nn.Linear(HIDDEN, INNER)

    def forward(self, x: Tensor, between: Callable[[Tensor], Any] | None = None) -> Tensor:
        a = self.w1(x)
        if between is not None:
            between(x)
        return F.silu(a) * self.w3(x)


class _FeedForward(nn.Module):
    """A gated feed-forward layer; what a test does in its forward is said from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.w2 = _Inner(), nn.Linear(INNER, HIDDEN)
        self.recomputes = False
        self.between: Callable[[Tensor], Any] | None = None
        self.top: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.top is not None:
            self.w2.weight.data.clamp_(max=self.top)
        if self.recomputes:
            return self.w2(checkpoint(self.inner, x, use_reentrant=False))
        return self.w2(self.inner(x, self.between))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ff = nn.LayerNorm(HIDDEN), _FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ff(self.norm(x))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.Sequential(_Block(), _Block())
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(ids))))


def _plan(**options: Any) -> dict[str, Any]:
    return {
        "embed": Rowwise2D(output_layouts=Shard(1)),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.ff": PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate()
        ),
        "blocks.*.ff.inner.w[13]": Colwise2D(**options),
        "blocks.*.ff.w2": Rowwise2D(
            output_layouts=Shard(1),
            **{name: value for name, value in options.items() if name != "regather_input"},
        ),
        "norm": SequenceParallel(),
        "head": Colwise2D(input_layouts=Shard(1), use_local_output=False),
    }


def _pair(mesh: Any, **options: Any) -> tuple[Any, Any]:
    """A model on one device, and a copy of it on the mesh."""
    torch.manual_seed(0)
    one: Any = _Model().double()
    return one, parallelize_module(copy.deepcopy(one), mesh, _plan(**options))


def _loss(model: Any, seed: int) -> Tensor:
    ids, target = batch(3, 5, VOCAB, seed=seed)
    return loss_of(model(ids), target)


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _off(one: nn.Module, several: nn.Module) -> float:
    """The largest relative difference of a gradient."""
    worst = 0.0
    for (name, wanted), ours in zip(one.named_parameters(), several.parameters(), strict=True):
        assert (wanted.grad is None) == (ours.grad is None), name
        if wanted.grad is not None:
            worst = max(worst, relative(ours.grad, wanted.grad))
    return worst


def _steps(one: Any, several: Any, count: int = 2) -> float:
    worst = 0.0
    for seed in range(count):
        for model in (one, several):
            model.zero_grad()
            _loss(model, seed).backward()
        worst = max(worst, _off(one, several))
    return worst


def _held(model: Any, several: Any, mesh: Any) -> contextlib.AbstractContextManager[Any]:
    return torch_tp2d.no_sync(mesh) if model is several else contextlib.nullcontext()


def _on_grids(ranks: int, body: Callable[..., Any], *args: Any) -> None:
    for grid in GRIDS[ranks]:
        found = body(grid_mesh(*grid), *args)
        assert found is None or found < TOLERANCE, (grid, found)


class _Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.count += 1
        return weight * 2


def _computed(mesh: Any) -> float:
    worst = 0.0
    for algorithm in ("auto", "collective", "summa"):
        one, several = _pair(mesh, algorithm=algorithm)
        norms: list[Any] = []
        for model in (one, several):
            torch.manual_seed(3)
            spectral_norm(model.blocks[0].ff.inner.w1)
            ways = [_Counted() for _ in range(3)]
            register_parametrization(model.blocks[1].ff.w2, "weight", ways[0])
            register_parametrization(model.blocks[1].ff.w2, "bias", ways[1])
            register_parametrization(model.embed, "weight", ways[2])
            norms.append(ways)
        for wanted, ours in zip(one.buffers(), several.buffers(), strict=True):
            wanted.copy_(_whole(ours))
        # Registering runs them too.
        before = [[way.count for way in ways] for ways in norms]
        worst = max(worst, _steps(one, several, 3))
        counts = [
            [way.count - then for way, then in zip(ways, counted, strict=True)]
            for ways, counted in zip(norms, before, strict=True)
        ]
        assert counts[0] == counts[1] == [3, 3, 3], (algorithm, counts)
    return worst


@pytest.mark.deep
def test_a_parametrized_weight_is_computed_once_in_a_forward() -> None:
    """From the second forward on every gradient was wrong with ``spectral_norm``, which iterates
    once each time that its weight is computed: a Linear read its weight two to four times."""
    world.run(4, _on_grids, 4, _computed)


def _two_sets(mesh: Any) -> float:
    one, several = _pair(mesh)
    sets = []
    for model in (one, several):
        first, second = (
            {n: (p.detach() * by).requires_grad_() for n, p in model.named_parameters()}
            for by in (1.0, 1.3)
        )
        sets.append((first, second))

        def loss(params: dict[str, Tensor], seed: int, model: Any = model) -> Tensor:
            ids, target = batch(3, 5, VOCAB, seed=seed)
            return loss_of(functional_call(model, params, (ids,)), target)

        with _held(model, several, mesh):
            loss(first, 1).backward()
            loss(second, 1).backward()
        loss(first, 2).backward()
    worst = 0.0
    for wanted, ours in zip(*sets, strict=True):
        for name, param in wanted.items():
            grad = ours[name].grad
            assert param.grad is not None and grad is not None, name
            worst = max(worst, relative(grad, param.grad))
    return worst


def _computed_from_others(mesh: Any) -> float:
    """The model's first forward is with parameters that are computed from its own."""
    pair = _pair(mesh)
    ids, target = batch(3, 5, VOCAB)
    for model in pair:
        params = {name: p * 1.1 for name, p in model.named_parameters()}
        loss_of(functional_call(model, params, (ids,)), target).backward()
    return _off(*pair)


@pytest.mark.parametrize("ranks", [4, 2])
def test_parameters_computed_from_others(ranks: int) -> None:
    """For the first forward modules are set up again, and torch let no hook be set on these."""
    world.run(ranks, _on_grids, ranks, _computed_from_others)


def _swapped(mesh: Any) -> float:
    one, several = _pair(mesh)
    both, old = (one, several), []
    for model in both:
        for seed in range(2):
            with _held(model, several, mesh):
                _loss(model, seed).backward()
            if not seed:
                old.append(list(model.parameters()))
                changed = {k: (v.detach() * 1.1).clone() for k, v in model.state_dict().items()}
                model.load_state_dict(changed, assign=True)
        _loss(model, 2).backward()
    assert not context_of(mesh).accumulation
    before = [relative(b.grad, a.grad) for a, b in zip(*old, strict=True)]
    return max(_off(one, several), *before)


@pytest.mark.parametrize("body", [_two_sets, _swapped])
def test_micro_batches_keep_gradients_by_parameter(body: Callable[..., float]) -> None:
    """``no_sync`` kept gradients by module: with other parameters in it, by ``functional_call``
    or ``load_state_dict(assign=True)``, those got the gradients of the ones before."""
    world.run(4, _on_grids, 4, body)


def _raises(mesh: Any, where: str) -> float:
    one, several = _pair(mesh)

    def stop(grad: Tensor) -> None:
        raise KeyError("stop")

    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(stop)

    for model in (one, several):
        with _held(model, several, mesh):
            _loss(model, 1).backward()
        handle = model.get_submodule(where).register_forward_hook(watch)
        with pytest.raises(KeyError, match="stop"):
            _loss(model, 2).backward()
        handle.remove()
    return _steps(one, several)


def _raises_unwatched(mesh: Any) -> float:
    """By torch's own parallelize_module, which does not watch the model's forward."""
    torch.manual_seed(0)
    layers = (nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) * 2
    one = nn.Sequential(*layers[:3], *copy.deepcopy(nn.Sequential(*layers[3:]))).double()
    several = torch.distributed.tensor.parallel.parallelize_module(
        copy.deepcopy(one),
        mesh,
        {
            "[03]": Colwise2D(input_layouts=Shard(1)),
            "[25]": Rowwise2D(output_layouts=Shard(1)),
        },
    )
    whole = noise(4, 4, 8, seed=1)
    row, column = mesh.get_coordinate()
    mine = whole.chunk(mesh.shape[0])[row].chunk(mesh.shape[1], 1)[column]
    raising = False

    def stop(grad: Tensor) -> None:
        if raising:
            raise KeyError("stop")

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y = model[:3](x)
        y.register_hook(stop)
        return model[3:](y).square().sum()

    with torch_tp2d.no_sync(mesh):
        loss(several, mine).backward()
    raising = True
    with pytest.raises(KeyError, match="stop"):
        loss(several, mine).backward()
    raising = False
    several.zero_grad()
    for model, x in ((one, whole), (several, mine)):
        loss(model, x).backward()
    return _off(one, several)


@pytest.mark.parametrize("where", ["blocks.1.norm", "norm"])
def test_a_last_backward_that_raises_leaves_no_gradients(where: str) -> None:
    """What micro-batches had kept for the part that it did not reach was added to the next step,
    ``zero_grad()`` or not: only a backward that ends let go of it."""
    world.run(4, _on_grids, 4, _raises, where)


def test_a_last_backward_that_raises_leaves_none_without_a_watched_forward() -> None:
    """As above, of a model that torch's own ``parallelize_module`` was given."""
    world.run(4, _on_grids, 4, _raises_unwatched)


def _clipped(mesh: Any, how: str) -> str:
    _, several = _pair(mesh)
    for seed in range(2):
        _loss(several, seed)
    # Of all elements one is clipped, and so on one rank.
    weight = several.blocks[0].ff.w2.weight
    several.blocks[0].ff.top = float(weight.full_tensor().max()) - 1e-3
    try:
        if how == "backward":
            loss = _loss(several, 0)
            loss.backward()
        elif how == "no_grad":
            with torch.no_grad():
                several(batch(3, 5, VOCAB)[0])
        elif how == "next forward":
            _loss(several, 0)
            _loss(several, 0)
        else:
            several.blocks[0].ff.top = None
            with torch_tp2d.no_sync(mesh):
                _loss(several, 0).backward()
                weight.data.clamp_(max=float(weight.full_tensor().max()) - 1e-3)
                _loss(several, 0).backward()
    except ValueError as error:
        said = str(error)
    else:
        said = ""
    # What was gathered is gathered anew, and nothing is left of it.
    several.blocks[0].ff.top = None
    _loss(several, 0).backward()
    return said


@values_are_compared
@pytest.mark.parametrize("how", ["backward", "no_grad", "next forward", "micro-batches"])
def test_a_weight_changed_unseen_on_one_rank_is_an_error_on_all(how: str) -> None:
    """The rank whose shard had changed raised, and the others waited for it until the timeout:
    each compared the values of its own shard alone."""
    for said in world.run(4, _clipped_on, how):
        assert "Linear" in said and "torch does not see" in said, (how, said)


def _clipped_on(how: str) -> str:
    return _clipped(grid_mesh(2, 2), how)


def _recomputed(mesh: Any) -> float:
    worst = 0.0
    for options in ({"regather_input": True}, {}, {"algorithm": "collective"}):
        one, several = _pair(mesh, **options)
        for block in (*one.blocks, *several.blocks):
            block.ff.recomputes = True
        worst = max(worst, _steps(one, several))
        for model in (one, several):
            model.zero_grad()
            (_loss(model, 3) + _loss(model, 4)).backward()
        worst = max(worst, _off(one, several))
    return worst


@pytest.mark.parametrize("ranks", [deep(4), 2])
def test_checkpointing_inside_a_prepared_module(ranks: int) -> None:
    """With ``regather_input=True`` a CheckpointError: the recomputation did not find what its
    first run had taken in place of the prepared input, and kept the whole of it, not a shard."""
    world.run(ranks, _on_grids, ranks, _recomputed)


def _asked_late(mesh: Any, how: str) -> float | None:
    one, several = _pair(mesh)
    seen = []
    for model in (one, several):

        def between(x: Tensor, model: Any = model) -> None:
            if how == "hook":
                x.register_hook(lambda grad: grad * 3)
            elif how == "retain_grad":
                x.retain_grad()
                seen.append(x)
            else:
                x.register_hook(lambda grad: grad * 3).remove()

        for block in model.blocks:
            block.ff.between = between
    if how == "removed" or mesh.shape[1] == 1:
        return _steps(one, several)
    with pytest.raises(RuntimeError, match="before its first use") as error:
        _loss(several, 0).backward()
    assert "(" in str(error.value) and "tp_col" in str(error.value)
    return None


@pytest.mark.parametrize("how", ["hook", "retain_grad", "removed"])
@pytest.mark.parametrize("ranks", [4, 2])
def test_a_prepared_input_whose_gradient_is_asked_for_late(ranks: int, how: str) -> None:
    """A hook that was set, or ``retain_grad()`` called, between two projections was given the
    second's gradient alone, in silence: the first had taken a twin in the input's place."""
    world.run(ranks, _on_grids, ranks, _asked_late, how)


def _put_in_later(mesh: Any) -> float:
    one, several = _pair(mesh)
    worst = _steps(one, several, 1)
    for model in (one, several):
        torch.manual_seed(7)
        model.norm = nn.LayerNorm(HIDDEN).double()
        nn.init.normal_(model.norm.weight)
    with pytest.raises(ValueError, match=r"no plan entry names .*norm\.weight \(8,\)"):
        _loss(several, 1)
    with torch.no_grad():
        _loss(several, 1)
    parallelize_module(several.norm, mesh, SequenceParallel())
    return max(worst, _steps(one, several))


def test_a_module_that_is_put_in_after_the_plan() -> None:
    """Its gradients were those of each rank's own tokens, without an error: only the first forward
    looked for parameters that the plan has not placed."""
    world.run(4, _on_grids, 4, _put_in_later)
