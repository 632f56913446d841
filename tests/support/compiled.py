"""A compiled block beside one device, and what is in its graphs."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.compile_fx import select_decomp_table
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.fx import GraphModule

from support import world
from support.models import grid_mesh, relative
from support.pipelined import Block, differences, letter, plan
from torch_tp2d import Rowwise2D, comm, parallelize_module

world.preload("torch._inductor.compile_fx")


class Recorder:
    """A backend that notes what is in the graphs that Inductor would be given, a letter each."""

    def __init__(self, row: comm.Axis) -> None:
        self.row = row
        self.graphs: list[Any] = []

    def __call__(self, graph: GraphModule, inputs: list[Tensor]) -> Any:
        return aot_autograd(
            fw_compiler=self.record,
            bw_compiler=self.record,
            decompositions=select_decomp_table,
            partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        )(graph, inputs)

    def record(self, graph: GraphModule, inputs: Any) -> Any:
        letters = [letter(node.target, node.args, self.row) for node in graph.graph.nodes]
        self.graphs.append("".join(letters))
        return make_boxed_func(graph.forward)


class _Embedded(nn.Module):
    """A block whose tokens' sizes are known, so that it can be traced with uneven ones."""

    def __init__(self, hidden: int, inner: int, touches: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, hidden)
        self.block = Block(hidden, inner, touches)

    def forward(self, ids: Tensor) -> Tensor:
        return self.block(self.embedding(ids))


def recorded(
    rows: int,
    columns: int,
    sizes: tuple[int, int, int, int],
    piece: int,
    touches: bool = False,
    backend: str | None = None,
    recorder_of: Callable[[comm.Axis], Recorder] = Recorder,
    biases: bool = True,
    **options: Any,
) -> tuple[float, list[Any]]:
    """The largest difference to one device, and the graphs of forward and backward."""
    comm.axis.PIECE_BYTES = piece
    batch, sequence, hidden, inner = sizes
    mesh = grid_mesh(rows, columns)
    torch.manual_seed(0)
    one = _Embedded(hidden, inner, touches).double()
    for linear in () if biases else one.modules():
        if isinstance(linear, nn.Linear):
            linear.bias = None
    embedding = Rowwise2D(input_layouts=Replicate(), output_layouts=Shard(1))
    several = parallelize_module(
        copy.deepcopy(one), mesh, {"embedding": embedding, **plan(**options)}
    )
    recorder = recorder_of(several.block.w1._tp2d.grid.row)
    several.block.compile(fullgraph=True, backend=backend or recorder)
    ids = torch.randint(0, 11, (batch, sequence))
    several(ids)  # The first forward is in eager.
    wanted, y = one(ids), several(ids)
    wanted.square().mean().backward()
    (y.square().sum() / wanted.numel()).backward()
    mine = distribute_tensor(wanted.detach(), mesh, (Shard(0), Shard(1))).to_local()
    return max(relative(y.detach(), mine), *differences(one, several)), recorder.graphs


def check_one_order(graphs: Sequence[Sequence[str]], columns: int) -> None:
    """That the ranks of each row, and of each column, send to each other in one order.

    Args:
        graphs: of each rank.
    """
    for rank, mine in enumerate(graphs):
        of_row, of_column = graphs[rank // columns * columns], graphs[rank % columns]
        for letters, others in (("[^gsr]", of_row), ("[^GSR]", of_column)):
            assert [re.sub(letters, "", one) for one in mine] == [
                re.sub(letters, "", one) for one in others
            ]
