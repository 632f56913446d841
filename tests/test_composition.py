"""What a grid is combined with: pipeline stages, experts, adapters, context parallelism."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import world
from models import batch, local_heads, loss_of, plan_2d, relative, transformer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor

import torch_tp2d

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
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "tp_row", "tp_col"))
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


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("shape", [(2, 2, 1), (2, 1, 2)])
def test_pipeline_stages_on_grids(shape: tuple[int, int, int], schedule: str) -> None:
    assert max(world.run(4, _pipeline, shape, schedule)) < TOLERANCE
