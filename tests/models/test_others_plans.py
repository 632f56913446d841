"""Plans that others have published, with two classes renamed and the loss, beside one device.

The models are our own, of the same structure as those that the plans were written for: what they
are handed, how they take shapes from it, and what they compute with tables of positions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.testing._internal.distributed._tensor import common_dtensor

from support import world
from support.marks import deep
from support.models import DOUBLE, batch, grid_mesh, loss_of, relative, transformer
from torch_tp2d import Colwise2D, Rowwise2D, parallelize_module

TOLERANCE = 1e-10
GRIDS = [deep(1, 1), (2, 2), deep(1, 4), deep(4, 1), deep(1, 2), deep(2, 1), deep(2, 4), deep(4, 2)]
VOCAB, DIM, HEADS, SIZE, SEQUENCE = 24, 32, 4, 4, 8
Plan = dict[str, Any]


def _rotate_complex(x: Tensor, table: Tensor) -> Tensor:
    """RoPE by complex numbers, as Llama's first code has it; ``x`` is [B, S, heads, D]."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    table = table.view(1, pairs.shape[1], 1, pairs.shape[-1])
    return torch.view_as_real(pairs * table).flatten(3)


def _rotate_halves(x: Tensor, table: Tensor) -> Tensor:
    """RoPE by cosines and sines in one table of reals, as torchtitan's Qwen3 has it."""
    cosine, sine = table.view(1, x.shape[1], 1, 2 * x.shape[-1]).chunk(2, dim=-1)
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cosine + turned * sine


