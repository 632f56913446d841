"""What the ranks are given from outside is compared over them, when a module first runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torch_tp2d
from support.marks import deep
from support.models import Mlp, grid_mesh
from support.world import run
from torch_tp2d import Colwise2D, Rowwise2D, parallelize_module

HIDDEN, VOCAB = Mlp.HIDDEN, Mlp.VOCAB


def _ids(batch: int, sequence: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (batch, sequence), generator=torch.Generator().manual_seed(seed))


def _one_input_for_all(rows: int, columns: int) -> list[str]:
    """As pytorch/examples' two-layer program has it: every rank passes the same input."""
    mesh, said = grid_mesh(rows, columns), []
    plan = {"net1": Colwise2D(), "net2": Rowwise2D()}
    torch.manual_seed(0)
    for x in (torch.randn(20, HIDDEN), torch.randn(4, 5, HIDDEN)):
        several = parallelize_module(Mlp().double(), mesh, plan)
        with pytest.raises(ValueError, match="the same local tensor") as error:
            several(x.double())
        said.append(str(error.value))
        # A part of its own, a DTensor, and what is said in full are fine.
        part = x.double().chunk(rows)[mesh.get_local_rank(0)].clone()
        parallelize_module(Mlp().double(), mesh, plan)(part).sum().backward()
        whole = distribute_tensor(x.double(), mesh, (Replicate(), Replicate()))
        parallelize_module(Mlp().double(), mesh, plan)(whole).sum().backward()
        meant = {**plan, "net1": Colwise2D(input_layouts=(Shard(0), Replicate()))}
        parallelize_module(Mlp().double(), mesh, meant)(x.double()).sum().backward()
    several = parallelize_module(Mlp(embeds=True).double(), mesh, {**plan, "embed": Rowwise2D()})
    with pytest.raises(ValueError, match="hands on one of shape") as error:
        several(_ids(4, 5).flatten())
    said.append(str(error.value))
    return said


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(4, 1), (2, 1)])
def test_one_input_for_all_rows_is_refused(rows: int, columns: int) -> None:
    """Gradients were as many times too large as there are rows, and nothing told."""
    for said in run(rows * columns, _one_input_for_all, rows, columns):
        for message in said:
            assert f"tp_row={rows}" in message and "Shard(dim=0)" in message, message


class Patched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cut, self.net2 = nn.Conv2d(3, HIDDEN, 2, 2), nn.Linear(HIDDEN, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(self.cut(x).flatten(2).transpose(1, 2))


def _other_inputs(rows: int, columns: int) -> list[str]:
    """As a DistributedSampler over all ranks deals them out."""
    mesh, said = grid_mesh(rows, columns), []
    row, column = mesh.get_local_rank(0), mesh.get_local_rank(1)
    plan = {"net1": Colwise2D(), "net2": Rowwise2D()}
    embeds = Rowwise2D(output_layouts=Replicate())
    whole = torch_tp2d.Replicate(output_layouts=(Shard(0), Replicate()))

    def refused(model: nn.Module, plan: Any, x: Tensor, grad: bool = True) -> None:
        model = parallelize_module(model.double(), mesh, plan)
        with torch.set_grad_enabled(grad):
            with pytest.raises(ValueError, match="was given other values") as error:
                model(x)
        said.append(str(error.value))

    # By row, by column, one token on one rank alone; of another length; without gradients.
    by_row, by_column = _ids(4, 5, seed=row), _ids(4, 5, seed=column)
    one_token = _ids(4, 5)
    if row == rows - 1 and column == columns - 1:
        one_token[3, 4] = (one_token[3, 4] + 1) % VOCAB
    for style in (embeds, whole):
        with_embedding = {**plan, "embed": style}
        if rows > 1:
            refused(Mlp(embeds=True), with_embedding, by_row)
        if columns > 1:
            refused(Mlp(embeds=True), with_embedding, by_column)
        refused(Mlp(embeds=True), with_embedding, one_token, grad=False)
        refused(Mlp(embeds=True), with_embedding, _ids(4, 5 + row + column))
    images = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(row + column))
    cut = {"cut": Colwise2D(output_layouts=(Shard(0), Replicate())), "net2": Rowwise2D()}
    cut["net2"] = Rowwise2D(input_layouts=Replicate())
    refused(Patched(), cut, images.double())

    # The same on all; what comes later debug mode alone compares.
    model = parallelize_module(Mlp(embeds=True).double(), mesh, {**plan, "embed": embeds})
    model(_ids(4, 5)).sum().backward()
    model(one_token).sum().backward()
    torch_tp2d.debug.enable()
    with pytest.raises(ValueError, match="was given other values") as error:
        model(one_token)
    torch_tp2d.debug.disable()
    said.append(str(error.value))
    # A part of each row's own, which the plan says.
    own = Rowwise2D(input_layouts=(Shard(0), Replicate()), output_layouts=Replicate())
    model = parallelize_module(Mlp(embeds=True).double(), mesh, {**plan, "embed": own})
    model(_ids(4 * rows, 5).chunk(rows)[row]).sum().backward()
    parallelize_module(Mlp(embeds=True).double(), mesh, {**plan, "embed": own})(_ids(4, 5))
    return said


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(4, 1), (1, 2)])
def test_other_ids_on_some_rank_are_refused(rows: int, columns: int) -> None:
    """A loader that deals samples out over all ranks gave each rank's rows of another's words.

    Loss and gradients were of no batch at all, and nothing told but the debug mode.
    """
    for said in run(rows * columns, _other_inputs, rows, columns):
        for message in said:
            assert f"tp_row={rows}" in message and "data-parallel" in message, message
