"""Modules under ``Replicate`` that are given several tensors, or give several."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, PrepareModuleOutput

import torch_tp2d
from support import world
from support.marks import deep
from support.models import grid_mesh, relative
from support.one_module import spread, whole
from torch_tp2d import Colwise2D, Rowwise2D, parallelize_module

TOLERANCE = 1e-12
GRIDS = [(2, 1), deep(2, 2), deep(4, 1), deep(3, 1)]
SAMPLES = Shard(0), Replicate()


def _noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Near(nn.Module):
    """How near ``x`` is to prototypes that it is given beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6, dtype=torch.float64))

    def forward(self, x: Tensor, prototypes: Tensor) -> Tensor:
        return ((x * self.scale) @ prototypes.mT).log_softmax(-1)


class Masked(nn.Module):
    """A mean over the tokens that a mask leaves, of features that a vector scales."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6, dtype=torch.float64))

    def forward(self, x: Tensor, *, mask: Tensor, vector: Tensor) -> Tensor:
        kept = (x * self.scale * vector).masked_fill(~mask.unsqueeze(-1), 0.0)
        return x - kept.mean(1, keepdim=True)


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6, dtype=torch.float64))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return (x + positions).cumsum(1) * self.scale


def _differences(
    model: nn.Module, inputs: list[Any], mine: list[Any], rows: int, columns: int, **named: Any
) -> dict[str, float]:
    """A module's output and gradients from local tensors of this row's samples, and one device's.

    Args:
        inputs: those of one device.
        mine: this rank's.
        named: for each keyword one device's tensor and this rank's.
    """
    mesh = grid_mesh(rows, columns)
    ours = parallelize_module(
        copy.deepcopy(model), mesh, torch_tp2d.Replicate(input_layouts=SAMPLES)
    )
    expected = model(*inputs, **{name: pair[0] for name, pair in named.items()})
    expected.square().sum().backward()
    y = ours(*mine, **{name: pair[1] for name, pair in named.items()})
    y.square().sum().backward()
    found = {"output": relative(y.detach(), spread(expected.detach(), mesh, SAMPLES).to_local())}
    for (name, param), other in zip(ours.named_parameters(), model.parameters(), strict=True):
        found[name] = relative(whole(param.grad), other.grad)
    return found


def _prototypes_rank(rows: int, columns: int, count: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    x, table = _noise(4, 6), _noise(count, 6, seed=2)
    mine = spread(x, mesh, SAMPLES).to_local()
    return _differences(Near(), [x, table], [mine, table], rows, columns)


@pytest.mark.parametrize(("rows", "columns"), GRIDS)
@pytest.mark.parametrize("count", [2, 3])
def test_a_table_with_as_many_rows_as_a_rank_has_samples(
    rows: int, columns: int, count: int
) -> None:
    """A table beside the input, the same on every rank, of two rows where a rank had two samples,
    was taken for tokens, and became one of four rows: outputs of another shape, in silence. With
    three rows it was torch's error of mixed tensors."""
    for differences in world.run(rows * columns, _prototypes_rank, rows, columns, count):
        assert max(differences.values()) < TOLERANCE, differences


