"""Ready plans of Hugging Face's causal language models, beside one device in fp64."""

from __future__ import annotations

import copy
from pprint import pformat
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.parallel import parallelize_module as stock_parallelize_module

import torch_tp2d
from support import world
from support.device import DEVICE
from support.fake import fake_grid
from support.hf import (
    TOLERANCE,
    Batch,
    Differences,
    causal_lm_batch,
    causal_lm_truth,
    in_fp64,
    on_grid,
    own_loss,
    train_beside,
)
from support.marks import deep
from support.models import relative
from torch_tp2d import Colwise2D, CommCounter, Rowwise2D
from torch_tp2d.plans import Plan, plan_for

transformers = pytest.importorskip("transformers")

VOCAB = 33


def _causal_lm(family: str, **config: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32,
    }
    made = getattr(transformers, f"{family}Config")(**{**sizes, **config})
    return in_fp64(getattr(transformers, f"{family}ForCausalLM")(made))


def llama() -> Any:
    return _causal_lm("Llama")


def llama_grouped() -> Any:
    return _causal_lm("Llama", num_key_value_heads=2, attention_bias=True, mlp_bias=True)


def llama_odd() -> Any:
    """SmolLM2's heads: three query heads to a key head, neither a multiple of 2."""
    return _causal_lm("Llama", hidden_size=36, num_attention_heads=9, num_key_value_heads=3)


def mistral() -> Any:
    """With heads wider than their share of the hidden dim, and a window of four tokens."""
    return _causal_lm("Mistral", num_key_value_heads=2, head_dim=6, sliding_window=4)


def qwen2() -> Any:
    """With biases on q, k and v only, and the head tied to the embedding."""
    return _causal_lm("Qwen2", num_key_value_heads=2, tie_word_embeddings=True)


def gpt2(heads: int = 4, layers: int = 2) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=32,
        n_embd=4 * heads,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return in_fp64(transformers.GPT2LMHeadModel(config))


def gpt2_odd() -> Any:
    return gpt2(3)


EVEN, UNEVEN = (4, 8), (5, 7)
"""Batch and sequence."""


def _train(rows: int, columns: int, cases: list[tuple[Any, Any, dict[str, Any]]]) -> list[Any]:
    found = []
    for build, (size, sequence), options in cases:
        options = dict(options)
        padded = options.pop("padded", False)
        # transformers' own loss of whole logits rounds them to fp32.
        loss = own_loss if options.get("loss_parallel", True) else causal_lm_truth
        reference, model, _ = on_grid(build, rows, columns, **options)
        batch = causal_lm_batch(size, sequence, VOCAB, padded)
        found.append((build.__name__, options, train_beside(reference, model, batch, loss=loss)))
    return found


def _check(answers: list[Any]) -> None:
    for found in answers:
        for name, options, seen in found:
            assert isinstance(seen, Differences)
            assert seen.worst < TOLERANCE, (name, options, seen)


GRIDS = [(2, 2), (1, 4), (4, 1), (2, 4)]


BUILDERS = [llama, llama_grouped, llama_odd, mistral, qwen2, gpt2, gpt2_odd]
# Where nothing divides, where the head is tied, and where q, k and v are one weight.
FEW = [llama_odd, qwen2, gpt2]


@pytest.mark.parametrize(
    "rows,columns,row_dim,builders",
    [
        (2, 2, 0, FEW),
        deep(2, 2, 1, [llama_grouped, mistral, gpt2_odd]),
        deep(1, 4, 0, FEW),
        deep(4, 1, 1, FEW),
        *(deep(*grid, row_dim, BUILDERS) for grid in GRIDS for row_dim in (0, 1)),
    ],
    ids=lambda value: f"{len(value)}models" if isinstance(value, list) else None,
)
def test_every_model_trains_as_on_one_device(
    rows: int, columns: int, row_dim: int, builders: list[Any]
) -> None:
    """Whatever ``tp_row`` splits, with and without padding, and where nothing divides."""
    cases = [
        (
            build,
            UNEVEN if index % 2 else EVEN,
            {"row_dim": row_dim, "padded": (index > 2) == (row_dim == 0)},
        )
        for index, build in enumerate(BUILDERS)
        if build in builders
    ]
    _check(world.run(rows * columns, _train, rows, columns, cases))


