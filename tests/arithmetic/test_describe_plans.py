"""Every plan that is shipped, on every grid: the bytes predicted are the bytes counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from llama2 import Llama2, Llama2Config
from torch import nn

import torch_tp2d
from support import world
from support.decoders import FAMILIES, SIZES, decoder
from support.fake import fake_grid
from support.marks import deep
from support.models import grid_mesh, loss_of, transformer
from torch_tp2d import CommCounter, describe
from torch_tp2d.planner.describe import _sum
from torch_tp2d.plans import PLANS, DerivedPlan

transformers = pytest.importorskip("transformers")
world.preload("preload_hf")

GRIDS = (1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 3), (2, 4), (3, 3)
SAMPLES, TOKENS = 5, 7
"""They divide over nothing, and a grid of four rows has one without a sample."""


def _made(kind: str, config: str, **sizes: Any) -> nn.Module:
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**sizes))


def _decoder(family: str) -> nn.Module:
    # Its attention is not scaled_dot_product_attention, so that heads have to divide by 3, too.
    heads = {"num_attention_heads": 12, "num_key_value_heads": 12, "hidden_size": 48}
    model = decoder(family, **(heads if family == "Gemma2" else {}))
    if any(".experts." in name for name, _ in model.named_parameters()):
        # "eager" asks which tokens an expert has, and fake tokens have no values.
        model.set_experts_implementation("batched_mm")
    return model


def _models() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """A model for each plan, by its ``config.model_type``, and those that have none."""
    for family in sorted(FAMILIES):
        yield family, partial(_decoder, family)
    for family in ("Llama", "Mistral", "Qwen2"):
        yield family, partial(_made, f"{family}ForCausalLM", f"{family}Config", **SIZES)
    small = {"vocab_size": 33, "num_attention_heads": 4, "intermediate_size": 24}
    layers = {"hidden_size": 16, "num_hidden_layers": 2, **small}
    yield (
        "GPT2",
        partial(
            _made, "GPT2LMHeadModel", "GPT2Config", vocab_size=33, n_embd=16, n_head=4, n_layer=2
        ),
    )
    yield "Bert", partial(_made, "BertForMaskedLM", "BertConfig", **layers)
    heads = {"num_heads": 4, "vocab_size": 33, "decoder_start_token_id": 0}
    yield (
        "T5",
        partial(
            _made,
            "T5ForConditionalGeneration",
            "T5Config",
            d_model=16,
            d_kv=4,
            d_ff=24,
            num_layers=2,
            **heads,
        ),
    )
    image = {"image_size": 16, "num_labels": 6}
    windows = {"patch_size": 2, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4]}
    windows["drop_path_rate"] = 0.0
    yield (
        "Swin",
        partial(
            _made, "SwinForImageClassification", "SwinConfig", window_size=4, **windows, **image
        ),
    )
    # Of no plan: it is derived.
    yield (
        "ViT",
        partial(_made, "ViTForImageClassification", "ViTConfig", patch_size=4, **layers, **image),
    )
    yield "a GPT of torch's own tests", lambda: transformer(33, n_heads=4)
    yield (
        "the tutorial's Llama",
        lambda: Llama2(Llama2Config(33, dim=16, n_layers=2, n_heads=4, n_kv_heads=2)),
    )


def _given(model: nn.Module) -> dict[str, torch.Tensor] | None:
    if not isinstance(model, transformers.PreTrainedModel):
        return None
    ids = torch.arange(SAMPLES * TOKENS).reshape(SAMPLES, TOKENS) % 6
    if hasattr(model.config, "image_size"):
        size = model.config.image_size
        return {"pixel_values": torch.zeros(SAMPLES, 3, size, size), "labels": ids[:, 0]}
    return {"input_ids": ids, "labels": ids}


def _predicts(rows: int, columns: int, name: str) -> str | None:
    """What is wrong on this rank with the bytes of a step, if anything is."""
    mesh = grid_mesh(rows, columns)
    model = dict(_models())[name]()
    row, column = divmod(mesh.get_rank(), columns)
    # Of a large grid, its corners: the ranks between them have as much as one of these.
    asked = mesh.size() <= 4 or (row in (0, rows - 1) and column in (0, columns - 1))
    sizes = {"batch": SAMPLES, "seq": TOKENS}
    found = describe(model, mesh, rank=mesh.get_rank(), **sizes) if asked else None
    torch_tp2d.parallelize_module(model, mesh, torch_tp2d.plan_for(model, mesh))
    torch_tp2d.token_sizes(mesh, None)
    given = _given(model)
    for step in range(2):
        with CommCounter(mesh) as counter:
            if given is None:
                ids = torch.zeros(SAMPLES, TOKENS, dtype=torch.int64)
                loss = loss_of(model(ids), ids)
            else:
                loss = model(**given).loss
            loss.backward()
        model.zero_grad()
        counted = {key: (counter.calls[key], counter.bytes[key]) for key in counter.calls}
        if found is None:
            continue
        moved = _sum((*found.forward, *found.backward))
        predicted = {(move.axis, move.op): (move.calls, move.bytes) for move in moved}
        if counted != predicted:
            return f"step {step}: counted {counted}, predicted {predicted}"
    return None


@pytest.mark.gloo
@pytest.mark.parametrize("rows,columns", [deep(*grid) for grid in GRIDS])
def test_bytes_of_every_plan_are_as_predicted(rows: int, columns: int) -> None:
    """On every rank; of some plans, on some grids, it was only taken to be so."""
    wrong = {}
    for name, _ in _models():
        for rank, said in enumerate(world.run(rows * columns, _predicts, rows, columns, name)):
            if said is not None:
                wrong[name, rank] = said
    assert wrong == {}


def test_each_shipped_plan_is_there_and_taken() -> None:
    """Of a plan that is shipped later, too.

    The activation of Apertus learns two numbers, which its plan did not name: another was derived
    in its place, by which the feed-forward Linears were whole on every rank.
    """
    models = {name: build() for name, build in _models()}
    configs = [getattr(model, "config", None) for model in models.values()]
    kinds = {getattr(config, "model_type", None) for config in configs}
    assert set(PLANS) <= kinds
    with fake_grid(2, 2) as mesh:
        plans = {name: torch_tp2d.plan_for(model, mesh) for name, model in models.items()}
    derived = [name for name, plan in plans.items() if isinstance(plan, DerivedPlan)]
    assert derived == ["ViT", "a GPT of torch's own tests"]
