"""What a grid is combined with: pipeline stages, experts, adapters, context parallelism."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    SequenceParallel,
)
from torch.distributed.tensor.parallel import parallelize_module as stock_parallelize_module

import torch_tp2d
from support import world
from support.device import DEVICE
from support.dropout import on_one_device
from support.marks import deep
from support.models import (
    batch,
    grid_mesh,
    loss_of,
    parallelize,
    plan_2d,
    relative,
    train_beside,
    transformer,
)
from torch_tp2d import Colwise2D, Rowwise2D

TOLERANCE = 1e-11


class Stage(nn.Module):
    """Some of a Transformer's layers: the first stage has its embeddings, the last its head."""

    def __init__(self, whole: Any, index: int, stages: int) -> None:
        super().__init__()
        share = len(whole.layers) // stages
        self.layers = nn.ModuleDict(
            {str(i): whole.layers[i] for i in range(index * share, (index + 1) * share)}
        )
        if index == 0:
            self.tok_embeddings = whole.tok_embeddings
            self.pos_embeddings = whole.pos_embeddings
        if index == stages - 1:
            self.norm, self.output = whole.norm, whole.output

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "tok_embeddings"):
            positions = torch.arange(x.shape[1])
            x = self.tok_embeddings(x) + self.pos_embeddings(positions)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x)) if hasattr(self, "output") else x


def _pipeline(shape: tuple[int, int, int], schedule: str) -> float:
    """One device's loss and gradients against those of two stages, each on a grid."""
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("pp", "tp_row", "tp_col"))
    stages, rows, columns = shape
    vocab, microbatches, size, sequence = 33, 4, 8, 12
    reference = transformer(vocab, weight_tying=False)
    whole = copy.deepcopy(reference)
    index = mesh.get_local_rank("pp")
    stage = Stage(whole, index, stages)
    plan = {key: s for key, s in plan_2d().items() if hasattr(stage, key.partition(".")[0])}
    grid = mesh["tp_row", "tp_col"]
    torch_tp2d.parallelize_module(stage, grid, plan)
    for layer in stage.layers.values():
        layer.attention.n_heads //= columns

    # What travels from stage to stage: this rank's part of the tokens.
    micro = size // microbatches
    ids, target = batch(size, sequence, vocab)
    local = {"dtype": torch.float64, "requires_grad": True}
    hidden = torch.empty(micro // rows, sequence // columns, 16, **local)
    logits = torch.empty(micro // rows, sequence, vocab, **local)
    first, last = index == 0, index == stages - 1
    piped = PipelineStage(
        stage,
        index,
        stages,
        torch.device("cpu"),
        input_args=ids[:micro] if first else hidden,
        output_args=logits if last else hidden,
        group=mesh.get_group("pp"),
    )
    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
    losses: list[Tensor] = []
    run = kind(piped, microbatches, loss_fn=loss_of)
    run.step(*((ids,) if first else ()), **({"target": target, "losses": losses} if last else {}))

    wanted = loss_of(reference(ids), target)
    wanted.backward()
    worst = 0.0
    if last:
        worst = relative(torch.stack([loss.detach() for loss in losses]).mean(), wanted.detach())
    theirs = dict(Stage(reference, index, stages).named_parameters())
    for name, param in stage.named_parameters():
        assert isinstance(param.grad, DTensor)
        worst = max(worst, relative(param.grad, theirs[name].grad))
    return worst


@pytest.mark.parametrize(
    "shape,schedule",
    [
        ((2, 2, 1), "1f1b"),
        ((2, 1, 2), "gpipe"),
        deep((2, 2, 2), "1f1b"),
    ],
)
def test_pipeline_stages_on_grids(shape: tuple[int, int, int], schedule: str) -> None:
    """Local tensors travel between stages, each rank's to its like; microbatches are whole."""
    assert max(world.run(math.prod(shape), _pipeline, shape, schedule)) < TOLERANCE


class Swiglu(nn.Module):
    """Gated feed-forward, as Llama's."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Grouped(nn.Module):
    """Causal attention whose heads are counted from what the projections give."""

    def __init__(self, hidden: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(hidden, hidden, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class LlamaLike(nn.Module):
    """One layer, with Llama's names."""

    def __init__(self, vocab: int, hidden: int = 8, inner: int = 14) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.self_attn, self.mlp = Grouped(hidden, 2), Swiglu(hidden, inner)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        x = x + self.self_attn(self.input_layernorm(x))
        x = x + self.mlp(self.post_attention_layernorm(x))
        return self.lm_head(x)


def llama_plan(*, tokens: bool) -> dict[str, Any]:
    """The residual stream split by tokens, or by rows alone."""
    stream = Shard(1) if tokens else Replicate()
    norm: Any = SequenceParallel() if tokens else torch_tp2d.Replicate()
    plan = {
        "embed_tokens": Rowwise2D(output_layouts=stream),
        "*norm": norm,
        "self_attn.[qkv]_proj": Colwise2D(),
        "self_attn.o_proj": Rowwise2D(output_layouts=stream),
        "mlp.gate_proj": Colwise2D(input_layouts=stream),
        "mlp.up_proj": ColwiseParallel(input_layouts=stream),
        "mlp.down_proj": Rowwise2D(output_layouts=stream),
        "lm_head": Colwise2D(input_layouts=stream, use_local_output=False),
    }
    if tokens:
        plan["self_attn"] = PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate()
        )
    return plan


def _adapters(tokens: bool, rows: int, columns: int) -> dict[str, float]:
    """Three AdamW steps of the adapters alone, then merged into the weights, and taken out."""
    from peft import LoraConfig, get_peft_model

    vocab, dropout = 33, 0.3
    every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=3, target_modules=every, lora_dropout=dropout, init_lora_weights=False)
    adapted = get_peft_model(LlamaLike(vocab), config)
    adapted.double()
    reference = on_one_device(adapted)
    model = adapted.get_base_model()
    torch_tp2d.parallelize_module(model, grid_mesh(rows, columns), llama_plan(tokens=tokens))

    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    parts = reference, adapted
    optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in parts]
    seen = {"loss": 0.0, "gradient": 0.0, "parameter": 0.0}
    for step in range(3):
        ids, target = batch(3, 13, vocab, seed=step)
        losses = []
        for part in parts:
            torch.manual_seed(step)
            losses.append(loss_of(part(ids), target))
            losses[-1].backward()
        seen["loss"] = max(seen["loss"], relative(losses[1].detach(), losses[0].detach()))
        for (name, param), ours in zip(
            reference.named_parameters(), adapted.parameters(), strict=True
        ):
            assert (ours.grad is not None) is (name in trained), name
            if name in trained:
                seen["gradient"] = max(seen["gradient"], relative(ours.grad, param.grad))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for param, ours in zip(reference.parameters(), adapted.parameters(), strict=True):
        seen["parameter"] = max(seen["parameter"], relative(ours.detach(), param.detach()))

    with torch.no_grad():
        for part in parts:
            part.eval()
        wanted = reference(ids)
        adapted.merge_adapter()
        seen["merged"] = relative(model(ids), wanted)
        adapted.unmerge_adapter()
        seen["unmerged"] = relative(model(ids), wanted)
        seen["unloaded"] = relative(adapted.merge_and_unload()(ids), wanted)
    return seen