OPTIONS: list[tuple[Any, Any, dict[str, Any]]] = [
    (llama_grouped, UNEVEN, {"sequence_parallel": False}),
    (gpt2_odd, UNEVEN, {"loss_parallel": False, "row_dim": 1}),
    (llama_odd, UNEVEN, {"algorithm": "summa", "row_dim": 1}),
    (gpt2, UNEVEN, {"algorithm": "collective", "reshard_after_forward": True}),
    (llama_grouped, EVEN, {"regather_input": True, "algorithm": "pipelined"}),
    # Fewer sequences, or shorter ones, than there are rows or columns.
    (gpt2, (1, 8), {}),
    (llama, (3, 7), {"padded": True}),
]
MORE_OPTIONS: list[tuple[Any, Any, dict[str, Any]]] = [
    (gpt2, UNEVEN, {"sequence_parallel": False, "row_dim": 1}),
    (qwen2, UNEVEN, {"loss_parallel": False, "reduce_dtype": torch.float64}),
    (gpt2, UNEVEN, {"algorithm": "summa"}),
    (llama, (4, 3), {}),
]


@pytest.mark.parametrize(
    "rows,columns,more", [deep(4, 1, False), deep(2, 2, False), deep(2, 2, True), deep(4, 1, True)]
)
def test_options(rows: int, columns: int, more: bool) -> None:
    cases = list(MORE_OPTIONS if more else OPTIONS)
    if more and rows == columns:
        cases += [(gpt2, UNEVEN, {"algorithm": name}) for name in ("bmr", "cannon")]
    _check(world.run(rows * columns, _train, rows, columns, cases))


def tutorial_llama() -> Any:
    from llama2 import Llama2, Llama2Config

    return Llama2(Llama2Config(VOCAB, dim=16, n_layers=2, n_heads=4, n_kv_heads=2)).double()


def _tutorial_truth(model: Any, batch: Batch) -> Tensor:
    """The tutorial's model gives logits alone, and takes ids alone."""
    labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    logits = model(batch["input_ids"])
    if isinstance(logits, DTensor):
        return torch_tp2d.cross_entropy(logits, labels)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _tutorial(rows: int, columns: int) -> list[Any]:
    found = []
    for size, options in (
        (2, {}),
        (5, {}),
        (2, {"row_dim": 1}),
        (5, {"sequence_parallel": False, "loss_parallel": False}),
    ):
        reference, model, _ = on_grid(tutorial_llama, rows, columns, **options)
        batch = causal_lm_batch(size, 7, VOCAB)
        seen = train_beside(reference, model, batch, truth=_tutorial_truth, loss=_tutorial_truth)
        found.append(("tutorial", options, seen))
    return found


@pytest.mark.deep
@pytest.mark.parametrize("rows,columns", [(2, 2), deep(1, 4), deep(2, 4)])
def test_the_tutorials_llama(rows: int, columns: int) -> None:
    _check(world.run(rows * columns, _tutorial, rows, columns))


def _stock_1d(build: Any) -> Any:
    """The model by transformers' own plan, of torch's own styles, on a line of two ranks."""
    styles: dict[str, Any] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    }
    model = build()
    plan = {name: styles[style] for name, style in model.tp_plan.items()}
    mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=("tp",))
    return stock_parallelize_module(model, mesh, plan)


def _loss_and_gradients(model: Any, loss: Any = causal_lm_truth) -> list[Tensor]:
    batch = causal_lm_batch(4, 8, VOCAB)(0)
    value = loss(model, batch)
    value.backward()
    return [value.detach(), *(_whole(param.grad) for param in model.parameters())]


def _whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _three_ways() -> list[float]:
    worst = []
    for build in (llama, llama_grouped, mistral):
        wanted = _loss_and_gradients(build())
        stock = _loss_and_gradients(_stock_1d(build))
        mine = _loss_and_gradients(on_grid(build, 1, 2)[1], own_loss)
        for other in (stock, mine):
            worst.append(max(relative(a, b) for a, b in zip(other, wanted, strict=True)))
    return worst


def test_transformers_own_plan_agrees() -> None:
    """Of the same model, on a line of two: its ``tp_plan`` with torch's own styles, and ours."""
    for worst in world.run(2, _three_ways):
        assert max(worst) < TOLERANCE, worst


def _under_fsdp(build: Any, layers: str, shape: tuple[int, int, int]) -> Differences:
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("dp", "tp_row", "tp_col"))
    reference = build()
    model = copy.deepcopy(reference)
    grid = mesh["tp_row", "tp_col"]
    torch_tp2d.parallelize_module(model, grid, plan_for(model, grid))
    for layer in model.get_submodule(layers):
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    batch = causal_lm_batch(2 * shape[0], 7, VOCAB)
    replica = mesh["dp"].get_local_rank(), shape[0]
    return train_beside(reference, model, batch, replica=replica, steps=2)


