"""What a step waits for with no product beside it, by a rank's record (``support/record.py``).

Nothing is timed: seconds are worked out from stated rates of a machine.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from expecttest import TestCase
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.parallel import parallelize_module as stock_parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel

from support.record import Exposed, Machine, Record, Recorder, as_rank
from support.steps import PLANS, Step, ready, record, token_ids

transformers = pytest.importorskip("transformers")


def _large_llama(layers: int) -> Any:
    """Of Llama 3 8B's blocks."""
    config = transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(default)


Passes = tuple[Record, Record]
"""Of a forward and a backward."""


def _passes(step: Step, device: str = "meta") -> Passes:
    step().backward()
    with Recorder(device) as forward:
        loss = step()
    with Recorder(device) as backward:
        loss.backward()
    return forward.record, backward.record


def _on_grid(layers: int, shape: tuple[int, int], **options: Any) -> Passes:
    """A sequence of 8192 for each row, by the ready plan."""
    case = ready(lambda: _large_llama(layers), (shape[0], 8192), **options)
    with as_rank(5, *shape) as mesh:
        return _passes(case(mesh, "meta"))


def _fsdp_x_tp(layers: int, shape: tuple[int, int]) -> Passes:
    """The same by FSDP2 over rows and stock TP with sequence parallelism over columns.

    What FSDP2 gathers for the next layer is said to it, so that the order of the record is that of
    its stream. FSDP2 takes no meta tensors, and so these are fake ones.
    """
    stream: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False}
    layer = "layers.*"
    plan = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), **stream),
        f"{layer}.input_layernorm": SequenceParallel(),
        f"{layer}.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        f"{layer}.self_attn.[qkv]_proj": ColwiseParallel(),
        f"{layer}.self_attn.o_proj": RowwiseParallel(**stream),
        f"{layer}.post_attention_layernorm": SequenceParallel(),
        f"{layer}.mlp": PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate()
        ),
        f"{layer}.mlp.gate_proj": ColwiseParallel(),
        f"{layer}.mlp.up_proj": ColwiseParallel(),
        f"{layer}.mlp.down_proj": RowwiseParallel(**stream),
        "norm": SequenceParallel(),
    }
    with as_rank(5, 1, *shape) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        model = _large_llama(layers).model
        stock_parallelize_module(model, mesh["tp_col"], plan)
        with unset_fake_temporarily():
            for block in (*model.layers, model):
                fully_shard(block, mesh=mesh["tp_row"])
        for block, following in pairwise(model.layers):
            block.set_modules_to_forward_prefetch([following])
        ids = token_ids((1, 8192), "cpu")
        with sdpa_kernel(SDPBackend.MATH):
            return _passes(lambda: model(input_ids=ids).last_hidden_state.to_local().sum(), "cpu")


def _of_a_block(passes: Callable[[int], Passes]) -> list[Exposed]:
    """Forward and backward of one block, the rest left out by difference."""
    more, fewer = passes(3), passes(2)
    return [
        Exposed.of(a, Machine()) - Exposed.of(b, Machine())
        for a, b in zip(more, fewer, strict=True)
    ]


def _block_on(*shape: int) -> str:
    default = _of_a_block(lambda layers: _on_grid(layers, shape))
    assert all(one.exposed <= 0.1 * one.received for one in default)
    by_each = {
        "default": default,
        "collective": _of_a_block(lambda layers: _on_grid(layers, shape, algorithm="collective")),
        "FSDP2 x TP": _of_a_block(lambda layers: _fsdp_x_tp(layers, shape)),
    }
    return "\n".join(
        f"{name:10} {which:8} {one}"
        for name, passes in by_each.items()
        for which, one in zip(("forward", "backward"), passes, strict=True)
    )


class TestOverlap(TestCase):
    """A line each: bytes that a rank receives, those exposed, and seconds by stated rates."""

    maxDiff = None

    def test_a_llama_block_on_4_x_4(self) -> None:
        self.assertExpectedInline(
            _block_on(4, 4),
            """\
default    forward  270 MiB, 0.0 % exposed; 0.32 ms waiting, 2.92 ms computing
default    backward 348 MiB, 0.0 % exposed; 0.18 ms waiting, 5.84 ms computing
collective forward  270 MiB, 100.0 % exposed; 2.28 ms waiting, 2.92 ms computing
collective backward 348 MiB, 55.2 % exposed; 0.73 ms waiting, 5.84 ms computing
FSDP2 x TP forward  270 MiB, 71.1 % exposed; 0.71 ms waiting, 2.92 ms computing
FSDP2 x TP backward 348 MiB, 55.2 % exposed; 0.73 ms waiting, 5.84 ms computing""",
        )

    @pytest.mark.deep
    def test_a_llama_block_on_8_x_8(self) -> None:
        self.assertExpectedInline(
            _block_on(8, 8),
            """\
default    forward  270 MiB, 0.0 % exposed; 0.73 ms waiting, 1.46 ms computing
default    backward 315 MiB, 0.0 % exposed; 0.44 ms waiting, 2.92 ms computing
collective forward  270 MiB, 100.0 % exposed; 1.76 ms waiting, 1.46 ms computing
collective backward 315 MiB, 71.1 % exposed; 0.87 ms waiting, 2.92 ms computing
FSDP2 x TP forward  270 MiB, 83.1 % exposed; 0.82 ms waiting, 1.46 ms computing
FSDP2 x TP backward 315 MiB, 71.1 % exposed; 0.84 ms waiting, 2.92 ms computing""",
        )

    @pytest.mark.deep
    def test_ready_plans(self) -> None:
        seen = {name: Exposed.of(record(case, 0, 2, 2), Machine()) for name, case in PLANS.items()}
        self.assertExpectedInline(
            "\n".join(
                f"{name:28} {one.exposed:6} of {one.received:6} B" for name, one in seen.items()
            ),
            """\
llama                          3044 of  24740 B
llama pipelined                3488 of  29792 B
llama collective              20384 of  29792 B
llama odd                     25720 of  93544 B
qwen2                          3044 of  24868 B
gpt2                           6116 of  34660 B
gpt2 odd                      12232 of  33928 B
bert                           8496 of  35252 B
t5                             6176 of  70752 B
swin                         384604 of 568068 B
llama rows split sequences    31124 of  93764 B
gpt2 rows split sequences     12244 of  42836 B
bert rows split sequences     14580 of  38776 B
t5 rows split sequences       22484 of  81172 B
whole streams                 14464 of  30944 B
whole logits                   9184 of  37728 B""",
        )
