"""Numbers: low precision beside the stock plan's, repetition to the bit, what is not finite."""

from __future__ import annotations

import copy
import hashlib
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.parallel import loss_parallel as stock_loss_parallel
from torch.distributed.tensor.parallel import parallelize_module as stock_parallelize_module

import torch_tp2d
from support import world
from support.device import DEVICE
from support.marks import deep
from support.models import (
    DOUBLE,
    batch,
    grid_mesh,
    local_heads,
    parallelize,
    plan_2d,
    transformer,
    tutorial_plan,
)
from torch_tp2d import Colwise2D, Rowwise2D

VOCAB, BATCH, SEQUENCE = 64, 4, 16
SEEDS = 3


def _model(seed: int) -> nn.Module:
    return transformer(VOCAB, seed, dim=64, max_seq_len=SEQUENCE)


def _step(
    model: nn.Module, seed: int, context: Any, autocast: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Logits and loss, the gradients made."""
    ids, target = batch(BATCH, SEQUENCE, VOCAB, seed)
    mixed = nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast)
    with context():
        with mixed:
            pred = model(ids)
        logits = pred.flatten(0, 1)
        wide = torch.promote_types(logits.dtype, torch.float32)
        loss = F.cross_entropy(logits.to(wide), target.flatten())
        loss.backward()
    return _whole(pred), _whole(loss)


def _whole(value: Tensor) -> Tensor:
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).double()


def _far(ours: list[Tensor], truth: list[Tensor]) -> float:
    """The error of all of them as one vector, relative."""
    error = sum((_whole(a) - b).square().sum().item() for a, b in zip(ours, truth, strict=True))
    return math.sqrt(error / sum(b.square().sum().item() for b in truth))


def _grads(model: nn.Module) -> list[Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


def _precision(dtype: torch.dtype, autocast: bool) -> dict[str, list[float]]:
    """Root mean squares over seeds, for the stock plan and for ours on each grid of four."""
    held, lower = (torch.float32, dtype) if autocast else (dtype, None)
    line = init_device_mesh(DEVICE, (4,), mesh_dim_names=("tp",))
    found: dict[str, list[tuple[float, ...]]] = {}
    for seed in range(SEEDS):
        # What is exact has the rounded parameters: the error is of the arithmetic alone.
        truth = _model(seed).to(held).to(DOUBLE)
        logits, loss = _step(truth, seed, nullcontext, None)
        for name, shape in {"stock": None, "2x2": (2, 2), "4x1": (4, 1), "1x4": (1, 4)}.items():
            model = _model(seed).to(held)
            if shape is None:
                plan = tutorial_plan(ColwiseParallel, RowwiseParallel)
                stock_parallelize_module(model, line, plan)
                model.output.weight = model.tok_embeddings.weight
                local_heads(model, 4)
            else:
                parallelize(model, grid_mesh(*shape), plan_2d())
            context = stock_loss_parallel if shape is None else torch_tp2d.loss_parallel
            got, own_loss = _step(model, seed, context, lower)
            errors = _far([got], [logits]), _far(_grads(model), _grads(truth))
            found.setdefault(name, []).append((*errors, _far([own_loss], [loss])))
    return {
        name: torch.tensor(errors).square().mean(0).sqrt().tolist()
        for name, errors in found.items()
    }


@pytest.mark.parametrize(
    "dtype,autocast",
    [
        deep(torch.bfloat16, False),
        deep(torch.float16, True),
        deep(torch.bfloat16, True),
        deep(torch.float16, False),
    ],
)
def test_low_precision_is_as_close_as_the_stock_plans(dtype: torch.dtype, autocast: bool) -> None:
    """Of logits and gradients, as vectors: 0.98 to 1.19 times the stock plan's errors.

    The loss is one number, in which the errors of the logits cancel by chance, so that a ratio of
    a few of them says little: it is held against the precision itself.
    """
    for found in world.run(4, _precision, dtype, autocast):
        stock = found.pop("stock")
        for name, (logits, grads, loss) in found.items():
            assert 0 < logits < 1.5 * stock[0], (name, logits, stock)
            assert 0 < grads < 1.5 * stock[1], (name, grads, stock)
            assert loss < torch.finfo(dtype).eps / 4, (name, loss, stock)


def _sums(rows: int, columns: int, algorithm: str, accumulate: bool) -> dict[str, float]:
    """By reduce_dtype errors of gradients in bf16, where only sums over the rows are rounded."""
    mesh = grid_mesh(rows, columns)
    row = mesh.get_local_rank(0)
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32)).to(torch.bfloat16)
    for layer in one:
        # Whose sum with a product rounds nothing.
        nn.init.zeros_(layer.bias)
    xs = [torch.randn(rows, 24, 32, dtype=torch.bfloat16) for _ in range(3 if accumulate else 1)]
    # Every row's part is the rounded one of a device of its own; the truth adds them up exactly.
    wanted = [torch.zeros_like(param, dtype=torch.float64) for param in one.parameters()]
    for x in xs:
        for part in x.split(1):
            grads = torch.autograd.grad(one(part).float().square().sum(), list(one.parameters()))
            for total, grad in zip(wanted, grads, strict=True):
                total += grad.double()

    def error(grads: list[Tensor]) -> float:
        far = sum((grad - total).square().sum() for grad, total in zip(grads, wanted, strict=True))
        return (far / sum(total.square().sum() for total in wanted)).sqrt().item()

    errors = {"rounded once": error([total.bfloat16().double() for total in wanted])}
    for dtype in (None, torch.float32):
        options: Any = {"algorithm": algorithm, "reduce_dtype": dtype}
        plan = {"0": Colwise2D(**options), "1": Rowwise2D(**options)}
        model = torch_tp2d.parallelize_module(copy.deepcopy(one), mesh, plan)
        for x in xs:
            held = torch_tp2d.no_sync(mesh) if x is not xs[-1] else nullcontext()
            with held:
                model(x[row : row + 1]).float().square().sum().backward()
        assert all(param.grad.dtype == torch.bfloat16 for param in model.parameters())
        errors[str(dtype)] = error([p.grad.full_tensor().double() for p in model.parameters()])
    return errors


@pytest.mark.parametrize("algorithm", ["collective", "pipelined"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients_are_summed_in_the_dtype_that_is_asked_for(
    algorithm: str, accumulate: bool
) -> None:
    """In bf16 each addition over rows, and over micro-batches, rounds once more."""
    for errors in world.run(4, _sums, 4, 1, algorithm, accumulate):
        assert errors["torch.float32"] < 1.02 * errors["rounded once"], errors
        assert errors["None"] > 1.3 * errors["rounded once"], errors


def _trained(rows: int, columns: int, algorithm: str) -> str:
    """Every bit of two steps of AdamW: losses, norms, gradients and parameters of this rank."""
    model, plan = _model(0).float(), plan_2d()
    for key, style in plan.items():
        if "embeddings" not in key and hasattr(style, "algorithm"):
            style.algorithm = algorithm
    parallelize(model, grid_mesh(rows, columns), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    digest = hashlib.sha256()
    for seed in range(2):
        optimizer.zero_grad()
        ids, target = batch(3, 13, VOCAB, seed)
        with torch_tp2d.loss_parallel():
            loss = F.cross_entropy(model(ids).flatten(0, 1), target.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        grads = [param.grad for param in model.parameters()]
        for value in (loss, norm, *grads, *model.parameters()):
            assert value is not None
            local = value.to_local() if isinstance(value, DTensor) else value
            digest.update(local.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _trained_all(rows: int, columns: int, algorithms: tuple[str, ...]) -> dict[str, str]:
    found = {name: _trained(rows, columns, name) for name in algorithms}
    # A run leaves nothing behind that another would compute with.
    assert found["pipelined"] == _trained(rows, columns, "pipelined")
    return found


ANY_GRID = "pipelined", "collective", "summa"


@pytest.mark.parametrize(
    "rows,columns,algorithms",
    [
        (1, 2, ANY_GRID[:1]),
        deep(2, 2, (*ANY_GRID, "bmr", "cannon")),
        deep(1, 4, ANY_GRID),
        deep(4, 1, ANY_GRID),
        deep(3, 2, ANY_GRID),
    ],
)
def test_a_run_repeats_to_the_bit(rows: int, columns: int, algorithms: tuple[str, ...]) -> None:
    """In one process, and in processes of their own; not from one grid or algorithm to another."""
    first = world.run(rows * columns, _trained_all, rows, columns, algorithms)
    assert world.run(rows * columns, _trained_all, rows, columns, algorithms, fresh=True) == first


def _poisoned(value: float, rank: int) -> list[Any]:
    """What every rank makes of one number of one rank's shard."""
    model, seen = _model(0).float(), []
    parallelize(model, grid_mesh(2, 2), plan_2d())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    before = [param.to_local().detach().clone() for param in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    ids, target = batch(BATCH, SEQUENCE, VOCAB)

    def backward(poison: bool) -> None:
        optimizer.zero_grad()
        with torch_tp2d.loss_parallel():
            loss = F.cross_entropy(model(ids).flatten(0, 1), target.flatten())
        scaler.scale(loss).backward()
        grad = model.layers[0].feed_forward.w1.weight.grad
        if poison and torch.distributed.get_rank() == rank:
            grad.to_local()[0, 0] = value

    backward(poison=True)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    seen.append(str(norm.full_tensor().item()))
    backward(poison=True)
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    scaler.step(optimizer)
    scaler.update()
    seen.append(scaler.get_scale())
    same = zip(before, model.parameters(), strict=True)
    seen.append(all(torch.equal(old, new.to_local()) for old, new in same))
    backward(poison=False)
    scaler.step(optimizer)
    scaler.update()
    seen.append(scaler.get_scale())
    changed = zip(before, model.parameters(), strict=True)
    seen.append(all(not torch.equal(old, new.to_local()) for old, new in changed))
    return seen


@pytest.mark.parametrize(
    "value,rank", [deep(math.nan, 0), (math.inf, 3), deep(math.inf, 0), deep(math.nan, 3)]
)
def test_one_ranks_nan_is_everyones(value: float, rank: int) -> None:
    """In a gradient: the norm, ``error_if_nonfinite``, and the step that GradScaler leaves out."""
    assert world.run(4, _poisoned, value, rank) == [[str(value), 4.0, True, 4.0, True]] * 4


def _spreading(value: float) -> list[bool]:
    """Whether loss and norm are finite with one number of one rank's weight that is not."""
    model = _model(0).float()
    parallelize(model, grid_mesh(2, 2), plan_2d())
    if torch.distributed.get_rank() == 2:
        with torch.no_grad():
            model.layers[0].feed_forward.w1.weight.to_local()[0, 0] = value
    ids, target = batch(BATCH, SEQUENCE, VOCAB)
    with torch_tp2d.loss_parallel():
        loss = F.cross_entropy(model(ids).flatten(0, 1), target.flatten())
    loss.backward()
    norm = torch.nn.utils.get_total_norm(
        [param.grad for param in model.parameters() if param.grad is not None]
    )
    assert isinstance(norm, DTensor)
    return [bool(loss.isfinite()), bool(norm.full_tensor().isfinite())]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_spoils_the_loss_on_every_rank(value: float) -> None:
    assert world.run(4, _spreading, value) == [[False, False]] * 4