def _positions_rank(rows: int, columns: int, batch: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    x, positions = _noise(batch, 5, 6), _noise(1, 5, 6, seed=2)
    mine = spread(x, mesh, SAMPLES).to_local()
    return _differences(Placed(), [x, positions], [mine, positions], rows, columns)


@pytest.mark.parametrize("batch", [2, 3, 4])
def test_positions_beside_one_sample_and_two(batch: int) -> None:
    """With three samples on two rows positions of one sample were tokens to the rank with one
    sample and not to the other: an error on one rank, for which the other waited."""
    for differences in world.run(2, _positions_rank, 2, 1, batch):
        assert max(differences.values()) < TOLERANCE, differences


def _mask_rank(rows: int, columns: int, constant: bool) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    x, vector = _noise(4, 5, 6), _noise(6, seed=2)
    mask = torch.ones(4, 5, dtype=torch.bool) if constant else _noise(4, 5, seed=3) > 0
    mine = spread(x, mesh, SAMPLES).to_local()
    row, _ = mesh.get_coordinate()
    part = mask.chunk(rows)[row]
    return _differences(
        Masked(), [x], [mine], rows, columns, mask=(mask, part), vector=(vector, vector)
    )


@pytest.mark.parametrize(("rows", "columns"), [(2, 1), deep(2, 2), deep(4, 1)])
@pytest.mark.parametrize("constant", [False, True])
def test_a_mask_of_this_rows_tokens_and_a_vector(rows: int, columns: int, constant: bool) -> None:
    """They were torch's error of mixed tensors, which named no module."""
    for differences in world.run(rows * columns, _mask_rank, rows, columns, constant):
        assert max(differences.values()) < TOLERANCE, differences


class Weighted(nn.Module):
    """A sum that learns, of features and of as many others, or of one for each sample."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width, dtype=torch.float64))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x * self.scale + other


def _one_each_rank(rows: int, columns: int, shape: tuple[int, ...]) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    x, other = _noise(3, 1, 6), _noise(*shape, seed=2)
    mine = spread(x, mesh, SAMPLES).to_local()
    part = spread(other, mesh, SAMPLES).to_local() if shape[:1] == (3,) else other
    return _differences(Weighted(6), [x, other], [mine, part], rows, columns)


@pytest.mark.parametrize(("rows", "columns"), [(2, 1), deep(2, 2)])
@pytest.mark.parametrize("shape", [(3, 1, 1), (1,), (1, 1, 1), ()])
def test_one_element_beside_the_input(rows: int, columns: int, shape: tuple[int, ...]) -> None:
    """Of a number for each of three samples two rows hold two and one. One element was taken for a
    scalar, about which no other rank is asked: the row with two waited for the row with one."""
    for differences in world.run(rows * columns, _one_each_rank, rows, columns, shape):
        assert max(differences.values()) < TOLERANCE, differences


class Twice(nn.Module):
    """A sum that learns of what a projection makes twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.near, self.mix = nn.Linear(3, 3), Weighted(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.near(x), self.near(x.flip(1)))


def _corner_rank() -> float:
    mesh = grid_mesh(2, 2)
    one, corner = Twice().double(), (Shard(2), Shard(1))
    near = torch_tp2d.Replicate(input_layouts=(Replicate(), Replicate()), output_layouts=corner)
    ours = parallelize_module(
        copy.deepcopy(one), mesh, {"near": near, "mix": torch_tp2d.Replicate()}
    )
    x = _noise(1, 3, 3)
    with torch.no_grad():
        return relative(ours(x), spread(one(x), mesh, corner).to_local())


def test_one_element_that_a_style_has_handed_out() -> None:
    """Of three tokens of three features the last of four ranks holds one element. It was taken for
    a scalar, and the others, which asked for the tokens' sizes, waited for this rank. Random
    programs found it."""
    assert max(world.run(4, _corner_rank)) < TOLERANCE


class Positions(nn.Module):
    """Positions that a module of the plan looks up, for one sample, beside those of all samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.at = nn.Linear(6, 6), nn.Embedding(5, 6)
        self.mix = Placed()

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.up(x), self.at(torch.arange(5))[None])


def _looked_up_rank(rows: int, columns: int, batch: int, local: bool) -> float:
    mesh = grid_mesh(rows, columns)
    one, whole_layout = Positions().double(), (Replicate(), Replicate())
    plan = {
        "up": Colwise2D(input_layouts=SAMPLES, output_layouts=SAMPLES),
        "at": torch_tp2d.Replicate(output_layouts=whole_layout, use_local_output=local),
        "mix": torch_tp2d.Replicate(),
    }
    ours = parallelize_module(copy.deepcopy(one), mesh, plan)
    x = _noise(batch, 5, 6)
    one(x).square().sum().backward()
    ours(spread(x, mesh, SAMPLES).to_local()).square().sum().backward()
    pairs = zip(ours.parameters(), one.parameters(), strict=True)
    return max(relative(whole(param.grad), other.grad) for param, other in pairs)


def _looked_up_refused_rank(batch: int) -> str:
    with pytest.raises(ValueError, match="beside its input") as error:
        _looked_up_rank(2, 1, batch, True)
    return str(error.value)


def test_positions_that_the_plan_looks_up() -> None:
    """Of three samples on two rows one row has one, as the positions do: torch's error of mixed
    tensors on the other row, for which this one waited."""
    for batch in (2, 3, 4):
        assert max(world.run(2, _looked_up_rank, 2, 1, batch, False)) < TOLERANCE, batch
    assert max(world.run(2, _looked_up_rank, 2, 1, 2, True)) < TOLERANCE
    for message in world.run(2, _looked_up_refused_rank, 3):
        assert "Placed" in message and "use_local_output=False" in message


def _neither_rank() -> str:
    mesh = grid_mesh(2, 1)
    row, _ = mesh.get_coordinate()
    module = parallelize_module(Near(), mesh, torch_tp2d.Replicate(input_layouts=SAMPLES))
    with pytest.raises(ValueError, match="not the same on every rank") as caught:
        module(_noise(2, 6, seed=row), _noise(3, 6, seed=row))
    return str(caught.value)


def test_a_tensor_that_is_neither_whole_nor_of_the_tokens() -> None:
    for message in world.run(2, _neither_rank):
        assert "Near" in message and "tp_row=2" in message


class Head(nn.Module):
    """A recurrence, and a Linear of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.GRU(6, 6, batch_first=True)
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x)[0])


