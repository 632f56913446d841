"""Fused projections: ``Colwise2D(parts=...)``, beside one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_tp2d
from support import world
from support.device import DEVICE
from support.dropout import on_one_device
from support.fake import fake_grid
from support.marks import deep
from support.models import grid_mesh, relative
from torch_tp2d import Colwise2D, CommCounter, Rowwise2D
from torch_tp2d.comm import reshard_fused
from torch_tp2d.mesh.grid import Grid

TOLERANCE = 1e-12
HIDDEN, VOCAB = 12, 11


class Conv1D(nn.Module):
    """Hugging Face's: a Linear that stores ``[in, out]``."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.nf = features
        self.weight = nn.Parameter(0.3 * torch.randn(hidden, features) / hidden**0.5)
        self.bias = nn.Parameter(0.1 * torch.randn(features))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Mixer(nn.Module):
    """Products of three projections: wrong as soon as one feature stands beside another's."""

    def __init__(self, conv: bool, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.widths = widths
        self.drop: nn.Module = nn.Identity()
        if conv:
            self.qkv, self.out = Conv1D(sum(widths), HIDDEN), Conv1D(HIDDEN, widths[0])
        else:
            self.qkv, self.out = nn.Linear(HIDDEN, sum(widths)), nn.Linear(widths[0], HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split(self.widths, -1)
        # As many query heads as there are use one key head.
        k, v = (y.repeat_interleave(q.shape[-1] // y.shape[-1], -1) for y in (k, v))
        return x + self.out(self.drop(q.sin() * k.tanh() + v))


class Model(nn.Module):
    def __init__(self, conv: bool, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Mixer(conv, widths) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


ALIKE, GROUPED = (HIDDEN,) * 3, (2 * HIDDEN, HIDDEN, HIDDEN)
"""Widths of queries, keys and values."""


def model(conv: bool = True, widths: tuple[int, ...] = ALIKE) -> Model:
    torch.manual_seed(0)
    return Model(conv, widths).double()


def _plan(**options: Any) -> dict[str, Any]:
    algorithm = {key: options[key] for key in ("algorithm",) if key in options}
    return {
        "embed": Rowwise2D(output_layouts=Shard(1)),
        "layers.*.qkv": Colwise2D(input_layouts=Shard(1), **{"parts": 3, **options}),
        "layers.*.out": Rowwise2D(output_layouts=Shard(1), **algorithm),
    }


def _parallelize(ours: Model, mesh: Any, **options: Any) -> None:
    torch_tp2d.parallelize_module(ours, mesh, _plan(**options))
    for layer in ours.layers:
        layer.widths = tuple(width // mesh["tp_col"].size() for width in layer.widths)


def _steps(reference: nn.Module, ours: nn.Module, mesh: Any, part: Any = None) -> float:
    """SGD beside one device; three steps, so that what is gathered ahead has changed since."""
    worst = 0.0
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, ours)]
    for step in range(3):
        ids = torch.randint(0, VOCAB, (4, 8), generator=torch.Generator().manual_seed(step))
        torch.manual_seed(step)
        wanted = reference(ids).square().mean()
        torch.manual_seed(step)
        mine = ours(ids if part is None else part(ids))
        scale = wanted.new_tensor(1.0 / (4 * 8 * HIDDEN))
        (wanted).backward()
        (mine.square().sum() * scale * (1 if part is None else 2)).backward()
        for optimizer in optimizers:
            optimizer.step()
        for (name, param), other in zip(
            reference.named_parameters(), ours.parameters(), strict=True
        ):
            assert other.grad is not None, name
            worst = max(worst, relative(other.grad, param.grad))
            worst = max(worst, relative(other.detach(), param.detach()))
        for optimizer in optimizers:
            optimizer.zero_grad()
    return worst


def _trained(
    rows: int, columns: int, conv: bool, options: dict[str, Any], widths: tuple[int, ...] = ALIKE
) -> float:
    mesh = grid_mesh(rows, columns)
    reference = model(conv, widths)
    ours = copy.deepcopy(reference)
    _parallelize(ours, mesh, **options)
    fused: Any = ours.layers[0].qkv
    assert isinstance(fused.weight, DTensor)
    assert torch.equal(fused.weight.full_tensor(), reference.layers[0].qkv.weight)
    assert torch.equal(fused.bias.full_tensor(), reference.layers[0].qkv.bias)
    return _steps(reference, ours, mesh)


def _all_trained(rows: int, columns: int) -> dict[str, float]:
    square = ["bmr", "cannon"] if rows == columns else []
    ways: dict[str, dict[str, Any]] = {
        name: {"algorithm": name} for name in ["pipelined", "collective", "summa", *square]
    }
    ways["stationary"] = {"dataflow": "weight_stationary"}
    again = {"reshard_after_forward": True, "regather_input": True}
    ways["again"] = {"algorithm": "pipelined", **again}
    found = {name: _trained(rows, columns, True, options) for name, options in ways.items()}
    found["linear"] = _trained(rows, columns, False, {})
    for name in ("pipelined", "stationary", "again"):
        options = {**ways[name], "parts": GROUPED}
        found[f"{name} of grouped"] = _trained(rows, columns, False, options, GROUPED)
    return found


@pytest.mark.deep
@pytest.mark.parametrize("rows,columns", [(2, 2), (1, 4), (4, 1), (2, 3)])
def test_every_algorithm_multiplies_by_the_parts(rows: int, columns: int) -> None:
    for found in world.run(rows * columns, _all_trained, rows, columns):
        assert max(found.values()) < TOLERANCE, found


def _dropped(rows: int, columns: int) -> float:
    reference, mesh = model(), grid_mesh(rows, columns)
    for layer in reference.layers:
        layer.drop = nn.Dropout(0.3)
    ours = copy.deepcopy(reference)
    _parallelize(ours, mesh)
    return _steps(on_one_device(reference), ours, mesh)


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(1, 4)])
def test_dropout_of_what_is_made_of_the_parts(rows: int, columns: int) -> None:
    """It is as wide as one part here, of which no module beside gives the whole.

    So it was taken for whole features, masked alike on every column, and refused by a module after
    it that takes split ones.
    """
    assert max(world.run(rows * columns, _dropped, rows, columns)) < TOLERANCE


def _under_fsdp() -> float:
    mesh = init_device_mesh(DEVICE, (2, 1, 2), mesh_dim_names=("dp", "tp_row", "tp_col"))
    reference = model()
    ours = copy.deepcopy(reference)
    _parallelize(ours, mesh["tp_row", "tp_col"])
    for layer in ours.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(ours, mesh=mesh["dp"])
    mine = mesh["dp"].get_local_rank()
    return _steps(reference, ours, mesh, lambda ids: ids.chunk(2)[mine])


def test_under_fsdp() -> None:
    assert max(world.run(4, _under_fsdp)) < TOLERANCE


def _dealt(columns: int) -> None:
    axis = Grid(grid_mesh(1, columns)).col
    for parts in ((1,), (1, 1), (2, 2, 2), (1,) * 5, (4, 1, 1), (1, 3), (2, 1, 5)):
        sizes = [columns * part for part in parts]
        whole = torch.arange(2 * sum(sizes)).view(2, -1)
        shard = whole.chunk(columns, 1)[axis.index]
        of_each = [part.chunk(columns, 1)[axis.index] for part in whole.split(sizes, 1)]
        dealt = reshard_fused(shard, 1, sizes, axis).wait()
        assert torch.equal(dealt, torch.cat(of_each, 1)), parts
        assert torch.equal(reshard_fused(dealt, 1, sizes, axis, back=True).wait(), shard), parts


@pytest.mark.parametrize("columns", [1, 2, 3, 4])
def test_dealing_blocks_and_back(columns: int) -> None:
    world.run(columns, _dealt, columns)


def _compiled() -> float:
    reference = model()
    ours = copy.deepcopy(reference)
    mesh = grid_mesh(1, 2)
    _parallelize(ours, mesh, algorithm="collective")
    ours.layers[1].compile(fullgraph=True, backend="aot_eager")
    return _steps(reference, ours, mesh)


@pytest.mark.deep
def test_a_layer_is_one_graph() -> None:
    assert max(world.run(2, _compiled)) < TOLERANCE


@pytest.mark.parametrize("columns,moved", [(1, 0), (2, 1), (3, 2), (4, 2)])
def test_bytes_of_the_exchange(columns: int, moved: int) -> None:
    """Beside a plain weight of the size, once in forward and once in backward: blocks of
    ``1/(parts * C)`` of the weight's rows here, and of the bias; rank 0 keeps those it needs."""
    totals = []
    for parts in (1, 3):
        with fake_grid(2, columns) as mesh:
            linear = Conv1D(3 * HIDDEN, HIDDEN)
            torch_tp2d.parallelize_module(linear, mesh, Colwise2D(parts=parts))
            torch_tp2d.token_sizes(mesh, (4, 8))
            x = torch.zeros(2, 8, HIDDEN, requires_grad=True)
            with CommCounter(mesh) as counter:
                linear(x).sum().backward()
            totals.append(counter.total_bytes)
    block = HIDDEN // columns
    assert totals[1] - totals[0] == 2 * 4 * moved * block * (HIDDEN // 2 + 1)


def _refused(rows: int, columns: int) -> None:
    mesh = grid_mesh(rows, columns)
    with pytest.raises(ValueError, match="parts is the number"):
        Colwise2D(parts=0)
    with pytest.raises(ValueError, match="parts is the number"):
        Rowwise2D(parts=3)
    with pytest.raises(ValueError, match="parts is the number"):
        Colwise2D(parts=3, use_local_output=False)
    with pytest.raises(ValueError, match="side by side anyway"):
        Colwise2D(parts=3, output_layouts=Replicate())
    with pytest.raises(ValueError, match="Conv1D.*tp_col=2.*5 projections"):
        torch_tp2d.parallelize_module(model(), mesh, {"layers.*.qkv": Colwise2D(parts=5)})


def test_refusals() -> None:
    world.run(2, _refused, 1, 2)
