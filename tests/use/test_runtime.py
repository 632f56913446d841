"""What a step keeps between modules, held against whatever a user does between and within steps.

Each case is a program that gave a wrong number, or none, when weights were kept ahead by their
``_version`` and ``id``, and gathered inputs on the tensors themselves.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import PrepareModuleInput
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from support.marks import deep
from support.models import batch as token_batch
from support.models import grid_mesh, loss_of, parallelize, plan_2d, relative, transformer
from support.world import run
from torch_tp2d import (
    Attention2D,
    Colwise2D,
    Rowwise2D,
    attention_projections,
    parallelize_module,
)

TOLERANCE = 1e-11
GRIDS = [(2, 2), (4, 1), (1, 4)]


def _mlp(depth: int = 1, hidden: int = 8, inner: int = 12, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = []
    for _ in range(depth):
        layers += [nn.Linear(hidden, inner), nn.Tanh(), nn.Linear(inner, hidden)]
    return nn.Sequential(*layers).double()


def _plan(depth: int = 1, **options: Any) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    for layer in range(depth):
        plan[str(3 * layer)] = Colwise2D(input_layouts=Shard(1), **options)
        plan[str(3 * layer + 2)] = Rowwise2D(output_layouts=Shard(1), **options)
    return plan


def _tokens(batch: int, sequence: int, hidden: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, sequence, hidden, generator=generator, dtype=torch.float64)


def _mine(whole: Tensor, mesh: Any) -> Tensor:
    row, column = mesh.get_coordinate()
    return whole.chunk(mesh.shape[0])[row].chunk(mesh.shape[1], 1)[column].clone()


def _off(actual: Tensor, whole: Tensor, mesh: Any) -> float:
    """How far this rank's part of an output is from one device's."""
    return relative(actual.detach(), _mine(whole.detach(), mesh))


def _gradients_off(one: nn.Module, several: nn.Module) -> float:
    worst = 0.0
    for (name, a), b in zip(one.named_parameters(), several.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            worst = max(worst, relative(b.grad.full_tensor(), a.grad))
    return worst


def _on_grids(ranks: int, body: Callable[..., float]) -> dict[tuple[int, int], float]:
    return {grid: body(grid_mesh(*grid)) for grid in GRIDS if grid[0] * grid[1] == ranks}


def _adversary(mesh: Any) -> float:
    """fake = G(z) while D is frozen, as the step before left it, then D learns from it."""
    one = _mlp(1, seed=1), _mlp(1, seed=2)
    several = tuple(parallelize_module(copy.deepcopy(m), mesh, _plan()) for m in one)
    worst = 0.0
    optimizers = [
        [torch.optim.SGD(m.parameters(), lr=0.1) for m in pair] for pair in (one, several)
    ]
    for step in range(4):
        z = _tokens(4, 8, 8, step)
        for (g, d), (g_step, d_step), x in (
            (one, optimizers[0], z),
            (several, optimizers[1], _mine(z, mesh)),
        ):
            g.zero_grad()
            d.zero_grad()
            fake = g(x)
            d.requires_grad_(True)
            (d(fake.detach()).sin().sum() / z.numel()).backward()
            d_step.step()
            d.requires_grad_(False)
            (d(fake).square().sum() / z.numel()).backward()
            g_step.step()
        worst = max(worst, *(_gradients_off(a, b) for a, b in zip(one, several, strict=True)))
    return worst


def _layers_by_turns(mesh: Any) -> float:
    """Which layers learn changes with each step, and half-way through it."""
    one = _mlp(2)
    several = parallelize_module(copy.deepcopy(one), mesh, _plan(2))
    worst = 0.0
    for step in range(4):
        whole = _tokens(4, 8, 8, step)
        for model, x in ((one, whole), (several, _mine(whole, mesh))):
            model.zero_grad()
            for index, param in enumerate(model.parameters()):
                param.requires_grad_(index // 2 == step % 4)
            x = model[:3](x)
            for index, param in enumerate(model[3:].parameters()):
                param.requires_grad_(index // 2 == step % 2)
            (model[3:](x).square().sum() / whole.numel()).backward()
        worst = max(worst, _gradients_off(one, several))
    return worst


def _routes() -> dict[str, Callable[[Any], None]]:
    """Ways to change a weight; on DTensors torch counts few of them."""

    def adamw(**options: Any) -> Callable[[Any], None]:
        def change(weight: Any) -> None:
            weight.grad = torch.ones_like(weight)
            torch.optim.AdamW([weight], lr=0.1, **options).step()
            weight.grad = None

        return change

    def local(weight: Any) -> Tensor:
        return weight.to_local() if isinstance(weight, DTensor) else weight

    return {
        "mul_": lambda w: w.mul_(1.5),
        "data": lambda w: w.data.mul_(1.5),
        "to_local": lambda w: local(w).mul_(1.5),
        "foreach": lambda w: torch._foreach_mul_([w], 1.5),
        "foreach adamw": adamw(foreach=True),
        "fused adamw": adamw(fused=True),
    }


def _changed_between(mesh: Any) -> float:
    """A(x), a change to B, B(x): without a backward between, by each way."""
    worst = 0.0
    one = _mlp(1)
    several = parallelize_module(copy.deepcopy(one), mesh, _plan())
    whole = _tokens(4, 8, 8, 0)
    for learns in (False, True):
        for change in _routes().values():
            results = []
            for model, x in ((one, whole), (several, _mine(whole, mesh))):
                with torch.set_grad_enabled(learns):
                    model(x)
                    hidden = model[1](model[0](x))
                    with torch.no_grad():
                        change(model[2].weight)
                    by_hand = model[2](hidden)
                    results.append((by_hand, model(x)))
            worst = max(worst, *(_off(b, a, mesh) for a, b in zip(*results, strict=True)))
    return worst


def _changed_by_hooks(mesh: Any) -> float:
    """Hooks that change the next weight in ways that torch does not see."""
    one = _mlp(2)
    several = parallelize_module(copy.deepcopy(one), mesh, _plan(2))
    for model in (one, several):
        for name, target in (("2", model[2]), ("3", model[3])):

            def change(module: Any, *_: Any, target: Any = target) -> None:
                target.weight.data.mul_(1.1)

            if name == "2":
                target.register_forward_pre_hook(change)
            else:
                model[2].register_forward_hook(change)
    worst = 0.0
    for step in range(4):
        whole = _tokens(4, 8, 8, step)
        expected, y = one(whole), several(_mine(whole, mesh))
        worst = max(worst, _off(y, expected, mesh))
        one.zero_grad()
        several.zero_grad()
        (expected.square().sum() / whole.numel()).backward()
        (y.square().sum() / whole.numel()).backward()
        worst = max(worst, _gradients_off(one, several))
    return worst


class _Meddles(nn.Module):
    """Changes a weight in its forward, where nothing tells of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = _mlp()[0], _mlp()[2]
        self.meddles = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        if self.meddles:
            self.b.weight.data.mul_(1.5)
        return self.b(x)


