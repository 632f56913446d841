"""Two streams of tokens, an encoder's and a decoder's, of different lengths on one mesh."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, SequenceParallel
from torch.utils.checkpoint import checkpoint

import torch_tp2d
from support.device import DEVICE
from support.marks import deep
from support.models import DOUBLE, grid_mesh, loss_of, relative
from support.world import run
from torch_tp2d import Colwise2D, Rowwise2D

VOCAB, HIDDEN, HEADS = 11, 8, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = HIDDEN // HEADS
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4)
        )
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        def heads(y: Tensor, like: Tensor) -> Tensor:
            return y.view(*like.shape[:2], -1, self.head_dim)

        q, k, v = (heads(w(y), y) for w, y in ((self.wq, x), (self.wk, memory), (self.wv, memory)))
        q, k, v = (y.transpose(1, 2) for y in (self.q_norm(q), self.k_norm(k), v))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.wo(out.reshape(*x.shape[:2], -1))


class Block(nn.Module):
    residual = True

    def __init__(self, cross: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(HIDDEN), Attention()
        self.norm2, self.cross = (nn.LayerNorm(HIDDEN), Attention()) if cross else (None, None)
        self.norm3 = nn.LayerNorm(HIDDEN)
        self.w1, self.w2 = nn.Linear(HIDDEN, 12), nn.Linear(12, HIDDEN)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y)
        if self.norm2 is not None and self.cross is not None:
            x = x + self.cross(self.norm2(x), memory)
        y = self.w2(F.relu(self.w1(self.norm3(x))))
        return x + y if self.residual else y


class EncoderDecoder(nn.Module):
    recompute = False
    target_first = False

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.encoder = nn.ModuleList(Block(False) for _ in range(2))
        self.memory_norm = nn.LayerNorm(HIDDEN)
        self.decoder = nn.ModuleList(Block(True) for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def _run(self, block: nn.Module, *args: Tensor) -> Tensor:
        return checkpoint(block, *args, use_reentrant=False) if self.recompute else block(*args)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x = self.embed(target) if self.target_first else None
        memory = self.embed(source)
        for block in self.encoder:
            memory = self._run(block, memory)
        memory = self.memory_norm(memory)
        x = self.embed(target) if x is None else x
        for block in self.decoder:
            x = self._run(block, x, memory)
        return self.head(self.norm(x))


def plan(local: bool) -> dict[str, Any]:
    """The tutorial's, with attention that is handed both streams, local or as DTensors."""
    result: dict[str, Any] = {
        "embed": Rowwise2D(output_layouts=Shard(1), use_local_output=local),
        "memory_norm": SequenceParallel(use_local_output=local),
        "norm": SequenceParallel(),
        "head": Colwise2D(input_layouts=Shard(1), use_local_output=False),
    }
    for stack in ("encoder", "decoder"):
        for attention in ("attention", "cross")[: 1 + (stack == "decoder")]:
            name = f"{stack}.*.{attention}"
            result[name] = PrepareModuleInput(
                input_layouts=(Shard(1), Shard(1)),
                desired_input_layouts=(Replicate(), Replicate()),
            )
            result[f"{name}.w[qkv]"] = Colwise2D()
            result[f"{name}.wo"] = Rowwise2D(output_layouts=Shard(1), use_local_output=local)
        result[f"{stack}.*.norm[123]"] = SequenceParallel()
        result[f"{stack}.*.w1"] = Colwise2D(input_layouts=Shard(1))
        result[f"{stack}.*.w2"] = Rowwise2D(output_layouts=Shard(1), use_local_output=local)
    return result


def _pair(
    rows: int, columns: int, local: bool, mesh: DeviceMesh | None = None
) -> tuple[EncoderDecoder, EncoderDecoder]:
    mesh = grid_mesh(rows, columns) if mesh is None else mesh
    torch.manual_seed(0)
    reference = EncoderDecoder().to(DOUBLE)
    model = copy.deepcopy(reference)
    torch_tp2d.parallelize_module(model, mesh, plan(local))
    return reference, model


def _ids(size: int, sequence: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (size, sequence), generator=generator)