def _adapters_on(rows: int, columns: int) -> list[dict[str, float]]:
    # Importing peft takes a rank longer than all the rest.
    return [_adapters(tokens, rows, columns) for tokens in (True, False)]


@pytest.mark.parametrize("rows,columns", [deep(2, 2), deep(1, 4)])
def test_lora_by_peft(rows: int, columns: int) -> None:
    """A plan written for the model as it was, on the model with adapters."""
    pytest.importorskip("peft")
    for seen in world.run(rows * columns, _adapters_on, rows, columns):
        for differences in seen:
            assert max(differences.values()) < TOLERANCE, differences


class Experts(nn.Module):
    """Weights of all experts in two tensors, ``[experts, hidden, inner]`` and back.

    Given tokens sorted by expert, ``[tokens, hidden]``, and how many there are for each.
    """

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(experts, hidden, inner) / hidden**0.5)
        self.w2 = nn.Parameter(torch.randn(experts, inner, hidden) / inner**0.5)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        w1, w2 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2))
        pieces = x.split(counts.tolist())
        return torch.cat(
            [F.gelu(p @ up) @ down for p, up, down in zip(pieces, w1, w2, strict=True)]
        )


class ExpertParallel(ParallelStyle):
    """Whole experts on each rank, tokens sent to them: torch's tools, as a user has them."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for name, param in list(module.named_parameters()):
            placed = distribute_tensor(param.detach(), mesh, [Shard(0)] * mesh.ndim)
            module.register_parameter(name, nn.Parameter(placed))
        inner, world_group = module.forward, dist.group.WORLD
        size = mesh.size()

        def forward(x: Tensor, counts: Tensor) -> Tensor:
            """To the experts' ranks, sorted there by expert, through them, and back."""
            theirs = torch.empty_like(counts)
            dist.all_to_all_single(theirs, counts)
            sent = counts.view(size, -1).sum(1).tolist()
            got = theirs.view(size, -1).sum(1).tolist()
            arrived = all_to_all_single_autograd(x, got, sent, world_group)
            expert = torch.arange(theirs.numel()) % (theirs.numel() // size)
            order = expert.repeat_interleave(theirs).argsort(stable=True)
            y = inner(arrived[order], theirs.view(size, -1).sum(0))
            return all_to_all_single_autograd(y[order.argsort()], sent, got, world_group)

        module.forward = forward  # type: ignore[method-assign]
        return module


class MixtureOfExperts(nn.Module):
    """Each token to the expert that the router likes best, weighted by how much."""

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = Experts(experts, hidden, inner)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, chosen = self.router(x).flatten(0, 1).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=self.router.out_features)
        y = self.experts(flat[order], counts)[order.argsort()]
        return (y * weight.unsqueeze(-1)).view_as(x)


