"""What a step does on NCCL's transport, without a GPU: every rank's record (``support/record.py``).

Meta tensors stand for a GPU's: whatever mixes them with a CPU's, asks for a value, or makes a
tensor of a list is a fault, as it is an error there or stops the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
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

import torch_tp2d
from support.decoders import SIZES, VOCAB
from support.marks import deep
from support.record import Collective, Exposed, Machine, Record, Recorder, as_rank, disagreement
from torch_tp2d import (
    Attention2D,
    Block2DParallel,
    Colwise2D,
    Lifted,
    Norm2D,
    Rowwise2D,
    attention_projections,
    plan_for,
)
from torch_tp2d.mesh.extents import ask_sizes
from torch_tp2d.mesh.grid import Grid

transformers = pytest.importorskip("transformers")

Step = Callable[[], Any]
Case = Callable[[DeviceMesh, str], Step]
"""Applies a plan to a model on a device, and returns what runs a step's forward to its loss."""

EVEN, UNEVEN = (4, 8), (5, 7)


def _ids(size: tuple[int, int], device: str) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int64, device=device)


def _llama(**config: Any) -> Any:
    sizes = {**SIZES, "attention_dropout": 0.1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **config}))


def _llama_odd() -> Any:
    """Three query heads to a key head, neither a multiple of 2."""
    return _llama(hidden_size=36, num_attention_heads=9, num_key_value_heads=3)


def _qwen2() -> Any:
    config = transformers.Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return transformers.Qwen2ForCausalLM(config)


def _gpt2(heads: int = 4) -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=4 * heads, n_layer=2, n_head=heads
    )
    assert config.resid_pdrop and config.embd_pdrop and config.attn_pdrop
    return transformers.GPT2LMHeadModel(config)


def _bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    assert config.hidden_dropout_prob and config.attention_probs_dropout_prob
    return transformers.BertForMaskedLM(config)


def _t5() -> Any:
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    assert config.dropout_rate
    return transformers.T5ForConditionalGeneration(config)


def _swin() -> Any:
    config = transformers.SwinConfig(
        image_size=18,
        patch_size=2,
        embed_dim=24,
        depths=(2, 2),
        num_heads=(4, 8),
        window_size=4,
        num_labels=3,
        drop_path_rate=0.0,
    )
    return transformers.SwinForImageClassification(config)


def ready(
    build: Callable[[], Any],
    size: tuple[int, int] = EVEN,
    edit: Callable[[dict[str, Any], Any, DeviceMesh], None] | None = None,
    **options: Any,
) -> Case:
    """A model by its ready plan."""

    def apply(mesh: DeviceMesh, device: str) -> Step:
        with torch.device(device):
            model = build().train()
        plan = plan_for(model, mesh, **options)
        if edit is not None:
            edit(plan, model, mesh)
        torch_tp2d.parallelize_module(model, mesh, plan)
        batch: dict[str, torch.Tensor] = {}
        if model.config.model_type == "swin":
            batch["pixel_values"] = torch.zeros(size[0], 3, 18, 18, device=device)
            batch["labels"] = torch.zeros(size[0], dtype=torch.int64, device=device)
        else:
            batch["input_ids"] = batch["labels"] = _ids(size, device)
        if options.get("loss_parallel", True):
            return lambda: model(**batch).loss
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        return lambda: model(**inputs).logits.sum()

    return apply


PLANS = {
    "llama": ready(_llama),
    "llama pipelined": ready(_llama, UNEVEN, algorithm="pipelined"),
    "llama collective": ready(_llama, UNEVEN, algorithm="collective"),
    "llama odd": ready(_llama_odd, UNEVEN),
    "qwen2": ready(_qwen2),
    "gpt2": ready(_gpt2),
    "gpt2 odd": ready(lambda: _gpt2(3), UNEVEN),
    "bert": ready(_bert, UNEVEN),
    "t5": ready(_t5, UNEVEN),
    "swin": ready(_swin),
    "llama rows split sequences": ready(_llama_odd, UNEVEN, row_dim=1),
    "gpt2 rows split sequences": ready(_gpt2, UNEVEN, row_dim=1),
    "bert rows split sequences": ready(_bert, UNEVEN, row_dim=1),
    "t5 rows split sequences": ready(_t5, UNEVEN, row_dim=1),
    "whole streams": ready(_llama, UNEVEN, sequence_parallel=False),
    "whole logits": ready(_gpt2, loss_parallel=False),
}
QUICK = {"llama", "llama pipelined", "llama odd", "gpt2 odd", "bert", "swin", "whole streams"}


@cache
def record(case: Case, rank: int, *shape: int) -> Record:
    """What a rank does in its second step, forward and backward: the order is known then."""
    with as_rank(rank, *shape) as mesh:
        step = case(mesh, "meta")
        step().backward()
        with Recorder() as recorder:
            step().backward()
    return recorder.record