def _train(rows: int, columns: int, local: bool, recompute: bool, lengths: list[int]) -> float:
    reference, model = _pair(rows, columns, local)
    model.recompute = recompute
    return _differ(reference, model, lengths)


def _differ(reference: EncoderDecoder, model: EncoderDecoder, lengths: list[int]) -> float:
    worst = 0.0
    for size, source_length, target_length in (lengths, [lengths[0], *reversed(lengths[1:])]):
        source, target = _ids(size, source_length, 1), _ids(size, target_length, 2)
        wanted = loss_of(reference(source, target), target)
        actual = loss_of(model(source, target), target)
        wanted.backward()
        actual.backward()
        worst = max(worst, relative(actual.detach(), wanted.detach()))
        for param, ours in zip(reference.parameters(), model.parameters(), strict=True):
            assert isinstance(ours.grad, DTensor)
            worst = max(worst, relative(ours.grad, param.grad))
    return worst


@pytest.mark.parametrize("local", [True, deep(False)])
@pytest.mark.parametrize("rows,columns", [(2, 2), deep(1, 4)])
def test_lengths_that_differ(rows: int, columns: int, local: bool) -> None:
    """Keys and values of cross attention were held against the decoder's sizes."""
    for worst in run(rows * columns, _train, rows, columns, local, False, [3, 7, 5]):
        assert worst < 1e-10


def _bare(
    rows: int,
    columns: int,
    lengths: list[int],
    residual: bool,
    target_first: bool = False,
    norms: bool = False,
) -> float:
    torch.manual_seed(0)
    reference = EncoderDecoder().to(DOUBLE)
    reference.target_first = target_first
    for block in (reference.encoder[-1], *reference.decoder):
        block.residual = residual
    reference.memory_norm = nn.Identity()  # type: ignore[assignment]
    entries = plan(True)
    for name, attention in list(reference.named_modules()) if norms else ():
        if isinstance(attention, Attention):
            attention.q_norm, attention.k_norm = nn.RMSNorm(2).to(DOUBLE), nn.RMSNorm(2).to(DOUBLE)
            entries[f"{name}.[qk]_norm"] = torch_tp2d.Replicate(input_layouts=Shard(2))
    model = copy.deepcopy(reference)
    del entries["memory_norm"]
    torch_tp2d.parallelize_module(model, grid_mesh(rows, columns), entries)
    return _differ(reference, model, lengths)


@pytest.mark.parametrize("lengths", [[3, 7, 5], deep([3, 3, 2])])
@pytest.mark.parametrize("rows,columns", [(2, 1), deep(2, 2), deep(1, 4)])
def test_an_encoder_that_ends_with_a_sum(rows: int, columns: int, lengths: list[int]) -> None:
    """A sum of the user's code was held against the tokens that were embedded last.

    Refused where it was no part of them, on some ranks only: a hang. And where three columns have a
    token each, of two that are under way, the last one was taken for what stands in for none.
    """
    for worst in run(rows * columns, _bare, rows, columns, lengths, True):
        assert worst < 1e-10


@pytest.mark.parametrize("rows,columns", [(2, 1), deep(2, 2), deep(1, 4)])
@pytest.mark.parametrize("norms", [deep(False), True])
def test_blocks_that_end_with_a_linear(rows: int, columns: int, norms: bool) -> None:
    """What a Linear makes of the user's own tensors has no certain sizes: these it was taken for.

    An encoder's was held against the decoder's tokens, and refused by the ranks whose part differs.
    So was, once values told the encoder's sizes and normalized heads other dims, a decoder's.
    """
    for worst in run(rows * columns, _bare, rows, columns, [3, 7, 5], False, False, norms):
        assert worst < 1e-10


@pytest.mark.parametrize("residual", [deep(True), False])
@pytest.mark.parametrize("rows,columns", [(2, 1), deep(2, 2), deep(1, 4)])
def test_a_decoder_that_is_embedded_first(rows: int, columns: int, residual: bool) -> None:
    for worst in run(rows * columns, _bare, rows, columns, [3, 7, 5], residual, True):
        assert worst < 1e-10