def _table(head_dim: int, length: int, *, as_complex: bool) -> Tensor:
    rates = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=DOUBLE) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=DOUBLE), rates)
    if as_complex:
        return torch.polar(torch.ones_like(angles), angles)
    angles = torch.cat([angles, angles], dim=-1)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class _RMSNorm(nn.Module):
    """A norm in Python, as most models have it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class _Attention(nn.Module):
    """Shapes by the input's first dims, heads by ``n_heads``: whole ones, or local ones."""

    def __init__(self, kv_heads: int, *, as_complex: bool, with_norms: bool) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = HEADS, kv_heads, DIM // HEADS
        self.rotate = _rotate_complex if as_complex else _rotate_halves
        self.wq = nn.Linear(DIM, DIM, bias=False)
        self.wk = nn.Linear(DIM, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(DIM, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(DIM, DIM, bias=False)
        norm = _RMSNorm if as_complex else lambda dim: nn.RMSNorm(dim, eps=1e-5)
        self.q_norm = norm(self.head_dim) if with_norms else None
        self.k_norm = norm(self.head_dim) if with_norms else None

    def forward(
        self, x: Tensor, freqs_cis: Tensor, mask: Any = None, positions: Any = None
    ) -> Tensor:
        assert mask is None and positions is None
        bs, seqlen, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = xq.view(bs, seqlen, self.n_heads, self.head_dim)
        xk = xk.view(bs, seqlen, self.n_kv_heads, self.head_dim)
        xv = xv.view(bs, seqlen, self.n_kv_heads, self.head_dim)
        if self.q_norm is not None:
            xq, xk = self.q_norm(xq), self.k_norm(xk)
        xq, xk = self.rotate(xq, freqs_cis), self.rotate(xk, freqs_cis)
        groups = self.n_heads // self.n_kv_heads
        if groups > 1:
            xk, xv = (
                t[:, :, :, None, :]
                .expand(bs, seqlen, self.n_kv_heads, groups, self.head_dim)
                .reshape(bs, seqlen, self.n_heads, self.head_dim)
                for t in (xk, xv)
            )
        xq, xk, xv = (t.transpose(1, 2) for t in (xq, xk, xv))
        y = F.scaled_dot_product_attention(xq, xk, xv, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(bs, seqlen, -1)
        return self.wo(y)


class _FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(DIM, 3 * DIM, bias=False)
        self.w2 = nn.Linear(3 * DIM, DIM, bias=False)
        self.w3 = nn.Linear(DIM, 3 * DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class _Block(nn.Module):
    def __init__(self, arguments: int, kv_heads: int, **attention: bool) -> None:
        super().__init__()
        self.arguments = arguments
        self.attention = _Attention(kv_heads, **attention)
        self.feed_forward = _FeedForward()
        norm = _RMSNorm if attention["as_complex"] else lambda dim: nn.RMSNorm(dim, eps=1e-5)
        self.attention_norm, self.ffn_norm = norm(DIM), norm(DIM)

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        rest = (None,) * (self.arguments - 2)
        h = x + self.attention(self.attention_norm(x), freqs_cis, *rest)
        return h + self.feed_forward(self.ffn_norm(h))


class _Llama(nn.Module):
    """Llama 2 and 3 (``as_complex``) or Qwen3 (``with_norms``), two blocks of it."""

    def __init__(
        self,
        kv_heads: int = HEADS,
        *,
        arguments: int = 2,
        as_complex: bool = True,
        with_norms: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        table = _table(DIM // HEADS, 2 * SEQUENCE, as_complex=as_complex)
        self.register_buffer("freqs_cis", table, persistent=False)
        self.layers = nn.ModuleList(
            _Block(arguments, kv_heads, as_complex=as_complex, with_norms=with_norms)
            for _ in range(2)
        )
        self.norm = _RMSNorm(DIM) if as_complex else nn.RMSNorm(DIM, eps=1e-5)
        self.output = nn.Linear(DIM, VOCAB, bias=False)
        for param in self.parameters():
            param.data = param.data.to(DOUBLE)
            if param.ndim == 1:
                param.data += torch.randn(param.shape, dtype=DOUBLE) * 0.1

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        freqs_cis = self.freqs_cis[: tokens.shape[1]]
        for layer in self.layers:
            h = layer(h, freqs_cis)
        return self.output(self.norm(h))


def _local_heads(model: nn.Module, columns: int) -> None:
    for layer in model.layers:
        layer.attention.n_heads //= columns
        layer.attention.n_kv_heads //= columns


# The plans, each as its program applies it.


def _root_plan(colwise: Any, rowwise: Any, *, loss_parallel: bool) -> Plan:
    head = {"output_layouts": Replicate()}
    if loss_parallel:
        head = {"output_layouts": Shard(-1), "use_local_output": False}
    return {
        "tok_embeddings": rowwise(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": colwise(input_layouts=Shard(1), **head),
    }


def _block_plan(colwise: Any, rowwise: Any, prepared: tuple[Any, ...], local: bool) -> Plan:
    """``prepared`` are the layouts of what attention is handed after the activation."""
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), *prepared),
            desired_input_layouts=(Replicate(), *prepared),
        ),
        "attention.wq": colwise(use_local_output=local),
        "attention.wk": colwise(use_local_output=local),
        "attention.wv": colwise(use_local_output=local),
        "attention.wo": rowwise(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "feed_forward.w1": colwise(),
        "feed_forward.w2": rowwise(output_layouts=Shard(1)),
        "feed_forward.w3": colwise(),
    }


def _by_layers(model: nn.Module, mesh: DeviceMesh, root: Plan, block: Callable[[], Plan]) -> None:
    parallelize_module(model, mesh, root)
    for layer in model.layers:
        parallelize_module(layer, mesh, block())


def _examples(names: Any, mesh: DeviceMesh, *, loss_parallel: bool) -> tuple[Any, Any]:
    """pytorch/examples' fsdp_tp_example.py of today: DTensors inside attention, no model edit."""
    reference = _Llama()
    model = copy.deepcopy(reference)
    _by_layers(
        model,
        mesh,
        _root_plan(*names, loss_parallel=loss_parallel),
        lambda: _block_plan(*names, (Replicate(),), False),
    )
    return reference, model


def _examples_before(names: Any, mesh: DeviceMesh) -> tuple[Any, Any]:
    """The same program of some years ago, and torchtitan's llama3: local heads inside attention."""
    columns = mesh["tp_col"].size()
    reference = _Llama(HEADS)
    model = copy.deepcopy(reference)
    _by_layers(
        model,
        mesh,
        _root_plan(*names, loss_parallel=False),
        lambda: _block_plan(*names, (None,), True),
    )
    _local_heads(model, columns)
    return reference, model


def _titan_llama3(names: Any, mesh: DeviceMesh) -> tuple[Any, Any]:
    """torchtitan's llama3: four arguments, loss parallel, heads told by -1 in its own code."""
    reference = _Llama(arguments=4)
    model = copy.deepcopy(reference)
    _by_layers(
        model,
        mesh,
        _root_plan(*names, loss_parallel=True),
        lambda: _block_plan(*names, (None, None, None), True),
    )
    _local_heads(model, mesh["tp_col"].size())
    return reference, model


def _titan_qwen3(names: Any, mesh: DeviceMesh) -> tuple[Any, Any]:
    """torchtitan's qwen3: norms of queries and keys by SequenceParallel over the heads."""
    reference = _Llama(arguments=4, as_complex=False, with_norms=True)
    model = copy.deepcopy(reference)
    norms = {
        "attention.q_norm": SequenceParallel(sequence_dim=2),
        "attention.k_norm": SequenceParallel(sequence_dim=2),
    }
    _by_layers(
        model,
        mesh,
        _root_plan(*names, loss_parallel=True),
        lambda: _block_plan(*names, (Replicate(), None, None), False) | norms,
    )
    return reference, model


def _lightning(names: Any, mesh: DeviceMesh) -> tuple[Any, Any]:
    """Lightning's example: the first block shards a replicated embedding's output."""
    colwise, rowwise = names
    reference = _Llama()
    model = copy.deepcopy(reference)
    root = _root_plan(colwise, rowwise, loss_parallel=False) | {
        "tok_embeddings": rowwise(input_layouts=Replicate()),
        "layers.0": PrepareModuleInput(
            input_layouts=(Replicate(), None),
            desired_input_layouts=(Shard(1), None),
            use_local_output=True,
        ),
    }
    _by_layers(model, mesh, root, lambda: _block_plan(colwise, rowwise, (None,), True))
    _local_heads(model, mesh["tp_col"].size())
    return reference, model


def _torch_test(
    names: Any, mesh: DeviceMesh, *, sequence_parallel: bool, local: bool
) -> tuple[Any, Any]:
    """torch's test Transformer by its own ``parallelize``, in which two names are other classes."""
    reference = transformer(VOCAB)
    model = copy.deepcopy(reference)
    own = {
        "ColwiseParallel": names[0],
        "RowwiseParallel": names[1],
        "parallelize_module": parallelize_module,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in own.items():
            patch.setattr(common_dtensor, name, value)
        common_dtensor.Transformer.parallelize(model, mesh, sequence_parallel, local)
    for layer in model.layers:
        if local:
            layer.attention.n_heads = reference.model_args.n_heads // mesh["tp_col"].size()
        elif not sequence_parallel:
            # That plan names no attention, so its shapes would be this row's: one line more.
            whole = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
            parallelize_module(layer.attention, mesh, whole)
    return reference, model


PROGRAMS: dict[str, Callable[[Any, DeviceMesh], tuple[Any, Any]]] = {
    "examples": lambda n, m: _examples(n, m, loss_parallel=False),
    "examples, loss parallel": lambda n, m: _examples(n, m, loss_parallel=True),
    "examples of before": _examples_before,
    "torchtitan llama3": _titan_llama3,
    "torchtitan qwen3": _titan_qwen3,
    "lightning": _lightning,
    "torch test": lambda n, m: _torch_test(n, m, sequence_parallel=True, local=False),
    "torch test, local": lambda n, m: _torch_test(n, m, sequence_parallel=True, local=True),
    "torch test, no sp": lambda n, m: _torch_test(n, m, sequence_parallel=False, local=False),
    "torch test, no sp, local": lambda n, m: _torch_test(n, m, sequence_parallel=False, local=True),
}
NAMES = {"renamed": (Colwise2D, Rowwise2D), "stock": (ColwiseParallel, RowwiseParallel)}


def _loss(logits: Tensor, target: Tensor, mesh: DeviceMesh) -> Tensor:
    """The mean over all tokens, of a DTensor or of this row's whole logits."""
    if isinstance(logits, DTensor):
        return loss_of(logits, target)
    mine = target.tensor_split(mesh.shape[0])[mesh.get_local_rank("tp_row")]
    total = F.cross_entropy(logits.flatten(0, -2), mine.flatten(), reduction="sum")
    return total / target.numel()


def _differences(spelling: str, rows: int, columns: int) -> dict[str, float]:
    mesh = grid_mesh(rows, columns)
    found = {}
    for program, make in PROGRAMS.items():
        reference, model = make(NAMES[spelling], mesh)
        for step in range(2):
            ids, target = batch(SIZE, SEQUENCE, VOCAB, seed=step)
            wanted = loss_of(reference(ids), target)
            logits = model(ids)
            loss = _loss(logits, target, mesh)
            wanted.backward()
            loss.backward()
        loss = loss.detach().clone()
        if not isinstance(logits, DTensor):
            torch.distributed.all_reduce(loss, group=mesh.get_group("tp_row"))
        found[f"{program}: loss"] = relative(loss, wanted.detach())
        for (name, param), ours in zip(
            reference.named_parameters(), model.parameters(), strict=True
        ):
            assert isinstance(ours.grad, DTensor), name
            found[f"{program}: {name}"] = relative(ours.grad, param.grad)
    return found


@pytest.mark.deep
@pytest.mark.parametrize("spelling", ["renamed", deep("stock")])
@pytest.mark.parametrize("rows,columns", GRIDS)
def test_published_programs_equal_one_device(rows: int, columns: int, spelling: str) -> None:
    """Two classes renamed, or none, and the loss over all tokens; the model as it is.

    Attention that computes with DTensors of the global shape took its batch and sequence from a
    local input: a lifted PrepareModuleInput handed on local tensors whatever was inside it, so
    that ``view`` failed for want of elements on more than one row. And a table of positions
    declared ``Replicate()`` was taken for this row's tokens: R times its length.
    """
    for found in world.run(rows * columns, _differences, spelling, rows, columns):
        wrong = {key: value for key, value in found.items() if not value < TOLERANCE}
        assert not wrong, wrong