def check(records: list[Record]) -> None:
    """Of every rank of a grid: nothing that a GPU stops for, and ranks that fit each other."""
    for record in records:
        assert not record.faults
    assert not disagreement(records)


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(3, 2)])
@pytest.mark.parametrize("name", [name if name in QUICK else deep(name) for name in PLANS])
def test_ready_plans(name: str, rows: int, columns: int) -> None:
    check([record(PLANS[name], rank, rows, columns) for rank in range(rows * columns)])


def test_a_row_without_tokens() -> None:
    """A piece of nothing came from a column without tokens, and was asked for its one place.

    On NCCL's transport, where sequences are split over rows of which one has none: its ranks
    raised, and those of the other rows would have waited.
    """
    case = PLANS["gpt2 rows split sequences"]
    check([record(case, rank, 3, 2) for rank in range(6)])


@pytest.mark.parametrize("rows,columns", [deep(4, 4), deep(2, 8)])
def test_more_ranks(rows: int, columns: int) -> None:
    """Most of which have no tokens in some dim, or fewer heads than others."""
    case = ready(_llama_odd, UNEVEN)
    check([record(case, rank, rows, columns) for rank in range(rows * columns)])


def test_the_size_exchange_copies_nothing_to_the_device() -> None:
    """Symptom: a model without an embedding copied a list from the host in every style's call.

    Cause: ``torch.tensor([size], device=...)``, which on a GPU waits for the copy as well.
    """
    with as_rank(0, 2, 2) as mesh, Recorder() as recorder:
        ask_sizes(3, Grid(mesh).col, torch.device("meta")).wait()
    assert not recorder.record.faults


class Stack(nn.Module):
    """Linears with dropout and a norm between, by any style."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.norm, self.dropout = nn.LayerNorm(16), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(self.dropout(torch.relu(self.up(x)))))


def stack(plan: dict[str, Any], layout: tuple[Any, Any]) -> Case:
    """A block by itself, given local tensors of which no embedding has said the sizes."""

    def apply(mesh: DeviceMesh, device: str) -> Step:
        with torch.device(device):
            model = nn.Sequential(Stack(), Stack())
        torch_tp2d.parallelize_module(model, mesh, {f"*.{key}": x for key, x in plan.items()})
        shape = [*EVEN, 16]
        for placement, size in zip(layout, mesh.shape, strict=True):
            shape[placement.dim] //= size
        torch_tp2d.token_sizes(mesh, EVEN)
        x = torch.zeros(shape, device=device, requires_grad=True)
        return lambda: model(x).sum()

    return apply


TOKENS, FEATURES = (Shard(0), Shard(1)), (Shard(0), Shard(-1))
ALGORITHMS = ("pipelined", "collective", "summa", "bmr", "cannon")


def blocks(**options: Any) -> Case:
    style = {"input_layouts": Shard(-1), "output_layouts": Shard(-1)}
    plan = {
        "up": Block2DParallel(**options),
        "down": Block2DParallel(**options),
        "norm": Norm2D(**style),
    }
    return stack(plan, FEATURES)


class Attends(nn.Module):
    """Causal attention of its own making, 9 heads of queries and 3 of keys."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.dropout = 9, 3, dropout
        self.q, self.o = nn.Linear(36, 36), nn.Linear(36, 36)
        self.k, self.v = nn.Linear(36, 12), nn.Linear(36, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True, dropout_p=self.dropout
        )
        return self.o(y.transpose(1, 2).flatten(2))


def attends(algorithm: str = "auto", dropout: float = 0.0, row_dim: int = 1) -> Case:
    """Of a sequence that rows split, by an algorithm."""

    def apply(mesh: DeviceMesh, device: str) -> Step:
        with torch.device(device):
            model = nn.Sequential(nn.Embedding(VOCAB, 36), Attends(dropout), nn.Linear(36, VOCAB))
        columns, whole = mesh.shape[1], algorithm == "local"
        q, kv, o = attention_projections(9, 3, columns, row_dim=row_dim, whole_keys=whole)
        plan = {
            "0": Rowwise2D(row_dim=row_dim, output_layouts=Shard(1), use_local_output=False),
            "1": Attention2D(row_dim=row_dim, algorithm=algorithm),
            "1.q": q,
            "1.[kv]": kv,
            "1.o": o,
            "2": Colwise2D(row_dim=row_dim, use_local_output=False),
        }
        torch_tp2d.parallelize_module(model, mesh, plan)
        ids = _ids(UNEVEN, device)
        return lambda: torch_tp2d.cross_entropy(model(ids), ids)

    return apply


def pairs(**options: Any) -> Case:
    plan = {
        "up": Colwise2D(input_layouts=Shard(1), **options),
        "down": Rowwise2D(output_layouts=Shard(1), **options),
        "norm": SequenceParallel(use_local_output=True),
    }
    return stack(plan, TOKENS)


