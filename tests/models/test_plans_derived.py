"""Plans that are derived from what a model's forward does, its names and its library unknown."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import torch_tp2d
from support import world
from support.decoders import SIZES, VOCAB, decoder, in_fp64_throughout, transformers, waved
from support.fake import fake_grid
from support.hf import Batch, causal_lm_batch, causal_lm_truth, on_grid, own_loss, train_beside
from support.marks import deep
from torch_tp2d.plans import DerivedPlan, derived_plan, plan_for

HIDDEN, HEADS = 16, 4
TOLERANCE = 1e-10


class Mixer(nn.Module):
    """Attention with one projection for all three, and a norm of its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.back = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.num_heads, self.scale = HEADS, nn.RMSNorm(HIDDEN // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(self.scale(q), self.scale(k), v, is_causal=True)
        return self.back(y.transpose(1, 2).flatten(2))


class Sinks(Mixer):
    """Attention that may look at nothing: a score for that of each head, a scale of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.sinks = nn.Parameter(torch.linspace(-1, 1, 2))
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN // 2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (-1, HIDDEN // 2)).transpose(1, 2) for y in (q, k, v))
        scores = (q * self.gain) @ k.transpose(-1, -2)
        sinks = self.sinks.view(1, -1, 1, 1).expand(len(x), -1, x.shape[1], -1)
        probabilities = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return self.back((probabilities @ v).transpose(1, 2).flatten(2))


class ByNames(Mixer):
    """Attention whose functions are called by keywords, in an order of their own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.into = nn.Linear(HIDDEN, HIDDEN)
        self.keys, self.values = nn.Linear(HIDDEN, HIDDEN // 2), nn.Linear(HIDDEN, HIDDEN // 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
            for layer in (self.into, self.keys, self.values)
        )
        if self.how == "softmax":
            scores = q @ k.repeat_interleave(2, 1).mT
            y = torch.softmax(dim=-1, input=scores) @ v.repeat_interleave(2, 1)
        else:
            y = F.scaled_dot_product_attention(value=v, key=k, query=q, enable_gqa=True)
        return self.back(y.transpose(1, 2).flatten(2))


class Swish(nn.Module):
    """An activation that learns how steep it is, feature by feature."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.steep = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.steep * x)


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = Swish(24)
        self.before, self.after = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.mixer = Mixer()
        self.both, self.out = nn.Linear(HIDDEN, 48), nn.Linear(24, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.before(x))
        gate, up = self.both(self.after(x)).chunk(2, -1)
        return x + self.out(self.act(gate) * up)


class Unheard(nn.Module):
    """A language model of nobody's, with names of nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(32, HIDDEN)
        self.stages = nn.ModuleList(Stage() for _ in range(2))
        self.last = nn.LayerNorm(HIDDEN)
        self.guess = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.guess.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for stage in self.stages:
            x = stage(x)
        return self.guess(self.last(x))


_SIZES = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
_NO_DROPOUT: dict[str, Any] = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_GPT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

_BOTH: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": HIDDEN,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 24 for side in ("encoder", "decoder")},
    "dropout": 0.0,
    **{f"{name}_token_id": id for id, name in enumerate(("pad", "bos", "eos"))},
    "decoder_start_token_id": 1,
}
_TOWER: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "projection_dim": HIDDEN,
}
_VISION: dict[str, Any] = {**_TOWER, "image_size": 8, "patch_size": 4}
_TEXT: dict[str, Any] = {**_TOWER, "vocab_size": VOCAB, "eos_token_id": 2}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # An encoder and a decoder, whose embeddings are tied to one that is never called.
    "BartForConditionalGeneration": ("BartConfig", {**_BOTH, "max_position_embeddings": 32}),
    # Two towers, tokens picked by their ids, a scale that the model itself has.
    "CLIPModel": (
        "CLIPConfig",
        {"text_config": _TEXT, "vision_config": _VISION, "projection_dim": HIDDEN},
    ),
    "CLIPTextModel": ("CLIPTextConfig", _TEXT),
    # Classifiers, of families whose ready plans are for other heads.
    "BertForSequenceClassification": ("BertConfig", {**_SIZES, **_NO_DROPOUT}),
    "GPT2ForSequenceClassification": (
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "pad_token_id": 0, **_GPT},
    ),
    "LlamaForSequenceClassification": ("LlamaConfig", {**SIZES, "pad_token_id": 0}),
    "LlamaForTokenClassification": ("LlamaConfig", {**SIZES, "classifier_dropout": 0.0}),
    "CLIPVisionModel": ("CLIPVisionConfig", _VISION),
    "DistilBertForMaskedLM": (
        "DistilBertConfig",
        {
            "vocab_size": VOCAB,
            "dim": HIDDEN,
            "n_layers": 2,
            "n_heads": HEADS,
            "hidden_dim": 24,
            "max_position_embeddings": 32,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "ElectraForMaskedLM": ("ElectraConfig", {**_SIZES, **_NO_DROPOUT, "embedding_size": HIDDEN}),
    "GPTJForCausalLM": (
        "GPTJConfig",
        {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "rotary_dim": 4, **_GPT},
    ),
    "GPTNeoForCausalLM": (
        "GPTNeoConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "num_layers": 2,
            "num_heads": HEADS,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 32,
            "resid_dropout": 0.0,
            "embed_dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", _SIZES),
    "OPTForCausalLM": (
        "OPTConfig",
        {**_SIZES, "ffn_dim": 24, "word_embed_proj_dim": HIDDEN, "dropout": 0.0},
    ),
    # A bias for each head, by the distance of two tokens.
    "MptForCausalLM": (
        "MptConfig",
        {"vocab_size": VOCAB, "d_model": HIDDEN, "n_layers": 2, "n_heads": 4, "max_seq_len": 32},
    ),
    # Queries, keys and values of unequal sizes in one weight, cut by what the config says.
    "Phi3ForCausalLM": (
        "Phi3Config",
        {**SIZES, "pad_token_id": 0, "attention_dropout": 0.0},
    ),
    # Queries, keys and values from one projection, parts of the sequence seen by some layers.
    "ModernBertForMaskedLM": (
        "ModernBertConfig",
        {**_SIZES, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "cls_token_id": 3},
    ),
    # Positions that an embedding makes by itself, given the sizes of the ids.
    "PegasusForConditionalGeneration": (
        "PegasusConfig",
        {**_BOTH, "max_position_embeddings": 32},
    ),
    "RobertaForMaskedLM": ("RobertaConfig", {**_SIZES, **_NO_DROPOUT, "pad_token_id": 1}),
    "ViTForImageClassification": (
        "ViTConfig",
        {
            "hidden_size": HIDDEN,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "intermediate_size": 24,
            "image_size": 8,
            "patch_size": 4,
            **_NO_DROPOUT,
        },
    ),
    # Sounds, by convolutions, and a decoder that indexes its table of positions.
    "WhisperForConditionalGeneration": (
        "WhisperConfig",
        {**_BOTH, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 32},
    ),
}
DECODERS = ["Cohere", "Gemma2", "Glm4", "Olmo2", "Phi", "Qwen3", "StableLm", "Starcoder2"]
"""Those that have ready plans too, which are not looked at."""


def _build(name: str) -> Any:
    torch.manual_seed(0)
    if name in DECODERS:
        return decoder(name)
    kind, sizes = MODELS[name]
    return waved(getattr(transformers, name)(getattr(transformers, kind)(**sizes)))


def _batch(name: str) -> Callable[[int], dict[str, Any]]:
    """What a model is given at a step."""
    # Whose tokens are all in one dim has rows of whole sequences, as many on each.
    size = 4 if name.startswith("OPT") else 5
    causal: Any = causal_lm_batch(size, 7, VOCAB)

    def batch(step: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(3, VOCAB, (5, 9), generator=generator)
        images = torch.randn(5, 3, 8, 8, generator=generator, dtype=torch.float64)
        given: dict[str, dict[str, Any]] = {
            "Bart": {"input_ids": ids, "labels": ids[:, 1:7].contiguous()},
            "CLIPModel": {"input_ids": ids, "pixel_values": images, "return_loss": True},
            "CLIPText": {"input_ids": ids},
            "CLIPVision": {"pixel_values": images},
            "BertForSequence": {"input_ids": ids, "labels": ids[:, 0] % 2},
            "GPT2ForSequence": {"input_ids": ids, "labels": ids[:, 0] % 2},
            "LlamaForSequence": {"input_ids": ids, "labels": ids[:, 0] % 2},
            "LlamaForToken": {"input_ids": ids, "labels": ids % 2},
            "Pegasus": {"input_ids": ids, "labels": ids[:, 1:7].contiguous()},
            "ViT": {"pixel_values": images, "labels": ids[:, 0] % 2},
            "Whisper": {"input_features": images.flatten(1)[:, :128].view(5, 8, 16)},
        }
        given["Whisper"]["labels"] = ids[:, 1:7].contiguous()
        return next((x for start, x in given.items() if name.startswith(start)), causal(step))

    return batch


def _loss_of_tokens(model: nn.Module, inputs: Batch) -> Tensor:
    """Of an encoder that has no loss of its own."""
    outputs = model(**inputs)
    worth = torch.linspace(0, 1, HIDDEN, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for y in (outputs.last_hidden_state, outputs.pooler_output):
        total = total + ((y.full_tensor() if isinstance(y, DTensor) else y) * worth).square().sum()
    return total


def _train(rows: int, columns: int, names: list[str]) -> dict[str, float]:
    seen = {}
    with in_fp64_throughout():
        for name in names:
            reference, model, _ = on_grid(
                lambda: _build(name),  # noqa: B023
                rows,
                columns,
                plans=derived_plan,
            )
            causal = name in DECODERS or name.endswith("CausalLM")
            loss = _loss_of_tokens if name in ("CLIPTextModel", "CLIPVisionModel") else own_loss
            truth = causal_lm_truth if causal else loss
            seen[name] = train_beside(
                reference, model, _batch(name), truth=truth, loss=loss, steps=2
            ).worst
    return seen


ALL = [*MODELS, *DECODERS]


@pytest.mark.parametrize(
    "rows,columns,names",
    [
        (1, 2, ["Phi3ForCausalLM"]),
        *(deep(*grid, ALL) for grid in ((2, 2), (4, 1))),
        # Parts of a fused weight have to divide: Phi-3's two key heads do not.
        deep(1, 4, [name for name in ALL if not name.startswith("Phi3")]),
    ],
    ids=lambda value: f"{len(value)}models" if isinstance(value, list) else None,
)
def test_models_train_by_derived_plans(rows: int, columns: int, names: list[str]) -> None:
    # A body has four minutes, which all of them together may not be done in on a busy machine.
    for start in range(0, len(names), 8):
        for seen in world.run(rows * columns, _train, rows, columns, names[start : start + 8]):
            assert not {name: far for name, far in seen.items() if not far < TOLERANCE}


def _unheard(rows: int, columns: int, kind: Callable[[], nn.Module]) -> float:
    def loss(model: nn.Module, inputs: Batch) -> Tensor:
        logits = model(inputs["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())

    reference, model, _ = on_grid(lambda: waved(kind()), rows, columns)
    data = causal_lm_batch(5, 7, VOCAB)
    return train_beside(reference, model, data, truth=loss, loss=loss).worst


@pytest.mark.parametrize("rows,columns", [(2, 1), deep(2, 2), deep(1, 4), deep(4, 1), deep(1, 2)])
def test_a_model_that_nobody_listed(rows: int, columns: int) -> None:
    """Its logits are whole, so that its training loop stays as it is."""
    assert max(world.run(rows * columns, _unheard, rows, columns, Unheard)) < TOLERANCE


class Listed(nn.Module):
    """Layers in lists of lists, whose parts have numbers for names, as x-transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.guess = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        up, down = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)
        feeds = [nn.Sequential(OrderedDict(up=up, act=nn.GELU(), down=down))]
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.ModuleList([nn.LayerNorm(HIDDEN)]), branch])
            for feed in feeds
            for branch in (Mixer(), feed)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for (norm,), branch in self.layers:
            x = x + branch(norm(x))
        return self.guess(x)


def test_layers_in_lists_of_lists() -> None:
    """One entry for all norms, ``layers.*.*.*``, named the projections beside them as well."""
    assert max(world.run(4, _unheard, 2, 2, Listed)) < TOLERANCE


def test_what_a_derived_plan_says() -> None:
    with fake_grid(2, 2) as mesh:
        plan = plan_for(Unheard(), mesh)
    assert isinstance(plan, DerivedPlan)
    assert (
        str(plan)
        == """\
stages.*.mixer       attention of 4 heads
stages.*.mixer.into  heads of stages.*.mixer
stages.*.mixer.back  closes the heads of stages.*.mixer
stages.*.both        opens what stages.*.out closes
stages.*.act         on features that are split
stages.*.out         closes stages.*.both
words                an embedding of tokens
places               an embedding of positions
stages.*.before      a norm of the residual stream
stages.*.after       a norm of the residual stream
last                 a norm of the residual stream
guess                the head, by its vocabulary"""
    )
    assert "parts=3" in str(plan["stages.*.mixer.into"])
    assert "parts=2" in str(plan["stages.*.both"])


class Named(Unheard):
    def __init__(self, how: str) -> None:
        super().__init__()
        for stage in self.stages:
            stage.mixer = ByNames(how)


@pytest.mark.parametrize("how", ["softmax", "attention"])
def test_arguments_are_read_by_name(how: str) -> None:
    """``softmax(input=x)`` raised an IndexError, and values given first counted as the queries.

    The attention then had as many heads as the values. Arguments were read by their places.
    """
    with fake_grid(2, 2) as mesh:
        plan = plan_for(Named(how), mesh)
    assert isinstance(plan, DerivedPlan)
    assert plan.reasons["stages.*.mixer"] == f"attention of {HEADS} heads"
    assert plan.reasons["stages.*.mixer.back"] == "closes the heads of stages.*.mixer"


class Sinking(Unheard):
    """Nobody's model, whose attention has parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        for stage in self.stages:
            stage.mixer = Sinks()


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(4, 1), deep(1, 2)])
def test_parameters_of_an_attention(rows: int, columns: int) -> None:
    """Sinks of each head, which no plan could name: the entry of the module is its attention's."""
    with fake_grid(rows, columns) as mesh:
        plan = plan_for(Sinking(), mesh)
    assert plan["stages.*.mixer"].own_parameters == {"sinks": ("heads",), "gain": (None,)}
    assert max(world.run(rows * columns, _unheard, rows, columns, Sinking)) < TOLERANCE


class Gain(nn.Module):
    """A norm that is given a scalar, before its tokens or after them."""

    def __init__(self, features: int = HIDDEN) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, features))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.weight * x * y


class Gained(Unheard):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.stages[0].act = Gain(24)
        self.stages[0].after = Gain()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        stage, half = self.stages[0], torch.tensor(0.5)
        gate, up = stage.both(self._of(stage.after, x, half, "norm")).chunk(2, -1)
        x = x + stage.mixer(stage.before(x))
        x = x + stage.out(self._of(stage.act, gate, half, "act") * up)
        return self.guess(self.last(self.stages[1](x)))

    def _of(self, module: nn.Module, x: Tensor, scale: Tensor, name: str) -> Tensor:
        return module(scale, x) if name == self.where else module(x, scale)


@pytest.mark.parametrize("where,name", [("norm", "after"), ("act", "act"), ("nowhere", "")])
def test_a_scalar_before_the_tokens_is_refused(where: str, name: str) -> None:
    """``plan_for`` raised an IndexError of the scalar's shape, which has no sizes of tokens."""
    with fake_grid(2, 2) as mesh:
        if not name:
            assert plan_for(Gained(where), mesh)
            return
        with pytest.raises(ValueError, match=rf"stages.0.{name}, Gain.*a scalar before its tokens"):
            plan_for(Gained(where), mesh)


class _Odd(Unheard):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        if case in ("root", "scaled"):
            self.gain = nn.Parameter(torch.tensor(0.7))
        elif case == "unused":
            self.unused = nn.Linear(2, 2)
        elif case == "whole":
            self.between = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, ids: Tensor) -> Tensor:
        if self.case == "values" and ids.sum().item() > 0:
            raise AssertionError
        y = super().forward(ids)
        if self.case == "root":
            y = y + self.guess(self.words(ids) * self.gain)
        if self.case == "scaled":
            y = y * self.gain
        if self.case == "whole":
            y = y + self.guess(self.between(self.words(ids)).cumsum(1))
        return y