@pytest.mark.parametrize(
    "build,layers",
    [deep(llama_odd, "model.layers"), deep(gpt2, "transformer.h")],
    ids=["llama", "gpt2"],
)
def test_under_fsdp(build: Any, layers: str) -> None:
    for seen in world.run(8, _under_fsdp, build, layers, (2, 2, 2)):
        assert seen.worst < TOLERANCE, seen


def _as_transformers(rows: int, columns: int) -> None:
    """What a user of transformers sees: the loss of ``labels``, logits, ties, checkpoints."""
    for build in (qwen2, gpt2):
        batch = causal_lm_batch(4, 8, VOCAB, padded=True)(0)
        wanted = (reference := build()).eval()(**batch)
        for loss_parallel in (True, False):
            _, model, _ = on_grid(build, rows, columns, loss_parallel=loss_parallel)
            seen = model.eval()(**batch)
            # transformers rounds logits to fp32 for the loss.
            assert relative(seen.loss, wanted.loss) < 1e-6
            assert isinstance(seen.logits, DTensor) == loss_parallel
            assert relative(seen.logits, wanted.logits) < TOLERANCE
            embedding = model.get_input_embeddings().weight
            assert model.lm_head.weight is embedding
            for name, value in model.state_dict().items():
                assert torch.equal(_whole(value), reference.state_dict()[name]), name
            batch_loss = model(**batch, num_items_in_batch=10).loss
            assert relative(batch_loss, reference(**batch, num_items_in_batch=10).loss) < 1e-6
        _, base, _ = on_grid(lambda build=build: build().base_model, rows, columns)
        ids = batch["input_ids"]
        hidden = base(ids).last_hidden_state
        assert relative(hidden, reference.base_model(ids).last_hidden_state) < TOLERANCE


@pytest.mark.deep
def test_what_a_user_of_transformers_sees() -> None:
    world.run(4, _as_transformers, 2, 2)


def _edited(rows: int, columns: int) -> list[Any]:
    def stock_mlp(plan: Plan, mesh: Any) -> None:
        for name in ("gate_proj", "up_proj"):
            assert f"model.layers.*.mlp.{name}" in plan
            plan[f"model.layers.*.mlp.{name}"] = ColwiseParallel()
        plan["model.layers.*.mlp.down_proj"] = RowwiseParallel(
            output_layouts=Shard(1), use_local_output=False
        )
        plan["model.layers.1.self_attn.q_proj"] = Colwise2D(algorithm="collective")
        plan["model.layers.0.self_attn.q_proj"] = plan.pop("model.layers.*.self_attn.q_proj")

    reference, model, _ = on_grid(llama, rows, columns, edit=stock_mlp)
    return [("edited", {}, train_beside(reference, model, causal_lm_batch(*UNEVEN, VOCAB)))]


@pytest.mark.deep
def test_an_edited_plan() -> None:
    _check(world.run(4, _edited, 2, 2))


def test_a_plan_prints_readably() -> None:
    with fake_grid(2, 2) as mesh:
        for build in (llama_odd, gpt2):
            plan = plan_for(build(), mesh)
            lines = pformat(plan, width=400).splitlines()
            assert len(lines) == len(plan)
            for line, (name, style) in zip(lines, sorted(plan.items()), strict=True):
                assert repr(name) in line and type(style).__name__ in line
                assert "object at" not in line
    assert "parts=3" in str(plan["transformer.h.*.attn.c_attn"])
    assert str(plan[""]) == "LossFunction(causal_lm_loss)"


def test_refusals() -> None:
    with fake_grid(2, 2) as mesh:
        with pytest.raises(ValueError, match=r"Linear .*no ready plan.*'gpt2'.*'llama'"):
            plan_for(nn.Linear(2, 2), mesh)
        with pytest.raises(ValueError, match=r"of model_type 'phi3'"):
            # One weight for all, and a key head that does not divide.
            sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
            config = transformers.Phi3Config(
                **sizes, vocab_size=32, num_key_value_heads=1, pad_token_id=0
            )
            plan_for(transformers.Phi3Model(config), mesh)
        with pytest.raises(TypeError, match="sequence_paralel"):
            plan_for(llama(), mesh, sequence_paralel=True)
        with pytest.raises(ValueError, match="row_dim"):
            plan_for(llama(), mesh, row_dim=2)
        with pytest.raises(ValueError, match="algorithm"):
            plan_for(llama(), mesh, algorithm="fox")
        with pytest.raises(ValueError, match="tp_row"):
            plan_for(llama(), mesh["tp_col"])
        with pytest.raises(TypeError, match="DeviceMesh"):
            plan_for(llama(), 4)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="cross-attention"):
            config = transformers.GPT2Config(
                n_layer=1, n_embd=8, n_head=2, add_cross_attention=True
            )
            plan_for(transformers.GPT2LMHeadModel(config), mesh)
        with pytest.raises(ValueError, match="c_attn.*3 projections.*give it parts=3"):
            model = gpt2()
            plan = plan_for(model, mesh)
            plan["transformer.h.*.attn.c_attn"] = Colwise2D()
            torch_tp2d.parallelize_module(model, mesh, plan)


