"""The model that most tests train, in fp64, and its plans."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

import torch_tp2d
from torch_tp2d import Colwise2D, Lifted, Rowwise2D

from .device import DEVICE

# torch's Transformer ends in `.float()`, which would round the fp64 logits to fp32.
DOUBLE = torch.float64

EVEN, UNEVEN = (4, 8, 8), (3, 13, 33)
"""Batch, sequence, vocab. On 4 rows a batch of 3 leaves one without tokens."""


class DoubleTransformer(Transformer):
    """torch's own test Transformer (tied embeddings, causal attention) that stays in fp64."""

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        h = h + self.pos_embeddings(torch.arange(0, tokens.shape[1], device=tokens.device))
        h = self.dropout(h)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


class RMSNorm(nn.Module):
    """A norm of somebody's own, as Qwen3's, Gemma 3's and OLMo 2's are."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Mlp(nn.Module):
    """Two Linears, behind an embedding or not."""

    HIDDEN, VOCAB = 12, 11

    def __init__(self, embeds: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(self.VOCAB, self.HIDDEN) if embeds else None
        self.net1, self.net2 = nn.Linear(self.HIDDEN, 16), nn.Linear(16, self.HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        return self.net2(torch.relu(self.net1(x)))


def grid_mesh(rows: int, columns: int) -> DeviceMesh:
    return init_device_mesh(DEVICE, (rows, columns), mesh_dim_names=("tp_row", "tp_col"))


def transformer(vocab: int = 8, seed: int = 0, **args: Any) -> DoubleTransformer:
    torch.manual_seed(seed)
    args = {"dropout_p": 0.0, **args}
    return DoubleTransformer(ModelArgs(vocab_size=vocab, **args)).to(DOUBLE)


def batch(size: int, sequence: int, vocab: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (size, sequence), generator=generator)
    return ids, torch.randint(0, vocab, (size, sequence), generator=generator)


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def tutorial_plan(colwise: Any, rowwise: Any, **head: Any) -> dict[str, Any]:
    """The PyTorch tutorial's plan; which classes it is made of is all that sets 2-D apart."""
    attention = "layers.*.attention"
    return {
        "tok_embeddings": rowwise(input_layouts=Replicate(), output_layouts=Shard(1)),
        "pos_embeddings": rowwise(input_layouts=Replicate(), output_layouts=Shard(0)),
        "layers.*.attention_norm": SequenceParallel(),
        attention: PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        f"{attention}.wq": colwise(),
        f"{attention}.wk": colwise(),
        f"{attention}.wv": colwise(),
        f"{attention}.wo": rowwise(output_layouts=Shard(1)),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.feed_forward.w1": colwise(input_layouts=Shard(1)),
        "layers.*.feed_forward.w2": rowwise(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": colwise(input_layouts=Shard(1), **{"use_local_output": False, **head}),
    }


def plan_2d(**head: Any) -> dict[str, Any]:
    return tutorial_plan(Colwise2D, Rowwise2D, **head)


def plan_mixed() -> dict[str, Any]:
    """Stock attention beside a 2-D MLP and 2-D embeddings."""
    plan = plan_2d()
    for name in ("wq", "wk", "wv"):
        plan[f"layers.*.attention.{name}"] = ColwiseParallel()
    plan["layers.*.attention.wo"] = RowwiseParallel(output_layouts=Shard(1))
    return plan


def plan_dtensor() -> dict[str, Any]:
    """Attention on DTensors of the global shape, so that the model needs no edit at all."""
    plan = plan_2d()
    for name in ("wq", "wk", "wv"):
        plan[f"layers.*.attention.{name}"] = Colwise2D(use_local_output=False)
    plan["layers.*.attention"] = Lifted(plan["layers.*.attention"], use_local_output=False)
    return plan


def plan_without_sequence_parallel(**head: Any) -> dict[str, Any]:
    """The stock tensor-parallel plan: norms are named by no entry."""
    return {
        "tok_embeddings": Rowwise2D(input_layouts=Replicate(), output_layouts=Replicate()),
        "pos_embeddings": Rowwise2D(input_layouts=Replicate(), output_layouts=Replicate()),
        "layers.*.attention.w[qkv]": Colwise2D(),
        "layers.*.attention.wo": Rowwise2D(),
        "layers.*.feed_forward.w1": Colwise2D(),
        "layers.*.feed_forward.w2": Rowwise2D(),
        "output": Colwise2D(**{"use_local_output": False, **head}),
    }


def local_heads(model: nn.Module, columns: int) -> None:
    """The tutorial's own edit: attention views local heads."""
    for layer in model.layers:
        layer.attention.n_heads = layer.attention.n_heads // columns


def parallelize(model: nn.Module, mesh: DeviceMesh, plan: dict[str, Any], **kwargs: Any) -> None:
    torch_tp2d.parallelize_module(model, mesh, plan, **kwargs)
    attention = plan.get("layers.*.attention")
    if not isinstance(attention, Lifted):
        local_heads(model, mesh["tp_col"].size())


def relative(actual: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted."""
    actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
    scale = wanted.norm().item()
    return (actual - wanted).norm().item() / (scale if scale else 1.0)


def differences_of_row(
    model: nn.Module, reference: nn.Module, rows: int, row: int
) -> dict[str, float]:
    """Of a row's local output, and of trained parameters' gradients, for ``[4, 3, 8]``."""
    x = torch.randn(4, 3, 8, dtype=torch.float64)
    wanted, y = reference(x), model(x.chunk(rows)[row])
    wanted.sin().sum().backward()
    y.sin().sum().backward()
    seen = {"output": relative(y, wanted.chunk(rows)[row])}
    for (name, ours), param in zip(model.named_parameters(), reference.parameters(), strict=True):
        if param.requires_grad:
            seen[name] = relative(ours.grad.full_tensor(), param.grad)
    return seen


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy, of whole logits on one device or of a DTensor on a mesh."""
    if isinstance(logits, DTensor):
        return torch_tp2d.cross_entropy(logits, target)
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def train_beside(
    reference: nn.Module,
    model: nn.Module,
    vocab: int,
    size: int,
    sequence: int,
    steps: int = 3,
    **adamw: Any,
) -> float:
    """Train both by AdamW with clipped gradients; the largest relative difference of anything."""
    optimizers = [
        torch.optim.AdamW(part.parameters(), lr=1e-2, **adamw) for part in (reference, model)
    ]
    worst = 0.0
    for step in range(steps):
        ids, target = batch(size, sequence, vocab, seed=step)
        wanted, loss = loss_of(reference(ids), target), loss_of(model(ids), target)
        wanted.backward()
        loss.backward()
        worst = max(worst, relative(loss.detach(), wanted.detach()))
        for (name, param), ours in zip(
            reference.named_parameters(), model.parameters(), strict=True
        ):
            assert ours.grad is not None, name
            assert ours.grad.placements == ours.placements, (name, ours.grad.placements)
            worst = max(worst, relative(ours.grad, param.grad))
        norms = [
            torch.nn.utils.clip_grad_norm_(part.parameters(), 0.5) for part in (reference, model)
        ]
        worst = max(worst, relative(norms[1], norms[0]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for param, ours in zip(reference.parameters(), model.parameters(), strict=True):
            worst = max(worst, relative(ours.detach(), param.detach()))
    return worst


def train_by(
    plan: Callable[[], dict[str, Any]], rows: int, columns: int, sizes: tuple[int, int, int]
) -> tuple[float, float]:
    """The largest difference of training by a plan; a rank's share of the weights, times ranks."""
    size, sequence, vocab = sizes
    mesh = grid_mesh(rows, columns)
    reference = transformer(vocab)
    model = copy.deepcopy(reference)
    parallelize(model, mesh, plan())
    assert {param.device_mesh for param in model.parameters()} == {mesh}
    assert model.output.weight is model.tok_embeddings.weight
    held = sum(param.to_local().numel() for param in model.parameters())
    share = held * mesh.size() / sum(param.numel() for param in reference.parameters())
    return train_beside(reference, model, vocab, size, sequence), share


def train_with_algorithm(algorithm: str, rows: int, columns: int) -> float:
    size, sequence, vocab = UNEVEN
    reference = transformer(vocab)
    model = copy.deepcopy(reference)

    def with_algorithm(style: Any) -> Any:
        linear = isinstance(style, torch_tp2d.Colwise2D | torch_tp2d.Rowwise2D)
        if linear:
            style.algorithm = algorithm
        return style

    plan = {
        key: style if "embeddings" in key else with_algorithm(style)
        for key, style in plan_2d().items()
    }
    parallelize(model, grid_mesh(rows, columns), plan)
    return train_beside(reference, model, vocab, size, sequence)
