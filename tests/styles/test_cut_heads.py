"""Heads that the user's code makes of a column's features: by their own number, or refused."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from support import world
from support.marks import deep
from support.models import grid_mesh
from support.one_module import Between, gradients
from torch_tp2d import Attention2D, Colwise2D, Rowwise2D, parallelize_module

WIDTH, HEADS, VOCAB = 32, 4, 11


class Cut(nn.Module):
    """A module that reshapes, as einops has one."""

    def forward(self, x: Tensor, count: int) -> Tensor:
        return x.unflatten(-1, (count, -1))


class Attention(nn.Module):
    """As einops has it: the size of a head is what is left of the features that it sees."""

    def __init__(
        self, name: str, *, in_kernel: bool = True, size: int | None = None, keys: int | None = None
    ) -> None:
        super().__init__()
        self.name, self.in_kernel, self.head_dim, self.of_keys = name, in_kernel, size, keys
        self.cut = Cut()
        setattr(self, name, HEADS)
        self.to_qkv, self.to_out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.to_qkv(x).chunk(3, dim=-1)
        if self.head_dim is None:
            count = getattr(self, self.name)
            k, v = (t.unflatten(2, (-1, self.of_keys or t.shape[2] // count)) for t in qkv[1:])
            q, k, v = (t.transpose(1, 2) for t in (self.cut(qkv[0], count), k, v))
        else:
            q, k, v = (t.view(*t.shape[:2], -1, self.head_dim).transpose(1, 2) for t in qkv)
        if self.in_kernel:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = (q @ k.mT / (WIDTH / HEADS) ** 0.5).softmax(-1) @ v
        out: Tensor = self.to_out(y.transpose(1, 2).flatten(2))
        return out


def _plan(around: Attention2D | None) -> dict[str, Any]:
    return {
        "embed": Rowwise2D(output_layouts=Shard(1), use_local_output=around is None),
        **({} if around is None else {"middle": around}),
        "middle.to_qkv": Colwise2D(
            input_layouts=Shard(1) if around is None else Replicate(), parts=3
        ),
        "middle.to_out": Rowwise2D(output_layouts=Shard(1)),
        "head": Colwise2D(input_layouts=Shard(1), use_local_output=False),
    }


def _said(rows: int, columns: int) -> dict[str, str]:
    mesh, said = grid_mesh(rows, columns), {}
    by_name = Attention2D(local_attributes=("my_heads",))
    by_hand = Attention("own_heads")
    by_hand.own_heads, by_hand.heads = HEADS // columns, HEADS
    for case, middle, around in (
        ("known", Attention("heads"), Attention2D()),
        ("known, written out", Attention("heads", in_kernel=False), Attention2D()),
        ("named", Attention("my_heads"), by_name),
        ("by size", Attention("my_heads", size=WIDTH // HEADS), Attention2D()),
        ("by size, bare", Attention("my_heads", size=WIDTH // HEADS), None),
        ("divided by hand", by_hand, None),
        ("all of the bare", Attention("heads"), None),
        ("all of the short", Attention("h", in_kernel=False), None),
        ("all of the unknown", Attention("my_heads"), Attention2D()),
        ("all of the given", Attention("count", in_kernel=False), Attention2D(num_heads=HEADS)),
        ("all of the queries", Attention("heads", in_kernel=False, keys=WIDTH // HEADS), None),
        ("all in the kernel", Attention("count"), Attention2D(num_heads=HEADS)),
    ):
        model = Between(VOCAB, WIDTH, lambda middle=middle: middle).double()
        reference = copy.deepcopy(model)
        if middle is by_hand:
            reference.middle.own_heads = HEADS
        ids = torch.randint(0, VOCAB, (4, 5), generator=torch.Generator().manual_seed(1))
        parallelize_module(model, mesh, _plan(around))
        try:
            for y in (model(ids).full_tensor(), reference(ids)):
                F.cross_entropy(y.flatten(0, 1), ids.flatten()).backward()
            said[case] = f"differs by {max(gradients(reference, model).values()) > 1e-10}"
        except (ValueError, RuntimeError) as error:
            said[case] = "\n".join((str(error), *getattr(error, "__notes__", ())))
    return said


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(1, 4), deep(4, 1)])
def test_heads_of_a_part_of_the_features(rows: int, columns: int) -> None:
    """Each column cut its features into as many heads as all columns have, in silence.

    Attention of ``heads=4`` by einops, of half the features, is that of four heads of half the
    size: under a plan of Colwise2D and Rowwise2D alone, and under Attention2D, which did not know
    the attribute ``heads``. Everything after it was another model. Where keys are cut by their
    size instead, torch raised, of sizes that nobody wrote.
    """
    for said in world.run(rows * columns, _said, rows, columns):
        if sys.version_info < (3, 11):
            del said["all of the queries"]
        if columns > 1:
            for case in [case for case in said if case.startswith("all of")]:
                message = said.pop(case)
                assert "test_cut_heads.py:" in message and "local_attributes=(" in message, case
                assert f"are cut into {HEADS} heads" in message, message
            assert f"of all {HEADS} heads" in said.pop("all in the kernel")
        assert set(said.values()) == {"differs by False"}, said
