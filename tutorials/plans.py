"""Ways to lay the GPT-2 of ``gpt2.py`` and the Llama 2 of ``llama2.py`` over the same devices.

``plan_1d_sequence`` is what a PyTorch user writes today. ``plan_2d`` is that plan with
``ColwiseParallel`` renamed to ``Colwise2D``, ``RowwiseParallel`` to ``Rowwise2D``, and applied to
``mesh["tp_row", "tp_col"]`` instead of ``mesh["tp"]``: read them side by side.
``llama2_1d`` and ``llama2_2d`` are the two again for Llama 2.
"""

from __future__ import annotations

import torch.nn as nn
from gpt2 import GPT2
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import torch_tp2d
from torch_tp2d import Colwise2D, Rowwise2D

Plan = dict[str, ParallelStyle]


class Replicated(ParallelStyle):
    """Runs a module whole on every rank, its parameters replicated on the mesh.

    torch has no such style. Without it the norms of a plan that does not shard the sequence stay
    plain tensors, which ``clip_grad_norm_`` and AdamW refuse to mix with DTensors.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_module: nn.Module, inputs: tuple, mesh: DeviceMesh) -> DTensor:
            return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)

        def leave(_module: nn.Module, output: DTensor, _mesh: DeviceMesh) -> object:
            return output.to_local()

        return distribute_module(module, device_mesh, None, enter, leave)


def plan_1d() -> Plan:
    """Stock tensor parallelism: the residual stream is whole on every rank."""
    return {
        "wte": RowwiseParallel(input_layouts=Replicate()),
        "wpe": RowwiseParallel(input_layouts=Replicate()),
        "h.*.ln_1": Replicated(),
        "h.*.attn.q_proj": ColwiseParallel(),
        "h.*.attn.k_proj": ColwiseParallel(),
        "h.*.attn.v_proj": ColwiseParallel(),
        "h.*.attn.c_proj": RowwiseParallel(),
        "h.*.ln_2": Replicated(),
        "h.*.mlp.c_fc": ColwiseParallel(),
        "h.*.mlp.c_proj": RowwiseParallel(),
        "ln_f": Replicated(),
        "lm_head": ColwiseParallel(use_local_output=False),
    }


def plan_1d_sequence() -> Plan:
    """Stock tensor and sequence parallelism: the residual stream is split by sequence."""
    return {
        "wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "wpe": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "h.*.ln_1": SequenceParallel(),
        "h.*.attn": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "h.*.attn.q_proj": ColwiseParallel(),
        "h.*.attn.k_proj": ColwiseParallel(),
        "h.*.attn.v_proj": ColwiseParallel(),
        "h.*.attn.c_proj": RowwiseParallel(output_layouts=Shard(1)),
        "h.*.ln_2": SequenceParallel(),
        "h.*.mlp.c_fc": ColwiseParallel(input_layouts=Shard(1)),
        "h.*.mlp.c_proj": RowwiseParallel(output_layouts=Shard(1)),
        "ln_f": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }


def plan_2d() -> Plan:
    """The same on a grid: a layout speaks of ``tp_col``; ``tp_row`` splits the batch."""
    return {
        "wte": Rowwise2D(input_layouts=Replicate(), output_layouts=Shard(1)),
        "wpe": Rowwise2D(input_layouts=Replicate(), output_layouts=Shard(0)),
        "h.*.ln_1": SequenceParallel(),
        "h.*.attn": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "h.*.attn.q_proj": Colwise2D(),
        "h.*.attn.k_proj": Colwise2D(),
        "h.*.attn.v_proj": Colwise2D(),
        "h.*.attn.c_proj": Rowwise2D(output_layouts=Shard(1)),
        "h.*.ln_2": SequenceParallel(),
        "h.*.mlp.c_fc": Colwise2D(input_layouts=Shard(1)),
        "h.*.mlp.c_proj": Rowwise2D(output_layouts=Shard(1)),
        "ln_f": SequenceParallel(),
        "lm_head": Colwise2D(input_layouts=Shard(1), use_local_output=False),
    }


def plan_bmr() -> Plan:
    """The grid again, its matrix products by broadcast-multiply-roll (square grids only)."""
    return plan_2d() | {
        "h.*.attn.q_proj": Colwise2D(algorithm="bmr"),
        "h.*.attn.k_proj": Colwise2D(algorithm="bmr"),
        "h.*.attn.v_proj": Colwise2D(algorithm="bmr"),
        "h.*.attn.c_proj": Rowwise2D(output_layouts=Shard(1), algorithm="bmr"),
        "h.*.mlp.c_fc": Colwise2D(input_layouts=Shard(1), algorithm="bmr"),
        "h.*.mlp.c_proj": Rowwise2D(output_layouts=Shard(1), algorithm="bmr"),
        "lm_head": Colwise2D(input_layouts=Shard(1), use_local_output=False, algorithm="bmr"),
    }


def llama2_1d() -> Plan:
    """Stock tensor and sequence parallelism of Llama 2."""
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.attention_norm": SequenceParallel(),
        # The second input is the rotary table.
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        "layers.*.attention.wq": ColwiseParallel(),
        "layers.*.attention.wk": ColwiseParallel(),
        "layers.*.attention.wv": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.feed_forward": PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate()
        ),
        "layers.*.feed_forward.w1": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.feed_forward.w3": ColwiseParallel(),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }


def llama2_2d() -> Plan:
    """The same on a grid."""
    return {
        "tok_embeddings": Rowwise2D(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.attention_norm": SequenceParallel(),
        # The second input is the rotary table.
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        "layers.*.attention.wq": Colwise2D(),
        "layers.*.attention.wk": Colwise2D(),
        "layers.*.attention.wv": Colwise2D(),
        "layers.*.attention.wo": Rowwise2D(output_layouts=Shard(1)),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.feed_forward": PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate()
        ),
        "layers.*.feed_forward.w1": Colwise2D(),
        "layers.*.feed_forward.w2": Rowwise2D(output_layouts=Shard(1)),
        "layers.*.feed_forward.w3": Colwise2D(),
        "norm": SequenceParallel(),
        "output": Colwise2D(input_layouts=Shard(1), use_local_output=False),
    }


PLANS_1D = {"1d": plan_1d, "1d-sp": plan_1d_sequence}
PLANS_2D = {"2d": plan_2d, "bmr": plan_bmr}
LLAMA2_PLANS = {"1d": llama2_1d, "2d": llama2_2d}


def parallelize(model: GPT2, mesh: DeviceMesh, plan: str) -> None:
    """Applies a plan by name, in place.

    Args:
        model: with its weights, the same on every rank.
        mesh: has the axis ``tp`` for ``"1d"`` and ``"1d-sp"``, and ``tp_row`` and ``tp_col`` for
            ``"2d"`` and ``"bmr"``.
        plan: the name.
    """
    if plan in PLANS_1D:
        parallelize_module(model, mesh["tp"], PLANS_1D[plan]())
        # Each style made a parameter of its own: tie the head to the embedding again.
        model.lm_head.weight = model.wte.weight
    else:
        torch_tp2d.parallelize_module(model, mesh["tp_row", "tp_col"], PLANS_2D[plan]())
