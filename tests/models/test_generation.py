"""``generate``, ``inputs_embeds`` and new heads of Hugging Face models that lie on a grid."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from support import world
from support.fake import fake_grid
from support.hf import TOLERANCE, causal_lm_batch, in_fp64, on_grid
from support.marks import deep
from support.models import relative
from torch_tp2d import Colwise2D, parallelize_module
from torch_tp2d.plans import AsTransformers, plan_for

transformers = pytest.importorskip("transformers")

VOCAB = 33


def llama(**config: Any) -> Any:
    """Three query heads to a key head; neither number a multiple of 2."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}
    sizes |= {"vocab_size": VOCAB, "intermediate_size": 24, "num_hidden_layers": 2} | config
    return in_fp64(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)))


def gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return in_fp64(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts)))


def t5() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 4}
    sizes |= {"num_layers": 2, "relative_attention_num_buckets": 8}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    return in_fp64(transformers.T5ForConditionalGeneration(config))


def bert() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return in_fp64(transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **dropouts)))


def _ids(batch: int, length: int) -> Tensor:
    return causal_lm_batch(batch, length, VOCAB)(0)["input_ids"]


def _generate(model: Any, ids: Tensor, **how: Any) -> Tensor:
    torch.manual_seed(7)
    options = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, **{"attention_mask": torch.ones_like(ids), **options, **how})


def _generated(rows: int, columns: int) -> None:
    ids = _ids(3, 5)
    for build in (llama, gpt2):
        wanted = _generate(build().eval(), ids, do_sample=False)
        others = [{"loss_parallel": False}, {"sequence_parallel": False}] if build is llama else []
        for plan in ({}, *others):
            _, model, _ = on_grid(build, rows, columns, **plan)
            found = _generate(model.eval(), ids, do_sample=False)
            assert torch.equal(found, wanted), (build, plan)
        model = copy.deepcopy(model)
        assert torch.equal(_generate(model, ids, do_sample=False), wanted)
        assert isinstance(model(ids).logits, DTensor), "as they were, when it has generated"
        sampled = _generate(build().eval(), ids, do_sample=True)
        assert torch.equal(_generate(model, ids, do_sample=True), sampled)


@pytest.mark.deep
def test_generates_with_a_cache() -> None:
    """By the default plan too, whose split logits transformers failed on, deep inside."""
    world.run(4, _generated, 2, 2)


def _padded(rows: int, columns: int) -> None:
    def build() -> Any:
        return llama(num_attention_heads=6)

    ids = _ids(3, 5)
    mask = (torch.arange(5) >= torch.tensor([[0], [2], [3]])).long()
    how = {"attention_mask": mask, "do_sample": False}
    wanted = _generate(build().eval(), ids, **how)
    _, model, _ = on_grid(build, rows, columns)
    assert torch.equal(_generate(model.eval(), ids, **how), wanted)


@pytest.mark.deep
def test_padded_prompts_where_key_heads_do_not_divide() -> None:
    """transformers packs the queries of a group before it calls attention, by the whole model's.

    The reshape failed, and the error spoke of a forward that does not call attention.
    """
    world.run(4, _padded, 2, 2)


def _beams(rows: int, columns: int, cases: list[tuple[int, int]]) -> None:
    for build in (llama, gpt2, t5):
        reference, model, _ = on_grid(build, rows, columns)
        for batch, beams in cases:
            ids, how = _ids(batch, 5), {"num_beams": beams, "num_return_sequences": beams}
            for sample in (False, True):
                wanted = _generate(reference.eval(), ids, do_sample=sample, **how)
                found = _generate(model.eval(), ids, do_sample=sample, **how)
                assert torch.equal(found, wanted), (build, batch, beams, sample)
        assert not hasattr(model, "_reorder_cache")


@pytest.mark.parametrize(
    "rows,columns,cases",
    [
        deep(2, 2, [(3, 3)]),
        deep(2, 2, [(2, 2), (1, 2), (1, 5), (4, 3), (5, 3)]),
        deep(4, 1, [(1, 2), (1, 3), (2, 3), (4, 2), (5, 3)]),
        deep(1, 4, [(1, 2), (3, 2)]),
    ],
)
def test_beam_search(rows: int, columns: int, cases: list[tuple[int, int]]) -> None:
    """Beams of a sample that lie on one row and on several, and rows without a beam.

    A row's cache was asked for beams of all rows: "index out of range in self".
    """
    world.run(rows * columns, _beams, rows, columns, cases)


