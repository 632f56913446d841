"""Hugging Face's GPT-2, BERT and T5 in the shapes of the paper, and stock tensor parallelism.

TP2D (doi 10.11992/tis.202411023) trains GPT-2 sizes with heads of 64 and a layer for every 36 to
40 of the hidden dim (its Table 3), and compares the three kinds of models in its Table 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

KINDS = ("gpt2", "bert", "t5")
HEAD = 64
"""Size of an attention head, the paper's."""
SEED = 20250

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """A model and the global batch. T5 has half of the layers on a side, and ``seq`` on both."""

    layers: int
    hidden: int
    batch: int
    seq: int
    vocab: int

    @property
    def heads(self) -> int:
        return self.hidden // HEAD


def build(kind: str, sizes: Sizes) -> Any:
    """A fresh model without dropout, of the same weights each time.

    BERT has one token more, which masks others.
    """
    torch.manual_seed(SEED)
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=sizes.vocab,
                n_embd=sizes.hidden,
                n_layer=sizes.layers,
                n_head=sizes.heads,
                n_positions=sizes.seq,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=sizes.vocab - 1,
                eos_token_id=sizes.vocab - 1,
                use_cache=False,
            )
        )
    if kind == "bert":
        return transformers.BertForMaskedLM(
            transformers.BertConfig(
                vocab_size=sizes.vocab + 1,
                hidden_size=sizes.hidden,
                num_hidden_layers=sizes.layers,
                num_attention_heads=sizes.heads,
                intermediate_size=4 * sizes.hidden,
                max_position_embeddings=sizes.seq,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
    if kind == "t5":
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=sizes.vocab,
                d_model=sizes.hidden,
                d_kv=HEAD,
                d_ff=4 * sizes.hidden,
                num_layers=max(1, sizes.layers // 2),
                num_heads=sizes.heads,
                dropout_rate=0.0,
                pad_token_id=sizes.vocab - 1,
                eos_token_id=sizes.vocab - 1,
                decoder_start_token_id=sizes.vocab - 1,
                use_cache=False,
            )
        )
    raise ValueError(f"no model {kind!r}: choose from {KINDS}")


def window(kind: str, sizes: Sizes) -> int:
    """Tokens of a sequence that :func:`task` is to be given."""
    return 2 * sizes.seq if kind == "t5" else sizes.seq


def task(kind: str, ids: Tensor, vocab: int, seed: int) -> Batch:
    """What a model is given of ``ids [B, window]``, all of it decided by ``seed``.

    GPT-2 predicts the next token. BERT finds 15 % of the tokens, of which 80 % are masked, 10 %
    replaced and 10 % left. T5 continues the first half of each sequence.
    """
    if kind == "gpt2":
        return {"input_ids": ids, "labels": ids}
    if kind == "t5":
        half = ids.shape[1] // 2
        return {"input_ids": ids[:, :half], "labels": ids[:, half:].contiguous()}
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.rand(ids.shape, generator=generator) < 0.15
    how = torch.rand(ids.shape, generator=generator)
    others = torch.randint(0, vocab, ids.shape, generator=generator)
    shown = torch.where(how < 0.8, torch.full_like(ids, vocab), others)
    shown = torch.where(how < 0.9, shown, ids)
    return {
        "input_ids": torch.where(hidden, shown, ids),
        "labels": ids.masked_fill(~hidden, -100),
    }


class SplitProjection(nn.Module):
    """GPT-2's fused projection as three Linears, which torch's styles can shard."""

    def __init__(self, fused: Any) -> None:
        super().__init__()
        weights, biases = fused.weight.detach().t().chunk(3), fused.bias.detach().chunk(3)
        self.parts = nn.ModuleList(
            _linear(weight, bias) for weight, bias in zip(weights, biases, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    # FSDP2 takes no transposed parameter.
    linear.weight = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format))
    linear.bias = nn.Parameter(bias.detach().clone())
    return linear


def _unfuse(model: Any, parts: int) -> None:
    """The edits that GPT-2 needs before torch's styles take it: Linears, and local widths."""
    for block in model.transformer.h:
        block.attn.c_attn = SplitProjection(block.attn.c_attn)
        block.attn.split_size //= parts
        for owner, name in ((block.attn, "c_proj"), (block.mlp, "c_fc"), (block.mlp, "c_proj")):
            conv = getattr(owner, name)
            setattr(owner, name, _linear(conv.weight.t(), conv.bias))


def _prepared(*keywords: str) -> PrepareModuleInput:
    """One gradient reduction for all that read a module's input."""
    whole = dict.fromkeys(keywords, Replicate())
    return PrepareModuleInput(
        input_layouts=(Replicate(),),
        desired_input_layouts=(Replicate(),),
        input_kwarg_layouts=whole,
        desired_input_kwarg_layouts=whole,
    )


def stock_plan(kind: str, prepared: bool) -> dict[str, ParallelStyle]:
    """Tensor parallelism by torch's own styles: whole residuals and norms, logits split."""
    wide = {"embedding": RowwiseParallel(input_layouts=Replicate()), "in": ColwiseParallel()}
    wide |= {"out": RowwiseParallel(), "head": ColwiseParallel(use_local_output=False)}
    if kind == "gpt2":
        named = {
            "transformer.wte": "embedding",
            "transformer.h.*.attn.c_attn.parts.*": "in",
            "transformer.h.*.attn.c_proj": "out",
            "transformer.h.*.mlp.c_fc": "in",
            "transformer.h.*.mlp.c_proj": "out",
            "lm_head": "head",
        }
        inputs = {"transformer.h.*.attn": _prepared()}
    elif kind == "bert":
        layer = "bert.encoder.layer.*"
        named = {
            "bert.embeddings.word_embeddings": "embedding",
            f"{layer}.attention.self.query": "in",
            f"{layer}.attention.self.key": "in",
            f"{layer}.attention.self.value": "in",
            f"{layer}.attention.output.dense": "out",
            f"{layer}.intermediate.dense": "in",
            f"{layer}.output.dense": "out",
            "cls.predictions.decoder": "head",
        }
        inputs = {f"{layer}.attention.self": _prepared()}
    else:
        named = {"shared": "embedding", "lm_head": "head"}
        inputs = {}
        for stack, kinds in (
            ("encoder", ("layer.0.SelfAttention",)),
            ("decoder", ("layer.0.SelfAttention", "layer.1.EncDecAttention")),
        ):
            block = f"{stack}.block.*"
            named[f"{stack}.embed_tokens"] = "embedding"
            named[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"] = "in"
            for attention in kinds:
                named |= {f"{block}.{attention}.{name}": "in" for name in "qkv"}
                named[f"{block}.{attention}.o"] = "out"
                across = ("key_value_states",) if "EncDec" in attention else ()
                inputs[f"{block}.{attention}"] = _prepared(*across)
            feed_forward = f"{block}.layer.{len(kinds)}.DenseReluDense"
            named |= {f"{feed_forward}.wi": "in", f"{feed_forward}.wo": "out"}
    plan = {name: wide[style] for name, style in named.items()}
    return (inputs if prepared else {}) | plan


def apply_stock(kind: str, model: Any, mesh: DeviceMesh, prepared: bool) -> None:
    """Put a model on a line of ranks by :func:`stock_plan`, with the edits that it takes."""
    parts = mesh.size()
    if kind == "gpt2":
        _unfuse(model, parts)
    parallelize_module(model, mesh, stock_plan(kind, prepared))
    # torch's styles make a parameter of its own for each module.
    if kind == "gpt2":
        model.lm_head.weight = model.transformer.wte.weight
    elif kind == "bert":
        predictions = model.cls.predictions
        predictions.decoder.weight = model.bert.embeddings.word_embeddings.weight
        predictions.bias = predictions.decoder.bias
    else:
        for module in (model.encoder.embed_tokens, model.decoder.embed_tokens, model.lm_head):
            module.weight = model.shared.weight
        for module in model.modules():
            if type(module).__name__ == "T5Attention":
                module.n_heads //= parts
                module.inner_dim //= parts