def _changed_within(mesh: Any) -> float:
    """Right, or an error: never what was gathered before the change."""
    one = _Meddles()
    several = parallelize_module(
        copy.deepcopy(one),
        mesh,
        {"a": Colwise2D(input_layouts=Shard(1)), "b": Rowwise2D(output_layouts=Shard(1))},
    )
    whole = _tokens(4, 8, 8, 0)
    several(_mine(whole, mesh))
    one.meddles = several.meddles = True
    expected = one(whole)
    if mesh.shape[0] > 1:
        with pytest.raises(ValueError, match="during the forward"):
            several(_mine(whole, mesh)).sum().backward()
        return 0.0
    return _off(several(_mine(whole, mesh)), expected, mesh)


def _refilled(mesh: Any) -> float:
    """One input buffer, filled anew for each batch in ways that torch does not count."""
    one = _mlp(1)
    several = parallelize_module(copy.deepcopy(one), mesh, _plan())
    buffer = torch.empty_like(_mine(_tokens(4, 8, 8, 0), mesh))
    as_array = buffer.numpy()
    worst = 0.0
    for step in range(6):
        whole = _tokens(4, 8, 8, step)
        mine = _mine(whole, mesh)
        if step % 3 == 0:
            as_array[:] = mine.numpy()
        elif step % 3 == 1:
            buffer.data.copy_(mine)
        else:
            with torch.no_grad():
                buffer.copy_(mine)
        worst = max(worst, _off(several(buffer), one(whole), mesh))
        # And module by module, with no model around that could tell one forward from the next.
        by_hand = several[2](several[1](several[0](buffer)))
        worst = max(worst, _off(by_hand, one(whole), mesh))
    return worst