OPERATIONS = {
    **{name: pairs(algorithm=name) for name in ALGORITHMS},
    "gathered again": pairs(algorithm="pipelined", reshard_after_forward=True),
    "pairs fused with what moves": pairs(algorithm="fused"),
    "pairs that stay": pairs(dataflow="weight_stationary"),
    **{f"{name} of blocks": blocks(algorithm=name) for name in ALGORITHMS},
    "blocks that stay": blocks(dataflow="weight_stationary"),
    **{f"attention by {name}": attends(name) for name in ("ring", "gather", "two_phase", "local")},
    "attention with dropout": attends(dropout=0.1),
    "attention of whole sequences": attends(row_dim=0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_algorithms_dataflows_and_attention(name: str) -> None:
    check([record(OPERATIONS[name], rank, 2, 2) for rank in range(4)])


# Whether the ranks fit each other


def _started(*order: tuple[tuple[int, ...], int]) -> Record:
    return Record(
        [Collective((ranks, 0), "all_reduce", "float32", (n, "sum"), n) for ranks, n in order]
    )


def test_the_check_of_the_order_finds_what_is_wrong() -> None:
    """Another size, a swapped pair, one too few, splits that do not fit, and a cycle of groups."""
    a, b, c = (0, 1), (1, 2), (0, 2)
    good = [_started((a, 1), (c, 1)), _started((a, 1), (b, 1)), _started((b, 1), (c, 1))]
    assert not disagreement(good)
    assert "collective 0" in disagreement([_started((a, 1)), _started((a, 2))])
    swapped = [_started((a, 1), (a, 2)), _started((a, 2), (a, 1))]
    assert "collective 0" in disagreement(swapped)
    assert "collective 1" in disagreement([_started((a, 1), (a, 1)), _started((a, 1))])
    assert "only [0]" in disagreement([_started((a, 1)), _started()])
    # Each of three ranks starts first what the next one starts last.
    cycle = [_started((a, 1), (c, 1)), _started((b, 1), (a, 1)), _started((c, 1), (b, 1))]
    assert "waits for itself" in disagreement(cycle)

    def exchange(sends: tuple[int, int], receives: tuple[int, int]) -> Record:
        return Record([Collective((a, 0), "all_to_all_single", "int64", (sends, receives), 8)])

    assert not disagreement([exchange((0, 2), (0, 1)), exchange((1, 0), (2, 0))])
    assert "collective 0" in disagreement([exchange((0, 2), (0, 1)), exchange((2, 0), (2, 0))])


BOTH = ("tp_row", "tp_col")


def _stage(rank: int) -> Record:
    """What a rank does of two pipeline stages, the first of which has both axes as one line.

    Two batches, all forwards first. What a stage hands on goes to the rank of the next one that is
    at the same place in its grid.
    """
    with as_rank(rank, 2, 2, 2) as mesh:
        first = mesh.get_local_rank("dp") == 0
        line = {
            "0": Lifted(ColwiseParallel(), axes=BOTH),
            "1": Lifted(RowwiseParallel(), axes=BOTH),
        }
        place = rank % 4
        handed = Collective(((place, place + 4), 0), "send", "float32", (128,), 512)
        if first:
            with torch.device("meta"):
                model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
            torch_tp2d.parallelize_module(model, mesh[BOTH], line)
            x = torch.zeros(*EVEN, 16, device="meta", requires_grad=True)
            step: Step = lambda: model(x).sum()  # noqa: E731
        else:
            step = pairs()(mesh[BOTH], "meta")
        with Recorder() as recorder:
            events, losses = recorder.record.events, []
            for _ in range(2):
                events += [] if first else [handed]
                losses.append(step())
                events += [handed] if first else []
            for loss in losses:
                events += [handed] if first else []
                loss.backward()
                events += [] if first else [handed]
    return recorder.record


def test_pipeline_stages_that_use_other_groups() -> None:
    records = [_stage(rank) for rank in range(8)]
    line = {one.group[0] for record in records for one in record.collectives}
    assert (0, 1, 2, 3) in line and (4, 5, 6, 7) not in line
    check(records)


def test_a_group_of_some_ranks_does_not_wait_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Symptom: on NCCL, with ``init_process_group(device_id=)``, a style on both axes of a pipeline
    stage's grid would have hung: found by reading, as the others of the world were not there.

    Cause: torch makes a group of a bound world by splitting the world's communicator, for which
    NCCL waits for all its ranks, and ``use_local_synchronization`` does not change that.
    """
    splits: list[Any] = []
    monkeypatch.setattr(distributed_c10d, "_get_split_source", splits.append)
    with as_rank(0, 2, 2, 2) as mesh:
        world = dist.group.WORLD
        assert world is not None
        world.bound_device_id = torch.device("cuda", 0)
        line = Grid(mesh[BOTH], BOTH).col
        assert line.size == 4 and not splits
        assert world.bound_device_id == torch.device("cuda", 0)


# What is waited for with nothing beside it


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
        ids = _ids((1, 8192), "cpu")
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