def _whole_input_rank(local: bool) -> dict[str, float]:
    mesh = grid_mesh(2, 1)
    one = Head().double()
    style = torch_tp2d.Replicate(
        input_layouts=(Replicate(), Replicate()), output_layouts=SAMPLES, use_local_output=local
    )
    plan = {"inner": style, "out": Colwise2D(use_local_output=False)}
    ours = parallelize_module(copy.deepcopy(one), mesh, plan)
    x = _noise(4, 5, 6)
    expected, y = one(x), ours(x)
    expected.square().sum().backward()
    y.square().sum().full_tensor().backward()
    found = {"output": relative(whole(y), expected.detach())}
    for (name, param), other in zip(ours.named_parameters(), one.parameters(), strict=True):
        found[name] = relative(whole(param.grad), other.grad)
    return found


@pytest.mark.parametrize("local", [True, False])
def test_the_layout_of_several_outputs_of_a_whole_input(local: bool) -> None:
    """Of a module whose input was whole, ``output_layouts`` and ``use_local_output`` held for one
    output only: a recurrence's tuple stayed whole, and the Linear after it took it for a row's
    samples, with twice the gradient."""
    for differences in world.run(2, _whole_input_rank, local):
        assert max(differences.values()) < TOLERANCE, differences


class Several(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        y = x * self.scale
        kinds: dict[str, Any] = {
            "list": [y, y + 1],
            "dict": {"a": y},
            "nested": (y, (y, y + 1)),
            "named": torch.max(y, -1),
        }
        return kinds[self.kind]


def _nested_rank(kind: str) -> list[str]:
    mesh = grid_mesh(2, 1)
    module = parallelize_module(
        Several(kind), mesh, torch_tp2d.Replicate(input_layouts=(Shard(0), Shard(1)))
    )
    x = spread(_noise(4, 6, 6), mesh, (Shard(0), Shard(1))).to_local()
    return [type(y).__name__ for y in torch.utils._pytree.tree_leaves(module(x))]


@pytest.mark.parametrize("kind", ["list", "dict", "nested", "named"])
def test_outputs_in_whatever_they_are_nested(kind: str) -> None:
    """Only those of a tuple came back local; in a list, a dict, a named tuple or a tuple inside a
    tuple the user got DTensors for a local input."""
    for kinds in world.run(2, _nested_rank, kind):
        assert DTensor.__name__ not in kinds


def _states_rank(samples: int, length: int) -> dict[str, Any]:
    mesh = grid_mesh(2, 1)
    torch.manual_seed(0)
    one = nn.GRU(6, 3, batch_first=True, bidirectional=True).double()
    ours = parallelize_module(copy.deepcopy(one), mesh, torch_tp2d.Replicate(input_layouts=SAMPLES))
    x = _noise(samples, length, 6)
    _, states = ours(spread(x, mesh, SAMPLES).to_local())
    expected = spread(one(x)[1].detach(), mesh, (Shard(1), Replicate())).to_local()
    assert states.shape == expected.shape
    return {"states": relative(states.detach(), expected)}


@pytest.mark.parametrize(("samples", "length"), [(2, 2), (2, 3), (4, 4)])
def test_states_of_as_many_layers_as_there_are_samples(samples: int, length: int) -> None:
    """The states ``[2, 2, 3]`` of a bidirectional recurrence of two samples of two tokens were
    taken for tokens, and split by layers."""
    for differences in world.run(2, _states_rank, samples, length):
        assert max(differences.values()) < TOLERANCE, differences


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.GRU(6, 6, batch_first=True)
        self.decoder = nn.GRU(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, states = self.encoder(x)
        return self.decoder(y, states)[0]


def _handed_states_rank(batch: int) -> dict[str, float]:
    mesh = grid_mesh(2, 1)
    one = Translator().double()
    style = torch_tp2d.Replicate(input_layouts=SAMPLES)
    ours = parallelize_module(copy.deepcopy(one), mesh, {"encoder": style, "decoder": style})
    x = _noise(batch, 5, 6)
    y, expected = ours(spread(x, mesh, SAMPLES).to_local()), one(x)
    y.square().sum().backward()
    expected.square().sum().backward()
    found = {"output": relative(y.detach(), spread(expected.detach(), mesh, SAMPLES).to_local())}
    for (name, param), other in zip(ours.named_parameters(), one.parameters(), strict=True):
        found[name] = relative(whole(param.grad), other.grad)
    return found


@pytest.mark.parametrize("batch", [4, 3])
def test_states_that_one_recurrence_hands_another(batch: int) -> None:
    """The local states of a row's samples that our own recurrence had handed on were refused: they
    had to be of all samples."""
    for differences in world.run(2, _handed_states_rank, batch):
        assert max(differences.values()) < TOLERANCE, differences


class Flattens(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "contiguous":
            y = x.contiguous().view(-1, 6)
        else:
            y = x.reshape(-1, 6) if self.how == "reshape" else x.flatten(0, 1)
        return (y * self.scale).view(x.shape)


def _transposed_rank(how: str) -> dict[str, float]:
    mesh = grid_mesh(2, 1)
    x = _noise(5, 4, 6)
    mine = spread(x, mesh, (Shard(1), Replicate())).to_local().transpose(0, 1)
    return _differences(Flattens(how), [x.transpose(0, 1)], [mine], 2, 1)


@pytest.mark.parametrize("how", ["contiguous", "reshape", "flatten"])
def test_an_input_that_is_a_transpose(how: str) -> None:
    """A DTensor of a transposed local tensor claimed to be contiguous, and each of these functions
    believed it: "view size is not compatible"."""
    for differences in world.run(2, _transposed_rank, how):
        assert max(differences.values()) < TOLERANCE, differences


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.scale) + 1


def _in_place_rank() -> str:
    mesh = grid_mesh(2, 1)
    module = parallelize_module(InPlace(), mesh, torch_tp2d.Replicate(input_layouts=SAMPLES))
    x = _noise(2, 5, 6).requires_grad_()
    with pytest.raises(ValueError, match="in place") as caught:
        module(x * 1)
    with torch.no_grad():
        module(x * 1)
    return str(caught.value)


def test_a_change_of_the_input_in_place() -> None:
    """The input had the new values and the old graph: whoever used it afterwards, as a residual,
    got wrong gradients of it and of the module, in silence."""
    assert all("InPlace" in message for message in world.run(2, _in_place_rank))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return self.b(self.a(x))


def _prepared_output_rank() -> str:
    mesh = grid_mesh(1, 2)
    plan = {
        "": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
        "a": Colwise2D(),
        "b": Rowwise2D(output_layouts=Shard(1)),
    }
    block = parallelize_module(Block().double(), mesh, plan)
    with pytest.raises(ValueError, match=r"Block.*hands on one") as caught:
        block(_noise(4, 8, 6))
    return str(caught.value)


def test_a_prepared_output_in_another_layout_than_declared() -> None:
    """The Linear inside handed on this column's tokens, the entry declared whole ones and cut them
    again: half of the tokens were lost, in silence. Inputs were compared, outputs were not."""
    assert all("output_layouts" in message for message in world.run(2, _prepared_output_rank))


def _no_tensor_rank() -> str:
    mesh = grid_mesh(1, 2)
    prepares = PrepareModuleInput(
        input_layouts=(Replicate(), Replicate()), desired_input_layouts=(Replicate(), Replicate())
    )
    block = parallelize_module(
        Block().double(), mesh, {"": prepares, "a": Colwise2D(), "b": Rowwise2D()}
    )
    with pytest.raises(TypeError, match="Block") as caught:
        block(_noise(4, 8, 6), [1])
    return str(caught.value)


def test_a_layout_of_what_is_no_tensor() -> None:
    """The error named no module and no mend."""
    assert all("list" in message and "None" in message for message in world.run(2, _no_tensor_rank))