def _experts(rows: int, columns: int) -> float:
    mesh = grid_mesh(rows, columns)
    vocab = 33
    reference = transformer(vocab)
    torch.manual_seed(1)
    reference.layers[1].feed_forward = MixtureOfExperts(8, 16, 24).double()
    model = copy.deepcopy(reference)
    plan = plan_2d()
    for name in ("w1", "w2"):
        plan[f"layers.0.feed_forward.{name}"] = plan.pop(f"layers.*.feed_forward.{name}")
    # Tokens stay where they are: the router and the sending take them one by one.
    here = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1))
    plan["layers.1.feed_forward"] = here
    plan["layers.1.feed_forward.router"] = torch_tp2d.Replicate()
    stock_parallelize_module(model, mesh, {"layers.1.feed_forward.experts": ExpertParallel()})
    parallelize(model, mesh, plan)
    assert {param.device_mesh for param in model.parameters()} == {mesh}
    return train_beside(reference, model, vocab, 3, 13)


@pytest.mark.parametrize("rows,columns", [(1, 2), deep(2, 2), deep(4, 1)])
def test_experts_of_torch_beside_a_grid(rows: int, columns: int) -> None:
    """Experts over all ranks of the grid, on its mesh: their gradients need no sum over rows."""
    assert max(world.run(rows * columns, _experts, rows, columns)) < TOLERANCE


def _context_parallel() -> None:
    mesh = init_device_mesh(DEVICE, (2, 1, 2), mesh_dim_names=("cp", "tp_row", "tp_col"))
    model = transformer(8)
    parallelize(model, mesh["tp_row", "tp_col"], plan_2d())
    ids, _ = batch(2, 8, 8)
    with context_parallel(mesh["cp"], buffers=[ids], buffer_seq_dims=[1]):
        with pytest.raises(NotImplementedError, match="attention on a CPU with a query placed"):
            model(ids)


def test_context_parallel_is_refused_on_a_cpu() -> None:
    """torch 2.13's ring knows the flash, efficient and cuDNN kernels, and none of a CPU's."""
    world.run(4, _context_parallel)


class Adapted(nn.Module):
    """A Linear with adapters, laid out as peft lays it out."""

    def __init__(self, down: nn.Module, up: nn.Module) -> None:
        super().__init__()
        self.in_features = 8
        self.base_layer = nn.Linear(8, 8)
        self.lora_A, self.lora_B = nn.ModuleDict({"a": down}), nn.ModuleDict({"a": up})
        self.lora_dropout = nn.ModuleDict()


def _refusals() -> list[str]:
    mesh = grid_mesh(1, 2)
    linear = nn.Linear(8, 8)
    cases: list[tuple[nn.Module, Any]] = [
        (Adapted(nn.Conv1d(8, 3, 1), nn.Conv1d(3, 8, 1)), Colwise2D()),
        (Adapted(linear, linear), torch_tp2d.Norm2D()),
        (Adapted(linear, linear), Colwise2D(dataflow="weight_stationary")),
    ]
    messages = []
    for module, style in cases:
        with pytest.raises(ValueError) as raised:
            torch_tp2d.parallelize_module(
                nn.ModuleDict({"q_proj": module}), mesh, {"q_proj": style}
            )
        messages.append(str(raised.value))
    return messages


def test_adapters_that_no_style_knows_are_refused() -> None:
    for conv, norm, stationary in world.run(2, _refusals):
        assert conv.startswith("'q_proj'") and "other than pairs of Linear" in conv
        assert "Norm2D for a layer with adapters" in norm
        assert "with a weight that moves" in stationary