class _InPlace(nn.Module):
    """Changes what it is given, before and between its projections."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.q, self.k, self.o = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        if self.how == "mul":
            x = x.mul_(3)
        elif self.how == "view":
            x.view(-1)[:5] = 0.0
        return self.o(torch.sigmoid(q) * self.k(x))


def _prepared_in_place(mesh: Any) -> float:
    """What PrepareModuleInput hands on is the user's to change: right, or torch's own error."""
    worst = 0.0
    for how in ("mul", "view", "none"):
        one = _InPlace(how).double()
        prepare = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        several = parallelize_module(
            copy.deepcopy(one),
            mesh,
            {"": prepare, "[qk]": Colwise2D(), "o": Rowwise2D(output_layouts=Shard(1))},
        )
        whole = _tokens(4, 8, 8, 0)
        if how == "view" and mesh.shape[1] == 1:
            # The row's own tokens, and so not the first of all but on the first row.
            continue
        inputs = whole.clone().requires_grad_(), _mine(whole, mesh).requires_grad_()
        try:
            if how == "view":
                y = several(inputs[1] * 1)
                (y.square().sum() / whole.numel()).backward()
                continue
            expected = one.o(
                torch.sigmoid(one.q(inputs[0])) * one.k(inputs[0] * (3, 1)[how != "mul"])
            )
            y = several(inputs[1] * 1)
            worst = max(worst, _off(y, expected, mesh))
            (y.square().sum() / whole.numel()).backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error), error
            continue
        (expected.square().sum() / whole.numel()).backward()
        worst = max(worst, _gradients_off(one, several))
        worst = max(worst, _off(inputs[1].grad, inputs[0].grad, mesh))
    return worst


def _second_order(mesh: Any) -> float:
    """A gradient penalty: its own gradient was dropped without a word."""
    several = parallelize_module(_mlp(1), mesh, _plan())
    x = _mine(_tokens(4, 8, 8, 0), mesh).requires_grad_()
    (grad,) = torch.autograd.grad(several(x).square().sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()
    return 0.0


def _empty_shards(mesh: Any) -> float:
    """Weights of 6 and 9 features over four rows, gathered again for backward.

    A rank's shard is empty, which was taken for one that FSDP2 has not gathered yet: its gather
    was not started there, and the other ranks waited.
    """
    worst = 0.0
    for hidden, inner in ((6, 9), (9, 6)):
        one = _mlp(2, hidden, inner)
        several = parallelize_module(copy.deepcopy(one), mesh, _plan(2, reshard_after_forward=True))
        for step in range(3):
            whole = _tokens(4, 8, hidden, step)
            for model, x in ((one, whole), (several, _mine(whole, mesh))):
                (model(x).square().sum() / whole.numel()).backward()
        worst = max(worst, _gradients_off(one, several))
    return worst


def _garbage_on_one_rank(mesh: Any) -> float:
    """A graph in a cycle that never ran backward: one rank collects it, the others do not.

    Its weights' gathers for backward were started ahead where it was still there.
    """
    one = _mlp(2)
    several = parallelize_module(copy.deepcopy(one), mesh, _plan(2, reshard_after_forward=True))
    gc.disable()
    for step in range(3):
        whole = _tokens(4, 8, 8, step)
        dropped: list[Any] = [several[:3](_mine(whole, mesh))]
        dropped.append(dropped)
        del dropped
        if mesh.get_rank() == 1:
            gc.collect()
        (several[3:](_mine(whole, mesh)).square().sum() / whole.numel()).backward()
        (one[3:](whole).square().sum() / whole.numel()).backward()
    gc.enable()
    return _gradients_off(one, several)


class _Attention(nn.Module):
    num_heads = 4

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y(x).unflatten(-1, (-1, 2)).transpose(1, 2) for y in (self.q, self.k, self.v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).flatten(2))


def _attention_without_embedding(mesh: Any) -> float:
    """The sizes that Attention2D had written met the next batch: a ValueError on some ranks only.

    No embedding writes them anew there, and a Linear before the attention made a DTensor by them.
    """
    torch.manual_seed(0)
    one = nn.Sequential(*_mlp(1), _Attention()).double()
    q, kv, o = attention_projections(4, 4, mesh.shape[1], output_layouts=Shard(1))
    plan = _plan(1) | {"3": Attention2D(), "3.q": q, "3.[kv]": kv, "3.o": o}
    plan["2"] = Rowwise2D(output_layouts=Shard(1), use_local_output=False)
    several = parallelize_module(copy.deepcopy(one), mesh, plan)
    worst = 0.0
    for size in ((4, 4), (5, 6), (2, 3)):
        whole = _tokens(*size, 8, 0)
        layout = Shard(0), Shard(1)
        part = distribute_tensor(whole, mesh, layout, src_data_rank=None).to_local()
        expected, y = one(whole), several(part).to_local()
        wanted = distribute_tensor(expected.detach(), mesh, layout, src_data_rank=None).to_local()
        if part.numel():
            worst = max(worst, relative(y.detach(), wanted))
        y.square().sum().backward()
        expected.square().sum().backward()
    return max(worst, _gradients_off(one, several))


PROGRAMS = [
    _adversary,
    _layers_by_turns,
    _changed_between,
    _changed_by_hooks,
    _changed_within,
    _refilled,
    _prepared_in_place,
    _second_order,
    _empty_shards,
    _garbage_on_one_rank,
    _attention_without_embedding,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__[1:])
def test_right_whatever_changes_between_modules(program: Callable[..., float]) -> None:
    for worst in run(4, _on_grids, 4, program):
        assert all(off <= TOLERANCE for off in worst.values()), worst


def _micro_batches() -> float:
    """Two batches of other sizes before one backward, computed again in it."""
    mesh = grid_mesh(2, 2)
    one, several = transformer(), transformer()
    parallelize(several, mesh, plan_2d())
    worst = 0.0
    for model in (one, several):
        for index, layer in enumerate(model.layers):
            forward = layer.forward

            def again(*args: Any, forward: Any = forward) -> Tensor:
                return checkpoint(forward, *args, use_reentrant=False)

            object.__setattr__(model.layers[index], "forward", again)
    sizes = ((4, 8), (3, 5))
    for _ in range(2):
        losses = []
        for model in (one, several):
            outputs = [
                (model(ids), target)
                for ids, target in (token_batch(*size, 8, seed=1) for size in sizes)
            ]
            losses.append(sum(loss_of(*output) for output in outputs))
            losses[-1].backward()
        worst = max(worst, relative(losses[1].detach(), losses[0].detach()))
    return max(worst, _gradients_off(one, several))


@pytest.mark.deep
def test_recomputation_meets_the_sizes_of_its_own_batch() -> None:
    """It met those of the batch that came last: a ValueError, or a hang."""
    for worst in run(4, _micro_batches):
        assert worst <= TOLERANCE


def _leaf_again() -> float:
    """The first block's q and k share what is gathered of the batch, in forward and once more."""
    mesh, worst = grid_mesh(2, 2), 0.0

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.o = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.o(torch.sigmoid(self.q(x)) * self.k(x))

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Both()

        def forward(self, x: Tensor) -> Tensor:
            contexts = partial(create_selective_checkpoint_contexts, policy)
            return checkpoint(self.block, x, use_reentrant=False, context_fn=contexts)

    torch.manual_seed(0)
    one = Net().double()
    plan = {
        "block.[qk]": Colwise2D(input_layouts=Shard(1)),
        "block.o": Rowwise2D(output_layouts=Shard(1)),
    }
    several = parallelize_module(copy.deepcopy(one), mesh, plan)
    for step in range(2):
        whole = _tokens(4, 8, 8, step)
        one(whole).square().sum().backward()
        several(_mine(whole, mesh)).square().sum().backward()
        worst = max(worst, _gradients_off(one, several))
    return worst