@pytest.mark.deep
def test_an_encoder_computed_again_for_backward() -> None:
    """By then the decoder's sizes were under way, and the encoder's tokens refused."""
    for worst in run(4, _train, 2, 2, False, True, [3, 7, 5]):
        assert worst < 1e-10


def _handed_on(replicas: int, rows: int, columns: int) -> dict[str, float]:
    """Local streams into blocks of which each is a unit of FSDP2's, or has backward hooks."""
    names = "dp", "tp_row", "tp_col"
    mesh = init_device_mesh(DEVICE, (replicas, rows, columns), mesh_dim_names=names)
    seen = {}
    for units, hooks in product(("blocks", "nested", ""), (False, True)):
        reference, model = _pair(rows, columns, True, mesh["tp_row", "tp_col"])
        blocks: list[Any] = [*model.encoder, *model.decoder]
        for block in blocks if units else ():
            for inside in (block.attention, block.w1) if units == "nested" else ():
                fully_shard(inside, mesh=mesh["dp"])
            fully_shard(block, mesh=mesh["dp"])
        if units:
            fully_shard(model, mesh=mesh["dp"])
        for block in blocks if hooks else ():
            block.register_full_backward_hook(lambda *args: None)
        # Of 5 and 6 tokens on two ranks one holds as many.
        seen[f"{units} {hooks}"] = _differ(reference, model, [3, 6, 5])
    return seen


@pytest.mark.parametrize("shape", [deep((2, 1, 2)), deep((1, 2, 2))])
def test_local_streams_that_are_handed_on_as_other_tensors(shape: tuple[int, int, int]) -> None:
    """A unit of FSDP2's, or a module with a backward hook, is handed views of what it is given.

    Nothing was known of those, so that keys and values were held against the decoder's sizes, and
    refused by the ranks whose part differs.
    """
    for seen in run(4, _handed_on, *shape):
        assert max(seen.values()) < 1e-10, seen


def _unknown_memory() -> str:
    _, model = _pair(2, 2, True)
    block = model.decoder[0]
    memory = model.embed(_ids(4, 8, 1))
    x = model.embed(_ids(4, 12, 2))
    block(x, memory)
    try:
        block(x, (memory + 0).detach())
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_local_stream_of_unknown_origin_is_refused() -> None:
    """A local tensor without a graph, of the user's code, says nothing of other ranks' shards."""
    for message in run(4, _unknown_memory):
        assert "is not this rank's part of the tokens (4, 12)" in message
        assert "or a DTensor" in message


def _beside_another() -> str:
    _, model = _pair(2, 2, True)
    model(_ids(4, 8, 1), _ids(4, 12, 2))
    torch.manual_seed(1)
    reference = nn.Sequential(nn.Linear(HIDDEN, 12), nn.ReLU(), nn.Linear(12, HIDDEN)).to(DOUBLE)
    x = torch.randn(2, 6, HIDDEN, dtype=DOUBLE)
    plan = {"0": Colwise2D(input_layouts=Shard(1)), "2": Rowwise2D(use_local_output=False)}
    result = []
    row, column = divmod(dist.get_rank(), 2)
    for mesh in (grid_mesh(2, 2), model.head.weight.device_mesh):
        mlp = copy.deepcopy(reference)
        torch_tp2d.parallelize_module(mlp, mesh, plan)
        try:
            y = mlp(x[row : row + 1, 3 * column : 3 * column + 3])
            assert relative(y.full_tensor(), reference(x)) < 1e-12
            result.append("right")
        except ValueError as error:
            result.append(str(error))
    return "\n".join(result)


def test_a_model_without_an_embedding_beside_one_that_has_one() -> None:
    """Meshes that compare equal shared the sizes of the last tokens that were embedded.

    A benchmark of a single block, run in a process where a whole model had run before, was
    refused its input, and the message did not say whose tokens those were.
    """
    for message in run(4, _beside_another, fresh=True):
        other, same = message.split("\n")
        assert other == "right"
        assert "of the tokens (4, 12) that were last embedded" in same
        assert "torch_tp2d.token_sizes(" in same and "a mesh of its own" in same