def _embeds(rows: int, columns: int, plans: list[tuple[Any, dict[str, Any]]]) -> dict[str, float]:
    seen: dict[str, float] = {}
    for build, options in plans:
        reference, model, mesh = on_grid(build, rows, columns, **options)
        part = torch.zeros(2, 4, reference.get_input_embeddings().weight.shape[1] // 2)
        with pytest.raises(ValueError, match=r"whole on every rank, .* not \(2, 4, "):
            model(inputs_embeds=part)
        for batch, length in ((3, 7), (1, 8)):
            ids = _ids(batch, length)
            embeds = reference.get_input_embeddings()(ids).detach() + 1.0
            for kind in ("whole", "a DTensor"):
                x, y = (embeds.clone().requires_grad_() for _ in range(2))
                given = y
                if kind == "a DTensor":
                    given = DTensor.from_local(y, mesh, (Replicate(), Replicate()))
                more = {"decoder_input_ids": ids[:, :5]} if build is t5 else {}
                wanted = reference(inputs_embeds=x, **more).logits
                found = model(inputs_embeds=given, **more).logits
                (wanted.sin().sum()).backward()
                whole = found.full_tensor() if isinstance(found, DTensor) else found
                (whole.sin().sum()).backward()
                case = f"{build.__name__} {options} {batch, length} {kind}"
                seen[f"{case} logits"] = relative(whole, wanted)
                seen[f"{case} gradient"] = relative(y.grad, x.grad)
            for (name, a), b in zip(reference.named_parameters(), model.parameters(), strict=True):
                # Keys' biases have none but for rounding: softmax takes them away.
                if a.grad is not None and not name.endswith("key.bias"):
                    seen[f"{case} {name}"] = relative(b.grad, a.grad)
    return {name: value for name, value in seen.items() if not value < TOLERANCE}


PLANS: list[tuple[Any, dict[str, Any]]] = [
    *((build, {"row_dim": row_dim}) for build in (llama, gpt2, bert, t5) for row_dim in (0, 1)),
    (llama, {"loss_parallel": False}),
    (bert, {"sequence_parallel": False}),
]


@pytest.mark.parametrize(
    "rows,columns,plans",
    [(1, 2, PLANS[:1]), deep(2, 2, PLANS), deep(1, 4, PLANS), deep(4, 1, PLANS)],
)
def test_embeds_that_are_whole(
    rows: int, columns: int, plans: list[tuple[Any, dict[str, Any]]]
) -> None:
    """Plain ``inputs_embeds`` were taken for this rank's part, or met DTensors."""
    for wrong in world.run(rows * columns, _embeds, rows, columns, plans):
        assert not wrong, wrong


def _new_heads(rows: int, columns: int) -> dict[str, float]:
    seen: dict[str, float] = {}
    ids = _ids(4, 6)
    for build in (llama, gpt2):
        reference, model, mesh = on_grid(build, rows, columns)
        with pytest.raises(ValueError, match="resize_token_embeddings before parallelize_module"):
            model.resize_token_embeddings(40)
        torch.manual_seed(3)
        head = nn.Linear(reference.lm_head.in_features, 7).double()
        reference.lm_head, model.lm_head = head, copy.deepcopy(head)
        with pytest.raises(ValueError, match=r"no plan entry names .*lm_head.weight \(7, "):
            model(ids)
        parallelize_module(model, mesh, {"lm_head": Colwise2D(use_local_output=False)})
        labels = ids % 7
        wanted = nn.functional.cross_entropy(
            reference(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        )
        found = model(ids, labels=labels).loss
        wanted.backward()
        found.backward()
        seen["loss"] = relative(found, wanted)
        for (name, a), b in zip(reference.named_parameters(), model.parameters(), strict=True):
            seen[f"{build.__name__} {name}"] = relative(b.grad, a.grad)
        resized = build()
        resized.resize_token_embeddings(40, mean_resizing=False)
        wanted = resized(ids).logits
        parallelize_module(resized, mesh, plan_for(resized, mesh))
        seen["resized before"] = relative(resized(ids).logits, wanted)
    return {name: value for name, value in seen.items() if not value < TOLERANCE}


@pytest.mark.deep
def test_heads_are_replaced_and_vocabularies_resized() -> None:
    for wrong in world.run(4, _new_heads, 2, 2):
        assert not wrong, wrong


def test_the_plans_entry_for_the_model_itself() -> None:
    with fake_grid(2, 2) as mesh:
        plan = plan_for(llama().model, mesh)
        assert isinstance(plan[""], AsTransformers)