@pytest.mark.parametrize(
    "case,words",
    [
        ("root", r"The root, _Odd.*the model itself has the parameters \['gain'\]"),
        ("unused", "unused, Linear.*was not called"),
        ("values", "_Odd cannot run without values"),
    ],
)
def test_what_is_unclear_is_said(case: str, words: str) -> None:
    with fake_grid(2, 2) as mesh, pytest.raises(ValueError, match="has no ready plan") as failed:
        plan_for(_Odd(case), mesh)
    assert re.search(words, str(failed.value)), failed.value


def test_what_stays_whole_is_said() -> None:
    with fake_grid(2, 2) as mesh, pytest.warns(UserWarning, match=r"stay whole.*\['between'\]"):
        plan = plan_for(_Odd("whole"), mesh)
    assert isinstance(plan["between"], torch_tp2d.Replicate)


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "LlamaForTokenClassification"])
def test_a_head_that_no_ready_plan_knows(name: str) -> None:
    """A ready plan left the classifier out, and its first forward said so."""
    with fake_grid(2, 2) as mesh:
        plan = plan_for(_build(name), mesh)
    assert isinstance(plan, DerivedPlan)
    assert {"classifier", "score"} & set(plan)


def test_a_batch_and_its_heads_in_one_dim_are_refused() -> None:
    """BLOOM's biases: what a column holds of them lies in as many places as there are samples."""
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=1, n_head=HEADS)
    words = "argument alibi .* has the batch and its heads in one dim"
    with fake_grid(2, 2) as mesh, pytest.raises(ValueError, match=words):
        derived_plan(transformers.BloomForCausalLM(config), mesh)


def _scaled(rows: int, columns: int) -> float:
    def loss(model: nn.Module, inputs: Batch) -> Tensor:
        logits = model(inputs["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())

    reference, model, _ = on_grid(lambda: waved(_Odd("scaled")), rows, columns)
    return train_beside(reference, model, causal_lm_batch(5, 7, VOCAB), truth=loss, loss=loss).worst


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(1, 4), deep(4, 1)])
def test_a_scale_of_the_models_own(rows: int, columns: int) -> None:
    assert max(world.run(rows * columns, _scaled, rows, columns)) < TOLERANCE