def test_selective_checkpointing_of_a_batch() -> None:
    """What had been gathered once was gathered twice again: "not found in storage"."""
    for worst in run(4, _leaf_again):
        assert worst <= TOLERANCE


def _selective(save: str) -> float:
    """Checkpointing that keeps some products, as torchtitan's does."""
    worst = 0.0
    names = {"mm": torch.ops.aten.mm.default, "addmm": torch.ops.aten.addmm.default}
    kept = [names[save]] if save in names else []
    collectives = [
        torch.ops._c10d_functional.all_gather_into_tensor.default,
        torch.ops._c10d_functional.all_to_all_single.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    ]
    if save == "collectives":
        kept = collectives

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        wanted = op in kept
        return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE

    for algorithm in ("pipelined", "collective", "summa", "bmr"):
        for reshard in (None, True):
            mesh = grid_mesh(2, 2)
            one = nn.Sequential(*(_mlp(1, seed=seed) for seed in range(3)))
            options = {"algorithm": algorithm}
            if algorithm in ("pipelined", "collective"):
                options["reshard_after_forward"] = reshard
            several = parallelize_module(
                copy.deepcopy(one),
                mesh,
                {f"*.{key}": style for key, style in _plan(1, **options).items()},
            )
            for step in range(2):
                whole = _tokens(4, 8, 8, step)
                (one(whole).square().sum() / whole.numel()).backward()
                y = _mine(whole, mesh)
                for index, block in enumerate(several):
                    y = (
                        checkpoint(
                            block,
                            y,
                            use_reentrant=False,
                            context_fn=lambda: create_selective_checkpoint_contexts(policy),
                        )
                        if index != 1
                        else block(y)
                    )
                (y.square().sum() / whole.numel()).backward()
            worst = max(worst, _gradients_off(one, several))
    return worst


@pytest.mark.parametrize("save", [deep("mm"), "addmm", deep("collectives")])
def test_selective_checkpointing(save: str) -> None:
    """A product that was kept had a later one added in place: "has been mutated"."""
    for worst in run(4, _selective, save):
        assert worst <= TOLERANCE


def _stepped_too_early(mesh: Any) -> float:
    for algorithm in ("pipelined", "collective"):
        several = parallelize_module(_mlp(1), mesh, _plan(1, algorithm=algorithm))
        loss = several(_mine(_tokens(4, 8, 8, 0), mesh)).square().sum()
        for param in several.parameters():
            param.grad = torch.ones_like(param)
        torch.optim.SGD(several.parameters(), lr=0.1).step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    return 0.0


def test_a_weight_changed_between_forward_and_backward_is_seen() -> None:
    """The gathered weight went on to be used, or the new one, as it happened to be kept."""
    run(4, _on_grids, 4, _stepped_too_early)