def _renamed_tutorial_plan() -> Plan:
    """The PyTorch tutorial's plan for Llama with Hugging Face's names, two classes renamed.

    Between modules it has DTensors: transformers makes rotary tables as long as it sees sequences.
    """
    layer = "model.layers.*"
    stream: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False}
    return {
        "model.embed_tokens": Rowwise2D(**stream),
        f"{layer}.input_layernorm": SequenceParallel(),
        f"{layer}.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        f"{layer}.self_attn.[qkv]_proj": Colwise2D(),
        f"{layer}.self_attn.o_proj": Rowwise2D(**stream),
        f"{layer}.post_attention_layernorm": SequenceParallel(),
        f"{layer}.mlp": PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate()
        ),
        f"{layer}.mlp.gate_proj": Colwise2D(),
        f"{layer}.mlp.up_proj": Colwise2D(),
        f"{layer}.mlp.down_proj": Rowwise2D(**stream),
        "model.norm": SequenceParallel(),
        "lm_head": Colwise2D(input_layouts=Shard(1), use_local_output=False),
    }


def _bytes_of_a_layer(make: Any, plan_of: Any) -> str:
    """One layer of a model, the rest left out by difference."""
    counters = []
    for layers in (1, 2):
        with fake_grid(2, 2) as mesh:
            model = make(layers).float()
            torch_tp2d.parallelize_module(model, mesh, plan_of(model, mesh))
            ids = torch.zeros(4, 8, dtype=torch.int64)
            with CommCounter(mesh) as forward:
                loss = torch_tp2d.cross_entropy(model(ids).logits, ids)
            with CommCounter(mesh) as backward:
                loss.backward()
            counters.append((forward, backward))
    lines = []
    for name, one, two in zip(("forward", "backward"), *counters, strict=True):
        lines.append(f"{name} {two.total_bytes - one.total_bytes} B")
        for key in sorted(two.calls):
            calls = two.calls[key] - one.calls[key]
            lines.append(f"  {key[0]} {key[1]} {calls} {two.bytes[key] - one.bytes[key]} B")
    return "\n".join(lines)


class TestBytesOfALayer(TestCase):
    """By the ready plan, for 4 x 8 tokens on a 2 x 2 grid; see test_bytes.py for how to accept."""

    def test_llama(self) -> None:
        def make(layers: int) -> Any:
            return _causal_lm("Llama", num_hidden_layers=layers, vocab_size=32)

        ready = _bytes_of_a_layer(make, plan_for)
        self.assertExpectedInline(
            ready,
            """\
forward 4224 B
  tp_col all_gather_into_tensor 2 1024 B
  tp_col all_reduce 0 0 B
  tp_col reduce_scatter_tensor 2 1024 B
  tp_row all_gather_into_tensor 7 2176 B
  tp_row all_reduce 0 0 B
  tp_row all_to_all_single 0 0 B
backward 6656 B
  tp_col all_gather_into_tensor 2 1024 B
  tp_col all_reduce 2 128 B
  tp_col reduce_scatter_tensor 2 1024 B
  tp_row all_gather_into_tensor 7 2176 B
  tp_row all_reduce 2 128 B
  tp_row all_to_all_single 0 0 B
  tp_row reduce_scatter_tensor 7 2176 B""",
        )
        self.assertEqual(ready, _bytes_of_a_layer(make, lambda *_: _renamed_tutorial_plan()))

    def test_gpt2(self) -> None:
        self.assertExpectedInline(
            _bytes_of_a_layer(lambda n: gpt2(layers=n), plan_for),
            """\
forward 5408 B
  tp_col all_gather_into_tensor 2 1024 B
  tp_col all_reduce 0 0 B
  tp_col all_to_all_single 2 288 B
  tp_col reduce_scatter_tensor 2 1024 B
  tp_row all_gather_into_tensor 4 3072 B
  tp_row all_reduce 0 0 B
  tp_row all_to_all_single 0 0 B
backward 9280 B
  tp_col all_gather_into_tensor 2 1024 B
  tp_col all_reduce 2 256 B
  tp_col all_to_all_single 2 288 B
  tp_col reduce_scatter_tensor 2 1024 B
  tp_row all_gather_into_tensor 4 3072 B
  tp_row all_reduce 6 544 B
  tp_row all_to_all_single 0 0 B
  tp_row reduce_scatter_tensor 4 3072 B""",
        )
