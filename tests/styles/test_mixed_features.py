"""Functions of all features, where each rank has some of them: refused by file and line."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import torch_tp2d
from support import world
from support.marks import deep
from support.models import grid_mesh
from support.one_module import Between, gradients
from torch_tp2d import Colwise2D, Rowwise2D, parallelize_module

WIDTH, WIDE, HEAD, VOCAB = 12, 32, 4, 11


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _by_hand(x)


class Middle(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH), act

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.up(x)))
        return y


def _by_hand(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, HEAD))


OF_A_PART: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": _by_hand,
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "layer_norm": lambda x: F.layer_norm(x, normalized_shape=x.shape[-1:]),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "softmax": lambda x: (2 * x).softmax(dim=2),
    "group_norm": lambda x: F.group_norm(x.flatten(0, 1), 2).view_as(x),
    "cumsum": lambda x: x.cumsum(-1),
    "std": lambda x: x / (1 + x.std(axis=-1, keepdim=True)),
    "linalg_vector_norm": lambda x: x / torch.linalg.vector_norm(x, 2, -1, keepdim=True),
    # Over heads.
    "var": lambda x: (_heads(x) + _heads(x).var(2, keepdim=True)).flatten(2),
}
RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "single features": lambda x: F.gelu(x) + x.sigmoid(),
    "each head": lambda x: F.rms_norm(_heads(x), (HEAD,)).flatten(2),
    "each head, by hand": lambda x: _by_hand(_heads(x)).flatten(2),
    "each head, softmax": lambda x: _heads(x).transpose(1, 2).softmax(-1).mT.flatten(1, 2).mT,
    # Of all elements: True is no dim. Nothing goes on with it.
    "a single number": lambda x: x if x.detach().flatten(0, 1).std(True) > 0 else -x,
    "features of whole tokens": lambda x: x + x.detach().mean((0, 1), keepdim=True),
}


def _said(rows: int, columns: int) -> dict[str, str]:
    mesh, said = grid_mesh(rows, columns), {}
    plan = {
        "embed": Rowwise2D(output_layouts=Replicate()),
        "middle.up": Colwise2D(),
        "middle.down": Rowwise2D(output_layouts=Replicate()),
        "head": Colwise2D(use_local_output=False),
    }
    of_features = (Shard(0), Shard(-1))
    ways = {
        "by Replicate()": {"middle.act": torch_tp2d.Replicate(input_layouts=of_features)},
        "on DTensors": {"middle.up": Colwise2D(use_local_output=False)},
    }
    acts = OF_A_PART | RIGHT | {name: Norm() for name in ways}
    for name, act in acts.items():
        model = Between(VOCAB, WIDTH, lambda act=act: Middle(act)).double()
        reference = copy.deepcopy(model)
        ids = torch.randint(0, VOCAB, (4, 5), generator=torch.Generator().manual_seed(1))
        parallelize_module(model, mesh, plan | ways.get(name, {}))
        try:
            for y in (model(ids).full_tensor(), reference(ids)):
                F.cross_entropy(y.flatten(0, 1), ids.flatten()).backward()
            said[name] = f"differs by {max(gradients(reference, model).values()) > 1e-10}"
        except ValueError as error:
            said[name] = str(error)
    return said


@pytest.mark.parametrize("rows,columns", [(1, 2), deep(2, 2), deep(1, 4)])
def test_functions_of_all_features(rows: int, columns: int) -> None:
    """A norm, a softmax or a mean of features that ``tp_col`` splits was of a part, in silence.

    ``x * rsqrt(x.square().mean(-1))`` between Colwise2D and Rowwise2D, or keys that are normalized
    before they are cut into heads: each rank did so by its own features.
    """
    for said in world.run(rows * columns, _said, rows, columns):
        for name in OF_A_PART:
            message = said.pop(name)
            assert "test_mixed_features.py:" in message and f" {name} takes dim " in message, (
                message
            )
        if rows > 1:
            del said["features of whole tokens"]
        assert set(said.values()) == {"differs by False"}, said


class Across(nn.Module):
    """A Linear over five tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.over = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.gelu(self.over(x.mT)).mT
        return y


class OverTokens(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.up, self.across, self.down = nn.Linear(WIDTH, wide), Across(), nn.Linear(wide, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.across(self.up(x)))
        return y


def _transposed(rows: int, columns: int, widths: tuple[int, ...]) -> dict[str, str]:
    mesh, said = grid_mesh(rows, columns), {}
    local = Colwise2D()
    for wide in widths:
        for name, up, over in (
            ("rowwise", local, Rowwise2D()),
            ("split by declaration", local, Colwise2D(input_layouts=Shard(-1))),
            ("whole by default", local, Colwise2D()),
            ("on DTensors", Colwise2D(use_local_output=False), torch_tp2d.Replicate()),
            ("in a module that is replicated", local, None),
        ):
            model = Between(VOCAB, WIDTH, lambda wide=wide: OverTokens(wide)).double()
            reference = copy.deepcopy(model)
            ids = torch.randint(0, VOCAB, (4, 5), generator=torch.Generator().manual_seed(1))
            plan = {
                "embed": Rowwise2D(output_layouts=Replicate()),
                "middle.up": up,
                "middle.across.over": over,
                "middle.down": Rowwise2D(output_layouts=Replicate()),
                "head": Colwise2D(use_local_output=False),
            }
            if over is None:
                plan["middle.across"] = torch_tp2d.Replicate()
                del plan["middle.across.over"]
            parallelize_module(model, mesh, plan)
            try:
                for y in (model(ids).full_tensor(), reference(ids)):
                    F.cross_entropy(y.flatten(0, 1), ids.flatten()).backward()
                worst = max(gradients(reference, model).values())
                said[f"{wide} {name}"] = f"differs by {worst > 1e-10}"
            except ValueError as error:
                said[f"{wide} {name}"] = str(error)
    return said


@pytest.mark.parametrize(
    "rows,columns,widths",
    [(1, 2, (9,)), deep(2, 2, (9, 10, 11, 16)), deep(1, 4, (9, 10, 11, 16))],
)
def test_features_where_tokens_should_be(rows: int, columns: int, widths: tuple[int, ...]) -> None:
    """Local features, transposed: where those of one rank were as many as its tokens, it went on.

    The others raised (of 9 features on two columns one has 5, as there are tokens), and it waited
    for them until the timeout.
    """
    for said in world.run(rows * columns, _transposed, rows, columns, widths):
        for key, message in said.items():
            if key.endswith(("on DTensors", "replicated")):
                assert message == "differs by False", (key, message)
            else:
                assert "each rank has a part along tp_col" in message, (key, message)
                assert "use_local_output=False" in message, (key, message)
